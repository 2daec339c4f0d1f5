# SPDX-License-Identifier: Apache-2.0
# The drop-in classes: signatures, values against the oracle, and what goes beyond the original.
from __future__ import annotations

import inspect

import ctxkv
import pytest
import torch
from ctxkv import (
    ContextKvStore,
    ContextNormConstants,
    ContextNorms,
    compile_context_kv_store,
    compile_context_norms,
    context_norm_constants,
)

import oracle
from helpers import BF16, bf16, poisoned, rng, slots, stock_cache, table, views

CPU = torch.device("cpu")


def parameters(function) -> list[str]:
    return [p for p in inspect.signature(function).parameters if p != "self"]


def test_names_and_signatures_are_the_originals() -> None:
    assert parameters(ContextNorms.__init__) == [
        "hidden_weight", "pre_weights", "num_layers", "hidden_eps", "pre_eps", "device",
        "hidden_gain_center", "pre_gain_center", "hidden_input_scale", "pre_input_scale",
        "constants",
    ]
    assert parameters(ContextNorms.__call__) == ["x"]
    assert parameters(ContextKvStore.__init__) == ["num_heads", "rope", "eps"]
    assert parameters(ContextKvStore.__call__) == [
        "k", "v", "positions", "slots", "cos_sin_cache", "caches",
    ]
    assert ContextNormConstants._fields == (
        "hidden_weight_fp32", "pre_weight_fp32", "hidden_input_scale", "pre_input_scale",
        "enable_pdl",
    )
    assert parameters(context_norm_constants) == [
        "hidden_weight", "pre_weights", "hidden_input_scale", "pre_input_scale",
    ]
    assert parameters(compile_context_kv_store) == ["heads", "rope", "enable_pdl"]
    assert parameters(compile_context_norms) == ["constants"]


def test_constants() -> None:
    w = torch.ones(8192, dtype=BF16)
    none = context_norm_constants(None, None, hidden_input_scale=True, pre_input_scale=True)
    assert none[:4] == (None, None, False, False)
    both = context_norm_constants(w, w.float().expand(3, -1), pre_input_scale=True)
    assert both[:4] == (False, True, False, True)
    with pytest.raises(ValueError, match="hidden_weight has dtype torch.float16"):
        context_norm_constants(w.half(), None)
    with pytest.raises(ValueError, match=r"pre_weights has shape \[2, 4096\], must end with 8192"):
        context_norm_constants(None, torch.ones(2, 4096))


def test_compile_gives_one_object_for_one_set_of_constants() -> None:
    constants = context_norm_constants(None, None)
    assert compile_context_norms(constants) is compile_context_norms(constants)
    assert compile_context_norms(constants) is not compile_context_norms(
        constants._replace(pre_weight_fp32=True)
    )
    one = compile_context_kv_store(2, True, False)
    assert one is compile_context_kv_store(2, True, False)
    assert one is not compile_context_kv_store(2, False, False)


