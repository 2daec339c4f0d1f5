# SPDX-License-Identifier: Apache-2.0
# Properties over shapes, strides, dtypes and bad arguments: same bits, or a refusal by name.
from __future__ import annotations

import ctxkv
import pytest
import torch
from ctxkv import Norm, Norms, Projection, Store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from helpers import BF16, bf16, poisoned, rng, stock_cache, table, views

quick = settings(
    max_examples=100, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
CPU = ctxkv.device("cpu")
I64 = torch.int64


def strided(draw, tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in memory of other strides, offset and order; unit stride stays last."""
    outer = list(range(tensor.dim() - 1))
    order = draw(st.permutations(outer)) if outer else []
    lead, tail = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    shape = [tensor.shape[i] for i in order] + [lead + tensor.shape[-1] + tail]
    memory = poisoned(*shape).narrow(-1, lead, tensor.shape[-1])
    back = sorted(range(len(order)), key=lambda i: order[i])
    look = memory.permute(*back, len(order))
    look.copy_(tensor)
    return look


@st.composite
def norm_calls(draw):
    kind = draw(st.sampled_from(["row", "rms"]))
    width = 8192 if kind == "row" else 8 * draw(st.integers(1, 400))
    g = rng(draw(st.integers(0, 2**31)))
    rows = draw(st.integers(0, 5))
    weight = draw(st.sampled_from([BF16, torch.float32])) if kind == "row" else BF16
    return kind, strided(draw, bf16(g, rows, width)), (
        (1 + torch.randn(width, generator=g) / 4).to(weight)
    )


@given(norm_calls())
@quick
def test_norms_of_any_width_and_stride(call) -> None:
    kind, x, weight = call
    plan = Norms(
        CPU, num_layers=1, hidden_size=x.shape[1], hidden=Norm(kind, 1e-6),
        layer=Norm("absent", 0.0), hidden_weight=weight,
    )
    out = torch.empty(1, *x.shape, dtype=BF16)
    plan.run(x, out)
    flat = x.contiguous()
    want = (
        oracle.row_norm(flat, weight, 1e-6) if kind == "row"
        else oracle.rms_norm(flat, weight, 1e-6, len(x))
    )
    assert oracle.same(out[0], want)


@st.composite
def projections(draw):
    g = rng(draw(st.integers(0, 2**31)))
    layers, rows = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    heads, dim = draw(st.integers(1, 2)), draw(st.sampled_from([64, 128]))
    width = 16 * draw(st.integers(1, 6))
    shared = draw(st.booleans())
    normed = strided(draw, bf16(g, 1 if shared else layers, rows, width))
    weights = bf16(g, layers, 2 * heads * dim, width)
    form = draw(st.sampled_from(["one", "layers", "halves", "flat"]))
    bias = bf16(g, layers, 2 * heads * dim) if draw(st.booleans()) else None
    time_major = draw(st.booleans())
    return normed, weights, form, bias, heads, dim, time_major


@given(projections())
@quick
def test_projection_of_any_layout(call) -> None:
    normed, weights, form, bias, heads, dim, time_major = call
    layers, columns, width = weights.shape
    rows, half = normed.shape[1], columns // 2
    passed = {
        "one": lambda: weights,
        "flat": lambda: weights.view(-1, width),
        "layers": lambda: [w.clone() for w in weights],
        "halves": lambda: [p.clone() for w in weights for p in (w[:half], w[half:])],
    }[form]()
    plan = Projection(
        CPU, passed, num_layers=layers, num_kv_heads=heads, head_dim=dim, hidden_size=width,
        bias=bias,
    )
    if time_major:
        kv = torch.empty(rows, layers, columns, dtype=BF16).transpose(0, 1)
    else:
        kv = torch.empty(layers, rows, columns, dtype=BF16)
    plan.run(normed, kv)
    for l in range(layers):
        n = normed[l if len(normed) > 1 else 0].contiguous()
        want = oracle.project(n, weights[l], None if bias is None else bias[l])
        assert oracle.same(kv[l].contiguous(), want)


@st.composite
def stores(draw):
    g = rng(draw(st.integers(0, 2**31)))
    layers, rows, heads = draw(st.integers(1, 4)), draw(st.integers(0, 9)), draw(st.integers(1, 3))
    norm, dim = draw(st.sampled_from([("plain", 64), ("absent", 64), ("absent", 128)]))
    rope = draw(st.sampled_from(["none", "gptj", "neox"]))
    k, v = (strided(draw, bf16(g, layers, rows, heads, dim)) for _ in "kv")
    caches = []
    for _ in range(layers):
        blocks, size = draw(st.integers(1, 3)), draw(st.integers(1, 7))
        if draw(st.booleans()):
            caches.append(views(stock_cache(blocks, heads, size, dim)))
        else:
            pools = [poisoned(size, heads, blocks, dim + 2).permute(2, 0, 1, 3) for _ in "kv"]
            caches.append(tuple(pool[..., 1 : dim + 1] for pool in pools))
    wild = st.sampled_from([-1, -(2**63), 2**63 - 1, 2**32, 2**31 - 1, -7])
    lists = []
    for key, _ in caches:
        places = key.shape[0] * key.shape[1]
        count = draw(st.integers(0, rows))
        free = draw(st.permutations(range(places)))
        chosen = [draw(wild) if draw(st.integers(0, 4)) == 0 else s for s in free[:count]]
        lists.append(None if draw(st.integers(0, 5)) == 0 else torch.tensor(chosen, dtype=I64))
    at = torch.tensor(
        [draw(st.sampled_from([0, 5, 29, 30, -1, 2**40])) for _ in range(rows)], dtype=I64
    )
    return k, v, at, lists, caches, norm, rope, table(g, 30, dim)


@given(stores())
@quick
def test_store_of_any_layout_and_any_slots(call) -> None:
    k, v, at, lists, caches, norm, rope, cos_sin = call
    layers, _, heads, dim = k.shape
    wanted = [tuple(part.clone() for part in pair) for pair in caches]
    expected = 0
    for l, pair in enumerate(wanted):
        if lists[l] is None:
            continue
        limit = None if rope == "none" else 30
        room = pair[0].shape[0] * pair[0].shape[1]
        for t, slot in enumerate(lists[l].tolist()):
            inside = limit is None or 0 <= int(at[t]) < limit
            expected += slot >= room or (0 <= slot and not inside)
        oracle.store_layer(
            k[l].contiguous(), v[l], at, lists[l], cos_sin, rope, pair,
            (lambda x: oracle.plain_k_norm(x, 1e-6)) if norm == "plain" else (lambda x: x),
        )
    plan = Store(
        CPU, num_layers=layers, num_kv_heads=heads, head_dim=dim, k_norm=norm, k_eps=1e-6,
        rope=rope, cos_sin=None if rope == "none" else cos_sin,
    )
    plan.bind_caches([p[0] for p in caches], [p[1] for p in caches])
    plan.run(k, v, None if rope == "none" else at, lists)
    for got, want in zip(caches, wanted):
        assert oracle.same(got[0], want[0]) and oracle.same(got[1], want[1])
    assert plan.faults().count == expected


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.none(), st.text(max_size=3), st.booleans()
)
GOOD = {
    "num_layers": 2, "hidden_size": 64, "num_kv_heads": 1, "head_dim": 64, "max_rows": 4,
    "k_eps": 1e-5, "rotary_dim": 0,
}


def make(kind: str, changed: dict) -> None:
    it = {**GOOD, **changed}
    if kind == "norms":
        Norms(
            CPU, num_layers=it["num_layers"], hidden_size=it["hidden_size"],
            hidden=Norm("rms", it["k_eps"]), layer=Norm("absent", 0.0),
        )
    elif kind == "projection":
        names = ("num_layers", "hidden_size", "num_kv_heads", "head_dim", "max_rows")
        weights = torch.zeros(2, 128, 64, dtype=BF16)
        Projection(CPU, weights, **{n: it[n] for n in names})
    else:
        names = ("num_layers", "num_kv_heads", "head_dim", "k_eps", "rotary_dim")
        Store(CPU, k_norm="absent", **{n: it[n] for n in names})


@given(st.sampled_from(["norms", "projection", "store"]), st.sampled_from(sorted(GOOD)), NUMBERS)
@settings(quick, max_examples=300)
def test_bad_numbers_are_refused_by_name_or_taken(kind: str, name: str, value) -> None:
    try:
        make(kind, {name: value})
    except ValueError as error:
        known = (name, "weights", "eps", "k_norm")
        assert any(word in str(error) for word in known), str(error)
        assert "must" in str(error)
    except RuntimeError as error:
        assert "memory" in str(error)


@pytest.mark.parametrize("kind", ["norms", "projection", "store"])
def test_the_good_numbers_are_good(kind: str) -> None:
    make(kind, {})


DTYPES = st.sampled_from([
    torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.complex64,
])
SHAPES = st.lists(st.integers(0, 3), max_size=5)


@given(DTYPES, SHAPES, st.sampled_from(["x", "out"]))
@quick
def test_tensors_of_another_kind_are_refused_by_name(dtype, shape: list[int], name: str) -> None:
    plan = Norms(CPU, num_layers=1, hidden_size=64, hidden=Norm("rms"), layer=Norm("absent", 0.0))
    good = {"x": torch.ones(2, 64, dtype=BF16), "out": torch.zeros(1, 2, 64, dtype=BF16)}
    with pytest.raises(ValueError, match=f"{name} has dtype"):
        plan.run(**{**good, name: good[name].to(dtype)})
    with pytest.raises(ValueError, match=f"{name} has shape"):
        plan.run(**{**good, name: torch.ones(shape, dtype=BF16)})
    assert bool((good["out"] == 0).all())


@given(st.one_of(st.none(), st.integers(), st.text(max_size=3), st.just(b"x"), st.just([[1]])))
@quick
def test_what_is_no_tensor_is_refused_by_name(value) -> None:
    plan = Norms(CPU, num_layers=1, hidden_size=64, hidden=Norm("rms"), layer=Norm("absent", 0.0))
    with pytest.raises(ValueError, match="x is of type"):
        plan.run(value, torch.zeros(1, 2, 64, dtype=BF16))
