# SPDX-License-Identifier: Apache-2.0
# ContextKV and the operators: against the oracle, compiled, chunked, threaded, rebound.
from __future__ import annotations

import threading
import types

import pytest
import torch
from ctxkv import ContextKV, ContextNorms, Norm

import oracle
from helpers import BF16, bf16, rng, slots, stock_cache, table, views

L, H, D, BLOCKS = 3, 1, 8192, 4


class Draft:
    """Random weights of a small draft with its real hidden size, and the chain by the oracle."""

    def __init__(self, seed: int, layers: int = L, heads: int = H) -> None:
        g = self.g = rng(seed)
        self.weights = bf16(g, layers, 2 * heads * 64, D, scale=2.0**-5)
        self.hidden = (1 + torch.randn(D, generator=g) / 8).to(BF16)
        self.layers = (1 + torch.randn(layers, D, generator=g) / 8).to(BF16)
        self.table = table(g, 300)
        self.heads = heads

    def chain(self, **more) -> ContextKV:
        return ContextKV(
            self.weights, self.heads, hidden_weight=self.hidden, layer_weights=self.layers,
            rope="gptj", cos_sin=self.table, **more,
        )

    def inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = bf16(self.g, rows, D)
        at = torch.randint(0, 300, (rows,), generator=self.g)
        return x, at, slots(self.g, rows, BLOCKS * 16, holes=True)

    def caches(self) -> list[torch.Tensor]:
        return [stock_cache(BLOCKS, self.heads, 16) for _ in self.weights]

    def expected(self, x, at, lists) -> list[torch.Tensor]:
        wanted = self.caches()
        h = oracle.row_norm(x, self.hidden)
        for l, cache in enumerate(wanted):
            if lists[l] is None:
                continue
            n = oracle.row_norm(h, self.layers[l])
            kv = oracle.project(n, self.weights[l]).view(len(x), 2, self.heads, 64)
            oracle.store_layer(
                kv[:, 0], kv[:, 1], at, lists[l], self.table, "gptj", views(cache),
                lambda rows: oracle.plain_k_norm(rows, 1e-5),
            )
        return wanted


@pytest.fixture(scope="module")
def draft() -> Draft:
    return Draft(11)


@pytest.fixture(scope="module")
def call(draft):
    x, at, lists = draft.inputs(5)
    other = slots(draft.g, 3, BLOCKS * 16)
    given = [lists, None, other]
    return x, at, given, draft.expected(x, at, given)


def all_same(got, wanted) -> bool:
    return all(oracle.same(a, b) for a, b in zip(got, wanted, strict=True))


def test_chain_against_the_oracle(draft, call) -> None:
    x, at, lists, wanted = call
    chain, caches = draft.chain(), draft.caches()
    chain.bind(caches)
    chain(x, at, lists)
    assert all_same(caches, wanted) and chain.faults().count == 0


def test_pools_apart_and_weights_apart(draft, call) -> None:
    x, at, lists, wanted = call
    chain = ContextKV(
        list(draft.weights), H, hidden_weight=draft.hidden, layer_weights=list(draft.layers),
        rope="gptj", cos_sin=draft.table,
    )
    pools = [(stock_cache(BLOCKS, 16, H, 32), stock_cache(BLOCKS, 16, H, 32)) for _ in range(L)]
    chain.bind(pools)
    chain(x, at, lists)
    for (k, v), want in zip(pools, wanted):
        assert oracle.same(k, views(want)[0]) and oracle.same(v, views(want)[1])


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_any_passes_same_bits(draft, call, most: int) -> None:
    x, at, lists, wanted = call
    chain, caches = draft.chain(max_rows=most), draft.caches()
    chain.bind(caches)
    chain(x, at, lists)
    assert all_same(caches, wanted)


def test_one_slot_tensor_is_for_all_layers(draft, call) -> None:
    x, at, lists, _ = call
    chain, one, many = draft.chain(), draft.caches(), draft.caches()
    chain.bind(one)
    chain(x, at, lists[0])
    chain.bind(many)
    chain(x, at, [lists[0]] * L)
    assert all_same(one, many)


def test_nothing_to_do(draft, call) -> None:
    x, at, lists, _ = call
    chain, caches = draft.chain(), draft.caches()
    chain.bind(caches)
    chain(x, at, None)
    chain(x, at, [None] * L)
    chain(x[:0], at[:0], lists[0][:0])
    assert all_same(caches, draft.caches())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(draft, call, backend: str) -> None:
    x, at, lists, wanted = call
    chain, caches = draft.chain(), draft.caches()
    chain.bind(caches)
    compiled = torch.compile(
        lambda x, at, a, b: chain(x * 1, at, [a, None, b]), backend=backend, fullgraph=True
    )
    compiled(x, at, lists[0], lists[2])
    assert all_same(caches, wanted)
    if backend == "inductor":
        assert chain._other is None, "the caches were copied"


def test_compiled_norms_are_kept(draft, call) -> None:
    norms = ContextNorms(draft.hidden, draft.layers, L, 1e-5, 1e-5, device=torch.device("cpu"))
    compiled = torch.compile(lambda x: norms(x * 1) + 0, fullgraph=True)
    assert oracle.same(compiled(call[0]), norms(call[0]))


