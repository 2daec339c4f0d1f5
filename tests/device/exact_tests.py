#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proof of the ways that a chain can go on a GPU: bits of norms + torch.bmm + store at every size,
replays, batch invariance.

usage: CTXKV_LIBRARY=.../libctxkv.so exact_tests.py [name ...]     last line: N passed, N failed
EXACT_SECONDS: the sweep over sizes stops after so long (and fails: it did not see them all).
"""
import os
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import lib as Q  # noqa: E402
from operands import CPU, GPU, PAGE, D, Muse  # noqa: E402
from runner import main, test  # noqa: E402

SIZES = [*range(1, 81), 96, 128, 130, 255, 256, 257, 1000, 1024, 4096, 16384]


def hostile_rows(x):
    """Every row past the first few has something unusual: the rows beside it must not notice."""
    rows = x.shape[0]
    bits = x.view(torch.int16)
    for first, value in ((3, 0x0001), (5, 0x7F80), (7, 0x7FC0), (11, 0x7F7F), (13, -0x8000),
                         (17, 0x0080)):
        for t in range(first, rows, 29):
            bits[t, t % 64::97] = value
    if rows > 2:
        bits[2] = 0x0003  # subnormals alone
    return x


def product(n, w, H):
    """By torch.bmm; where the library is kept from cuBLAS, by its own general kernel too:
    compute-sanitizer's racecheck cannot live with cuBLAS's kernels."""
    if "CTXKV_CUBLAS" not in os.environ:
        return torch.bmm(n, w.transpose(1, 2))
    out = torch.empty(*n.shape[:2], w.shape[1], dtype=torch.bfloat16, device="cuda")
    before = os.environ.pop("CTXKV_CHAIN_WAYS", None)
    os.environ["CTXKV_CHAIN_WAYS"] = "none"
    plan = GPU.projection(w, w.shape[0], H, mode=Q.EXACT, max_rows=n.shape[1])
    del os.environ["CTXKV_CHAIN_WAYS"]
    if before is not None:
        os.environ["CTXKV_CHAIN_WAYS"] = before
    Q.run_projection(plan, n, out)
    torch.cuda.synchronize()
    plan.close()
    return out


class Operands:
    """A Muse Spark chain on the GPU with hostile rows, and its caches by torch.bmm."""
    def __init__(self, H, layers, most, seed=1):
        g = torch.Generator(device="cuda").manual_seed(seed)
        rand = lambda *s: torch.randn(*s, device="cuda", generator=g)  # noqa: E731
        self.H, self.L, N = H, layers, 128 * H
        self.x = hostile_rows(rand(most, D).bfloat16())
        self.hw, self.lw = (1 + 0.1 * rand(D)).bfloat16(), (1 + 0.1 * rand(layers, D)).bfloat16()
        self.w = (0.02 * rand(layers, N, D)).bfloat16()
        self.w[:, 5].mul_(1e-38)  # subnormal weights
        self.w[0, 9, 77] = 3e38   # sums that overflow
        self.table = rand(4096, 64).bfloat16()
        self.positions = torch.randint(0, 4096, (most,), device="cuda", generator=g)
        self.blocks = most // PAGE + 3
        self.slots = [torch.randperm(self.blocks * PAGE, device="cuda", generator=g)[:most].contiguous()
                      for _ in range(layers)]
        self.slots[-1][::5] = -1

    def norms_desc(self):
        return GPU.norms_desc((Q.ROW, 1e-5, 0, 0), (Q.ROW, 1e-5, 0, 0), self.L, hw=self.hw, lw=self.lw)

    def chain(self, most):
        return GPU.chain(
            self.norms_desc(), GPU.projection_desc(self.w, self.L, self.H, mode=Q.AUTO),
            GPU.store_desc(self.L, self.H, rope=Q.GPTJ, table=self.table), most)

    def caches(self):
        return [torch.full((self.blocks, self.H, PAGE, 128), 0x5A5A, dtype=torch.int16,
                           device="cuda").view(torch.bfloat16) for _ in range(self.L)]

    def run(self, plan, rows):
        """rows: a slice of x."""
        caches = self.caches()
        Q.bind(plan, *Q.split(caches))
        Q.run_chain(plan, self.x[rows], self.positions[rows], [s[rows] for s in self.slots])
        return caches

    def reference(self, norms, store, T):
        n = torch.empty(self.L, T, D, dtype=torch.bfloat16, device="cuda")
        Q.run_norms(norms, self.x[:T], n)
        kv = product(n, self.w, self.H).view(self.L, T, 2, self.H, 64)
        caches = self.caches()
        Q.bind(store, *Q.split(caches))
        Q.run_store(store, kv[:, :, 0], kv[:, :, 1], self.positions[:T], [s[:T] for s in self.slots])
        return caches


def equal(a, b):
    return all(torch.equal(i.view(torch.int16), j.view(torch.int16)) for i, j in zip(a, b))


@test
def every_size_has_cublas_bits():
    limit, begin, seen = float(os.environ.get("EXACT_SECONDS", 1e9)), time.time(), 0
    for most in (80, 1024, 16384):
        for H in (2, 1, 4, 8, 16):
            o = Operands(H, 5 if H <= 2 and most <= 1024 else 2, most, seed=H)
            norms = GPU.make("norms", o.norms_desc(), None)
            store = GPU.store(o.L, H, rope=Q.GPTJ, table=o.table)
            plan = o.chain(most)
            for T in [t for t in SIZES if t <= most and (most == 80 or t > most // 13 and t > 80)]:
                assert time.time() - begin < limit, f"no time left at H={H} T={T}, {seen} sizes seen"
                got, want = o.run(plan, slice(0, T)), o.reference(norms, store, T)
                torch.cuda.synchronize()
                assert equal(got, want), f"H={H} T={T}"
                seen += 1
            assert Q.faults(plan).count == 0
            for p in (plan, norms, store):
                p.close()
            del o, got, want
    print(f"  {seen} sizes")
    assert seen == 5 * len(SIZES)


def projection_operands(H, layers, rows, D_=D, seed=1, hd=64):
    """Inputs of their own for each layer, hostile rows among them, and weights."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(layers, rows, D_, device="cuda", generator=g).bfloat16()
    w = (0.02 * torch.randn(layers, 2 * hd * H, D_, device="cuda", generator=g)).bfloat16()
    for l in range(layers):
        hostile_rows(x[l])
    w[:, 5].mul_(1e-38)  # subnormal weights
    w[0, 9, 7] = 3e38    # sums that overflow
    return x, w


