#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerate what README.md and docs/ show of bench/results: the tables between
<!-- table: NAME --> and <!-- end -->, and the pictures (these with matplotlib only).

usage: bench/tables.py [--check]   (--check: exit 1 if anything is out of date, write nothing)
"""
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILES = ["README.md", "docs/benchmarks.md"]
sys.path.insert(0, str(ROOT / "python"))
from ctxkv import plot  # noqa: E402

# Name in docs/images, file in bench/results, options of python -m ctxkv plot.
PICTURES = [
    ("h200-chain", "h200", ["--ops", "chain", "--heads", "2,16",
                            "--programs", "ctxkv,seed,stock,floor"]),
    ("h200", "h200", ["--heads", "2,16"]),
    ("h200-qwen3", "h200_qwen3", ["--ops", "chain", "--programs", "ctxkv,stock,floor"]),
    ("cpu", "cpu", []),
]


def load(name):
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def us(value):
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def ratio(a, b):
    return "" if a is None or b is None else f"{a / b:.2f}x"


def h200(ops=("norms", "projection", "store", "chain"), rows_wanted=None, heads_wanted=None):
    data = load("h200")
    if data is None:
        return "(no results committed yet)"
    table = []
    for op in ops:
        for row in data["rows"]:
            if row["op"] != op or (rows_wanted and row["rows"] not in rows_wanted):
                continue
            if heads_wanted and row.get("heads") not in heads_wanted:
                continue
            t = row["us"]
            peer = t.get("cublas") if op == "projection" else t.get("seed")
            table.append([op, str(row.get("heads", "")), str(row["rows"]), us(t.get("ctxkv")),
                          us(t.get("seed")), us(t.get("stock")), us(t.get("cublas")),
                          us(t.get("floor")), ratio(t.get("ctxkv"), peer)])
    head = ["op", "KV heads", "rows", "ctxkv us", "seed us", "stock us", "cuBLAS us", "floor us",
            "ctxkv / peer"]
    return markdown(head, table)


def qwen3(ops=("chain", "norm", "projection", "store"), rows_wanted=None):
    """The weighted family beside vLLM's stock kernels (bench/weighted_bench.py)."""
    data = load("h200_qwen3")
    if data is None:
        return "(no results committed yet)"
    table = []
    for op in ops:
        rows = sorted((r for r in data["rows"] if r["op"] == op), key=lambda r: r["rows"])
        for shape in dict.fromkeys(r["shape"] for r in data["rows"]):
            for row in rows:
                if row["shape"] != shape or (rows_wanted and row["rows"] not in rows_wanted):
                    continue
                t = row["us"]
                table.append([op, shape, str(row["rows"]), us(t.get("ctxkv")), us(t.get("stock")),
                              us(t.get("cublas")), us(t.get("floor")),
                              ratio(t.get("ctxkv"), t.get("stock", t.get("cublas")))])
    head = ["op", "shape", "rows", "ctxkv us", "stock us", "cuBLAS us", "floor us", "ctxkv / peer"]
    return markdown(head, table)


def host():
    """What the host pays on a GPU (bench/host_times.py)."""
    data = load("h200") or {}
    table = [[str(h["heads"]), f"{h['plan_first_ms']:.1f}", f"{h['plan_ms']:.1f}",
              *(f"{us:.1f}" for us in h["run_us"].values())] for h in data.get("host", [])]
    rows = list(data["host"][0]["run_us"]) if table else []
    head = ["KV heads", "first plan ms", "a plan ms", *(f"run of {r} rows us" for r in rows)]
    return markdown(head, table)


def cpu(ops=("norms", "projection", "store", "chain")):
    data = load("cpu")
    if data is None:
        return "(no results committed yet)"
    table = []
    for row in data["rows"]:
        if row["op"] not in ops:
            continue
        t, macs = row["us"], row["macs"]
        table.append([row["op"], str(row["heads"]), str(row["rows"]), us(t.get("ctxkv")),
                      us(t.get("onednn")), us(t.get("torch")), us(t.get("floor")),
                      ratio(t.get("ctxkv"), t.get("torch")),
                      f"{macs / t['ctxkv'] * 1e-3:.1f}" if macs else "",
                      f"{row['bytes'] / t['ctxkv'] * 1e-3:.1f}"])
    head = ["op", "KV heads", "rows", "ctxkv us", "oneDNN us", "torch us", "copy us",
            "ctxkv / torch", "GMAC/s", "GB/s"]
    versions = [data["name"], data["tier"] + " tier"] + [
        v for v in (data.get("onednn"), data.get("torch") and "torch " + data["torch"]) if v]
    return f"{', '.join(versions)}; copy {data['copy_gb_s']} GB/s.\n\n" + markdown(head, table)