def test_opcheck(draft, call) -> None:
    x, at, lists, _ = call
    chain, caches = draft.chain(), draft.caches()
    chain.bind(caches)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (caches, x, at, lists, chain._id)
    torch.library.opcheck(torch.ops.ctxkv.context_kv_.default, arguments, test_utils=checks)
    norms = ContextNorms(None, None, 2, 1e-5, 1e-5, device=torch.device("cpu"))
    torch.library.opcheck(torch.ops.ctxkv.norms.default, (x, norms._id), test_utils=checks)
    schema = torch.ops.ctxkv.context_kv_.default._schema
    assert schema.arguments[0].alias_info.is_write and schema.is_mutable


def test_operator_of_a_dead_plan() -> None:
    with pytest.raises(RuntimeError, match="plan 123456789 is no longer there"):
        torch.ops.ctxkv.norms(torch.ones(1, D, dtype=BF16), 123456789)


def test_threads_share_a_chain(draft) -> None:
    chain, caches = draft.chain(), draft.caches()
    chain.bind(caches)
    inputs = [(*draft.inputs(3)[:2], torch.arange(3 * i, 3 * i + 3)) for i in range(8)]
    threads = [
        threading.Thread(target=lambda i=i: [chain(*inputs[i]) for _ in range(5)])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone, wanted = draft.chain(), draft.caches()
    alone.bind(wanted)
    for one in inputs:
        alone(*one)
    assert all_same(caches, wanted)


def test_without_caches() -> None:
    chain = ContextKV(torch.zeros(1, 128, D, dtype=BF16), 1)
    at = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="no caches"):
        chain(torch.ones(1, D, dtype=BF16), None, at)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x": torch.ones(2, D)}, "x has dtype float32"),
        ({"x": torch.ones(2, 4096, dtype=BF16)}, r"x has shape \[2, 4096\]"),
        ({"x": torch.ones(D, 2, dtype=BF16).t()}, "x has strides"),
        ({"at": torch.zeros(2, dtype=torch.int32)}, "positions has dtype int32"),
        ({"at": torch.zeros(3, dtype=torch.int64)}, r"positions has shape \[3\]"),
        ({"at": torch.zeros(4, dtype=torch.int64)[::2]}, "positions has strides"),
        ({"at": None}, "positions is NULL"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, r"slots\[0\] has dtype int32"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots\[0\] has 3 rows"),
        ({"slots": [torch.zeros(2, dtype=torch.int64)] * 2}, "slot_count is 2"),
        ({"slots": [7]}, r"slots\[0\] is of type int"),
    ],
)
def test_bad_calls_write_nothing(draft, change: dict, said: str) -> None:
    at = torch.zeros(2, dtype=torch.int64)
    given = {"x": torch.ones(2, D, dtype=BF16), "at": at, "slots": at, **change}
    chain, caches = draft.chain(), draft.caches()
    chain.bind(caches)
    with pytest.raises(ValueError, match=said):
        chain(given["x"], given["at"], given["slots"])
    assert all_same(caches, draft.caches())


def test_qwen3_rows_of_one_call_are_never_split() -> None:
    weights = torch.zeros(1, 256, 64, dtype=BF16)
    chain = ContextKV(
        weights, 1, head_dim=128, hidden=Norm("rms", 1e-6), layer=Norm("absent", 0.0),
        hidden_weight=torch.ones(64, dtype=BF16), k_norm="absent", max_rows=4,
    )
    chain.bind([stock_cache(1, 1, 16, 128)])
    with pytest.raises(ValueError, match="rows is 5, must be in 0..4"):
        chain(torch.ones(5, 64, dtype=BF16), None, torch.arange(5))


def test_caches_of_a_wrong_shape() -> None:
    chain = ContextKV(torch.zeros(2, 128, D, dtype=BF16), 1)
    good = stock_cache(1, 1, 16)
    with pytest.raises(ValueError, match="caches has 1 layers, must have 2"):
        chain.bind([good])
    with pytest.raises(ValueError, match=r"caches\[1\] has shape \[1, 1, 16, 64\]"):
        chain.bind([good, stock_cache(1, 1, 16, 32)])
    with pytest.raises(ValueError, match=r"keys\[1\] has shape"):
        chain.bind([good, stock_cache(1, 2, 16)])


def test_each_further_stream_has_a_workspace(monkeypatch):
    """The first stream takes the plan's own; found by two streams on an H200."""
    chain = object.__new__(ContextKV)
    chain.device, chain._workspaces = torch.device("cuda"), {}
    plan = types.SimpleNamespace(workspace_size=1000)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: empty(n, dtype=dtype))
    first, second = chain._workspace(plan, 1), chain._workspace(plan, 2)
    assert first == 0 and second % 256 == 0 and second != 0
    assert chain._workspace(plan, 1) == 0 and chain._workspace(plan, 2) == second
    held = chain._workspaces[2]
    assert held.data_ptr() <= second and second + 1000 <= held.data_ptr() + held.numel()
