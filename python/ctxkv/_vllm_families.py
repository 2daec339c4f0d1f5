# SPDX-License-Identifier: Apache-2.0
# What a vLLM 0.33 draft's context chain computes, as ContextKV's arguments; or why stock stays.
from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import torch

from ._descriptors import Norm

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


class Caches(NamedTuple):
    """What the layers' caches hold, and the scales that their inserts divide by (FP8)."""

    cache_type: str
    k_scales: Optional[list[torch.Tensor]]
    v_scales: Optional[list[torch.Tensor]]


# vLLM's kv_cache_dtype as ours. Others quantise in their own way: not here.
_CACHE_TYPES = {
    "auto": "bf16", "bfloat16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
_CACHE_DTYPES = {
    "bf16": (torch.bfloat16,), "fp8_e4m3": (torch.uint8, torch.float8_e4m3fn),
    "fp8_e5m2": (torch.uint8, torch.float8_e5m2),
}


def _scale(attn: Any, name: str, i: int) -> torch.Tensor:
    scale: Any = getattr(attn, name, None)
    known = isinstance(scale, torch.Tensor) and scale.dtype == torch.float32
    _need(known and scale.numel() == 1, f"{name} of layer {i} is not one FP32 value")
    return scale.detach().reshape(())


def check_layers(layers: Sequence[Any]) -> Caches:
    """What is known of the attention layers before their caches exist."""
    for attn in layers:
        update = getattr(type(attn.impl), "do_kv_cache_update", None)
        known = _BACKENDS.get(getattr(update, "__module__", ""))
        _need(
            known is not None and getattr(update, "__qualname__", "") == known,
            f"attention backend {type(attn.impl).__name__} inserts in its own way",
        )
        dtype = getattr(attn, "kv_cache_dtype", "auto")
        _need(dtype in _CACHE_TYPES, f"kv_cache_dtype is {dtype}, must be bfloat16 or fp8")
        kind = str(getattr(attn.impl, "attn_type", "decoder"))
        _need("encoder" not in kind.lower().replace("encoder_decoder", ""), f"attn_type is {kind}")
        shared = getattr(attn.impl, "kv_sharing_target_layer_name", None)
        _need(shared is None, f"a layer shares the cache of {shared}")
    kind = _same(
        [_CACHE_TYPES[getattr(attn, "kv_cache_dtype", "auto")] for attn in layers],
        "kv_cache_dtype",
    )
    if kind == "bf16":
        return Caches(kind, None, None)
    return Caches(
        kind,
        [_scale(attn, "_k_scale", i) for i, attn in enumerate(layers)],
        [_scale(attn, "_v_scale", i) for i, attn in enumerate(layers)],
    )


def check_caches(
    caches: Sequence[torch.Tensor], like: torch.Tensor, heads: int, dim: int, kind: str
) -> None:
    """The caches as bound by vLLM: [num_blocks, H, block_size, 2*head_dim], any strides."""
    for i, cache in enumerate(caches):
        shape, must = list(cache.shape), _CACHE_DTYPES[kind]
        _need(cache.dtype in must, f"cache {i} is {cache.dtype}, must be {must[-1]}")
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
    caches = check_layers(model._attn_layers)
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
            "rope": rope, "cos_sin": table, **caches._asdict(),
        },
        table,
    )


# ---- the Qwen3 family: vllm.model_executor.models.qwen3_dflash and its heirs -------------------
# The parts of the chain that an heir may have of its own, and those that none may.
_SHARED = ("precompute_and_store_context_kv", "_normalize_context_k")


def _inherits(model: Any, known: type, names: Sequence[str]) -> None:
    for name in names:
        ours = getattr(type(model), name, None)
        _need(ours is getattr(known, name), f"{name} of {type(model).__name__} is overridden")
    if not hasattr(model, "_num_attn_layers"):
        model._build_fused_kv_buffers()


def _bf16(tensor: torch.Tensor, what: str) -> torch.Tensor:
    _need(tensor.dtype == torch.bfloat16, f"{what} is {tensor.dtype}")
    return tensor.detach()


