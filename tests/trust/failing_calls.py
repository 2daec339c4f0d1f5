# SPDX-License-Identifier: Apache-2.0
# Every system call and allocation of every command fails in its turn.
"""usage: failing_calls.py CTXKV SHIM (failing_calls.c, preloaded)

For each command and each kind of call the n-th call fails, n = 0, 1, ... until the command has
made fewer. Each time: success with the usual output, or exit status 2 and one line that names the
file, the option or what memory was for; no partial output, no temporary file, inputs and an
existing output as they were."""

import collections
import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CTXKV, SHIM = map(os.path.abspath, sys.argv[1:3])
SMALL = ["--family", "qwen3", "--hidden-size", "16", "--head-dim", "64", "--layers", "1"]
SYNTH = [*SMALL, "--kv-heads", "1", "--rows", "3", "--max-position", "8"]
INPUT = ["--model", "in/d", "--context", "in/d/context.safetensors"]
EVERY = ["--family", "gemma4", "--hidden-size", "16", "--head-dim", "64", "--layers", "2", "--bias",
         "--kv-heads", "1", "--rows", "3", "--max-position", "8", "--scales", "--layer-tables",
         "--table-type", "fp16", "--zero-centered"]
EVERY_INPUT = ["--model", "in/e", "--context", "in/e/context.safetensors"]
EVERY_RUN = ["run", "--device", "cpu", *EVERY_INPUT, "--cache-type", "fp8_e5m2", "--out"]
BENCH = ["bench", "--device", "cpu", *SMALL, "--heads", "1", "--rows", "1", "--seconds", "0.001"]
# name: (command, output that it writes, whether its text is the same every time)
COMMANDS = {
    "run": (["run", "--device", "cpu", *INPUT, "--out", "out/o"], "out/o", True),
    "run, a shard": (
        ["run", "--device", "cpu", "--model", "in/s", *INPUT[2:], "--out", "out/o"], "out/o", True),
    "run, replacing": (["run", "--device", "cpu", *INPUT, "--out", "out/old"], "out/old", True),
    "synth": (["synth", *SYNTH, "out/d"], "out/d", True),
    "synth, shards": (["synth", *SYNTH, "--shards", "2", "--table", "out/d"], "out/d", True),
    "synth, options": (["synth", *EVERY, "out/d"], "out/d", True),
    "run, options": ([*EVERY_RUN, "out/o"], "out/o", True),
    "diagnose, options": (["diagnose", *EVERY_INPUT, "--cache", "in/g"], None, False),
    "verify": (["verify", "in/a", "in/b"], None, True),
    "diagnose": (["diagnose", *INPUT, "--cache", "in/b"], None, False),
    "diagnose, JSON": (["diagnose", *INPUT, "--cache", "in/b", "--json"], None, False),
    "diagnose, list": (["diagnose", "--list", "--json"], None, True),
    "info": (["info", "--json"], None, False),
    "selftest": (["selftest", "--device", "cpu", "--golden", "in/golden"], None, False),
    "bench": ([*BENCH, "--json", "out/b", "--compare", "in/bench", "--tolerance", "100"],
              "out/b", False),
}
NUMBERS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "ENOMEM": errno.ENOMEM,
           "EMFILE": errno.EMFILE, "EACCES": errno.EACCES, "EDQUOT": errno.EDQUOT}
# kind of call: how it fails
KINDS = {
    "open": ["EMFILE", "EIO"], "mkostemp": ["ENOSPC", "EMFILE"], "close": ["EIO", "EDQUOT"],
    "write": ["ENOSPC", "EIO", "short", "interrupt"], "fsync": ["EIO", "ENOSPC"],
    "rename": ["ENOSPC", "EACCES"], "fchmod": ["EIO"], "fstat": ["EIO"], "stat": ["EIO"],
    "lstat": ["EIO"], "realpath": ["EIO"], "mkdir": ["ENOSPC"], "unlink": ["EIO"],
    "mmap": ["ENOMEM"], "malloc": ["ENOMEM"], "thread": ["EAGAIN"],
}
# These measure or compute for long: their own files only.
FEW = {"bench": {"write": ["ENOSPC"], "rename": ["EACCES"]},
       "selftest": {"open": ["EMFILE"], "fstat": ["EIO"], "lstat": ["EIO"], "mmap": ["ENOMEM"]}}
NUMBERS["EAGAIN"] = errno.EAGAIN
NAMED = re.compile(r"(in|out)/[\w./]+|--[a-z]+|tensor '|the arguments|memory for ")


def call(words, folder, **env):
    return subprocess.run(
        [CTXKV, *words], cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=120,
        env={**os.environ, **env})


