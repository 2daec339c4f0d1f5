# SPDX-License-Identifier: Apache-2.0
"""The completions of bash, zsh and fish, each asked in its own shell."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers import BIN, ok

FOLDER = Path(BIN).resolve().parent.parent.parent / "completions"
COMMANDS = re.findall(r"^  (\w+) ", ok("--help"), re.M)


def long_options(command):
    return set(re.findall(r"^ .*?(--[\w-]+)", ok(command, "--help"), re.M)) | {"--help"}


def need(shell):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed (scripts/deps test)")


def bash(*words, cwd=None):
    script = (
        f'source {FOLDER}/bash/ctxkv; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ctxkv; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-uc", script, "bash", *words], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split())


def fish(line, cwd=None):
    script = f"source {FOLDER}/fish/ctxkv.fish; complete -C $argv[1]"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script, line], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return {text.split("\t")[0] for text in done.stdout.splitlines()}


def zsh(keys, cwd):
    """What the line has become when typed with tabs: the function ctxkv prints its arguments."""
    master, slave = pty.openpty()
    start = (
        f"fpath=({FOLDER}/zsh $fpath); autoload -U compinit; compinit -D -u; "
        "PS1=; unsetopt zle_bracketed_paste prompt_sp 2>/dev/null; setopt no_beep; "
        'ctxkv() { print -r -- "GOT<$*>" }; print READ""Y\n'
    )
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=slave, stdout=slave, stderr=slave, cwd=cwd, close_fds=True,
        env={**os.environ, "TERM": "dumb"}, start_new_session=True,
    )
    os.close(slave)
    seen = b""

    def until(pattern):
        nonlocal seen
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = re.search(pattern, seen)
            if found:
                return found
            if select.select([master], [], [], 0.2)[0]:
                seen += os.read(master, 65536)
        raise AssertionError(f"no {pattern!r} in {seen!r}")

    try:
        os.write(master, start.encode())
        until(rb"READY\r?\n")
        os.write(master, keys.encode() + b"\n")
        return until(rb"GOT<([^>\"$]*)>").group(1).decode()
    finally:
        shell.kill()
        shell.wait()
        os.close(master)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "somefolder").mkdir()
    (tmp_path / "somefile").touch()
    return tmp_path


def test_bash_knows_every_command_and_option():
    assert bash("ctxkv", "") == {*COMMANDS, "help", "--help", "--version"}
    for command in COMMANDS:
        words = {word.rstrip("=") for word in bash("ctxkv", command, "--")}
        assert words == long_options(command) | {"--usage"}, command
    assert bash("ctxkv", "se") == {"selftest"}


def test_bash_values(folder):
    assert bash("ctxkv", "run", "--numerics", "=", "pa") == {"pair", "packed"}
    assert bash("ctxkv", "run", "--projection", "") == {"auto", "exact", "cublas"}
    assert bash("ctxkv", "run", "--cpu-mask", "=") == {"scalar", "avx2", "avx512"}
    assert bash("ctxkv", "run", "--threads", "") == set()
    caches = {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2"}
    for command in ("run", "bench", "diagnose"):
        assert bash("ctxkv", command, "--cache-type", "=") == caches
    for command in ("synth", "bench"):
        assert bash("ctxkv", command, "--family", "") == {"muse", "qwen3", "laguna", "gemma4"}
    assert bash("ctxkv", "synth", "--table-type", "=", "fp") == {"fp16", "fp32"}
    assert bash("ctxkv", "run", "--model", "=", "some", cwd=folder) == {"somefolder"}
    assert bash("ctxkv", "run", "-c", "some", cwd=folder) == {"somefile", "somefolder"}
    assert bash("ctxkv", "synth", "some", cwd=folder) == {"somefolder"}
    assert bash("ctxkv", "verify", "some", cwd=folder) == {"somefile", "somefolder"}


def test_fish(folder):
    need("fish")
    assert fish("ctxkv ") == set(COMMANDS)
    for command in COMMANDS:
        assert fish(f"ctxkv {command} --") == long_options(command), command
    assert fish("ctxkv run --numerics pa") == {"pair", "packed"}
    assert fish("ctxkv run --threads ") == set()
    assert fish("ctxkv run --model some", cwd=folder) == {"somefolder/"}
    assert fish("ctxkv run --context some", cwd=folder) >= {"somefile", "somefolder/"}
    assert fish("ctxkv verify some", cwd=folder) >= {"somefile", "somefolder/"}


def test_zsh(folder):
    need("zsh")
    assert zsh("ctxkv selft\t--verb\t", folder) == "selftest --verbose"
    assert zsh("ctxkv run --numerics=pac\t--chec\t", folder) == "run --numerics=packed --checked"
    assert zsh("ctxkv run --model=some\t", folder).rstrip("/ ") == "run --model=somefolder"
    assert zsh("ctxkv verify somefi\t", folder).rstrip() == "verify somefile"


def test_zsh_has_every_option():
    need("zsh")
    text = (FOLDER / "zsh" / "_ctxkv").read_text()
    for command in COMMANDS:
        part = re.search(rf"^    {command}\)$(.*?)^        ;;$", text, re.M | re.S).group(1)
        assert set(re.findall(r"--[\w-]+(?==?\[|=?})", part)) == long_options(command)
