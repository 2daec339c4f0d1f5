# SPDX-License-Identifier: Apache-2.0
"""The C descriptors of the plans, from Python arguments; each with the tensors it points at."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any, NamedTuple, Optional

from . import _abi, _tensor
from ._library import choice, integer, library, real
from ._tensor import TensorList


class Norm(NamedTuple):
    """One norm: kind "row" (Muse Spark, D = 8192), "rms" (Qwen3 family) or "absent"; eps >= 0;
    gain_centre is added to the weight; input_scale: the weight multiplies the input ("row")."""

    kind: str = "row"
    eps: float = 1e-5
    gain_centre: float = 0.0
    input_scale: bool = False


def _norm(name: str, norm: Norm) -> _abi.Norm:
    made = _abi.Norm()
    made.kind = choice(f"{name}.kind", norm.kind, _abi.NORM_KINDS)
    made.eps = real(f"{name}.eps", norm.eps)
    made.gain_centre = real(f"{name}.gain_centre", norm.gain_centre)
    made.input_scale = int(bool(norm.input_scale))
    return made


def pointer(tensor: Optional[_abi.DLTensor]) -> Any:
    return None if tensor is None else ctypes.pointer(tensor)


def _one_or_list(value: Any, name: str) -> Optional[TensorList]:
    if value is None:
        return None
    return TensorList([value] if _tensor.is_tensor(value) else value, name)


def norms_desc(
    *,
    num_layers: int,
    hidden_size: int = 8192,
    hidden: Norm = Norm(),
    layer: Norm = Norm(),
    hidden_weight: Any = None,
    layer_weights: Any = None,
    numerics: str = "stock",
) -> tuple[_abi.NormsDesc, Any]:
    desc = _abi.NormsDesc()
    library().ctxkv_norms_desc_init_sized(byref(desc), ctypes.sizeof(desc))
    desc.hidden_size = integer("hidden_size", hidden_size)
    desc.num_layers = integer("num_layers", num_layers)
    desc.hidden, desc.layer = _norm("hidden", hidden), _norm("layer", layer)
    weight = _tensor.optional(hidden_weight, "hidden_weight")
    desc.hidden_weight = pointer(weight)
    layers = _one_or_list(layer_weights, "layer_weights")
    if layers is not None:
        desc.layer_weights, desc.layer_weight_count = layers.pointers, layers.count
    desc.numerics = choice("numerics", numerics, _abi.NUMERICS)
    return desc, (weight, layers)


def projection_desc(
    weights: Any,
    *,
    num_layers: int,
    num_kv_heads: int,
    hidden_size: int = 8192,
    head_dim: int = 64,
    bias: Any = None,
    bias_add: str = "fused",
    k_only: bool = False,
    mode: str = "auto",
    max_rows: int = 0,
) -> tuple[_abi.ProjectionDesc, Any]:
    desc = _abi.ProjectionDesc()
    library().ctxkv_projection_desc_init_sized(byref(desc), ctypes.sizeof(desc))
    desc.hidden_size = integer("hidden_size", hidden_size)
    desc.num_layers = integer("num_layers", num_layers)
    desc.num_kv_heads = integer("num_kv_heads", num_kv_heads)
    desc.head_dim = integer("head_dim", head_dim)
    if weights is None:
        raise ValueError("weights is None, must be one tensor, or a list of them")
    given = TensorList([weights] if _tensor.is_tensor(weights) else weights, "weights")
    desc.weights, desc.weight_count = given.pointers, given.count
    bias = _tensor.optional(bias, "bias")
    desc.bias = pointer(bias)
    desc.bias_add = choice("bias_add", bias_add, _abi.BIAS_ADDS)
    desc.k_only = int(bool(k_only))
    desc.mode = choice("mode", mode, _abi.PROJECTION_MODES)
    desc.max_rows = integer("max_rows", max_rows)
    return desc, (given, bias)


def store_desc(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int = 64,
    k_norm: str = "plain",
    k_eps: float = 1e-5,
    k_norm_weight: Any = None,
    k_gain_centre: float = 0.0,
    rope: str = "none",
    rotary_dim: int = 0,
    cos_sin: Any = None,
    v_norm: str = "absent",
    v_eps: float = 1e-5,
    v_scale: Optional[float] = None,
    v_from_k: bool = False,
    cache_type: str = "bf16",
    k_scales: Any = None,
    v_scales: Any = None,
    checked: bool = False,
) -> tuple[_abi.StoreDesc, Any]:
    desc = _abi.StoreDesc()
    library().ctxkv_store_desc_init_sized(byref(desc), ctypes.sizeof(desc))
    desc.num_layers = integer("num_layers", num_layers)
    desc.num_kv_heads = integer("num_kv_heads", num_kv_heads)
    desc.head_dim = integer("head_dim", head_dim)
    desc.k_norm = choice("k_norm", k_norm, _abi.K_NORMS)
    desc.k_eps = real("k_eps", k_eps)
    weight = _tensor.optional(k_norm_weight, "k_norm_weight")
    desc.k_norm_weight = pointer(weight)
    desc.k_gain_centre = real("k_gain_centre", k_gain_centre)
    desc.rope = choice("rope", rope, _abi.ROPES)
    desc.rotary_dim = integer("rotary_dim", rotary_dim)
    if cos_sin is None or _tensor.is_tensor(cos_sin):
        tables: Any = _tensor.optional(cos_sin, "cos_sin")
        desc.cos_sin = pointer(tables)
    else:
        tables = TensorList(cos_sin, "cos_sin")
        desc.layer_cos_sin, desc.layer_cos_sin_count = tables.pointers, tables.count
    desc.v_norm = choice("v_norm", v_norm, _abi.V_NORMS)
    desc.v_eps = real("v_eps", v_eps)
    desc.v_scale = _v_scale(v_scale)
    desc.v_from_k = int(bool(v_from_k))
    desc.cache_type = choice("cache_type", cache_type, _abi.CACHE_TYPES)
    scales = _scales(desc, k_scales, v_scales)
    desc.checked = int(bool(checked))
    return desc, (weight, tables, scales)


def _v_scale(given: Optional[float]) -> float:
    scale = 0.0 if given is None else real("v_scale", given)
    if given is not None and scale == 0:
        raise ValueError("v_scale is 0, must be another number, or None for V as it is")
    return scale


def _scales(desc: _abi.StoreDesc, k_scales: Any, v_scales: Any) -> Any:
    if (k_scales is None) != (v_scales is None):
        name, other = ("k", "v") if k_scales is None else ("v", "k")
        raise ValueError(f"{name}_scales is None, must be given with {other}_scales")
    if k_scales is None:
        return None
    k, v = TensorList(k_scales, "k_scales"), TensorList(v_scales, "v_scales")
    if k.count != v.count:
        raise ValueError(f"v_scales has {v.count} tensors, must have {k.count} as k_scales")
    desc.k_scales, desc.v_scales, desc.scale_count = k.pointers, v.pointers, k.count
    return k, v
