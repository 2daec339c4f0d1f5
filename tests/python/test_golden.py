# SPDX-License-Identifier: Apache-2.0
# The H200's checksums through the binding: by our own tensors, by torch's, by the command.
from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from ctxkv import ContextKV, ContextKvStore, ContextNorms, Norm, golden, selftest
from ctxkv.__main__ import main

from helpers import BF16, POISON, views

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden"
LARGE = {"chain-h16-t2", "chain-h4-t17", "chain-h2-t130", "wchain-2048-t17", "wchain-5120-t1"}


def rows(file: str) -> list:
    return [
        pytest.param(row, id=row.get("name", f"{row.get('theta')}-{row.get('rotary_dim')}"))
        for row in golden.table(FOLDER / file)
    ]


def case_rows() -> list:
    made = []
    for file, case, checks in selftest.TABLES:
        for row in golden.table(FOLDER / file):
            name = row.get("name", "")
            if file == "rope.csv" and row["positions"] > 50000:
                continue  # 29 s of single positions; `selftest` runs them
            marks = [pytest.mark.slow] if name in LARGE else []
            identity = f"{file}-{name or row['theta']}-{row.get('rotary_dim', '')}"
            made.append(pytest.param(case, checks(row), row, id=identity, marks=marks))
    return made


@pytest.mark.parametrize("case, checks, row", case_rows())
def test_case(cpu, case, checks, row) -> None:
    tally = selftest.Tally()
    case(cpu, row, tally)
    assert (tally.passed, tally.failed) == (checks, 0)


def to_torch(array) -> torch.Tensor | None:
    if array is None:
        return None
    tensor = torch.from_numpy(array.view("int16") if array.dtype == "uint16" else array)
    return tensor.view(BF16) if array.dtype == "uint16" else tensor


def torch_crc(tensor: torch.Tensor) -> int:
    return golden.crc(tensor.contiguous().view(torch.int16).numpy())


@pytest.mark.parametrize("row", rows("norms.csv"))
def test_context_norms_on_torch_tensors(row) -> None:
    x = golden.bf16(row.seed, (row.T, 8192), 1.0)
    if row.special:
        golden.special_norm_rows(x)
    norms = ContextNorms(
        to_torch(golden.gain(row.seed + 1, (8192,), row.hidden_gain, row.hidden)),
        to_torch(golden.gain(row.seed + 2, (row.L, 8192), row.layer_gain, row.layer)),
        row.L,
        row.hidden_eps,
        row.layer_eps,
        device=torch.device("cpu"),
        hidden_gain_center=row.hidden_gain,
        pre_gain_center=row.layer_gain,
        hidden_input_scale=row.hidden in "BF",
        pre_input_scale=row.layer in "BF",
    )
    assert torch_crc(norms(to_torch(x))) == row.crc_stock_sm90[0]


def torch_caches(row, dim: int) -> list[torch.Tensor]:
    shape = (row.num_blocks, row.H, row.block_size, 2 * dim)
    return [torch.full(shape, POISON, dtype=torch.int16).view(BF16) for _ in range(row.L)]


def torch_slots(row, count: int) -> list[torch.Tensor]:
    places = row.num_blocks * row.block_size
    return [torch.from_numpy(golden.slots(row.seed, l, count, places)) for l in range(row.L)]


@pytest.mark.parametrize("row", rows("store.csv"))
def test_context_kv_store_on_torch_tensors(row) -> None:
    kv = golden.bf16(row.seed, (row.L, row.T, 2 * row.H * 64), 4.0)
    if row.special:
        golden.special_store_rows(kv)
    kv = to_torch(kv).view(row.L, row.T, 2, row.H, 64)
    table = to_torch(golden.bf16(row.seed + 2, (row.max_position, 64), 1.0)) if row.rope else None
    caches = torch_caches(row, 64)
    positions = torch.from_numpy(golden.positions(row.seed + 1, row.T, row.max_position))
    store = ContextKvStore(row.H, bool(row.rope), row.eps)
    keys = [views(cache)[0] for cache in caches]
    store(kv[:, :, 0], kv[:, :, 1], positions, torch_slots(row, row.R), table, keys)
    assert [torch_crc(cache) for cache in caches] == row.crc_cache_per_layer