def tree(folder):
    """Path -> bytes of every file, and the folders."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.read_bytes() if path.is_file() else None
    return found


def make_inputs(folder):
    (folder / "in/golden").mkdir(parents=True)
    golden = Path(__file__).parent.parent / "golden"
    for name in ("inv_freq.csv", "rope.csv"):
        lines = (golden / name).read_text().splitlines()[:3]
        (folder / "in/golden" / name).write_text("\n".join(lines) + "\n")
    for words in (["synth", *SYNTH, "in/d"], ["synth", *SYNTH, "--shards", "2", "in/s"],
                  ["run", "--device", "cpu", *INPUT, "--out", "in/a"],
                  ["synth", *EVERY, "in/e"], [*EVERY_RUN, "in/f"],
                  [*BENCH, "--json", "in/bench"]):
        done = call(words, folder)
        assert done.returncode == 0, done.stderr
    for source, changed in (("in/a", "in/b"), ("in/f", "in/g")):
        data = bytearray((folder / source).read_bytes())
        data[-1] ^= 0x40
        (folder / changed).write_bytes(data)


def fresh_output(folder):
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    (folder / "out/old").write_text("what was there before")


class Attack:
    """One command in a folder of its own."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.words, self.output, self.same_text = COMMANDS[name]
        shutil.copytree(folder.parent / "template/in", folder / "in")
        self.inputs = tree(folder / "in")
        fresh_output(folder)
        self.before = tree(folder / "out")
        self.usual = call(self.words, folder)
        assert self.usual.returncode < 2 and not self.usual.stderr, (name, self.usual)
        self.after = tree(folder / "out")

    def wrong(self, kind, how, done):
        """What is wrong with a run in which a call failed; "" if nothing."""
        text, now = done.stderr.decode(errors="replace"), tree(self.folder / "out")
        if kind == "unlink":  # then the temporary file cannot but stay
            now = {name: data for name, data in now.items() if ".ctxkv-" not in name}
        if tree(self.folder / "in") != self.inputs:
            return "an input changed"
        # On a busy machine a row may take a hundred times what it took before: --compare tells.
        slower = self.name == "bench" and done.returncode < 2
        if done.returncode == self.usual.returncode or slower:
            if text:
                return f"success, yet it says {text!r}"
            if self.same_text and (now != self.after or done.stdout != self.usual.stdout):
                return "success with another output"
            if now.keys() != self.after.keys():
                return f"success with the files {list(now)}"
            if self.output == "out/b" and len(now["out/b"[4:]]) < 500:
                return "success with half a report"
            return ""
        if done.returncode != 2:
            return f"exit status {done.returncode}, {text!r}"
        if now != self.before:
            return f"left {[n for n in now if now[n] != self.before.get(n)]}"
        if text.count("\n") != 1 or not text.startswith("ctxkv"):
            return f"said {text!r}"
        if kind in ("malloc", "mmap") and "memory" not in text:
            return f"does not speak of memory: {text!r}"
        if not NAMED.search(text):
            return f"names nothing: {text!r}"
        return ""

    def once(self, kind, n, how):
        """Whether a call failed, and what is wrong."""
        note = self.folder / "note"
        note.unlink(missing_ok=True)
        fresh_output(self.folder)
        reason = str(NUMBERS.get(how, how))
        done = call(self.words, self.folder, LD_PRELOAD=SHIM, CTXKV_FAIL=f"{kind}:{n}:{reason}",
                    CTXKV_FAIL_NOTE=str(note))
        wrong = self.wrong(kind, how, done)
        return note.exists(), done.returncode, wrong

    def all(self):
        counts, faults = collections.Counter(), []
        for kind, hows in FEW.get(self.name, KINDS).items():
            for how in hows:
                for n in itertools.count():
                    happened, status, wrong = self.once(kind, n, how)
                    counts["tried"] += happened
                    counts["refused"] += happened and status == 2
                    if wrong:
                        faults.append(f"{self.name}: {kind} {n} {how}: {wrong}")
                    if not happened:
                        break
        return self.name, counts, faults


def main():
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        make_inputs(root / "template")

        def work(name):
            folder = root / name.replace(", ", "-").replace(" ", "-")
            folder.mkdir()
            return Attack(folder, name).all()

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(work, sys.argv[3:] or COMMANDS))
    bad = 0
    for name, counts, faults in results:
        print(f"{name:16} {counts['tried']:5} failures, {counts['refused']:5} refusals")
        for fault in faults:
            print("FAIL", fault)
        bad += len(faults)
    total = sum(counts["tried"] for _, counts, _ in results)
    print(f"{total - bad} passed, {bad} failed")
    return bad > 0 or not total


if __name__ == "__main__":
    sys.exit(main())
