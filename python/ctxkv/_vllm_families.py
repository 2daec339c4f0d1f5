# SPDX-License-Identifier: Apache-2.0
# What a vLLM 0.33 draft's context chain computes, as ContextKV's arguments; or why stock stays.
from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch

from .plans import Norm

_BACKENDS = {
    "vllm.v1.attention.backends.flash_attn": "FlashAttentionImpl.do_kv_cache_update",
    "vllm.v1.attention.backends.flashinfer": "FlashInferImpl.do_kv_cache_update",
}


class Stock(Exception):
    """The stock chain has to run; the text says why."""


class Described(NamedTuple):
    """A draft as ContextKV takes it."""

    weights: torch.Tensor
    arguments: dict[str, Any]
    table: Optional[torch.Tensor]


def _need(condition: Any, reason: str) -> None:
    if not condition:
        raise Stock(reason)


def _same(values: Sequence[Any], what: str) -> Any:
    _need(all(value == values[0] for value in values), f"the layers differ in {what}")
    return values[0]


def check_layers(layers: Sequence[Any]) -> None:
    """What is known of the attention layers before their caches exist."""
    for attn in layers:
        update = getattr(type(attn.impl), "do_kv_cache_update", None)
        known = _BACKENDS.get(getattr(update, "__module__", ""))
        _need(
            known is not None and getattr(update, "__qualname__", "") == known,
            f"attention backend {type(attn.impl).__name__} inserts in its own way",
        )
        dtype = getattr(attn, "kv_cache_dtype", "auto")
        _need(dtype in ("auto", "bfloat16"), f"kv_cache_dtype is {dtype}, must be bfloat16")
        kind = str(getattr(attn.impl, "attn_type", "decoder"))
        _need("encoder" not in kind.lower().replace("encoder_decoder", ""), f"attn_type is {kind}")
        shared = getattr(attn.impl, "kv_sharing_target_layer_name", None)
        _need(shared is None, f"a layer shares the cache of {shared}")


def check_caches(caches: Sequence[torch.Tensor], like: torch.Tensor, heads: int, dim: int) -> None:
    """The caches as bound by vLLM: [num_blocks, H, block_size, 2*head_dim], any strides."""
    for i, cache in enumerate(caches):
        shape = list(cache.shape)
        _need(cache.dtype == torch.bfloat16, f"cache {i} is {cache.dtype}, must be bfloat16")
        _need(cache.device == like.device, f"cache {i} lies on {cache.device}")
        _need(
            len(shape) == 4 and shape[1] == heads and shape[3] == 2 * dim,
            f"cache {i} has shape {shape}, must be [num_blocks, {heads}, block_size, {2 * dim}]",
        )


def _rope(rope: Any, head_dim: int, device: torch.device) -> tuple[str, Optional[torch.Tensor]]:
    if rope is None:
        return "none", None
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    # Scaled kinds (YaRN, Llama 3, ...) only fill the table in another way.
    plain = isinstance(rope, RotaryEmbedding) and all(
        getattr(type(rope), name) is getattr(RotaryEmbedding, name)
        for name in ("forward_cuda", "forward_native", "_match_cos_sin_cache_dtype")
    )
    _need(plain and not rope.use_flashinfer, f"RoPE of type {type(rope).__name__}")
    _need(
        rope.head_size == rope.rotary_dim == head_dim,
        f"rotary_dim is {rope.rotary_dim}, must be head_dim ({head_dim})",
    )
    table = rope.cos_sin_cache.to(device=device, dtype=torch.bfloat16).contiguous()
    _need(table.dim() == 2 and table.shape[1] == head_dim, f"RoPE table {list(table.shape)}")
    return ("neox" if rope.is_neox_style else "gptj"), table


