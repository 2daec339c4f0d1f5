# SPDX-License-Identifier: Apache-2.0
# Subclasses of vLLM's draft models whose context K/V chain runs by ctxkv where it can.
"""Loaded by vLLM, by name, when such a draft is built. Each class overrides
`precompute_and_store_context_kv`, and `load_weights` to notice new weights."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.models.muse_spark.common.dspark import MuseSparkDSparkForCausalLM

from . import _vllm_families as families
from ._vllm_path import ContextPath


class _ByCtxkv:
    _ctxkv_describe: Any = None
    model: Any

    def precompute_and_store_context_kv(
        self, context_states: Any, context_positions: Any, context_slot_mapping: Any = None
    ) -> None:
        """The stock method's contract: norms, projection, K norm, RoPE and insert of the rows."""
        path = self.__dict__.get("_ctxkv_path")
        if path is None:
            path = ContextPath(self.model, type(self)._ctxkv_describe)
            self.__dict__["_ctxkv_path"] = path
        stock = super().precompute_and_store_context_kv  # type: ignore[misc]
        path(stock, context_states, context_positions, context_slot_mapping)

    def load_weights(self, weights: Any) -> Any:
        path = self.__dict__.get("_ctxkv_path")
        if path is not None:
            path.forget()
        return super().load_weights(weights)  # type: ignore[misc]


class CtxkvMuseSparkDSpark(_ByCtxkv, MuseSparkDSparkForCausalLM):
    """Muse Spark's DSpark draft."""

    _ctxkv_describe = staticmethod(families.muse_spark)


class CtxkvDFlashQwen3(_ByCtxkv, DFlashQwen3ForCausalLM):
    """DFlash drafts of the Qwen3 kind."""

    _ctxkv_describe = staticmethod(families.qwen3)


class CtxkvQwen3DSpark(_ByCtxkv, Qwen3DSparkForCausalLM):
    """DSpark drafts of the Qwen3 kind."""

    _ctxkv_describe = staticmethod(families.qwen3)


class CtxkvDFlash2Qwen3(_ByCtxkv, DFlash2Qwen3ForCausalLM):
    """DFlash2 drafts of the Qwen3 kind: convolutions in the layers, DFlash's context chain."""

    _ctxkv_describe = staticmethod(families.qwen3)


# Made when asked for: their modules bring more of vLLM with them.
_LATER = {
    "CtxkvXPress": ("vllm.model_executor.models.qwen3_xpress", "Qwen3XPressForCausalLM", "qwen3"),
    "CtxkvLiLiCorr": ("vllm.model_executor.models.lilicorr", "LiLiCorrForCausalLM", "qwen3"),
    "CtxkvLaguna": (
        "vllm.model_executor.models.laguna_dflash", "DFlashLagunaForCausalLM", "laguna",
    ),
    "CtxkvGemma4DSpark": (
        "vllm.model_executor.models.gemma4_dspark", "Gemma4DSparkForCausalLM", "gemma4",
    ),
    "CtxkvDFlash2Beam": ("vllm.models.beam", "DFlash2BeamForCausalLM", "own_kernel"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, stock, describe = _LATER[name]
    base = getattr(importlib.import_module(module), stock)
    body = {
        "__module__": __name__, "__doc__": f"{stock} by ctxkv.",
        "_ctxkv_describe": staticmethod(getattr(families, describe)),
    }
    made = type(name, (_ByCtxkv, base), body)
    globals()[name] = made
    return made