def test_plans_are_refused_during_a_capture(monkeypatch) -> None:
    store = ContextKvStore(1, False, 1e-5)
    monkeypatch.setattr("ctxkv._streams.capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        compile_context_norms(context_norm_constants(None, None))
    with pytest.raises(RuntimeError, match="captured"):
        compile_context_kv_store(1, True, True)
    k = torch.ones(1, 1, 1, 64, dtype=BF16)
    with pytest.raises(RuntimeError, match="first call with these caches"):
        at = torch.zeros(1, dtype=torch.int64)
        store(k, k, at, [at], None, [views(stock_cache(1, 1, 16))[0]])


@pytest.mark.parametrize("hidden", ["n", "b", "B", "f", "F"])
@pytest.mark.parametrize("layer", ["n", "b", "B", "f", "F"])
def test_norms_against_the_oracle(hidden: str, layer: str) -> None:
    g = rng(ord(hidden) * 256 + ord(layer))
    x = bf16(g, 4, 8192)
    kinds = {"n": None, "b": BF16, "B": BF16, "f": torch.float32, "F": torch.float32}
    first = None if hidden == "n" else (torch.randn(8192, generator=g) + 1).to(kinds[hidden])
    second = None if layer == "n" else torch.randn(3, 8192, generator=g).to(kinds[layer])
    norms = ContextNorms(
        first, second, 3, 1e-5, 3e-6, device=CPU, pre_gain_center=1.0,
        hidden_input_scale=hidden in "BF", pre_input_scale=layer in "BF",
    )
    h = oracle.row_norm(x, first, 1e-5, 0.0, hidden in "BF")
    want = torch.stack([
        oracle.row_norm(h, None if second is None else second[l], 3e-6, 1.0, layer in "BF")
        for l in range(3)
    ])
    assert oracle.same(norms(x), want)


def test_norms_take_strided_rows_and_none() -> None:
    g = rng(5)
    big = bf16(g, 6, 2 * 8192)
    norms = ContextNorms(None, None, 2, 1e-5, 1e-5, device=CPU)
    assert oracle.same(norms(big[:, :8192]), norms(big[:, :8192].contiguous()))
    assert norms(big[:0, :8192]).shape == (2, 0, 8192)
    odd = torch.empty(4 * 8192 + 1, dtype=BF16)[1:].view(4, 8192).copy_(big[:4, :8192])
    assert oracle.same(norms(odd), norms(big[:4, :8192]))


@pytest.mark.parametrize(
    "x, said",
    [
        (torch.ones(2, 8192), "x has dtype float32"),
        (torch.ones(2, 4096, dtype=BF16), r"\[T, 8192\]"),
        (torch.ones(8192, 2, dtype=BF16).t(), "stride 1"),
        (torch.ones(8192, dtype=BF16), r"\[T, 8192\]"),
    ],
)
def test_norms_refuse_by_name(x: torch.Tensor, said: str) -> None:
    norms = ContextNorms(None, None, 2, 1e-5, 1e-5, device=CPU)
    with pytest.raises(ValueError, match=said):
        norms(x)


def test_norm_weights_that_do_not_fit_their_constants() -> None:
    constants = context_norm_constants(torch.ones(8192), None)
    with pytest.raises(ValueError, match="hidden_weight is torch.bfloat16, must be torch.float32"):
        ContextNorms(
            torch.ones(8192, dtype=BF16), None, 2, 1e-5, 1e-5, device=CPU, constants=constants
        )
    with pytest.raises(ValueError, match=r"layer_weights has shape \[1, 8192\]"):
        ContextNorms(None, torch.ones(1, 8192), 2, 1e-5, 1e-5, device=CPU)


def test_each_of_nine_layers_has_its_own_weight() -> None:
    # cases B12: layer 0's weight was once used for all.
    weights = torch.stack([torch.full((8192,), 2.0**l) for l in range(9)]).to(BF16)
    norms = ContextNorms(None, weights, 9, 0.0, 0.0, device=CPU)
    out = norms(torch.ones(1, 8192, dtype=BF16))
    assert [out[l].unique().tolist() for l in range(9)] == [[2.0**l] for l in range(9)]


# ---- the store ---------------------------------------------------------------------------------
def random_store(seed: int, layers: int, rows: int, heads: int, rope: bool):
    g = rng(seed)
    kv = bf16(g, layers, rows, 2, heads, 64)
    at = torch.randint(0, 200, (rows,), generator=g)
    return g, kv[:, :, 0], kv[:, :, 1], at, table(g, 200) if rope else None


def expected(k, v, at, lists, cos_sin, caches, eps: float) -> list[torch.Tensor]:
    wanted = [cache.clone() for cache in caches]
    kind = "none" if cos_sin is None else "gptj"
    for l, cache in enumerate(wanted):
        oracle.store_layer(
            k[l], v[l], at, lists[l], cos_sin, kind, views(cache),
            lambda rows: oracle.plain_k_norm(rows, eps),
        )
    return wanted


@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("layers", [1, 5, 9])
def test_store_against_the_oracle(heads: int, rope: bool, layers: int) -> None:
    g, k, v, at, cos_sin = random_store(heads + layers, layers, 11, heads, rope)
    lists = [slots(g, 7, 5 * 16, holes=l % 2 == 1) for l in range(layers)]
    caches = [stock_cache(5, heads, 16) for _ in range(layers)]
    wanted = expected(k, v, at, lists, cos_sin, caches, 1e-6)
    store = ContextKvStore(heads, rope, 1e-6)
    store(k, v, at, lists, cos_sin, [views(cache)[0] for cache in caches])
    for l, (got, want) in enumerate(zip(caches, wanted)):
        assert oracle.same(got, want), f"layer {l}"


def test_layers_may_differ_in_strides_and_shape() -> None:
    # cases B04: one buffer for all layers, one layer contiguous, one of another block count.
    g, k, v, at, cos_sin = random_store(7, 5, 6, 2, True)
    shared = poisoned(8, 5, 2, 16, 128)
    caches = [shared[:, l] for l in range(5)]
    caches[3], caches[1] = stock_cache(7, 2, 16), stock_cache(20, 2, 5)
    lists = [slots(g, 6, 7 * 16) for _ in range(5)]
    wanted = expected(k, v, at, lists, cos_sin, caches, 1e-5)
    ContextKvStore(2, True, 1e-5)(k, v, at, lists, cos_sin, [views(c)[0] for c in caches])
    for l, (got, want) in enumerate(zip(caches, wanted)):
        assert oracle.same(got, want), f"layer {l}"


def test_hostile_slots_write_nothing_else_and_are_reported() -> None:
    k = torch.ones(2, 4, 1, 64, dtype=BF16)
    v = torch.arange(1, 5).view(1, 4, 1, 1).expand(2, 4, 1, 64).to(BF16)
    at = torch.zeros(4, dtype=torch.int64)
    caches = [stock_cache(1, 1, 16) for _ in range(2)]
    lists = [
        torch.tensor([3, -1, 2**62, 7]),
        torch.tensor([-(2**63), 16, 2**32, 0]),
    ]
    wanted = expected(k, v, at, lists, None, caches, 1e-6)
    store = ContextKvStore(1, False, 1e-6)
    store(k, v, at, lists, None, [views(c)[0] for c in caches])
    assert all(oracle.same(got, want) for got, want in zip(caches, wanted))
    assert caches[0][0, 0, 3].tolist() == [1.0] * 128
    faults = store.faults()
    assert faults == ctxkv.FaultReport(3, "slot", 0, 2, 2**62, 16)
    assert store.faults().count == 0


def test_store_needs_its_table_exactly_with_rope() -> None:
    k = torch.ones(1, 1, 1, 64, dtype=BF16)
    at, cache = torch.zeros(1, dtype=torch.int64), views(stock_cache(1, 1, 16))[0]
    with pytest.raises(ValueError, match="cos_sin_cache is None"):
        ContextKvStore(1, True, 1e-5)(k, k, at, [at], None, [cache])
    with pytest.raises(ValueError, match="cos_sin_cache is given"):
        ContextKvStore(1, False, 1e-5)(k, k, at, [at], table(rng(1), 4), [cache])


def test_store_refuses_caches_without_room_for_v() -> None:
    k = torch.ones(1, 1, 1, 64, dtype=BF16)
    at = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"caches\[0\] has no V behind its K"):
        ContextKvStore(1, False, 1e-5)(k, k, at, [at], None, [poisoned(1, 16, 1, 64)])
    with pytest.raises(ValueError, match=r"caches\[0\] has dtype torch.float16"):
        half = views(stock_cache(1, 1, 16))[0].to(torch.float16)
        ContextKvStore(1, False, 1e-5)(k, k, at, [at], None, [half])


