# SPDX-License-Identifier: Apache-2.0
# The Qwen3 family's options over random shapes, against torch operations; what is refused.
from __future__ import annotations

import ctxkv
import pytest
import torch
from ctxkv import Chain, ContextKV, Norm, Norms, Projection, Store
from hypothesis import given
from hypothesis import strategies as st

import oracle
from helpers import BF16, bf16, rng, stock_cache, table, views
from test_properties import CPU, quick

F32 = torch.float32
CACHES = {
    "bf16": BF16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def stored(x: torch.Tensor, kind: str, scale: torch.Tensor) -> torch.Tensor:
    """BF16 values as a cache of this kind holds them, in its dtype."""
    if kind == "bf16":
        return x
    if kind == "fp16":
        return x.to(torch.float16)
    return oracle.fp8(x, scale, kind).view(CACHES[kind])


@st.composite
def stores(draw):
    g = rng(draw(st.integers(0, 2**31)))
    layers, rows, heads = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    dim = draw(st.sampled_from([64, 128, 256, 512]))
    kind = draw(st.sampled_from(sorted(CACHES)))
    dtype = draw(st.sampled_from([BF16, torch.float16, F32]))
    shared = draw(st.booleans())
    widths = [2 * draw(st.integers(1, dim // 2)) for _ in range(layers)]
    widths = widths[:1] * layers if shared else widths
    tables = [table(g, 40, w).to(dtype) for w in widths]
    tables = tables[:1] * layers if shared else tables
    weight = draw(st.sampled_from([None, BF16, F32]))
    it = {
        "rope": draw(st.sampled_from(["none", "gptj", "neox"])), "k_norm": "rms", "k_eps": 1e-6,
        "k_gain_centre": draw(st.sampled_from([0.0, 1.0])),
        "v_norm": draw(st.sampled_from(["absent", "rms"])),
        "v_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "v_scale": draw(st.sampled_from([None, 0.612, -3.0])), "v_from_k": draw(st.booleans()),
        "cache_type": kind,
    }
    drawn = torch.randn(layers, dim, generator=g)
    it["k_norm_weight"] = None if weight is None else drawn.to(weight)
    if it["rope"] != "none":
        it["cos_sin"] = tables[0] if shared else tables
        it["rotary_dim"] = widths[0] if shared else 0
    scaled = kind.startswith("fp8") and draw(st.booleans())
    scales = torch.rand(2, layers, generator=g) + 0.1
    if scaled:
        it["k_scales"] = [s.reshape(()) for s in scales[0]]
        it["v_scales"] = [s.reshape(1) for s in scales[1]]
    else:
        scales = torch.ones(2, layers)
    k, v = bf16(g, layers, rows, heads, dim), bf16(g, layers, rows, heads, dim)
    at = torch.randint(0, 40, (rows,), generator=g)
    slots = torch.randperm(16, generator=g)[:rows]
    pools = draw(st.booleans())
    return k, v, at, slots, it, tables, scales, pools


def empty_caches(layers: int, heads: int, dim: int, kind: str, pools: bool):
    """Pairs of K and V views: each in its own pool, or side by side in the last dimension."""
    dtype = CACHES[kind]
    if pools:
        made = [torch.full((2, 2, 8, heads, dim), 3.0).to(dtype) for _ in range(layers)]
        return [(m[0], m[1]) for m in made]
    wide = torch.full((2, heads, 8, 2 * dim), 3.0).to(dtype)
    return [views(wide.clone()) for _ in range(layers)]


@given(stores())
@quick
def test_a_store_of_any_options(call) -> None:
    k, v, at, slots, it, tables, scales, pools = call
    layers, rows, heads, dim = k.shape
    kind, kept = it["cache_type"], (k.clone(), v.clone())
    caches = empty_caches(layers, heads, dim, kind, pools)
    plan = Store(CPU, num_layers=layers, num_kv_heads=heads, head_dim=dim, **it)
    plan.bind_caches([p[0] for p in caches], [p[1] for p in caches])
    rope = it["rope"] != "none"
    plan.run(k, None if it["v_from_k"] else v, at if rope else None, slots)
    wanted = empty_caches(layers, heads, dim, kind, pools)
    for l in range(layers):
        weight = it["k_norm_weight"]
        n = oracle.rms_norm(
            k[l], None if weight is None else weight[l], 1e-6, 1,
            0.0 if weight is None else it["k_gain_centre"],
        )
        if rope:
            n = oracle.rope(n, at, tables[l], it["rope"])
        w = (k if it["v_from_k"] else v)[l]
        if it["v_norm"] == "rms":
            w = oracle.rms_norm(w, None, it["v_eps"], 1)
        if it["v_scale"] is not None:
            w = oracle.to_bf16(w.to(F32) * torch.tensor(it["v_scale"], dtype=F32))
        oracle.insert(
            *wanted[l], stored(n, kind, scales[0, l]), stored(w, kind, scales[1, l]), slots
        )
        for got, want in zip(caches[l], wanted[l]):
            assert oracle.same(got, want), f"layer {l}"
    assert oracle.same(k, kept[0]) and oracle.same(v, kept[1])


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_every_bf16_value_in_fp8(kind: str) -> None:
    """All 65536 patterns by a few scales, NaN and infinities too, beside torch's own rounding."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    v = every.view(1, 128, 1, 512)
    for scale in (1.0, 0.3, 2.0**-100, 2.0**100):
        cache = torch.zeros(2, 128, 1, 512, dtype=torch.uint8)
        s = [torch.tensor(scale)]
        plan = Store(
            CPU, num_layers=1, num_kv_heads=1, head_dim=512, k_norm="absent", cache_type=kind,
            k_scales=s, v_scales=s,
        )
        plan.bind_caches([cache[:1]], [cache[1:]])
        plan.run(v, v, None, torch.arange(128))
        want = oracle.fp8(v[0], s[0], kind)
        assert oracle.same(cache[1], want)
        # K passes through a rounding to BF16, which changes nothing but a NaN's payload.
        assert oracle.same(cache[0], want)


def test_every_bf16_value_in_fp16() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    v = every.view(1, 128, 1, 512)
    cache = torch.zeros(2, 128, 1, 512, dtype=torch.float16)
    plan = Store(
        CPU, num_layers=1, num_kv_heads=1, head_dim=512, k_norm="absent", cache_type="fp16"
    )
    plan.bind_caches([cache[:1]], [cache[1:]])
    plan.run(v, v, None, torch.arange(128))
    want = v[0].to(torch.float16).view(torch.int16)
    want[torch.isnan(v[0])] = 0x7FFF
    assert oracle.same(cache[1].view(torch.int16), want) and oracle.same(cache[0], cache[1])


@pytest.mark.parametrize("rows", [85, 86])
@pytest.mark.parametrize("numerics", ["stock", "invariant"])
def test_layer_norms_count_the_rows_of_all_layers(rows: int, numerics: str) -> None:
    """3 layers: 255 and 258 rows of one call, the last of the first order and the first of the
    second."""
    g = rng(rows)
    x, weights = bf16(g, rows, 4096), (1 + torch.randn(3, 4096, generator=g) / 4).to(BF16)
    plan = Norms(
        CPU, num_layers=3, hidden_size=4096, hidden=Norm("absent", 0.0), layer=Norm("rms", 1e-6),
        layer_weights=weights, numerics=numerics,
    )
    out = torch.empty(3, rows, 4096, dtype=BF16)
    plan.run(x, out)
    counted = 1 if numerics == "invariant" else 3 * rows
    for l in range(3):
        assert oracle.same(out[l], oracle.rms_norm(x, weights[l], 1e-6, counted))
    assert not oracle.same(oracle.rms_norm(x, weights[0], 1e-6, 1), oracle.rms_norm(
        x, weights[0], 1e-6, 256)), "the two orders agree here: the test says nothing"


@pytest.mark.parametrize("form", ["stacked", "layers"])
@pytest.mark.parametrize("add", ["fused", "after"])
def test_a_chain_of_k_alone(form: str, add: str) -> None:
    """Gemma 4's kind: K rows alone, a bias either way, V of raw K; against its parts."""
    g = rng(7)
    w, bias = bf16(g, 2, 128, 64), bf16(g, 2, 128)
    x, gain = bf16(g, 5, 64), bf16(g, 64)
    at, slots, cos_sin = torch.arange(5), torch.tensor([3, -1, 0, 9, 14]), table(g, 8, 32)
    chain = ContextKV(
        w if form == "stacked" else [one.clone() for one in w], 2, hidden=Norm("rms", 1e-6),
        layer=Norm("absent", 0.0), hidden_weight=gain, bias=bias, bias_add=add, k_norm="rms",
        k_eps=1e-6, rope="neox", rotary_dim=32, cos_sin=cos_sin, v_norm="rms", v_eps=1e-6,
        v_from_k=True, max_rows=8,
    )
    caches = [stock_cache(2, 2, 8) for _ in range(2)]
    chain.bind(caches)
    chain(x, at, slots)
    n = oracle.rms_norm(x, gain, 1e-6, 5)
    for l, cache in enumerate(caches):
        k = oracle.project(n, w[l], bias[l], add == "after").view(5, 2, 64)
        normed = oracle.rms_norm(k, None, 1e-6, 5)
        wanted = stock_cache(2, 2, 8)
        oracle.insert(*views(wanted), oracle.rope(normed, at, cos_sin, "neox"), normed, slots)
        assert oracle.same(cache, wanted)


def test_fp8_caches_bind_as_fp8_or_uint8_only() -> None:
    plan = Store(CPU, num_layers=1, num_kv_heads=1, k_norm="absent", cache_type="fp8_e4m3")
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        part = torch.zeros(1, 4, 1, 64, dtype=torch.uint8).view(dtype)
        plan.bind_caches([part], [part.clone()])
    for dtype in (BF16, torch.float8_e5m2, torch.int8, torch.float16):
        part = torch.zeros(1, 4, 1, 64, dtype=F32).to(dtype)
        with pytest.raises(ValueError, match=r"keys\[0\] has dtype .* must be FP8 e4m3 or uint8"):
            plan.bind_caches([part], [part])


REFUSED = {
    "v_scale is 0, must be another number": {"v_scale": 0},
    "v_scale is 'x', must be a number": {"v_scale": "x"},
    "v_scale is nan, must be finite": {"v_scale": float("nan")},
    "v_norm is 'row', must be one of 'absent', 'rms'": {"v_norm": "row"},
    "cache_type is 'int8', must be one of 'bf16', 'fp16'": {"cache_type": "int8"},
    "cache_type is 'nvfp4', must be one of": {"cache_type": "nvfp4"},
    "v_scales is None, must be given with k_scales": {"k_scales": [torch.ones(1)]},
    "k_scales is None, must be given with v_scales": {"v_scales": [torch.ones(1)]},
    "v_scales has 2 tensors, must have 1 as k_scales": {
        "k_scales": [torch.ones(1)], "v_scales": [torch.ones(1)] * 2,
    },
    "scale_count is 1, must be 0 unless cache_type is FP8": {
        "k_scales": [torch.ones(1)], "v_scales": [torch.ones(1)],
    },
    r"k_scales\[0\] has dtype bfloat16": {
        "k_scales": [torch.ones(1, dtype=BF16)], "v_scales": [torch.ones(1)],
        "cache_type": "fp8_e5m2",
    },
    r"k_scales\[0\] has shape \[3\]": {
        "k_scales": [torch.ones(3)], "v_scales": [torch.ones(1)], "cache_type": "fp8_e5m2",
    },
    "layer_cos_sin_count is 2, must be 0 or num_layers": {
        "cos_sin": [torch.ones(4, 64)] * 2, "rope": "neox",
    },
    r"layer_cos_sin\[0\] has 62 columns|has shape \[4, 66\]|66 columns": {
        "cos_sin": [torch.ones(4, 66)], "rope": "neox",
    },
    "cos_sin has dtype float64": {
        "cos_sin": torch.ones(4, 64, dtype=torch.float64), "rope": "neox",
    },
    "k_gain_centre is inf, must be finite": {"k_gain_centre": float("inf")},
    "v_eps is -1, must be finite and >= 0": {"v_eps": -1.0},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_name_the_argument(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Store(CPU, num_layers=1, num_kv_heads=1, **REFUSED[text])


def test_refusals_of_projection_and_chain() -> None:
    w = torch.zeros(1, 128, 64, dtype=BF16)
    shape = {"num_layers": 1, "num_kv_heads": 1, "hidden_size": 64}
    with pytest.raises(ValueError, match="bias_add is 'before', must be one of"):
        Projection(CPU, w, bias_add="before", **shape)
    with pytest.raises(ValueError, match=r"weights\[0\] has shape \[1, 128, 64\].* \[1, 64"):
        Projection(CPU, w, k_only=True, **shape)
    norm = {"num_layers": 1, "hidden_size": 64, "hidden": Norm("rms"), "layer": Norm("absent", 0)}
    with pytest.raises(ValueError, match=r"v_from_k is 1, must equal projection.k_only \(0\)"):
        Chain(
            CPU, norms=norm, projection={**shape, "weights": w}, max_rows=4,
            store={"num_layers": 1, "num_kv_heads": 1, "v_from_k": True},
        )
    plan = Store(CPU, num_layers=1, num_kv_heads=1, k_norm="absent", v_from_k=True)
    part = torch.zeros(1, 4, 1, 64, dtype=BF16)
    plan.bind_caches([part], [part.clone()])
    k = torch.ones(1, 2, 1, 64, dtype=BF16)
    with pytest.raises(ValueError, match="v is given, must be NULL in a plan with v_from_k"):
        plan.run(k, k, None, torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "dtype, torch_dtype", [("bf16", BF16), ("float16", torch.float16), ("fp32", F32)]
)
def test_a_rope_table_of_any_dtype(dtype: str, torch_dtype: torch.dtype) -> None:
    wide = torch.frombuffer(
        bytearray(ctxkv.rope_table(1e6, 32, 50, "fp32").tobytes()), dtype=F32
    ).view(50, 32)
    made = ctxkv.rope_table(1e6, 32, 50, dtype)
    got = torch.frombuffer(bytearray(made.tobytes()), dtype=torch_dtype).view(50, 32)
    assert oracle.same(got, wide.to(torch_dtype)) and bool((wide[0, :16] == 1).all())
