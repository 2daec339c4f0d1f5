# SPDX-License-Identifier: Apache-2.0
# The Python blocks of docs/python.md, torch's included.
from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block: str) -> None:
    exec(compile(block, "docs/python.md", "exec"), {"__name__": "block"})


def test_blocks_were_found() -> None:
    assert len(BLOCKS) == 3
