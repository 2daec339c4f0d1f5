#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Qwen3 family (SPEC 5) beside vLLM's stock chain on one GPU, in one process, on the same inputs.

usage: weighted_bench.py --library libctxkv.so [--peers DIR --kernels DIR] [--out h200_qwen3.json]
--peers: the folder with peers.py and weighted.py (the stock chain), --kernels: the device code they
were told to build. Medians of graph replays in microseconds; rows, weights and outputs rotate past
the L2 cache; five layers, head_dim 128, unless a shape says otherwise (--shapes NAME or D:H:L:head_dim,
several by ";"). --ways adds the chain by the ways that CTXKV_CHAIN_WAYS would name. Bits are compared
before anything is timed: norm and store with stock's; a whole chain with stock's where cuBLAS keeps K
whole, else (8 ranks: N = 1280, where stock's bits change with T) with our exact kernel's, and how many
of stock's values differ is said.
"""
import os
import sys

import torch

from gpu_run import Run, measure, options

L, HEAD, EPS, POSITIONS, PAGE = 5, 128, 1e-6, 40960, 16
OPS = ("chain", "norm", "projection", "store")
SHAPES = {"Qwen3-8B": (4096, 8), "Qwen3-4B": (2560, 8), "Qwen3-8B, 8 ranks": (4096, 1)}


class Operands:
    def __init__(self, D, H, T, L=L, HEAD=HEAD):
        self.D, self.H, self.L, self.HEAD, self.T = D, H, L, HEAD, T
        self.N = N = L * 2 * H * HEAD
        self.sets = max(1, min(24, 300 * 2**20 // (N * D * 2 + T * (4 * D + 4 * N))))
        self.sets = max(self.sets, 1 + 100 * 2**20 // (N * D * 2))  # the weights alone pass the L2
        rand = lambda *s: torch.randn(*s, device="cuda")  # noqa: E731
        self.x = [rand(T, D).bfloat16() for _ in range(self.sets)]
        self.w = [(rand(N, D) / 60).bfloat16() for _ in range(self.sets)]
        self.flat = [rand(T, N).bfloat16() for _ in range(self.sets)]
        self.normed = [rand(T, D).bfloat16() for _ in range(self.sets)]
        blocks = max(2 * T // PAGE, 64)
        self.caches = [torch.zeros(blocks, H, PAGE, 2 * HEAD, device="cuda", dtype=torch.bfloat16)
                       for _ in range(L)]
        self.slots = [[torch.randperm(blocks * PAGE, device="cuda")[:T].contiguous()
                       for _ in range(L)] for _ in range(self.sets)]
        self.positions = torch.randint(0, POSITIONS, (T,), device="cuda")
        self.norm_weight = (1 + rand(D) / 8).bfloat16()
        self.k_weight = (1 + rand(L, HEAD) / 8).bfloat16()
        self.table = rand(POSITIONS, HEAD).bfloat16()


class Ours:
    """The plans, and run[op](i): one call of the op on set i."""
    def __init__(self, Q, device, o, ways=None):
        self.Q, self.device, self.o, self.plans = Q, device, o, []
        norms, store = device.norms(*self.norm(), **self.weights()), device.store(*self.kind()[0],
                                                                                 **self.kind()[1])
        L, HEAD = o.L, o.HEAD
        Q.bind(store, *Q.split(o.caches, HEAD))
        projections = [device.projection(w, L, o.H, HEAD, o.D, max_rows=o.T) for w in o.w]
        self.plans += [norms, store, *projections]
        views = [f.view(o.T, L, 2, o.H, HEAD).permute(2, 1, 0, 3, 4) for f in o.flat]
        rows = [f.view(o.T, L, -1).transpose(0, 1) for f in o.flat]
        chains, parts = self.chains(o.sets, None), self.chains(o.sets, "none")
        named = self.chains(o.sets, ways) if ways else []
        room = Q.shared_workspace(chains + parts + named)
        calls = [Q.chain_call(o.x[i], o.positions, o.slots[i], room) for i in range(o.sets)]
        self.run = dict(
            norm=lambda i: Q.run_norms(norms, o.x[i], o.normed[i].unsqueeze(0)),
            projection=lambda i: Q.run_projection(projections[i], o.normed[i].unsqueeze(0), rows[i]),
            store=lambda i: Q.run_store(store, views[i][0], views[i][1], o.positions, o.slots[i]),
            chain=lambda i: Q.run_call(chains[i], calls[i]),
            parts=lambda i: Q.run_call(parts[i], calls[i]))
        if ways:
            self.run["ways"] = lambda i: Q.run_call(named[i], calls[i])
        self.calls = calls

    def norm(self):
        return (self.Q.RMS, EPS, 0, 0), (self.Q.ABSENT, 0, 0, 0), self.o.L, self.o.D

    def weights(self):
        return dict(hw=self.o.norm_weight)

    def kind(self):
        o = self.o
        return (o.L, o.H, o.HEAD), dict(k_norm=self.Q.K_RMS, eps=EPS, weight=o.k_weight,
                                    rope=self.Q.NEOX, table=o.table)

    def chains(self, count, ways, mode=None):
        """Plans by the ways CTXKV_CHAIN_WAYS names (None: all)."""
        device, o, made = self.device, self.o, []
        if ways is not None:
            os.environ["CTXKV_CHAIN_WAYS"] = ways
        for w in o.w[:count]:
            mode_ = self.Q.AUTO if mode is None else mode
            made.append(device.chain(
                device.norms_desc(*self.norm(), **self.weights()),
                device.projection_desc(w, o.L, o.H, o.HEAD, o.D, mode=mode_),
                device.store_desc(*self.kind()[0], **self.kind()[1]), o.T))
            self.Q.bind(made[-1], *self.Q.split(o.caches, o.HEAD))
        os.environ.pop("CTXKV_CHAIN_WAYS", None)
        self.plans += made
        return made

    def close(self):
        for plan in self.plans:
            plan.close()


def stock(S, o):
    """vLLM's kernels on the same operands, as S (weighted.py) runs them."""
    args = lambda i: (o.positions, o.slots[i], o.table, o.k_weight, o.caches, EPS)  # noqa: E731
    return dict(
        norm=lambda i: S.rms(o.x[i], o.norm_weight, EPS),
        store=lambda i: S.store(o.flat[i], o.L, o.H, o.HEAD, *args(i)),
        chain=lambda i: S.chain(o.x[i], o.norm_weight, o.w[i], o.L, o.H, o.HEAD, *args(i)))


def floors(o, bandwidth, rate):
    """The least time of the bytes (or operations) of each op, in microseconds."""
    T, N, D = o.T, o.N, o.D
    weights, math = N * D * 2 / bandwidth, 2 * T * N * D / rate
    all_bytes = dict(norm=T * D * 4, store=T * N * 4, projection=T * (D + N) * 2, chain=T * (D + N) * 2)
    least = {k: v / bandwidth for k, v in all_bytes.items()}
    for op in ("projection", "chain"):
        least[op] = max(least[op] + weights, math)
    return {k: v * 1e6 for k, v in least.items()}


def differing(a, b):
    return sum(int((p.view(torch.int16) != q.view(torch.int16)).sum()) for p, q in zip(a, b))


def stored(o, run):
    for c in o.caches:
        c.view(torch.int16).fill_(0x5A5A)
    torch.cuda.synchronize()
    run(0)
    torch.cuda.synchronize()
    return [c.clone() for c in o.caches]


def wrong_ops(Q, S, ours, other, o, name):
    """Names of our ops whose bits are not the reference's."""
    wrong, exact = [], ours.chains(1, "none", Q.EXACT)[0]
    call = Q.chain_call(o.x[0], o.positions, o.slots[0])
    want = stored(o, lambda i: Q.run_call(exact, call))
    for op in [k for k in ("chain", "parts", "ways") if k in ours.run]:
        if differing(stored(o, ours.run[op]), want):
            wrong.append(op)
    if S:
        ours.run["norm"](0)
        if differing([other["norm"](0)], [o.normed[0]]):
            wrong.append("norm")
        if differing(stored(o, other["store"]), stored(o, ours.run["store"])):
            wrong.append("store")
        by_stock = differing(stored(o, other["chain"]), want)
        total = 2 * o.T * o.N // 2
        print(f"bits {name} T={o.T}: stock's chain differs from the exact one in {by_stock} of {total}",
              flush=True)
        if by_stock and o.N >= 5120 and o.D >= 2048:
            wrong.append("stock")
    for op in wrong:
        print(f"DIFFERS: {op} {name} T={o.T}", flush=True)
    return wrong


def one_size(run, name, T):
    D, H, *other_shape = SHAPES[name] if name in SHAPES else map(int, name.split(":"))
    Q, S, args, o = run.Q, run.peers, run.args, Operands(D, H, T, *other_shape)
    ours, floor = Ours(Q, run.device, o, args.ways), floors(o, *run.limit)
    other = stock(S, o) if S else {}
    cublas = lambda i: torch.mm(o.normed[i], o.w[i].t(), out=o.flat[i])  # noqa: E731
    wrong = wrong_ops(Q, S, ours, other, o, name)
    for op in args.ops.split(","):
        count = max(o.sets, 24 if T <= 1024 else 4)
        full = {}
        if op not in wrong:
            full["ctxkv"] = measure(ours.run[op], o.sets, count)
        if op == "chain" and "parts" not in wrong:
            full["ctxkv_parts"] = measure(ours.run["parts"], o.sets, count)
        if op == "chain" and args.ways and "ways" not in wrong:
            full["ctxkv_" + args.ways] = measure(ours.run["ways"], o.sets, count)
        if op in other:
            full["stock"] = measure(other[op], o.sets, count)
        if op == "projection":
            full["cublas"] = measure(cublas, o.sets, count)
        run.row(full, floor[op], f"{op} {name} T={T}", op=op, family="qwen3", shape=name, hidden_size=D,
                heads=H, layers=o.L, head_dim=o.HEAD, rows=T)
    ours.close()
    return len(wrong)


def main():
    p = options(__doc__, "h200_qwen3.json")
    p.add_argument("--shapes", default=";".join(SHAPES))
    p.add_argument("--ops", default=",".join(OPS))
    p.add_argument("--ways")
    args = p.parse_args()
    run = Run(args, "weighted", layers=L, head_dim=HEAD)
    sizes = [(f"{name} T={T}", (name, T)) for T in map(int, args.rows.split(","))
             for name in args.shapes.split(";")]
    wrong = sum(one_size(run, *size) for size in run.sizes(sizes))
    print(f"{wrong} results have other bits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
