# SPDX-License-Identifier: Apache-2.0
# Where the tests find things, and what they skip, loudly.
from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
if os.environ.get("CTXKV_LIBRARY"):  # a build tree: the modules beside it, not an installed wheel
    sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def cpu():
    import ctxkv

    return ctxkv.device("cpu")


def _has_cuda() -> bool:
    import ctxkv

    return ctxkv.cuda_device_count() > 0


def pytest_collection_modifyitems(items) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not _has_cuda():
        skip = pytest.mark.skip(reason="NOT RUN: no CUDA device; run on one")
        for item in marked:
            item.add_marker(skip)
