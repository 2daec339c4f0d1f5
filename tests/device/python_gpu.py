#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package on a GPU: torch tensors, captures, streams, launches, torch.compile.

usage: PYTHONPATH=python CTXKV_LIBRARY=.../libctxkv.so python_gpu.py [name ...]
Last line: N passed, N failed. About 40 s, half of it torch.compile.
"""
import importlib.util
import os
import sys
import time

import torch

import ctxkv
from ctxkv import ContextKV, ContextKvStore, ContextNorms, Norm, compile_context_kv_store

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from runner import NotRun, main, test  # noqa: E402

BF16 = torch.bfloat16
L, D, BLOCKS = 5, 8192, 80


def same(a, b):
    return all(torch.equal(x.cpu().view(torch.int16), y.cpu().view(torch.int16))
               for x, y in zip(a, b, strict=True))


class Draft:
    """Random operands on the CPU, and by `on` on a device."""

    def __init__(self, heads, rows, seed=0, qwen3=False):
        g = torch.Generator().manual_seed(seed)
        self.qwen3, self.heads, self.rows = qwen3, heads, rows
        self.dim, self.width = (128, 4096) if qwen3 else (64, D)

        def draw(*shape, scale=1.0, centre=0.0):
            return (torch.randn(*shape, generator=g) * scale + centre).to(BF16)

        self.held = {
            "weights": draw(L, 2 * heads * self.dim, self.width, scale=0.02),
            "hidden": draw(self.width, scale=0.1, centre=1.0),
            "layers": draw(L, self.width, scale=0.1, centre=1.0),
            "k": draw(L, self.dim, scale=0.1, centre=1.0),
            "table": draw(4096, self.dim),
            "x": draw(rows, self.width),
            "at": torch.randint(0, 4096, (rows,), generator=g),
            "slots": torch.stack([torch.randperm(BLOCKS * 16, generator=g)[:rows]
                                  for _ in range(L)]),
        }
        self.held["slots"][1, ::5] = -1

    def on(self, where):
        return {name: tensor.to(where) for name, tensor in self.held.items()}

    def chain(self, t, **more):
        if self.qwen3:
            return ContextKV(
                t["weights"], self.heads, head_dim=128, hidden=Norm("rms", 1e-6),
                layer=Norm("absent", 0.0), hidden_weight=t["hidden"], k_norm="rms", k_eps=1e-6,
                k_norm_weight=t["k"], rope="neox", cos_sin=t["table"], **more)
        return ContextKV(
            t["weights"], self.heads, hidden_weight=t["hidden"], layer_weights=t["layers"],
            rope="gptj", cos_sin=t["table"], **more)

    def caches(self, where):
        shape = (BLOCKS, self.heads, 16, 2 * self.dim)
        return [torch.full(shape, 0x5A5A, dtype=torch.int16, device=where).view(BF16)
                for _ in range(L)]

    def expected(self):
        t, caches = self.on("cpu"), self.caches("cpu")
        chain = self.chain(t)
        chain.bind(caches)
        chain(t["x"], t["at"], list(t["slots"]))
        return caches


def bound(draft, **more):
    t, caches = draft.on("cuda"), draft.caches("cuda")
    chain = draft.chain(t, **more)
    chain.bind(caches)
    return t, caches, chain


@test
def chains_have_the_cpus_bits():
    for draft in (Draft(2, 8), Draft(16, 64, 1), Draft(1, 300, 2), Draft(8, 9, 3, qwen3=True)):
        t, caches, chain = bound(draft)
        chain(t["x"], t["at"], list(t["slots"]))
        assert same(caches, draft.expected()), (draft.heads, draft.rows)
        assert chain.faults().count == 0


@test
def passes_have_the_same_bits():
    draft = Draft(2, 150)
    t, caches, chain = bound(draft, max_rows=64)
    chain(t["x"], t["at"], list(t["slots"]))
    assert same(caches, draft.expected())


@test
def seeds_classes_have_the_cpus_bits():
    draft = Draft(4, 33)
    kv = torch.randn(L, 33, 2, 4, 64, generator=torch.Generator().manual_seed(9)).to(BF16)
    found = []
    for where in ("cpu", "cuda"):
        t, caches = draft.on(where), draft.caches(where)
        norms = ContextNorms(t["hidden"], t["layers"], L, 1e-5, 1e-6, device=torch.device(where))
        there = kv.to(where)
        ContextKvStore(4, True, 1e-5)(
            there[:, :, 0], there[:, :, 1], t["at"], list(t["slots"]), t["table"],
            [c.transpose(1, 2)[..., :64] for c in caches])
        found.append([norms(t["x"]), *caches])
    assert same(*found)


def peers():
    """The original kernels' launchers (peers.py of the device check), where they were carried."""
    folder = os.environ.get("DEVICE_PEERS", "")
    if not os.path.exists(os.path.join(folder, "peers.py")):
        raise NotRun("DEVICE_PEERS names no folder with peers.py")
    argv, sys.argv = sys.argv, ["peers.py", os.path.join(folder, "peers"), "/tmp"]
    os.environ["LIB"] = "1"
    try:
        spec = importlib.util.spec_from_file_location("peers", os.path.join(folder, "peers.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.argv = argv


@test
def the_originals_kernels_agree():
    them = peers()
    draft = Draft(4, 33, 12)
    t, ours, theirs = draft.on("cuda"), draft.caches("cuda"), draft.caches("cuda")
    slots = list(t["slots"])
    norms = ContextNorms(t["hidden"], t["layers"], L, 1e-5, 1e-6, device=torch.device("cuda"))
    want = them.seed90("b", "b", t["x"], t["hidden"], t["layers"], 1e-5, 1e-6, 0.0, 0.0, L)
    flat = torch.randn(L, 33, 2 * 4 * 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    flat = flat.cuda()
    kv = flat.view(L, 33, 2, 4, 64)
    ContextKvStore(4, True, 1e-5)(
        kv[:, :, 0], kv[:, :, 1], t["at"], slots, t["table"],
        [c.transpose(1, 2)[..., :64] for c in ours])
    them.seed_store(flat, 4, t["at"], slots, t["table"], theirs, 1e-5)
    torch.cuda.synchronize()
    assert same([norms(t["x"]), *ours], [want, *theirs])


@test
def a_captured_call_replays_with_new_inputs():
    draft, other = Draft(2, 8, 4), Draft(2, 8, 5)
    t, caches, chain = bound(draft)
    slots = list(t["slots"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call of all
        chain(t["x"], t["at"], slots)
    assert all(bool((c.view(torch.int16) == 0x5A5A).all()) for c in caches)
    for _ in range(3):
        graph.replay()
    assert same(caches, draft.expected())
    for name in ("x", "at", "slots"):
        t[name].copy_(other.held[name])
        draft.held[name] = other.held[name]
    for cache in caches:
        cache.view(torch.int16).fill_(0x5A5A)
    graph.replay()
    assert same(caches, draft.expected())


@test
def plans_are_refused_in_a_capture_that_goes_on():
    draft = Draft(2, 8)
    t, caches, chain = bound(draft)
    refused = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for make in (lambda: draft.chain(t), lambda: compile_context_kv_store(2, True, True),
                     lambda: chain.bind(caches)):
            try:
                make()
            except RuntimeError as error:
                refused.append("captured" in str(error))
        chain(t["x"], t["at"], list(t["slots"]))
    graph.replay()
    assert refused == [True] * 3 and same(caches, draft.expected())


@test
def two_streams_share_a_chain():
    drafts = [Draft(2, 64, 6), Draft(2, 64, 7)]
    t, caches, chain = bound(drafts[0])
    slots = torch.arange(128, device="cuda").view(2, 64)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [d.on("cuda") for d in drafts]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, own, where in zip(streams, inputs, slots):
            with torch.cuda.stream(stream):
                chain(own["x"], own["at"], where)
    torch.cuda.synchronize()
    want = drafts[0].caches("cpu")
    for draft, where in zip(drafts, slots.cpu()):
        host = drafts[0].on("cpu")
        alone = drafts[0].chain(host)
        alone.bind(want)
        alone(draft.held["x"], draft.held["at"], where)
    assert same(caches, want) and len(chain._workspaces) == 2


@test
def faults_are_reported():
    draft = Draft(2, 4)
    t, caches, chain = bound(draft)
    bad = torch.tensor([3, BLOCKS * 16, -1, 2**62], device="cuda")
    chain(t["x"], t["at"], bad)
    assert chain.faults() == ctxkv.FaultReport(2 * L, "slot", 0, 1, BLOCKS * 16, BLOCKS * 16)
    assert chain.faults().count == 0


@test
def launches_and_host_time():
    draft = Draft(2, 8)
    t, _, chain = bound(draft)
    slots = list(t["slots"])
    chain(t["x"], t["at"], slots)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        chain(t["x"], t["at"], slots)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events()
               if e.device_type == torch.autograd.DeviceType.CUDA and "mem" not in e.name.lower()]
    start = time.perf_counter()
    for _ in range(2000):
        chain(t["x"], t["at"], slots)
    took = (time.perf_counter() - start) / 2000 * 1e6
    torch.cuda.synchronize()
    print(f"launches: {len(kernels)} {kernels}; host time of a call: {took:.1f} us")
    assert 1 <= len(kernels) <= 3, "stock has 23"


@test
def compiled_with_torch():
    draft = Draft(2, 8, 8)
    t, caches, chain = bound(draft)
    compiled = torch.compile(lambda x, at, s: chain(x * 1, at, list(s.unbind())), fullgraph=True)
    compiled(t["x"], t["at"], t["slots"])
    torch.cuda.synchronize()
    assert same(caches, draft.expected()) and chain._other is None


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), os.environ.get("CTXKV_LIBRARY", "installed"))
    sys.exit(main())