def _muse_norm(norms: Sequence[Any], what: str) -> tuple[Norm, Optional[list[torch.Tensor]]]:
    from vllm.models.muse_spark.common.layers import (
        MuseSpark1xRMSNorm,
        MuseSpark1xRMSNormWithInputScale,
    )

    for norm in norms:
        _need(
            type(norm) in (MuseSpark1xRMSNorm, MuseSpark1xRMSNormWithInputScale),
            f"{what} is a {type(norm).__name__}",
        )
        _need(norm.variance_size_override is None, f"{what} takes its variance over fewer columns")
        _need(norm.hidden_size == 8192, f"hidden_size is {norm.hidden_size}, must be 8192")
    weighted = _same([norm.has_weight for norm in norms], f"{what}'s weight")
    made = Norm(
        "row",
        _same([norm.variance_epsilon for norm in norms], f"{what}'s eps"),
        _same([norm.fused_gain_center for norm in norms], f"{what}'s gain centre"),
        weighted and _same([norm.applies_weight_before_norm for norm in norms], f"{what}'s kind"),
    )
    if not weighted:
        return made, None
    weights = [norm.weight.detach() for norm in norms]
    dtype = _same([w.dtype for w in weights], f"{what}'s dtype")
    _need(dtype in (torch.bfloat16, torch.float32), f"{what}'s weight is {dtype}")
    return made, weights


def muse_spark(model: Any) -> Described:
    """vllm.models.muse_spark.common.dspark.MuseSparkDSparkModel."""
    from vllm.models.muse_spark.common.dspark import MuseSparkDSparkModel as Known

    for name in ("precompute_and_store_context_kv", "_project_muse_context_kv"):
        _need(getattr(type(model), name, None) is getattr(Known, name), f"{name} is overridden")
    if not hasattr(model, "_num_attn_layers"):
        model._build_fused_kv_buffers()
    check_layers(model._attn_layers)
    weights, dim = model._stacked_kv_weight, model._head_dim
    _need(weights.dtype == torch.bfloat16, f"the K/V weights are {weights.dtype}")
    _need(dim == 64, f"head_dim is {dim}, must be 64")
    hidden, hidden_weight = _muse_norm([model.hidden_norm], "the hidden norm")
    layer, layer_weights = _muse_norm(model._context_pre_norms, "the layers' norm")
    rope, table = _rope(model._rotary_emb, dim, weights.device)
    return Described(
        weights,
        {
            "num_kv_heads": model._num_kv_heads, "head_dim": dim, "hidden": hidden, "layer": layer,
            "hidden_weight": hidden_weight[0] if hidden_weight else None,
            "layer_weights": layer_weights, "k_norm": "plain", "k_eps": model._rms_norm_eps,
            "rope": rope, "cos_sin": table,
        },
        table,
    )


def qwen3(model: Any) -> Described:
    """vllm.model_executor.models.qwen3_dflash.DFlashQwen3Model and what inherits its chain."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as Known

    for name in (
        "precompute_and_store_context_kv", "_project_context_kv", "_normalize_context_k",
        "_build_fused_kv_buffers", "_build_context_kv_buffers",
    ):
        _need(getattr(type(model), name, None) is getattr(Known, name), f"{name} is overridden")
    if not hasattr(model, "_num_attn_layers"):
        model._build_fused_kv_buffers()
    check_layers(model._attn_layers)
    flat, layers, dim = model._fused_kv_weight, model._num_attn_layers, model._head_dim
    _need(flat is not None, "the K/V weights are quantised")
    _need(flat.dtype == torch.bfloat16, f"the K/V weights are {flat.dtype}")
    _need(dim in (64, 128, 256, 512), f"head_dim is {dim}, must be 64, 128, 256 or 512")
    scale = getattr(model.layers[0].self_attn, "v_scale", None)
    _need(scale is None, f"v_scale is {scale}, must be absent")
    bias = model._fused_kv_bias
    eps, weight = model._rms_norm_eps, model._hidden_norm_weight
    for name, norm in (("hidden", weight), ("K", model._k_norm_weights)):
        _need(norm.dtype == torch.bfloat16, f"the {name} norm's weight is {norm.dtype}")
    rope, table = _rope(model.layers[0].self_attn.rotary_emb, dim, flat.device)
    return Described(
        flat.view(layers, -1, flat.shape[-1]),
        {
            "num_kv_heads": model._num_kv_heads, "head_dim": dim, "hidden": Norm("rms", eps),
            "layer": Norm("absent", 0.0), "hidden_weight": weight.detach(),
            "bias": None if bias is None else bias.view(layers, -1), "k_norm": "rms",
            "k_eps": eps, "k_norm_weight": model._k_norm_weights, "rope": rope, "cos_sin": table,
        },
        table,
    )
