# SPDX-License-Identifier: Apache-2.0
# The Python blocks of README.md and docs, torch's included.
from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    (str(path.relative_to(ROOT)), block)
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    for block in re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.S | re.M)
]


@pytest.mark.parametrize("name, block", BLOCKS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BLOCKS)])
def test_block(name: str, block: str) -> None:
    exec(compile(block, name, "exec"), {"__name__": "block"})


def test_blocks_were_found() -> None:
    found = [name for name, _ in BLOCKS]
    assert found.count("README.md") == 1 and found.count("docs/python.md") == 3