def same(got, want):
    return torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))


@test
def few_rows_alone_have_cublas_bits():
    """Separate projections of every T up to 64 against torch.bmm, in both modes."""
    for H in (2, 1, 3, 4, 8, 16):
        layers = 5 if H <= 4 else 2
        x, w = projection_operands(H, layers, 64, seed=H)
        plans = [GPU.projection(w, layers, H, mode=mode) for mode in (Q.AUTO, Q.EXACT)]
        for T in range(1, 65):
            mine = x[:, :T].contiguous()
            want = torch.bmm(mine, w.transpose(1, 2))
            for plan in plans:
                kv = torch.full_like(want, 7)
                Q.run_projection(plan, mine, kv)
                assert same(kv, want), f"H={H} T={T}"
                # A layer's rows at the distance of 64: the same bits, nothing beside them.
                Q.run_projection(plan, x[:, :T], kv.zero_())
                assert same(kv, want), f"H={H} T={T}, rows of a larger tensor"
        for plan in plans:
            plan.close()


@test
def few_rows_alone_equal_the_general_kernel():
    """x off by two bytes goes to the kernel for anything: the same values, any shape and strides."""
    for D_, H, hd, layers in ((64, 1, 64, 1), (1088, 3, 64, 2), (1040, 2, 64, 2), (2560, 8, 128, 3),
                              (4096, 1, 256, 20), (8192, 2, 64, 5), (5120, 2, 512, 1)):
        x, w = projection_operands(H, layers, 64, D_, seed=D_, hd=hd)
        N = w.shape[1]
        plan = GPU.projection(w, layers, H, hd, D_, Q.EXACT)
        odd = torch.empty(layers * 64 * D_ + 1, dtype=torch.bfloat16, device="cuda")[1:]
        wide = torch.full((64, layers, D_ + 24), float("nan"), dtype=torch.bfloat16, device="cuda")
        for T in (1, 2, 7, 8, 9, 16, 17, 24, 31, 32, 33, 40, 48, 57, 64):
            for shared in (False, True):
                mine = x[:1 if shared else layers, :T]
                off = odd[:mine.numel()].view(mine.shape)
                off.copy_(mine)
                want = torch.empty(layers, T, N, dtype=torch.bfloat16, device="cuda")
                Q.run_projection(plan, off, want)
                # Rows of layers side by side, NaN around them; kv likewise, on an odd address.
                between = wide[:T, :mine.shape[0], 8:8 + D_].transpose(0, 1)
                between.copy_(mine)
                room = torch.full((T * layers * (N + 3) + 1,), 7.0, dtype=torch.bfloat16,
                                  device="cuda")
                kv = room[1:].view(T, layers, N + 3)
                for a in (mine.contiguous(), between):
                    out = kv[:, :, :N].transpose(0, 1)
                    Q.run_projection(plan, a, out)
                    assert same(out, want), f"D={D_} H={H} hd={hd} T={T} shared={shared}"
                    assert (kv[:, :, N:] == 7).all() and room[0] == 7, "written beside kv"
        plan.close()


