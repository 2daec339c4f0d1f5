#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ctxkv and its peers side by side on one GPU, in one process, on the same inputs.

usage: gpu_bench.py --library libctxkv.so [--peers DIR --kernels DIR] [--out h200.json] [--heads 2,16]
--peers: the folder with peers.py (stock and seed chains), --kernels: the device code it was told to
build. Without them only ctxkv and torch's cuBLAS are measured. Medians of graph replays in
microseconds; inputs, weights and outputs rotate past the L2 cache; L = 5, D = 8192, Muse Spark. What a
chain keeps between its launches lies where it lay before, with every peer: ours are given one
workspace, theirs come from torch's allocator, which hands out the block just freed.
"""
import os
import sys

import torch

from gpu_run import Run, measure, options
from host_times import host_times

L, D, EPS = 5, 8192, 1e-5


class Operands:
    def __init__(self, H, T):
        N = 128 * H
        self.H, self.T, self.N = H, T, N
        per_set = L * N * D * 2 + T * D * 2 * (L + 1) + 4 * L * T * N
        self.sets = max(1, min(24, 300 * 2**20 // per_set))
        rand = lambda *s: torch.randn(*s, device="cuda")  # noqa: E731
        self.x = [rand(T, D).bfloat16() for _ in range(self.sets)]
        self.w = [(rand(L, N, D) / 90).bfloat16() for _ in range(self.sets)]
        self.normed = [rand(L, T, D).bfloat16() for _ in range(self.sets)]
        self.kv = [rand(L, T, N).bfloat16() for _ in range(self.sets)]
        self.out = [torch.empty(L, T, D, dtype=torch.bfloat16, device="cuda")
                    for _ in range(self.sets)]
        page, blocks = 16, max(2 * T // 16, 64) * max(1, min(8, 4096 // T))
        self.caches = [torch.zeros(blocks, H, page, 128, device="cuda", dtype=torch.bfloat16)
                       for _ in range(L)]
        self.slots = [[torch.randperm(blocks * page, device="cuda")[:T].contiguous()
                       for _ in range(L)] for _ in range(self.sets)]
        self.positions = torch.randint(0, 65536, (T,), device="cuda")


def ours(Q, device, o, hw, lw, table):
    norms = device.norms((Q.ROW, EPS, 0, 0), (Q.ROW, EPS, 0, 0), L, hw=hw, lw=lw)
    store = device.store(L, o.H, eps=EPS, rope=Q.GPTJ, table=table)
    Q.bind(store, *Q.split(o.caches))
    projections, chains, calls = [], [], []
    for i in range(o.sets):
        projections.append(device.projection(o.w[i], L, o.H, max_rows=o.T))
        chain = device.chain(
            device.norms_desc((Q.ROW, EPS, 0, 0), (Q.ROW, EPS, 0, 0), L, hw=hw, lw=lw),
            device.projection_desc(o.w[i], L, o.H),
            device.store_desc(L, o.H, eps=EPS, rope=Q.GPTJ, table=table), o.T)
        Q.bind(chain, *Q.split(o.caches))
        chains.append(chain)
    views = [k.view(L, o.T, 2, o.H, 64) for k in o.kv]
    run = dict(
        norms=lambda i: Q.run_norms(norms, o.x[i], o.out[i]),
        projection=lambda i: Q.run_projection(projections[i], o.normed[i], o.kv[i]),
        store=lambda i: Q.run_store(store, views[i][:, :, 0], views[i][:, :, 1], o.positions,
                                    o.slots[i]),
        chain=lambda i: Q.run_call(chains[i], calls[i]))
    # The same chains by norms, projection and store alone, where another way is taken otherwise.
    os.environ["CTXKV_CHAIN_WAYS"] = "none"
    parts = []
    for i in range(o.sets):
        chain = device.chain(
            device.norms_desc((Q.ROW, EPS, 0, 0), (Q.ROW, EPS, 0, 0), L, hw=hw, lw=lw),
            device.projection_desc(o.w[i], L, o.H),
            device.store_desc(L, o.H, eps=EPS, rope=Q.GPTJ, table=table), o.T)
        Q.bind(chain, *Q.split(o.caches))
        parts.append(chain)
    del os.environ["CTXKV_CHAIN_WAYS"]
    room = Q.shared_workspace(chains + parts)
    calls += [Q.chain_call(o.x[i], o.positions, o.slots[i], room) for i in range(o.sets)]
    run["parts"] = lambda i: Q.run_call(parts[i], calls[i])
    return run, [norms, store, *projections, *chains, *parts]


def peers(P, o, hw, lw, table):
    def norms(f):
        return lambda i: f("b", "b", o.x[i], hw, lw, EPS, EPS, 0.0, 0.0, L)

    def chain(f, store):
        def run(i):
            n = f("b", "b", o.x[i], hw, lw, EPS, EPS, 0.0, 0.0, L)
            store(torch.bmm(n, o.w[i].transpose(1, 2)), o.H, o.positions, o.slots[i], table,
                  o.caches, EPS)
        return run
    result = {}
    for name, f, store in (("seed", P.seed90, P.seed_store), ("stock", P.stock_norms, P.stock_store)):
        result[name] = dict(
            norms=norms(f), chain=chain(f, store),
            store=lambda i, store=store: store(o.kv[i], o.H, o.positions, o.slots[i], table,
                                               o.caches, EPS))
    return result


def floors(o, bandwidth, rate):
    """The least time of the bytes (or operations) of each op, in microseconds."""
    T, N = o.T, o.N
    norms = (T * D * 2 * (1 + L) + (L + 1) * D * 2) / bandwidth
    projection = max((L * N * D * 2 + L * T * (D + N) * 2) / bandwidth, 2 * L * T * N * D / rate)
    store = 4 * L * T * N / bandwidth
    chain = max((L * N * D * 2 + T * D * 2 + L * T * N * 2) / bandwidth, 2 * L * T * N * D / rate)
    return {k: v * 1e6 for k, v in
            dict(norms=norms, projection=projection, store=store, chain=chain).items()}


def same_bits(o, run, seed):
    """A benchmark does not time what it has not just checked: our caches against the seed's."""
    found = []
    for chain in (run, seed):
        for c in o.caches:
            c.zero_()
        torch.cuda.synchronize()
        chain(0)
        torch.cuda.synchronize()
        found.append([c.clone() for c in o.caches])
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(*found))