def test_positions_beyond_the_table_are_never_read() -> None:
    # cases B06: the rows after the table are NaN.
    whole = table(rng(3), 4096)
    whole[2048:] = torch.nan
    k = bf16(rng(4), 1, 2, 1, 64)
    at, lists = torch.tensor([2047, 2048]), [torch.tensor([0, 1])]
    cache = stock_cache(1, 1, 16)
    wanted = expected(k, k, at, lists, whole[:2048], [cache], 1e-6)
    store = ContextKvStore(1, True, 1e-6)
    store(k, k, at, lists, whole[:2048], [views(cache)[0]])
    assert oracle.same(cache, wanted[0]) and not cache.isnan().any()
    assert store.faults() == ctxkv.FaultReport(1, "position", 0, 1, 2048, 2048)


def test_plans_for_passing_caches_are_let_go() -> None:
    kernel = compile_context_kv_store(1, False, False)
    k, at = torch.ones(1, 1, 1, 64, dtype=BF16), torch.zeros(1, dtype=torch.int64)
    store = ContextKvStore(1, False, 1e-5)
    for _ in range(100):
        cache = stock_cache(1, 1, 16)
        store(k, k, at, [at], None, [views(cache)[0]])
        assert cache[0, 0, 0].tolist() == [pytest.approx(1.0, abs=1e-4)] * 64 + [1.0] * 64
    assert 1 <= len(kernel.plans) <= 64
