# SPDX-License-Identifier: Apache-2.0
"""The GPU's path through the commands, on tests/fakecuda: a driver whose kernels do nothing."""

import json
import os

import pytest
from helpers import BIN, caches, cli, ok, ones_context, heads_model, refused, run_args, write_model

FAKE = os.path.abspath(os.path.join(os.path.dirname(BIN), "..", "..", "tests", "fakecuda", "new"))
ENV = {"LD_LIBRARY_PATH": FAKE}
pytestmark = pytest.mark.skipif(
    not os.path.exists(os.path.join(FAKE, "libcuda.so.1")), reason="a build without CUDA code"
)


def gpu_args(model, context, out, *more):
    args = list(run_args(model, context, out, *more, "--projection", "exact"))
    args[args.index("cpu")] = "cuda:0"
    return args


def test_info_names_the_gpu():
    info = json.loads(ok("info", "--json", env=ENV))
    (gpu,) = info["cuda"]["devices"]
    assert gpu["device"] == "cuda:0" and gpu["arch"] == 90 and gpu["driver"] == 13000
    assert "Fake GPU, sm_90" in ok("info", env=ENV)
    without = json.loads(ok("info", "--json", env={**ENV, "FAKECUDA": "devices=0"}))
    assert without["cuda"]["devices"] == [] and without["cuda"]["reason"]


def test_run_on_the_gpu(tmp_path):
    """The caches come back from the device, zero as they were made; the CPU's do not."""
    model = heads_model(tmp_path / "m", 2)
    context = ones_context(tmp_path / "c", 5, slots=[[0, 1, 2, -1, 4], [9, 8, 7, 6, 5]])
    text = ok(*gpu_args(model, context, tmp_path / "o"), env=ENV)
    assert "rows 4" in text and "rows 5" in text and "faults: none" in text
    assert not any(cache.any() for cache in caches(tmp_path / "o"))
    auto = gpu_args(model, context, tmp_path / "o")
    auto[auto.index("cuda:0")] = "auto"
    assert ok(*auto, env=ENV) == text
    assert ok(*auto, env={**ENV, "FAKECUDA": "devices=0"}) != text
    assert all(cache.any() for cache in caches(tmp_path / "o"))


def test_rope_table_goes_to_the_gpu(tmp_path):
    model = write_model(tmp_path / "m", 1, 1, config={"use_rope": True})
    ok(*gpu_args(model, ones_context(tmp_path / "c", 3), tmp_path / "o"), env=ENV)


def bench_args(*more):
    args = ("--heads", 1, "--layers", 2, "--rows", "4,64", "--seconds", 0.01)
    return ("bench", "--device", "cuda:0", "--projection", "exact", *args, *more)


def test_bench_replays_graphs(tmp_path):
    """A replay takes the fake driver a millisecond a launch, so every figure is known."""
    path = tmp_path / "b.json"
    text = ok(*bench_args("--no-check", "--json", path), env=ENV)
    assert "bits not compared" in text and "empty kernel 1000.00 us" in text
    data = json.loads(path.read_text())
    assert data["device"] == "cuda" and data["checked"] is False
    assert data["empty_kernel_us"] == 1000
    # 64 MiB in a millisecond; a copy reads and writes them.
    assert data["read_gb_s"] == pytest.approx(67.108864, rel=1e-6)
    assert data["copy_gb_s"] == pytest.approx(134.217728, rel=1e-6)
    for r in data["results"]:
        launches = 2 if r["op"] == "chain" and r["rows"] > 8 else 1  # few rows: one kernel
        assert r["median_us"] == r["p10_us"] == r["p90_us"] == 1000 * launches
        # Rows of a call rotate past 64 MiB of cache (norms: x and out; kv).
        a_set = r["rows"] * 2 * (3 * 8192 + 2 * 128)
        assert r["graph_calls"] == (64 << 20) // a_set + 1


def test_bench_times_no_wrong_bits():
    """The fake's kernels leave the caches as they were; a GPU without graphs cannot be timed."""
    done = cli(*bench_args(), env=ENV)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert b"differs from the" in done.stderr and b"layer 0, row 0" in done.stderr
    assert b"norms" not in done.stdout
    done = cli(*bench_args("--no-check"), env={**ENV, "FAKECUDA": "without=cuGraphLaunch"})
    assert done.returncode == 2 and b"cannot record" in done.stderr


def test_gpu_errors_are_one_line(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    args = gpu_args(model, context, tmp_path / "o")
    far = [a if a != "cuda:0" else "cuda:7" for a in args]
    refused(*far, env=ENV, words=["--device", "cuda:7"])
    refused(*args, env={**ENV, "FAKECUDA": "version=11080"}, words=["--device", "11.8"])
    refused(*args, env={**ENV, "FAKECUDA": "arch=75"}, words=["--device", "sm_75"])
    assert not (tmp_path / "o").exists()
