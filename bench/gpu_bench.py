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
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from host_times import host_times

ROWS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384]
L, D, EPS = 5, 8192, 1e-5
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def measure(call, sets, count, replays=9):
    """[median, p10, p90] of one call, from replays of a graph of `count` calls over the sets."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(min(sets, 2)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i % sets)
    times = []
    for r in range(replays + 2):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        if r >= 2:
            times.append(a.elapsed_time(b) * 1000 / count)
    times.sort()
    n = len(times)
    return [times[n // 2], times[n // 10], times[(9 * n) // 10]]


# The most seen on an H200: a plain read (bytes a second) and a large product (operations a second).
BYTES_PER_S, OPERATIONS_PER_S = 4.3e12, 800e12


def measured_limits(tool):
    """Read and copy bandwidth (bytes a second) and BF16 operations a second by kernels made for
    that (ctxkv bench), and what the floor is then said to be; None without the tool."""
    if not tool or not os.path.exists(tool):
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "limits.json")
        command = [tool, "bench", "--device", "cuda:0", "--heads", "1", "--layers", "1", "--rows",
                   "1", "--seconds", "0.2", "--no-check", "--projection", "exact", "--json", out]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            return None
        with open(out) as f:
            data = json.load(f)
    return data["read_gb_s"] * 1e9, data["copy_gb_s"] * 1e9, data["gmac_s"] * 2e9


def smi(fields):
    """The card's own words for these fields, or None."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, text=True,
                              stdout=subprocess.PIPE).stdout.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.CalledProcessError):
        return None


def limits():
    """Bandwidth of a memcpy node (read + written bytes a second) and BF16 rate of this card, now."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    for _ in range(60):
        a @ a
    rate = 2 * 8192**3 / (measure(lambda i: a @ a, 1, 5)[0] * 1e-6)
    b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    c = torch.empty_like(b)
    return 2 * b.numel() / (measure(lambda i: c.copy_(b), 1, 5)[0] * 1e-6), rate


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


def ratios(op, H, T, us):
    peer = us.get("seed", us.get("cublas")) if "ctxkv" in us else None
    text = " ".join(f"{k} {v:.2f}" for k, v in us.items())
    return f"ratios {op} H={H} T={T}: {text}" + (f" = {us['ctxkv'] / peer:.3f} of the peer" if peer else "")


def one_size(Q, P, device, o, weights, floors_of, limit, result):
    """Measures all ops of one size into result; returns how many of our chains have other bits."""
    mine, plans = ours(Q, device, o, *weights)
    others = peers(P, o, *weights) if P else {}
    others["cublas"] = dict(projection=lambda i: torch.bmm(o.normed[i], o.w[i].transpose(1, 2)))
    floor, wrong = floors_of(o, *limit), []
    if P:
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
        us = {k: round(v[0], 3) for k, v in full.items()}
        us["floor"] = round(floor[op], 3)
        spread = {k: [round(v[1], 3), round(v[2], 3)] for k, v in full.items()}
        result["rows"].append(dict(op=op, heads=o.H, rows=o.T, us=us, spread=spread))
        print(ratios(op, o.H, o.T, us), flush=True)
    for plan in plans:
        plan.close()
    return len(wrong)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--library", required=True)
    p.add_argument("--peers")
    p.add_argument("--kernels")
    p.add_argument("--tool", help="ctxkv, for the floors; default: that of the library's build")
    p.add_argument("--out", default="h200.json")
    p.add_argument("--heads", default="2,16,4,8", help="the first two before the rest")
    p.add_argument("--seconds", type=float, default=1e9, help="begin no size after so long")
    p.add_argument("--rows", default=",".join(map(str, ROWS)))
    args = p.parse_args()
    sys.path.insert(0, os.path.join(ROOT, "tests", "device"))
    os.environ["CTXKV_LIBRARY"] = args.library
    import lib as Q
    P = None
    if args.peers:
        os.environ["LIB"] = "1"
        sys.path.insert(0, args.peers)
        sys.argv = ["peers.py", args.kernels, "/tmp"]
        import peers as P
    torch.manual_seed(0)
    device = Q.Library().device("cuda:0")
    bandwidth, rate = limits()
    limit = max(bandwidth, BYTES_PER_S), max(rate, OPERATIONS_PER_S)
    floor = ("bytes at 4.3 TB/s or operations at 800 TFLOP/s, the most seen on this kind of card; "
             "copy_GBs is a memcpy node of this run and slower")
    beside = os.path.join(os.path.dirname(os.path.abspath(args.library)), "tools/ctxkv/ctxkv")
    measured = measured_limits(args.tool or beside)
    if measured:
        read, copy, burst = measured
        limit = max(bandwidth, read, copy), max(rate, burst)
        floor = (f"bytes at {limit[0] / 1e12:.2f} TB/s or operations at {limit[1] / 1e12:.0f} "
                 "TFLOP/s, by kernels that do nothing else, in this run (ctxkv bench); copy_GBs is a "
                 "memcpy node, bf16_TFLOPs torch's 8192^3 product")
    hw = torch.ones(D, device="cuda").bfloat16()
    lw = torch.ones(L, D, device="cuda").bfloat16()
    table = torch.randn(65536, 64, device="cuda").bfloat16()
    info = device.info()
    result = dict(
        machine=info.name.decode(), arch=info.arch, driver=info.driver, cublas=0,
        torch=torch.__version__, copy_GBs=round(bandwidth / 1e9, 1),
        bf16_TFLOPs=round(rate / 1e12, 1), layers=L, hidden_size=D,
        method="medians of graph replays; buffers rotate past the L2", floor=floor,
        date=time.strftime("%Y-%m-%d", time.gmtime()), driver_version=smi("driver_version"),
        clocks=f"SM and memory before the run: {smi('clocks.sm,clocks.mem')}; not locked", rows=[])
    if measured:
        result.update(read_kernel_GBs=round(read / 1e9, 1), copy_kernel_GBs=round(copy / 1e9, 1),
                      burst_TFLOPs=round(burst / 1e12, 1))
    result["host"] = host_times(Q, device)
    heads = list(map(int, args.heads.split(",")))
    begin, wrong = time.time(), 0
    for group in (heads[:2], heads[2:]):
        for T in map(int, args.rows.split(",")):
            for H in group:
                if time.time() - begin > args.seconds:
                    print(f"H={H} T={T}: no time left")
                    continue
                wrong += one_size(Q, P, device, Operands(H, T), (hw, lw, table),
                                  floors, limit, result)
                result["cublas"] = device.info().cublas
                with open(args.out, "w") as f:
                    json.dump(result, f, indent=1)
                    f.write("\n")
    print(f"{wrong} sizes differ from the seed's bits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