def one_size(run, o, weights):
    """Measures all ops of one size; returns how many of our chains have other bits."""
    mine, plans = ours(run.Q, run.device, o, *weights)
    others = peers(run.peers, o, *weights) if run.peers else {}
    others["cublas"] = dict(projection=lambda i: torch.bmm(o.normed[i], o.w[i].transpose(1, 2)))
    floor, wrong = floors(o, *run.limit), []
    if run.peers:
        wrong = [k for k in ("chain", "parts") if not same_bits(o, mine[k], others["seed"]["chain"])]
        for k in wrong:
            print(f"DIFFERS: {k} H={o.H} T={o.T}", flush=True)
    for op in ("chain", "norms", "projection", "store"):
        count = max(o.sets, 24 if o.T <= 1024 else 3 if op == "chain" else 6)
        full = {}
        if op not in wrong:
            full["ctxkv"] = measure(mine[op], o.sets, count)
        if op == "chain" and "parts" not in wrong:
            full["ctxkv_parts"] = measure(mine["parts"], o.sets, count)
        for name, table_of in others.items():
            if op in table_of:
                full[name] = measure(table_of[op], o.sets, count)
        run.row(full, floor[op], f"{op} H={o.H} T={o.T}", op=op, heads=o.H, rows=o.T)
    for plan in plans:
        plan.close()
    return len(wrong)


def main():
    p = options(__doc__, "h200.json")
    p.add_argument("--heads", default="2,16,4,8", help="the first two before the rest")
    args = p.parse_args()
    run = Run(args, "peers", layers=L, hidden_size=D)
    run.result["host"] = host_times(run.Q, run.device)
    hw = torch.ones(D, device="cuda").bfloat16()
    lw = torch.ones(L, D, device="cuda").bfloat16()
    table = torch.randn(65536, 64, device="cuda").bfloat16()
    heads, rows = (list(map(int, text.split(","))) for text in (args.heads, args.rows))
    sizes = [(f"H={H} T={T}", (H, T)) for group in (heads[:2], heads[2:]) for T in rows for H in group]
    wrong = sum(one_size(run, Operands(*size), (hw, lw, table)) for size in run.sizes(sizes))
    print(f"{wrong} sizes differ from the seed's bits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
