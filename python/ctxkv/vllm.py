# SPDX-License-Identifier: Apache-2.0
# The vLLM plugin's entry point (vllm.general_plugins): registers our draft classes, lazily.
"""`register` puts subclasses of vLLM's draft models in its registry, which run the context K/V
chain by ctxkv where they can and by vLLM's own code where not. It never raises and imports
neither torch nor any model; CTXKV_VLLM=0 turns it off."""

from __future__ import annotations

import importlib.metadata
import logging
import os

logger = logging.getLogger("vllm.ctxkv")

TESTED = "0.33."
# vLLM's architecture names and our classes for them.
MODELS = {
    "MuseSparkDSparkModel": "CtxkvMuseSparkDSpark",
    "DFlashDraftModel": "CtxkvDFlashQwen3",
    "MuseGlimmerAssistantModel": "CtxkvDFlashQwen3",
    "DFlashMuseGlimmerAssistantModel": "CtxkvDFlashQwen3",
    "Qwen3DSparkModel": "CtxkvQwen3DSpark",
    "Qwen3OmniDSparkModel": "CtxkvQwen3DSpark",
    "DFlash2DraftModel": "CtxkvDFlash2Qwen3",
    "Qwen3XPressModel": "CtxkvXPress",
    "DFlashQwen3XPressModel": "CtxkvXPress",
    "LiLiCorrDraftModel": "CtxkvLiLiCorr",
    "DFlashLagunaForCausalLM": "CtxkvLaguna",
    "Gemma4DSparkModel": "CtxkvGemma4DSpark",
    "DFlash2BeamDraftModel": "CtxkvDFlash2Beam",
}


def enabled() -> bool:
    """Whether CTXKV_VLLM allows the plugin (anything but 0, off, no, false)."""
    return os.environ.get("CTXKV_VLLM", "1").strip().lower() not in ("0", "off", "no", "false")


def register() -> None:
    """Registers the classes. Idempotent; run by vLLM in each of its processes."""
    try:
        _register()
    except Exception as error:  # an exception would stop the server
        logger.warning("ctxkv: vLLM's own context K/V chain stays: %s", error)


def _register() -> None:
    if not enabled():
        logger.info("ctxkv: off (CTXKV_VLLM=%s)", os.environ["CTXKV_VLLM"])
        return
    version = importlib.metadata.version("vllm")
    if not version.startswith(TESTED):
        logger.warning(
            "ctxkv: vLLM's own context K/V chain stays: vLLM is %s, only %sx was tested",
            version, TESTED,
        )
        return
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for arch, name in MODELS.items():
        if arch in known:
            ModelRegistry.register_model(arch, f"ctxkv.vllm_model:{name}")
