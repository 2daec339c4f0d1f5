# SPDX-License-Identifier: Apache-2.0
"""Help, the manual page, wrong arguments, info."""

import json
import os
import subprocess

import pytest
from helpers import (
    BIN,
    ok,
    refused,
)


COMMANDS = ["info", "synth", "run", "verify", "selftest", "bench", "diagnose"]


# ---- arguments
def test_help_and_version():
    top = ok("--help")
    for command in COMMANDS:
        assert f"\n  {command} " in top
        text = ok(command, "--help")
        assert text.startswith(f"Usage: ctxkv {command}")
        assert ok(command, "--usage").startswith(f"Usage: ctxkv {command}")
        assert ok(command, "--version") == ok(command, "-V") == ok("--version")
    assert ok("--version").startswith("ctxkv 0.")


def test_manual_page_has_every_option():
    page = os.path.join(os.path.dirname(BIN), "..", "..", "ctxkv.1")
    text = open(page).read().replace("\\-", "-")
    for command in COMMANDS:
        assert f"ctxkv {command}" in text
        for word in ok(command, "--help").replace(",", " ").replace("=", " ").split():
            if word.startswith("--") and len(word) > 2:
                assert word in text, (command, word)


@pytest.mark.parametrize(
    "args, words",
    [
        ([], ["no command"]),
        (["zz"], ["zz"]),
        (["run"], ["--model", "missing"]),
        (["run", "--model", "x"], ["--context", "missing"]),
        (["run", "--model", "x", "--context", "y"], ["--out", "missing"]),
        (["run", "--model"], ["--model", "DIR"]),
        (["run", "--nope"], ["--nope"]),
        (["run", "--HANG=1"], ["--HANG"]),  # argp's own: sleeps
        (["run", "--program-name=x"], ["--program-name"]),
        (["run", "--t", "3"], ["--t"]),
        (["run", "-z"], ["-z"]),
        (["run", "extra"], ["extra"]),
        (["run", "--checked=yes"], ["--checked"]),
        (["run", "--threads", "0"], ["--threads", "'0'", "1 to 1024"]),
        (["run", "--threads", "2x"], ["--threads", "'2x'"]),
        (["run", "--threads", ""], ["--threads", "''"]),
        (["run", "--block-size", "0"], ["--block-size", "'0'"]),
        (["run", "--block-size", "99999999999999999999"], ["--block-size", "99999999999999999999"]),
        (["run", "--num-blocks", "-1"], ["--num-blocks", "'-1'"]),
        (["run", "--device", "gpu"], ["--device", "gpu", "cuda:N"]),
        (["run", "--device", "cuda:x"], ["--device", "cuda:x"]),
        (["run", "--numerics", "fast"], ["--numerics", "fast", "pair"]),
        (["run", "--projection", "fast"], ["--projection", "fast", "exact"]),
        (["run", "--cpu-mask", "sse"], ["--cpu-mask", "sse", "avx2"]),
        (["verify"], ["0 files"]),
        (["verify", "a"], ["1 file"]),
        (["verify", "a", "b", "c"], ["'c'"]),
        (["info", "x"], ["'x'"]),
        (["synth"], ["DIR"]),
        (["synth", "a", "b"], ["'b'"]),
        (["synth", "--kv-heads", "0", "a"], ["--kv-heads"]),
        (["synth", "--family", "llama", "a"], ["--family", "llama", "muse"]),
        (["synth", "--hidden-size", "4096", "a"], ["--hidden-size", "8192"]),
        (["synth", "--bias", "a"], ["--bias", "muse"]),
        (["synth", "--rotary-dim", "32", "a"], ["--rotary-dim", "muse"]),
        (["synth", "--v-scale", "0.5", "a"], ["--v-scale", "muse"]),
        (["synth", "--v-scale", "0", "a"], ["--v-scale", "0"]),
        (["synth", "--family", "laguna", "--gptj", "a"], ["--gptj", "laguna"]),
        (["synth", "--family", "gemma4", "--sliding", "4", "a"], ["--sliding", "gemma4"]),
        (["synth", "--family", "qwen3", "--rotary-dim", "63", "a"], ["--rotary-dim", "63"]),
        (["synth", "--family", "qwen3", "--rotary-dim", "256", "a"], ["--rotary-dim", "128"]),
        (["synth", "--table-type", "fp8", "a"], ["--table-type", "fp8", "fp32"]),
        (["bench", "--rows", "1,x"], ["--rows", "1,x"]),
        (["bench", "--rows", ""], ["--rows"]),
        (["bench", "--heads", "0"], ["--heads"]),
        (["bench", "--tolerance", "nan"], ["--tolerance"]),
        (["bench", "--json", "/none/x"], ["--json", "/none/x"]),
        (["bench", "--compare", "/none/x"], ["--compare", "/none/x"]),
        (["selftest", "--numerics", "pair"], ["--numerics"]),
        (["info", "--projection", "exact"], ["--projection"]),
        (["selftest", "--golden", "/none"], ["--golden", "/none"]),
        (["selftest", "--golden", "/dev"], ["--golden", "/dev"]),
    ],
)
def test_wrong_arguments(tmp_path, args, words):
    refused(*args, words=words, cwd=tmp_path)
    assert os.listdir(tmp_path) == []


def test_no_gpu_is_said():
    info = json.loads(ok("info", "--json"))
    if not info["cuda"]["devices"]:
        assert info["cuda"]["reason"]
        refused("bench", "--device", "cuda:0", words=["--device"])


def test_info():
    info = json.loads(ok("info", "--json", "--threads", 1))
    assert info["version"] == ok("--version").split()[1]
    assert info["cpu"]["threads"] == 1
    assert info["cpu"]["used"] in info["cpu"]["found"] and "scalar" in info["cpu"]["found"]
    assert json.loads(ok("info", "--json", "--cpu-mask", "scalar"))["cpu"]["used"] == "scalar"
    mask = {"CTXKV_CPU_MASK": "scalar"}
    assert json.loads(ok("info", "--json", env=mask))["cpu"]["used"] == "scalar"
    assert "used: scalar" in ok("info", env=mask)
    for word in ("tiers", "threads", "cuda", "numerics", "build"):
        assert word in ok("info")


def test_full_standard_output():
    with open("/dev/full", "w") as full:
        done = subprocess.run([BIN, "info"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and b"standard output" in done.stderr
