# SPDX-License-Identifier: Apache-2.0
# Where pip's NVIDIA wheels put cuBLAS. The library itself prefers a copy that is already loaded.
from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Optional

_FOLDERS = ("cu13/lib", "cublas/lib")
_SONAMES = ("libcublas.so.13", "libcublas.so.12")


def find() -> Optional[str]:
    """Path of a wheel's libcublas, its libcublasLt loaded first; None where there is no wheel."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    for root in (spec.submodule_search_locations or []) if spec else []:
        for folder in _FOLDERS:
            for soname in _SONAMES:
                path = Path(root) / folder / soname
                if path.exists() and _load_lt(path):
                    return os.fspath(path)
    return None


def _load_lt(path: Path) -> bool:
    lt = path.with_name(path.name.replace("libcublas", "libcublasLt"))
    try:
        ctypes.CDLL(os.fspath(lt))
        return True
    except OSError:
        return False
