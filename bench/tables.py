#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerate the tables between <!-- table: NAME --> and <!-- end --> in README.md and docs/.

usage: bench/tables.py [--check]   (--check: exit 1 if a file is out of date, write nothing)
"""
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FILES = ["README.md", "docs/benchmarks.md"]


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


def cpu():
    data = load("cpu")
    if data is None:
        return "(no results committed yet)"
    table = []
    for row in data["rows"]:
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


TABLES = {
    "cpu": cpu,
    "h200": h200,
    "h200-chain": lambda: h200(("chain",), (1, 8, 64, 1024, 16384), (2, 16)),
}


def main():
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        new = re.sub(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
                     lambda m: m.group(1) + TABLES[m.group(2)]() + "\n" + m.group(3), text,
                     flags=re.S)
        if new != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    for name in stale:
        print(("out of date: " if "--check" in sys.argv else "updated: ") + name)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
