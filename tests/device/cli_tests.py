#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line on a GPU for every kind of draft: its caches are the CPU's, by bytes, and bench,
which compares before it measures, takes the same options.

usage: cli_tests.py CTXKV [DEVICE]     last line: N passed, N failed
"""
import subprocess
import sys
import tempfile

CTXKV, DEVICE = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuda:0"
SHAPE = ["--layers", "3", "--rows", "40", "--max-position", "256", "--kv-heads", "2"]
MUSE = ["--family", "muse", *SHAPE]
QWEN = ["--family", "qwen3", *SHAPE, "--hidden-size", "1024"]
LAGUNA = ["--family", "laguna", *SHAPE, "--hidden-size", "1024"]
GEMMA = ["--family", "gemma4", *SHAPE, "--hidden-size", "1024"]
DRAFTS = [
    (MUSE, "bf16"),
    ([*MUSE, "--table-type", "fp32", "--scales"], "fp8_e4m3"),
    ([*MUSE, "--zero-centered", "--fp32-norms"], "fp16"),
    (QWEN, "bf16"),
    ([*QWEN, "--rows", "300"], "bf16"),
    ([*QWEN, "--bias", "--v-scale", "0.612", "--rotary-dim", "64", "--zero-centered",
      "--fp32-norms", "--layer-tables", "--table-type", "fp32", "--scales", "--sliding", "8"],
     "fp8_e4m3"),
    ([*QWEN, "--gptj", "--rotary-dim", "32", "--head-dim", "64", "--table-type", "fp16"], "fp16"),
    ([*QWEN, "--no-affine", "--nope", "--head-dim", "256"], "bf16"),
    ([*LAGUNA, "--bias"], "bf16"),
    ([*LAGUNA, "--bias", "--rows", "100"], "bf16"),  # 300 rows of its norms
    ([*LAGUNA, "--bias", "--rotary-dim", "96", "--scales"], "fp8_e5m2"),
    (GEMMA, "bf16"),
    ([*GEMMA, "--head-dim", "128", "--bias", "--v-scale", "3", "--layer-tables", "--scales"],
     "fp8_e4m3"),
]


def call(*words):
    done = subprocess.run([CTXKV, *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.returncode}: {done.stderr}{done.stdout}")


def judge(options, cache, folder):
    inputs = ["--model", f"{folder}/d", "--context", f"{folder}/d/context.safetensors"]
    call("synth", *options, f"{folder}/d")
    for device in ("cpu", DEVICE):
        call("run", "--device", device, *inputs, "--cache-type", cache, "--out", f"{folder}/{device}")
    call("verify", f"{folder}/cpu", f"{folder}/{DEVICE}")
    call("diagnose", *inputs, "--cache", f"{folder}/{DEVICE}")
    call("bench", "--device", DEVICE, "--model", f"{folder}/d", "--cache-type", cache, "--rows",
         "8,300", "--seconds", "0.005")


def main():
    failed = 0
    for options, cache in DRAFTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                judge(options, cache, folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"FAIL {' '.join(options)}, {cache}: {error}", flush=True)
    print(f"{len(DRAFTS) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