@test
def few_rows_alone_replay_and_wait():
    """500 replays behind kernels that write x late give the bits of one run."""
    for H, T in ((2, 1), (2, 8), (2, 16), (2, 33), (2, 64), (4, 16), (16, 64)):
        layers = 5 if H <= 4 else 2
        x, w = projection_operands(H, layers, T, seed=T)
        plan, late = GPU.projection(w, layers, H), torch.zeros_like(x)
        want, kv = torch.bmm(x, w.transpose(1, 2)), torch.empty(
            layers, T, 128 * H, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        graph, wrong = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
        with torch.cuda.graph(graph):
            late.zero_()
            late.copy_(x)
            Q.run_projection(plan, late, kv)
            Q.run_projection(plan, late, kv)
            wrong += (kv.view(torch.int16) != want.view(torch.int16)).sum()
        for _ in range(500):
            graph.replay()
        torch.cuda.synchronize()
        assert wrong.item() == 0, f"H={H} T={T}: {wrong.item()} elements differ"
        plan.close()


@test
def one_run_of_each_way():
    """Small, for compute-sanitizer as well."""
    o = Operands(2, 2, 520, seed=7)
    plan, norms = o.chain(520), GPU.make("norms", o.norms_desc(), None)
    store = GPU.store(o.L, 2, rope=Q.GPTJ, table=o.table)
    # The general kernel takes long where every access is watched.
    for T in (1, 3, 8, 16, 31, 64, 130) + (() if "CTXKV_CUBLAS" in os.environ else (520,)):
        got, want = o.run(plan, slice(0, T)), o.reference(norms, store, T)
        torch.cuda.synchronize()
        assert equal(got, want), f"T={T}"
    for p in (plan, norms, store):
        p.close()
    x, w = projection_operands(2, 2, 64)
    alone = GPU.projection(w, 2, 2)
    for T in (1, 8, 16, 31, 64):
        mine, kv = x[:, :T].contiguous(), torch.empty(2, T, 256, dtype=torch.bfloat16, device="cuda")
        Q.run_projection(alone, mine, kv)
        assert same(kv, product(mine, w, 2)), f"alone, T={T}"
    alone.close()


@test
def replays_are_identical():
    for H, T in ((2, 1), (2, 4), (2, 8), (2, 16), (2, 33), (2, 64), (4, 8), (16, 8), (2, 96), (2, 1000)):
        o = Operands(H, 5 if H <= 4 else 2, T, seed=T)
        plan = o.chain(T)
        want, caches = o.run(plan, slice(0, T)), o.caches()
        Q.bind(plan, *Q.split(caches))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                Q.run_chain(plan, o.x, o.positions, o.slots)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(500):  # two runs each
            if i % 50 == 0:
                for c in caches:
                    c.view(torch.int16).fill_(0x5A5A)
            graph.replay()
            if i % 10 == 9:
                for a, b in zip(caches, want):
                    wrong += (a.view(torch.int16) != b.view(torch.int16)).sum()
        torch.cuda.synchronize()
        assert wrong.item() == 0, f"H={H} T={T}: {wrong.item()} elements differ"
        plan.close()


@test
def a_row_does_not_depend_on_its_batch():
    """Rows alone, and in batches of other sizes, have the bits that they have among all rows."""
    most = 300
    o = Operands(2, 5, most, seed=3)
    plan = o.chain(most)
    whole = o.run(plan, slice(0, most))
    for first, count in [(t, 1) for t in range(0, most, 23)] + [(2, 3), (40, 8), (17, 16), (5, 40),
                                                                (90, 64), (100, 97), (7, 257)]:
        part = o.run(plan, slice(first, first + count))
        for l in range(o.L):
            s = o.slots[l][first:first + count]
            s = s[s >= 0]
            a, b = (c[l].view(torch.int16)[s // PAGE, :, s % PAGE] for c in (whole, part))
            assert torch.equal(a, b), f"rows {first}..{first + count - 1}, layer {l}"
    plan.close()


@test
def a_row_does_not_depend_on_its_batch_on_the_cpu():
    m = Muse(1, 24, 2, seed=9)
    plan, whole = m.chain(CPU, m.host), m.caches()
    m.run(plan, whole, m.host)
    for first, count in ((0, 1), (7, 1), (23, 1), (3, 5), (8, 16)):
        r, part = slice(first, first + count), m.caches()
        Q.bind(plan, *Q.split(part))
        Q.run_chain(plan, m.host["x"][r], m.host["positions"][r], [s[r] for s in m.host["slots"]])
        for l in range(m.L):
            s = m.host["slots"][l][r]
            s = s[s >= 0]
            a, b = (c[l].view(torch.int16)[s // PAGE, :, s % PAGE] for c in (whole, part))
            assert torch.equal(a, b), f"rows {first}..{first + count - 1}, layer {l}"
    plan.close()


@test
def slow_producers_are_waited_for():
    """x, positions and slots are written by a kernel that takes long, before runs of every way."""
    for T in (1, 3, 8, 16, 32, 64, 200, 1024):
        o = Operands(2, 5, T, seed=T)
        plan = o.chain(T)
        want = o.run(plan, slice(0, T))
        x, positions = torch.zeros_like(o.x), torch.zeros_like(o.positions)
        slots, caches = [torch.full_like(s, -1) for s in o.slots], o.caches()
        Q.bind(plan, *Q.split(caches))
        torch.cuda.synchronize()
        for i in range(6):
            for c in caches:
                c.view(torch.int16).fill_(0x5A5A)
            x.zero_()
            torch.cuda._sleep(200000 * (i + 1))
            positions.copy_(o.positions)
            for a, b in zip(slots, o.slots):
                a.copy_(b)
            x.copy_(o.x)
            Q.run_chain(plan, x, positions, slots)
            Q.run_chain(plan, x, positions, slots)
            x.fill_(float("nan"))  # the runs have read it
            torch.cuda.synchronize()
            assert equal(caches, want), f"T={T} turn {i}"
        plan.close()


if __name__ == "__main__":
    sys.exit(main())
