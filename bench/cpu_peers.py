#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ctxkv, oneDNN and torch on this CPU, in rounds, so that a noisy neighbour meets all of them.

usage: cpu_peers.py --ctxkv TOOL --onednn PEER [--out cpu.json] (bench/run_cpu does it all)
Writes the schema of bench/results: rows of op, heads, rows, "us" by program (medians over the
rounds' medians) and "spread" (lowest p10, highest p90); "floor" is a copy of the bytes that must
move, measured in the same rounds.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import cpu_torch
    import torch
except ImportError as error:
    cpu_torch = None
    print(f"torch is left out: {error}", file=sys.stderr)


def ctxkv(args, heads, threads, told):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [args.ctxkv, "bench", "--device", "cpu", "--heads", str(heads),
                   "--rows", args.rows, "--threads", str(threads),
                   "--seconds", str(args.seconds), "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        data = json.loads(out.read_text())
    told.update({key: data[key] for key in ("version", "tier", "threads")})
    told.setdefault("copies", []).append(data["copy_gb_s"])
    for row in data["results"]:
        yield row["op"], row["rows"], (row["median_us"], row["p10_us"], row["p90_us"]), row


def onednn(args, heads, rows, threads, told):
    repeats = max(5, min(40, int(args.seconds * 2000 / (heads * rows))))
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([args.onednn, str(heads), str(rows), str(repeats)], check=True, text=True,
                          stdout=subprocess.PIPE, env=env)
    data = json.loads(done.stdout)
    told["onednn"] = data["peer"]
    return data["us"], data["p10"], data["p90"]


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def combine(found, told):
    """found: (op, heads, rows) -> program -> [(median, p10, p90) of each round]."""
    rows = []
    for (op, heads, count), programs in found.items():
        work = programs.pop("work")
        us = {name: round(statistics.median(t[0] for t in times), 2)
              for name, times in programs.items()}
        spread = {name: [round(min(t[1] for t in times), 2), round(max(t[2] for t in times), 2)]
                  for name, times in programs.items()}
        bytes_moved = work["gb_s"] * work["median_us"] * 1e3
        us["floor"] = round(bytes_moved / told["copy_gb_s"] * 1e-3, 2)
        macs = work["gmac_s"] * work["median_us"] * 1e3
        rows.append({"op": op, "heads": heads, "rows": count, "us": us, "spread": spread,
                     "bytes": round(bytes_moved), "macs": round(macs)})
    return sorted(rows, key=lambda r: (r["heads"], r["rows"]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ctxkv", required=True)
    parser.add_argument("--onednn")
    parser.add_argument("--out", default="bench/results/cpu.json")
    parser.add_argument("--heads", default="2,16")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    heads, counts = ([int(n) for n in text.split(",")] for text in (args.heads, args.rows))
    told, found, start = {}, {}, time.time()
    if cpu_torch:
        torch.set_num_threads(threads)
    for turn in range(args.rounds):
        for head in heads:
            for op, count, times, row in ctxkv(args, head, threads, told):
                entry = found.setdefault((op, head, count), {"work": row})
                entry.setdefault("ctxkv", []).append(times)
            chain = cpu_torch.Chain(head) if cpu_torch else None
            for count in counts:
                if args.onednn:
                    entry = found["projection", head, count]
                    entry.setdefault("onednn", []).append(onednn(args, head, count, threads, told))
                if chain:
                    for op, times in cpu_torch.all_steps(chain, count, args.seconds).items():
                        found[op, head, count].setdefault("torch", []).append(times)
            print(f"round {turn + 1}, {head} heads: {time.time() - start:.0f} s", file=sys.stderr)
    told["copy_gb_s"] = round(statistics.median(told.pop("copies")), 2)
    result = {"device": "cpu", "name": f"{cpu_name()}, {told['threads']} threads", **told,
              "torch": torch.__version__ if cpu_torch else None, "kernel": platform.release(),
              "date": time.strftime("%Y-%m-%d", time.gmtime()),
              "load": os.getloadavg()[0], "layers": 5, "hidden_size": 8192,
              "method": f"{args.rounds} rounds, the programs in turn; median of the medians",
              "rows": combine(found, told)}
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