def faster(name, op, program, heads=None):
    """How many times as fast as the program, over all sizes of the file."""
    data = load(name)
    rows = [row for row in (data or {"rows": []})["rows"]
            if row["op"] == op and heads in (None, row["heads"])]
    times = [row["us"][program] / row["us"]["ctxkv"] for row in rows
             if row["us"].get(program) and row["us"].get("ctxkv")]
    return f"{min(times):.2g}x to {max(times):.2g}x" if times else ""


def peers():
    """One line a peer: whether the bits are the same, and how much faster ctxkv is."""
    gpu = "H200"
    exact = "yes: golden checksums, `ctxkv selftest`"
    seed = "yes, but for eps = 0 with tiny keys; compared before each timing"
    narrow = "yes past 64 rows; up to there cuBLAS splits K, ctxkv never"
    lines = [
        ("vLLM 0.33.0's stock chain", gpu, exact, "h200", "chain", "stock"),
        ("the same of the Qwen3 family, 8 KV heads", gpu, exact, "h200_qwen3", "chain", "stock", 8),
        ("the same, 1 KV head on each of 8 ranks", gpu, narrow,
         "h200_qwen3", "chain", "stock", 1),
        ("the seed: two CuTe kernels around `torch.bmm`", gpu, seed, "h200", "chain", "seed"),
        ("cuBLAS by `torch.bmm`, projection", gpu, "yes, for two layers and more", "h200",
         "projection", "cublas"),
        ("torch's operators, chain", "CPU", "no", "cpu", "chain", "torch"),
        ("torch's operators, norms", "CPU", "no", "cpu", "norms", "torch"),
        ("oneDNN's BF16 matmul, projection", "CPU", "no", "cpu", "projection", "onednn"),
    ]
    return markdown(["peer", "on", "same bits", "ctxkv is so many times as fast"],
                    [[peer, on, same, faster(*rest)] for peer, on, same, *rest in lines])


TABLES = {
    "cpu": cpu,
    "cpu-chain": lambda: cpu(("chain",)),
    "host": host,
    "peers": peers,
    "h200": h200,
    "h200-qwen3": qwen3,
    "h200-qwen3-chain": lambda: qwen3(("chain",), (1, 8, 64, 256, 1024, 16384)),
    "h200-chain": lambda: h200(("chain",), (1, 8, 64, 1024, 16384), (2, 16)),
}


def draw(name, file, options, check):
    """True if the picture shows the file's numbers: each carries their digest."""
    data, picture = load(file), ROOT / "docs" / "images" / f"{name}.svg"
    if data is None:
        return True
    if picture.exists() and plot.source_of(data) in picture.read_text():
        return True
    if not check:
        command = [sys.executable, "-m", "ctxkv", "plot", str(RESULTS / f"{file}.json"), "--out",
                   str(picture.with_suffix("")), *options]
        done = subprocess.run(command, cwd=ROOT / "python", stdout=subprocess.DEVNULL)
        picture.with_suffix(".png").unlink(missing_ok=True)
        if done.returncode:
            raise SystemExit(f"{picture.relative_to(ROOT)} is out of date: run bench/tables.py by "
                             "a Python with matplotlib")
    return False


def main():
    check = "--check" in sys.argv
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        new = re.sub(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
                     lambda m: m.group(1) + TABLES[m.group(2)]() + "\n" + m.group(3), text,
                     flags=re.S)
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new)
    stale += [f"docs/images/{p[0]}.svg" for p in PICTURES if not draw(*p, check)]
    for name in stale:
        print(("out of date: " if check else "updated: ") + name)
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
