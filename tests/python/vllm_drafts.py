# SPDX-License-Identifier: Apache-2.0
# vLLM 0.33's own draft classes on a CPU, as far as the context chain needs them: real models,
# norms, RoPE and attention backends; only the CUDA operators under them are torch's.
from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import gemma4_dspark, laguna_dflash, qwen3_dflash
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.models.muse_spark.common.dspark import MuseSparkDSparkModel
from vllm.models.muse_spark.common.layers import (
    MuseSpark1xRMSNorm,
    MuseSpark1xRMSNormWithInputScale,
)
from vllm.v1.attention.backends import flash_attn, flashinfer

from helpers import BF16, bf16, rng, stock_cache

EPS = 1e-5
MAX_POSITION = 256
CONFIG = VllmConfig(device_config=DeviceConfig(device="cpu"))


def insert_by_torch(key, value, key_cache, value_cache, slots, dtype, k_scale, v_scale) -> None:
    """reshape_and_cache_flash."""
    size = key_cache.shape[1]
    key, value = quantised(key, dtype, k_scale), quantised(value, dtype, v_scale)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[t]
            value_cache[slot // size, slot % size] = value[t]


def quantised(x: torch.Tensor, dtype: str, scale: torch.Tensor) -> torch.Tensor:
    """What that kernel stores of finite x, as uint8 for FP8."""
    if dtype in ("auto", "bfloat16"):
        return x
    kind = {"fp8_e5m2": torch.float8_e5m2}.get(dtype, torch.float8_e4m3fn)
    most = torch.finfo(kind).max
    return (x.float() / scale).clamp(-most, most).to(kind).view(torch.uint8)


_fragment = torch.library.Library("_C_cache_ops", "FRAGMENT")
if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
    _fragment.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slots, str dtype, Tensor k_scale, Tensor v_scale) -> ()"
    )
    _fragment.impl("reshape_and_cache_flash", insert_by_torch, "CPU")


def _rms_norm(out, x, weight, eps) -> None:
    f = x.float()
    root = torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    while 1 < weight.dim() < x.dim():
        weight = weight.unsqueeze(1)  # a row for each layer
    out.copy_(f * root * weight.float())


def _rotary(positions, query, key, head_size, table, neox) -> None:
    made, _ = RotaryEmbedding.forward_static(
        positions, query, key, head_size, table.shape[1], table, neox
    )
    query.copy_(made)


def torch_operators(monkeypatch) -> None:
    """Torch's operators under vLLM's methods, where vLLM has CUDA's alone."""
    monkeypatch.setattr(MuseSpark1xRMSNorm, "supports_fused_kernel", lambda self, x: False)
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", insert_by_torch, raising=False)
    ops = SimpleNamespace(rms_norm=_rms_norm, rotary_embedding=_rotary)
    for module in (qwen3_dflash, laguna_dflash, gemma4_dspark):
        monkeypatch.setattr(module, "ops", ops)


def attention(kind: str, cache: torch.Tensor, dim: int) -> SimpleNamespace:
    """An attention layer with one of vLLM's backends."""
    cls = {
        "FLASH_ATTN": flash_attn.FlashAttentionImpl, "FLASHINFER": flashinfer.FlashInferImpl,
    }[kind]
    impl = cls.__new__(cls)
    impl.head_size, impl.kv_cache_dtype, impl.cache_dtype = dim, "auto", "auto"
    impl.attn_type, impl.kv_sharing_target_layer_name = "decoder", None
    impl.nvfp4_fa2 = impl.is_kvcache_nvfp4 = False
    one = torch.ones(())
    return SimpleNamespace(
        impl=impl, kv_cache=cache, kv_cache_dtype="auto", _k_scale=one, _v_scale=one
    )


def rotary(
    dim: int, neox: bool, theta: float = 500000.0, rotary_dim: int = 0
) -> RotaryEmbedding:
    with set_current_vllm_config(CONFIG):
        return RotaryEmbedding(dim, rotary_dim or dim, MAX_POSITION, theta, neox, BF16)


def with_fp8(model, dtype: str = "fp8") -> None:
    """The model's caches become FP8, with scales of their own."""
    for i, attn in enumerate(model._attn_layers):
        attn.kv_cache_dtype = attn.impl.kv_cache_dtype = dtype
        attn._k_scale = torch.tensor(0.5 + i / 8)
        attn._v_scale = torch.tensor([0.25 + i / 16])
        attn.kv_cache = attn.kv_cache.to(torch.uint8)


