# SPDX-License-Identifier: Apache-2.0
# `pip install .` from the sources into an empty environment, and the example there.
from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    names = ("CTXKV_LIBRARY", "PYTHONPATH", "CTXKV_CLI", "SKBUILD_CMAKE_ARGS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    # The wheel of a machine without CUDA: this one may have nvcc.
    return {**kept, "CMAKE_ARGS": "-DCTXKV_CUDA=OFF", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def call(*words, **more) -> str:
    done = subprocess.run(
        [str(w) for w in words], capture_output=True, text=True, timeout=400, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(environment, tmp_path_factory) -> Path:
    if os.environ.get("CTXKV_PYTHON_WHEEL") == "0":
        pytest.skip("NOT RUN: CTXKV_PYTHON_WHEEL=0")
    folder = tmp_path_factory.mktemp("wheel")
    call(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT,
        env=environment, cwd=folder,
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, environment, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("venv")
    call(sys.executable, "-m", "venv", folder)
    call(folder / "bin/pip", "install", "-q", "--no-deps", wheel, env=environment)
    return folder / "bin/python"


def test_wheel_is_for_any_python_and_complete(wheel) -> None:
    import ctxkv

    assert wheel.name.startswith(f"ctxkv-{ctxkv.__version__}-py3-none-")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        entries = next(n for n in names if n.endswith("entry_points.txt"))
        assert "[vllm.general_plugins]\nctxkv = ctxkv.vllm:register" in file.read(entries).decode()
    sources = {f"ctxkv/{p.name}" for p in (ROOT / "python/ctxkv").iterdir() if p.is_file()}
    inside = {n for n in names if ".dist-info/" not in n}
    assert inside == sources | {"ctxkv/libctxkv.so"}


def test_installed_package_works_alone(installed, environment, tmp_path) -> None:
    out = call(installed, "-m", "ctxkv", "info", env=environment, cwd=tmp_path)
    assert "site-packages/ctxkv/libctxkv.so" in out and "tiers" in out
    code = "import ctxkv; print(ctxkv.rope_table(500000.0, 64, 2).tobytes()[:4].hex())"
    assert call(installed, "-c", code, env=environment, cwd=tmp_path).strip() == "803f803f"


def test_example_runs_in_the_installed_package(installed, environment, tmp_path) -> None:
    example = ROOT / "examples/python/chain.py"
    out = call(installed, example, env=environment, cwd=tmp_path)
    assert "slot 3: K 1.0, V 1.0" in out and "skipped: 1" in out


def test_example_with_torch() -> None:
    out = call(sys.executable, ROOT / "examples/python/draft.py", env={
        **os.environ, "PYTHONPATH": str(ROOT / "python"),
    })
    assert "the same bits: True" in out
