# SPDX-License-Identifier: Apache-2.0
# ctxkv: the context K/V chain of speculative-decoding drafts, with the same bits everywhere.
"""The context K/V chain of speculative-decoding draft models on CPUs and NVIDIA GPUs.

Importing this loads neither the C library nor torch, and makes no CUDA call.

- `ctxkv.Device`, `Norms`, `Projection`, `Store`, `Chain`: the C API's plans, for any tensors.
- `ctxkv.ContextNorms`, `ContextKvStore` and their helpers: drop-ins for the CuTe kernels of vLLM's
  Muse Spark draft (need torch).
- `ctxkv.torch`: `ContextKV`, the chain bound to a draft, and the torch operators.
- `ctxkv.vllm`: the vLLM plugin. `python -m ctxkv`: info, selftest, plot.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._descriptors import Norm
from ._device import Device, cuda_device_count, device
from ._tensor import Tensor
from .plans import Chain, FaultReport, Norms, Projection, Store, rope_table

_LAZY = {
    "ContextKvStore": "context",
    "ContextNormConstants": "context",
    "ContextNorms": "context",
    "compile_context_kv_store": "context",
    "compile_context_norms": "context",
    "context_norm_constants": "context",
    "ContextKV": "torch",
}

__all__ = [
    "Chain",
    "Device",
    "FaultReport",
    "Norm",
    "Norms",
    "Projection",
    "Store",
    "Tensor",
    "cuda_device_count",
    "device",
    "rope_table",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ._library import version

        return version()
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, "__version__"])