@pytest.mark.parametrize("row", [r for r in rows("chain.csv") if r.id not in LARGE])
@pytest.mark.parametrize("passes", [1, 3])
def test_context_kv_on_torch_tensors(row, passes) -> None:
    weights = to_torch(golden.bf16(row.seed + 3, (row.L, 2 * row.H * 64, 8192), 2.0**-5))
    chain = ContextKV(
        weights,
        row.H,
        hidden=Norm("row", row.hidden_eps, row.hidden_gain, row.hidden in "BF"),
        layer=Norm("row", row.layer_eps, row.layer_gain, row.layer in "BF"),
        hidden_weight=to_torch(golden.gain(row.seed + 1, (8192,), row.hidden_gain, row.hidden)),
        layer_weights=to_torch(
            golden.gain(row.seed + 2, (row.L, 8192), row.layer_gain, row.layer)
        ),
        k_eps=row.k_eps,
        rope="gptj",
        cos_sin=to_torch(golden.bf16(row.seed + 5, (row.max_position, 64), 1.0)),
        max_rows=-(-row.T // passes),
    )
    caches = torch_caches(row, 64)
    chain.bind(caches)
    positions = torch.from_numpy(golden.positions(row.seed + 4, row.T, row.max_position))
    chain(to_torch(golden.bf16(row.seed, (row.T, 8192), 1.0)), positions, torch_slots(row, row.T))
    assert [torch_crc(cache) for cache in caches] == row.crc_cache_per_layer
    assert chain.faults().count == 0


def test_context_kv_of_the_qwen3_kind() -> None:
    row = next(r for r in golden.table(FOLDER / "weighted_chain.csv") if r.D == 2560)
    width = 2 * row.H * row.head_dim
    chain = ContextKV(
        to_torch(golden.bf16(row.seed + 4, (row.L, width, row.D), 2.0**-5)),
        row.H,
        head_dim=row.head_dim,
        hidden=Norm("rms", row.eps),
        layer=Norm("absent", 0.0),
        hidden_weight=to_torch(golden.gain(row.seed + 1, (row.D,), 0.0, "b")),
        k_norm="rms",
        k_eps=row.eps,
        k_norm_weight=to_torch(golden.gain(row.seed + 3, (row.L, row.head_dim), 0.0, "b")),
        rope="neox",
        cos_sin=to_torch(golden.bf16(row.seed + 6, (row.max_position, row.head_dim), 1.0)),
    )
    caches = torch_caches(row, row.head_dim)
    chain.bind(caches)
    positions = torch.from_numpy(golden.positions(row.seed + 5, row.T, row.max_position))
    x = to_torch(golden.bf16(row.seed, (row.T, row.D), 1.0))
    chain(x, positions, torch_slots(row, row.T))
    assert [torch_crc(cache) for cache in caches] == row.crc_cache_per_layer


# ---- the command -------------------------------------------------------------------------------
@pytest.fixture
def few(tmp_path) -> Path:
    for file in ("norms.csv", "store.csv", "weighted_norms.csv", "inv_freq.csv"):
        shutil.copy(FOLDER / file, tmp_path)
    return tmp_path


def test_selftest_command(few, capsys) -> None:
    assert main(["selftest", "--golden", str(few), "--quick"]) == 0
    norms, store = list(golden.table(few / "norms.csv")), list(golden.table(few / "store.csv"))
    checks = 2 * len(norms) + sum(row.L for row in store) + 15 + 45
    assert capsys.readouterr().out.splitlines()[-1] == f"{checks} passed, 0 failed"


def test_selftest_names_a_wrong_checksum(few, capsys) -> None:
    text = (few / "store.csv").read_text()
    (few / "store.csv").write_text(text.replace("9d2d0b2a", "9d2d0b2b"))
    assert main(["selftest", "--golden", str(few), "--quick"]) == 1
    out = capsys.readouterr().out
    assert "FAIL store-h1: cache of layer 0: 9d2d0b2a, must be 9d2d0b2b" in out
    assert out.splitlines()[-1].endswith(", 1 failed")


def test_selftest_counts_a_case_that_cannot_run(few, capsys) -> None:
    text = (few / "weighted_norms.csv").read_text()
    (few / "weighted_norms.csv").write_text(text.replace("wnorm-896-3,896,", "wnorm-odd,897,"))
    assert main(["selftest", "--golden", str(few), "--quick"]) == 1
    assert "FAIL wnorm-odd: hidden_size is 897" in capsys.readouterr().out


def test_selftest_without_tables(tmp_path, capsys) -> None:
    assert main(["selftest", "--golden", str(tmp_path)]) == 2
    assert main(["selftest", "--golden", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_malformed_table_names_file_and_line(tmp_path, capsys) -> None:
    (tmp_path / "norms.csv").write_text("name,T,crc_stock_sm90\nbroken,x,00\n")
    assert main(["selftest", "--golden", str(tmp_path), "--quick"]) == 2
    assert "norms.csv:2" in capsys.readouterr().err