def _table(model: Any, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """The rotation of all layers: layer 0's, as the stock chain has it."""
    dim, given = model._head_dim, model._rope_cos_sin_cache
    _need(model._rope_head_size == dim, f"RoPE of heads of {model._rope_head_size}, not {dim}")
    _need(
        given.dim() == 2 and given.shape[1] <= dim and given.shape[1] % 2 == 0,
        f"RoPE table {list(given.shape)} for heads of {dim}",
    )
    table = given.to(device=device, dtype=torch.bfloat16).contiguous()
    kind = "neox" if model._rope_is_neox else "gptj"
    return {"rope": kind, "rotary_dim": table.shape[1], "cos_sin": table}, table


def _family(model: Any, weights: torch.Tensor, **own: Any) -> Described:
    """What all of the family have in common, and what is a draft's own."""
    caches, dim = check_layers(model._attn_layers), model._head_dim
    _bf16(weights, "the K/V weights' dtype")
    _need(dim in (64, 128, 256, 512), f"head_dim is {dim}, must be 64, 128, 256 or 512")
    scale = getattr(model.layers[0].self_attn, "v_scale", None)
    _need(scale is None or scale != 0, "v_scale is 0")
    rope, table = _table(model, weights.device)
    return Described(
        weights,
        {
            "num_kv_heads": model._num_kv_heads, "head_dim": dim, "k_norm": "rms",
            "k_eps": model._rms_norm_eps, "v_scale": scale,
            "k_norm_weight": _bf16(model._k_norm_weights, "the K norm's weight"), **rope,
            **caches._asdict(), **own,
        },
        table,
    )


def _hidden_norm(model: Any) -> dict[str, Any]:
    return {
        "hidden": Norm("rms", model._rms_norm_eps), "layer": Norm("absent", 0.0),
        "hidden_weight": _bf16(model._hidden_norm_weight, "the hidden norm's weight"),
    }


def _per_layer(flat: Optional[torch.Tensor], layers: int) -> Optional[torch.Tensor]:
    return None if flat is None else flat.detach().view(layers, -1)


def qwen3(model: Any) -> Described:
    """DFlashQwen3Model and what inherits its chain: DSpark, DFlash2, XPress, LiLiCorr."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model as Known

    own = ("_project_context_kv", "_build_fused_kv_buffers", "_build_context_kv_buffers")
    _inherits(model, Known, _SHARED + own)
    flat, layers = model._fused_kv_weight, model._num_attn_layers
    _need(flat is not None, "the K/V weights are quantised")
    return _family(
        model, flat.view(layers, -1, flat.shape[-1]), **_hidden_norm(model),
        bias=_per_layer(model._fused_kv_bias, layers),
    )


def laguna(model: Any) -> Described:
    """DFlashLagunaModel: each layer's own norm of the states, a GEMM for each, bias after it."""
    from vllm.model_executor.models.laguna_dflash import DFlashLagunaModel as Known

    own = (
        "_project_context_kv", "_build_fused_kv_buffers", "_build_context_kv_buffers",
        "_normalize_context_k",
    )
    _inherits(model, Known, _SHARED + own)
    return _family(
        model, model._kv_weights, hidden=Norm("absent", 0.0),
        layer=Norm("rms", model._rms_norm_eps), bias=model._kv_biases, bias_add="after",
        layer_weights=_bf16(model._input_layernorm_weights, "the layers' norm's weight"),
    )


def gemma4(model: Any) -> Described:
    """Gemma4DSparkModel: V is the weightless norm of raw K."""
    from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkModel as Known

    own = ("_project_context_kv", "_build_fused_kv_buffers", "_build_context_kv_buffers")
    _inherits(model, Known, _SHARED + own)
    flat, layers, ones = model._fused_k_weight, model._num_attn_layers, model._v_norm_weights
    _need(bool((ones == 1).all()), "the V norm has a weight")
    return _family(
        model, flat.view(layers, -1, flat.shape[-1]), **_hidden_norm(model),
        bias=_per_layer(model._fused_k_bias, layers), v_from_k=True, v_norm="rms",
        v_eps=model._rms_norm_eps,
    )


def own_kernel(model: Any) -> Described:
    """Drafts whose stock chain ends in a fused kernel of their own."""
    raise Stock(f"{type(model).__name__} inserts by a kernel of its own")
