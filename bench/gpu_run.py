# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks on a GPU share: options, timing, the card's limits, the file of results."""
import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

ROWS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384]
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
    """Bandwidth of a memcpy node (read + written bytes a second) and BF16 rate of the card, now."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    for _ in range(60):
        a @ a
    rate = 2 * 8192**3 / (measure(lambda i: a @ a, 1, 5)[0] * 1e-6)
    b = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    c = torch.empty_like(b)
    return 2 * b.numel() / (measure(lambda i: c.copy_(b), 1, 5)[0] * 1e-6), rate


def options(description, out):
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--library", required=True)
    p.add_argument("--peers")
    p.add_argument("--kernels")
    p.add_argument("--tool", help="ctxkv, for the floors; default: that of the library's build")
    p.add_argument("--out", default=out)
    p.add_argument("--seconds", type=float, default=1e9, help="begin no size after so long")
    p.add_argument("--rows", default=",".join(map(str, ROWS)))
    return p


class Run:
    """Q: the library (tests/device/lib.py), device, peers: the module of that name in --peers, or
    None, limit: the floors' bytes and operations a second, result: what --out will hold."""
    def __init__(self, args, peers, **shape):
        self.args = args
        sys.path.insert(0, os.path.join(ROOT, "tests", "device"))
        os.environ["CTXKV_LIBRARY"] = args.library
        self.Q, self.peers = importlib.import_module("lib"), None
        if args.peers:
            os.environ["LIB"] = "1"
            sys.path.insert(0, args.peers)
            sys.argv = [f"{peers}.py", args.kernels, "/tmp"]
            self.peers = importlib.import_module(peers)
        torch.manual_seed(0)
        self.device = self.Q.Library().device("cuda:0")
        self.result = self.describe(shape)
        self.begin = time.time()

    def describe(self, shape):
        bandwidth, rate = limits()
        self.limit = max(bandwidth, BYTES_PER_S), max(rate, OPERATIONS_PER_S)
        floor = ("bytes at 4.3 TB/s or operations at 800 TFLOP/s, the most seen on this kind of "
                 "card; copy_GBs is a memcpy node of this run and slower")
        build = os.path.dirname(os.path.abspath(self.args.library))
        tool = self.args.tool or os.path.join(build, "tools/ctxkv/ctxkv")
        measured, more = measured_limits(tool), {}
        if measured:
            read, copy, burst = measured
            self.limit = max(bandwidth, read, copy), max(rate, burst)
            floor = (f"bytes at {self.limit[0] / 1e12:.2f} TB/s or operations at "
                     f"{self.limit[1] / 1e12:.0f} TFLOP/s, by kernels that do nothing else, in "
                     "this run (ctxkv bench); copy_GBs is a memcpy node, bf16_TFLOPs torch's "
                     "8192^3 product")
            more = dict(read_kernel_GBs=round(read / 1e9, 1), copy_kernel_GBs=round(copy / 1e9, 1),
                        burst_TFLOPs=round(burst / 1e12, 1))
        info = self.device.info()
        return dict(
            machine=info.name.decode(), arch=info.arch, driver=info.driver, cublas=0,
            torch=torch.__version__, copy_GBs=round(bandwidth / 1e9, 1),
            bf16_TFLOPs=round(rate / 1e12, 1), **shape,
            method="medians of graph replays; buffers rotate past the L2", floor=floor,
            date=time.strftime("%Y-%m-%d", time.gmtime()), driver_version=smi("driver_version"),
            clocks=f"SM and memory before the run: {smi('clocks.sm,clocks.mem')}; not locked",
            rows=[], **more)

    def sizes(self, sizes):
        """Those of (name, size) for which there is time; each one's results are written at once."""
        for name, size in sizes:
            if time.time() - self.begin > self.args.seconds:
                print(f"{name}: no time left")
                continue
            yield size
            self.result["cublas"] = self.device.info().cublas
            with open(self.args.out, "w") as f:
                json.dump(self.result, f, indent=1)
                f.write("\n")

    def row(self, full, floor, head, **what):
        """Notes [median, p10, p90] of each program beside the floor, and prints the ratio."""
        us = {k: round(v[0], 3) for k, v in full.items()}
        us["floor"] = round(floor, 3)
        spread = {k: [round(v[1], 3), round(v[2], 3)] for k, v in full.items()}
        self.result["rows"].append(dict(what, us=us, spread=spread))
        peer = us.get("seed", us.get("stock", us.get("cublas")))
        text = " ".join(f"{k} {v:.2f}" for k, v in us.items())
        if peer and "ctxkv" in us:
            text += f" = {us['ctxkv'] / peer:.3f} of the peer"
        print(f"ratios {head}: {text}", flush=True)
