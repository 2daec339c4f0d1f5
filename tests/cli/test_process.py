# SPDX-License-Identifier: Apache-2.0
"""Atomic output, signals, the terminal, selftest and bench."""

import json
import os
import pty
import resource
import signal
import subprocess
import time

import pytest
from helpers import (
    head_bytes,
    BIN,
    cli,
    heads_model,
    ok,
    ones_context,
    refused,
    run_args,
)


# ---- atomic output, signals, the terminal
def written(folder):
    """Bytes of the unfinished file; 0 when there is none, or it goes while we look."""
    try:
        return sum(e.stat().st_size for e in os.scandir(folder) if e.name != "o")
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_leaves_nothing(tmp_path, number):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    folder = tmp_path / "out"
    folder.mkdir()
    args = run_args(model, context, folder / "o", "--num-blocks", 30000)
    process = subprocess.Popen([BIN, *map(str, args)], stdout=subprocess.DEVNULL)
    # The probe's file appears and goes at once; the one being written grows.
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if written(folder) > 1 << 20:
            break
    process.send_signal(number)
    assert process.wait() == -number
    assert os.listdir(folder) == []


@pytest.mark.parametrize("moment", [1, 1 << 20, 24 << 20, 96 << 20])
def test_kill_leaves_the_old_file(tmp_path, moment):
    """Nobody can clean up after SIGKILL; what has the output's name is whole all the same."""
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "o").write_bytes(b"before")
    args = run_args(model, context, folder / "o", "--num-blocks", 30000)
    process = subprocess.Popen([BIN, *map(str, args)], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None and written(folder) < moment:
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (folder / "o").read_bytes() == b"before"


def test_reader_that_goes_away(tmp_path):
    """Standard output is a pipe that nobody reads: no noise, and the caches are whole."""
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    for args in (("info",), run_args(model, context, tmp_path / "o", "--num-blocks", 4)):
        there, end = os.pipe()
        os.close(there)
        process = subprocess.Popen([BIN, *map(str, args)], stdout=end, stderr=subprocess.PIPE)
        os.close(end)
        text = process.communicate()[1]
        assert process.returncode in (2, -signal.SIGPIPE), process.returncode
        assert text.count(b"\n") <= 1, text
    ok(*run_args(model, context, tmp_path / "again", "--num-blocks", 4))
    assert (tmp_path / "o").read_bytes() == (tmp_path / "again").read_bytes()


def mapping(pid, path):
    """Rss, Pss and Private_Dirty (KiB) of a process's mappings of a file."""
    sums = {"Rss": 0, "Pss": 0, "Private_Dirty": 0}
    inside = False
    try:
        with open(f"/proc/{pid}/smaps") as lines:
            for line in lines:
                key = line.split(":")[0]
                if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                    inside = line.rstrip().endswith(str(path))
                elif inside and key in sums:
                    sums[key] += int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return sums


def test_eight_processes_share_one_checkpoint(tmp_path):
    ok("synth", tmp_path / "m", "--kv-heads", 1, "--rows", 3000)
    weights = (tmp_path / "m" / "model.safetensors").resolve()
    size = weights.stat().st_size // 1024
    context = tmp_path / "m" / "context.safetensors"
    runs = []
    try:
        for i in range(8):  # each is stopped as soon as it has read half of the weights
            args = run_args(tmp_path / "m", context, tmp_path / f"o{i}", "--threads", 1)
            runs.append(subprocess.Popen([BIN, *map(str, args)], stdout=subprocess.DEVNULL))
            end = time.monotonic() + 60
            while time.monotonic() < end and mapping(runs[i].pid, weights)["Rss"] < size // 2:
                assert runs[i].poll() is None
            runs[i].send_signal(signal.SIGSTOP)
        seen = [mapping(p.pid, weights) for p in runs]
        assert sum(s["Rss"] for s in seen) > 3.9 * size, seen
        assert sum(s["Pss"] for s in seen) < 1.1 * size, (size, seen)
        assert all(s["Private_Dirty"] == 0 for s in seen), seen
    finally:
        for p in runs:
            p.kill()
            p.wait()


def test_file_that_shrinks_is_an_error(tmp_path):
    """A mapped file cut by someone else while it is read: one line, not a crash."""
    head = {"kv_cache.0": {"dtype": "BF16", "shape": [1 << 20, 1, 1, 256]}}
    size = 512 << 20
    head["kv_cache.0"]["data_offsets"] = [0, size]
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(head_bytes(head))
        os.truncate(path, path.stat().st_size + size)
    process = subprocess.Popen([BIN, "verify", *paths], stderr=subprocess.PIPE)
    end = time.monotonic() + 30
    while time.monotonic() < end and process.poll() is None:
        with open(f"/proc/{process.pid}/maps") as maps:
            if str(paths[1]) in maps.read():
                break
    process.send_signal(signal.SIGSTOP)
    os.truncate(paths[0], 4096)
    process.send_signal(signal.SIGCONT)
    text = process.communicate()[1]
    assert process.returncode == 2 and text.count(b"\n") == 1 and b"shorter" in text


def test_failed_write_leaves_nothing(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    folder = tmp_path / "out"
    folder.mkdir()

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    args = run_args(model, context, folder / "o", "--num-blocks", 100)
    refused(*args, preexec_fn=limit, words=[folder / "o", "File too large"])
    assert os.listdir(folder) == []
    refused("synth", folder, "--kv-heads", 1, preexec_fn=limit, words=["File too large"])
    assert os.listdir(folder) == []
    refused("synth", folder / "new", "--kv-heads", 1, preexec_fn=limit)
    assert os.listdir(folder) == []


def on_terminal(command):
    """Exit status, stdout (a pipe) and what came to the terminal that is its stderr."""
    main, other = pty.openpty()
    process = subprocess.Popen(command, stderr=other, stdout=subprocess.PIPE)
    out = process.communicate()[0]
    os.close(other)
    shown = b""
    try:
        while chunk := os.read(main, 4096):
            shown += chunk
    except OSError:
        pass
    os.close(main)
    return process.returncode, out, shown


def test_progress_bar_only_on_a_terminal(tmp_path):
    model = heads_model(tmp_path / "m", 1)
    context = ones_context(tmp_path / "c", 1)
    args = [BIN, *map(str, run_args(model, context, tmp_path / "o", "--num-blocks", 3000))]
    done = cli(*args[1:])
    assert done.returncode == 0 and done.stderr == b""
    status, out, shown = on_terminal(args)
    assert status == 0 and b"writing" in shown and b"%" in shown
    assert shown.endswith(b"\x1b[K") and b"\r" not in out


def test_bench_draws_a_bar_on_a_terminal(tmp_path):
    command = [BIN, "bench", "--device", "cpu", "--heads", "1", "--layers", "1", "--rows", "1"]
    status, out, shown = on_terminal([*command, "--seconds", "0.1"])
    assert status == 0 and b"projection" in shown and b"%" in shown
    assert b"\r" not in out and out.count(b"\n") == 7


# ---- selftest and bench
GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden")


def golden_part(folder, table, rows):
    lines = open(os.path.join(GOLDEN, table)).read().splitlines()
    (folder / table).write_text("\n".join(lines[: 1 + rows]) + "\n")
    return lines


def test_selftest_uses_the_projection_asked_for(tmp_path):
    golden_part(tmp_path, "chain.csv", 1)
    run = ("selftest", "--device", "cpu", "--golden", tmp_path, "--projection")
    assert ok(*run, "exact").splitlines()[-1] == ok(*run, "auto").splitlines()[-1]
    # No CPU has cuBLAS: a command that took the option and did not use it would pass here.
    text = ok(*run, "cublas", code=1)
    assert "mode is CUBLAS on a CPU device" in text and " 0 failed" not in text.splitlines()[-1]


def test_selftest_counts(tmp_path):
    golden_part(tmp_path, "norms.csv", 2)
    golden_part(tmp_path, "store.csv", 1)
    golden_part(tmp_path, "inv_freq.csv", 3)
    run = ("selftest", "--device", "cpu", "--golden", tmp_path)
    assert ok(*run).splitlines()[-1] == "14 passed, 0 failed"  # 4 + 5 + 3, and rsqrt twice
    assert ok(*run, "--verbose").count("pass ") == 12
    lines = golden_part(tmp_path, "norms.csv", 2)
    (tmp_path / "norms.csv").write_text(
        "\n".join([lines[0], lines[1].replace("1b7f9121", "1b7f9120", 1)])
    )
    text = ok(*run, code=1)
    assert text.splitlines()[-1] == "11 passed, 1 failed"
    assert "FAIL norms-nn: stock on sm_90: 1b7f9121, must be 1b7f9120" in text
    for cut, word in (
        (lines[1].replace(",n,", ",q,", 1), "'q'"),
        (lines[1].rsplit(",", 1)[0], "columns"),
        (lines[1].replace("1000", "10x0"), "seed"),
        (lines[1][:-1], "hexadecimal"),
        (lines[1].replace("1e-05", "nan"), "eps"),
    ):
        (tmp_path / "norms.csv").write_text(lines[0] + "\n" + cut + "\n")
        done = cli(*run)
        assert done.returncode == 2 and done.stderr.count(b"\n") == 1, (cut, done)
        assert word.encode() in done.stderr and b"norms.csv" in done.stderr
    (tmp_path / "norms.csv").write_text("")
    assert cli(*run).returncode == 2


def test_bench_reports_and_compares(tmp_path):
    path = tmp_path / "b.json"
    run = [
        "bench",
        "--device",
        "cpu",
        "--heads",
        1,
        "--layers",
        1,
        "--rows",
        "1,2",
        "--seconds",
        0.02,
    ]
    ok(*run, "--json", path)
    data = json.loads(path.read_text())
    assert [r["op"] for r in data["results"]] == ["norms", "projection", "store", "chain"] * 2
    for r in data["results"]:
        assert 0 < r["p10_us"] <= r["median_us"] <= r["p90_us"] and r["samples"] >= 3
        assert (r["gmac_s"] > 0) == (r["op"] in ("projection", "chain")) and r["gb_s"] > 0
        assert abs(r["copy_share"] - r["gb_s"] / data["copy_gb_s"]) < 1e-3
        moved = r["gb_s"] * r["median_us"] / max(data["copy_gb_s"], data["read_gb_s"])
        counted = r["gmac_s"] * r["median_us"] / data["gmac_s"]
        assert abs(r["floor_us"] / max(moved, counted) - 1) < 1e-3 and r["graph_calls"] == 0
    assert data["checked"] is True and data["empty_kernel_us"] == 0
    lines = ok(*run, "--csv", "--compare", path, "--tolerance", 100).splitlines()
    assert len(lines) == 9 and all(float(line.rsplit(",", 1)[1]) > 0 for line in lines[1:])
    for r in data["results"]:
        r["median_us"] /= 1000
    path.write_text(json.dumps(data))
    told = ok(*run, "--compare", path, code=1)
    assert "8 of 8 measurements slower" in told and "another machine" not in told
    path.write_text(json.dumps({**data, "name": "abacus"}))
    assert "of another machine: abacus" in ok(*run, "--compare", path, code=1)
    path.write_text(json.dumps({"results": []}))
    done = cli(*run, "--compare", path)
    assert done.returncode == 2 and b"none of these" in done.stderr
    path.write_text("{}")
    refused(*run, "--compare", path, words=["--compare", path])


def test_bench_takes_the_shape_of_a_draft(tmp_path):
    model = tmp_path / "m"
    ok("synth", model, "--kv-heads", 2, "--layers", 3, "--rows", 1)
    path = tmp_path / "b.json"
    run = ["bench", "--device", "cpu", "--model", model, "--rows", 1, "--seconds", 0.001]
    ok(*run, "--json", path, "--no-check")
    data = json.loads(path.read_text())
    assert data["checked"] is False and data["family"] == "muse"
    shapes = {(r["heads"], r["layers"], r["hidden_size"], r["head_dim"]) for r in data["results"]}
    assert shapes == {(2, 3, 8192, 64)}
    ok(*run, "--json", path, "--heads", 1)
    assert {r["heads"] for r in json.loads(path.read_text())["results"]} == {1}
    refused(*run, "--layers", 3, words=["--model", "--layers"])
    refused("bench", "--model", tmp_path, words=["--model", "config.json"])
