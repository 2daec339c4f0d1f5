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


@pytest.fixture
def on_torch(monkeypatch) -> None:
    """vLLM's drafts over torch's operators, and the plugin as it is just after it was loaded."""
    import vllm_drafts
    from ctxkv import _vllm_path

    vllm_drafts.torch_operators(monkeypatch)
    monkeypatch.setattr(_vllm_path, "_told", set())
    for name in ("CTXKV_VLLM", "CTXKV_RECORD", "CTXKV_MAX_ROWS"):
        monkeypatch.delenv(name, raising=False)


def _has_cuda() -> bool:
    import ctxkv

    return ctxkv.cuda_device_count() > 0


def pytest_collection_modifyitems(items) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and not _has_cuda():
        skip = pytest.mark.skip(reason="NOT RUN: no CUDA device; run on one")
        for item in marked:
            item.add_marker(skip)
