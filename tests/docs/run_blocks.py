#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run every code block of README.md and docs/: sh in a scratch folder with the built tools first in
PATH, python with the package importable, c as a program against the built library.

usage: run_blocks.py BUILD_FOLDER [FILE.md ...]
A block is left out only by a line "<!-- not run: REASON -->" right above it, and REASON names the file
in tests/ or scripts/ that does the same; those are listed. Every other fence must be one of the
languages above, or text. Blocks of one file share a folder, in order. Last line: N passed, N failed.
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})", re.M)
INSTEAD = re.compile(r"(?:tests|scripts)/[\w/.-]+\w")
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n)?^```(?P<lang>\w*)\n(?P<body>.*?)^```$", re.S | re.M)


def command(lang, body, folder, build):
    if lang in ("sh", "bash"):
        return ["bash", "-euo", "pipefail", "-c", body]
    if lang == "python":
        return [os.environ.get("CTXKV_PYTHON", sys.executable), "-c", body]
    if lang == "c":
        source = folder / "block.c"
        source.write_text(body)
        link = f"cc -std=c11 -Wall -I{ROOT}/include block.c {build}/libctxkv.a -lm -lpthread -ldl -o block && ./block"
        return ["bash", "-euc", link]
    return None


def run_file(path, build, env):
    passed = failed = 0
    text = path.read_text()
    blocks = list(BLOCK.finditer(text))
    fences = len(FENCE.findall(text))
    if fences != 2 * len(blocks):
        print(f"FAILED: {path.relative_to(ROOT)}: {fences} fences, but {len(blocks)} blocks were read")
        failed += 1
    with tempfile.TemporaryDirectory() as folder:
        for i, block in enumerate(blocks):
            name = f"{path.relative_to(ROOT)} block {i + 1} ({block['lang'] or 'text'})"
            if block["why"]:
                instead = INSTEAD.search(block["why"])
                known = instead is not None and (ROOT / instead[0]).exists()
                failed += not known
                print(f"left out: {name}: {block['why']}" + ("" if known else " (FAILED: no such)"))
                continue
            argv = command(block["lang"], block["body"], Path(folder), build)
            if argv is None:
                failed += block["lang"] != "text"
                print(f"{'text' if block['lang'] == 'text' else 'FAILED: not run'}: {name}")
                continue
            done = subprocess.run(argv, cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=600)
            good = done.returncode == 0
            passed, failed = passed + good, failed + (not good)
            print(("ok:     " if good else "FAILED: ") + name)
            if not good:
                print(done.stdout[-3000:])
    return passed, failed


def main():
    build = Path(sys.argv[1]).resolve()
    if not (build / "libctxkv.so").exists():
        print(f"{build}: nothing is built there; scripts/check gcc does it\n0 passed, 1 failed")
        return 1
    files = [Path(f).resolve() for f in sys.argv[2:]] or [
        *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md"))]
    env = dict(os.environ)
    env["PATH"] = f"{build}/tools/ctxkv:{build}/tests/check:{env['PATH']}"
    env["CTXKV_LIBRARY"] = str(build / "libctxkv.so")
    env["PYTHONPATH"] = str(ROOT / "python")
    env["CTXKV_SOURCE"] = str(ROOT)
    totals = [run_file(f, build, env) for f in files]
    print(f"{sum(t[0] for t in totals)} passed, {sum(t[1] for t in totals)} failed")
    return 1 if any(t[1] for t in totals) else 0


if __name__ == "__main__":
    sys.exit(main())