def _muse_norm(g, width: int, weight: bool, centred: bool, dtype, before: bool) -> nn.Module:
    cls = MuseSpark1xRMSNormWithInputScale if before else MuseSpark1xRMSNorm
    norm = cls(width, eps=EPS, has_weight=weight, zero_centered_gamma=centred)
    if weight:
        drawn = torch.randn(width, generator=g) / 8 + (0 if centred else 1)
        norm.weight = nn.Parameter(drawn.to(dtype), requires_grad=False)
    return norm


def muse_spark(
    seed: int = 0, layers: int = 2, heads: int = 1, rope: bool = True, weight: bool = True,
    centred: bool = False, dtype: torch.dtype = BF16, before: bool = False,
    backend: str = "FLASH_ATTN", block_size: int = 16, width: int = 8192,
) -> MuseSparkDSparkModel:
    """A MuseSparkDSparkModel of one rank, random weights, empty (poisoned) caches."""
    g = rng(seed)
    model = MuseSparkDSparkModel.__new__(MuseSparkDSparkModel)
    nn.Module.__init__(model)
    model.hidden_norm = _muse_norm(g, width, weight, centred, dtype, False)
    model.layers = [
        SimpleNamespace(
            self_attn=SimpleNamespace(
                pre_qkv_proj_norm=_muse_norm(g, width, weight, centred, dtype, before),
                qkv_proj=SimpleNamespace(weight=bf16(g, 64 + 128 * heads, width, scale=2.0**-5)),
                q_size=64, kv_size=64 * heads, head_dim=64, num_kv_heads=heads,
                qk_norm=MuseSpark1xRMSNorm(64, eps=EPS, has_weight=False),
                rotary_emb=rotary(64, False) if rope else None,
                attn=attention(backend, stock_cache(4, heads, block_size), 64),
            )
        )
        for _ in range(layers)
    ]
    model._build_fused_kv_buffers()
    return model


def _gain(g, n: int) -> nn.Parameter:
    return nn.Parameter((1 + torch.randn(n, generator=g) / 8).to(BF16), requires_grad=False)


def qwen3(
    seed: int = 0, layers: int = 2, heads: int = 2, dim: int = 64, width: int = 256,
    bias: bool = False, backend: str = "FLASH_ATTN", cls: type = DFlashQwen3Model,
    rotary_dim: int = 0, v_scale: float | None = None,
) -> DFlashQwen3Model:
    """A DFlashQwen3Model (or an heir of its attention) of one rank, likewise."""
    g = rng(seed)

    def linear(rows: int) -> SimpleNamespace:
        return SimpleNamespace(
            weight=bf16(g, rows, width, scale=2.0**-4), bias=bf16(g, rows) if bias else None,
            quant_method=UnquantizedLinearMethod(),
        )

    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.hidden_norm = SimpleNamespace(weight=_gain(g, width))
    model.layers = [
        SimpleNamespace(
            input_layernorm=SimpleNamespace(weight=_gain(g, width)),
            self_attn=SimpleNamespace(
                qkv_proj=linear(dim + 2 * heads * dim), k_proj=linear(heads * dim), v_proj=None,
                use_k_eq_v=True, q_size=dim, kv_size=heads * dim, head_dim=dim,
                num_kv_heads=heads, v_scale=v_scale,
                q_norm=SimpleNamespace(variance_epsilon=1e-6),
                k_norm=SimpleNamespace(weight=_gain(g, dim)),
                rotary_emb=rotary(dim, True, 1e6, rotary_dim),
                attn=attention(backend, stock_cache(4, heads, 16, dim), dim),
            ),
        )
        for _ in range(layers)
    ]
    model._build_fused_kv_buffers()
    return model


def caches(model) -> list[torch.Tensor]:
    return [attn.kv_cache for attn in model._attn_layers]


def fresh_caches(model) -> list[torch.Tensor]:
    """The model gets poisoned caches of the same strides; they are returned."""
    for attn in model._attn_layers:
        old = attn.kv_cache
        made = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
        made.view(torch.uint8).fill_(0x5A)
        attn.kv_cache = made
    return caches(model)


def drafter(cls: type, model: nn.Module) -> nn.Module:
    """An instance of a draft's outer class around a model."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made.model = model
    return made
