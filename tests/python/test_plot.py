# SPDX-License-Identifier: Apache-2.0
# Pictures of benchmarks and diagnoses, and the info command.
from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ctxkv import plot
from ctxkv.__main__ import main

BENCH = {
    "name": "cpu avx512",
    "results": [
        {"op": op, "heads": heads, "rows": rows, "median_us": 3.0 * rows, "copy_share": 0.5}
        for op in ("norms", "chain") for heads in (2, 16) for rows in (1, 8, 64)
    ],
}
PEERS = {
    "gpu": "H200",
    "rows": [
        {"op": "chain", "heads": 16, "rows": rows, "us": {
            "ctxkv": 20.0 + rows, "seed": 40.0 + rows, "stock": 90.0 + rows, "cublas": None,
            "floor": 9.0 + rows,
        }}
        for rows in (1, 64, 16384)
    ],
}
GRID = {
    "equal": False, "explained": 0.75, "verdict": ["layer_weight_first"],
    "grid": [[[0, 3, -1], [0, 0, -1]], [[64, 64, 64], [1, 0, 0]]],
}
SPREAD = {"rows": [{"op": "store", "heads": 2, "rows": 8, "us": {"ctxkv": [2.0, 1.9, 2.1]}}]}


def write(path: Path, data) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def texts(svg: Path) -> str:
    """matplotlib leaves each text as a comment beside its outlines."""
    return " ".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


@pytest.mark.parametrize(
    "data, words",
    [
        (BENCH, ["norms, 2 KV heads", "chain, 16 KV heads", "ctxkv", "floor", "cpu avx512"]),
        (PEERS, ["chain, 16 KV heads", "seed", "stock", "floor", "H200"]),
        (GRID, ["layer 0", "layer 1", "layer_weight_first: 75 % of the rows explained"]),
        ({**GRID, "grid_k": GRID["grid"], "grid_v": GRID["grid"]}, ["K", "V", "layer 1"]),
        ({**GRID, "equal": True, "grid": [[[0, 0]]]}, ["all bits equal"]),
        ({**GRID, "verdict": []}, ["no known fault"]),
    ],
)
def test_pictures(data: dict, words: list[str], tmp_path, capsys) -> None:
    file = write(tmp_path / "a b.json", data)
    assert main(["plot", str(file)]) == 0
    svg, png = tmp_path / "a b.svg", tmp_path / "a b.png"
    assert capsys.readouterr().out.split("\n")[:2] == [str(svg), str(png)]
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for word in words:
        assert word in texts(svg), word
    if data is PEERS:
        assert "cublas" not in texts(svg)
    first = svg.read_bytes(), png.read_bytes()
    assert main(["plot", str(file), "--out", str(tmp_path / "again")]) == 0
    again = (tmp_path / "again.svg").read_bytes(), (tmp_path / "again.png").read_bytes()
    assert first == again, "the same numbers gave another picture"


def test_what_is_read_is_what_is_there() -> None:
    panels = plot.read_bench(BENCH)
    assert panels[("chain", 16)] == {
        "ctxkv": [(1, 3.0), (8, 24.0), (64, 192.0)], "floor": [(1, 1.5), (8, 12.0), (64, 96.0)],
    }
    stock = plot.read_bench(PEERS)[("chain", 16)]["stock"]
    assert plot.read_bench(SPREAD)[("store", 2)] == {"ctxkv": [(8, 2.0)]}
    assert stock == [(1, 91.0), (64, 154.0), (16384, 16474.0)]


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "Expecting"),
        ("[]", "must hold one JSON object"),
        ("{}", "no measurement"),
        ('{"results": [{"op": "norms", "rows": 3}]}', "measurement 0 lacks op, rows or us"),
        ('{"results": [{"op": "norms", "rows": "x", "us": 1}]}', "measurement 0"),
        ('{"grid": []}', '"grid" must be a list'),
        ('{"grid": [[[1, 2], [1]]]}', "as many heads and rows"),
        ('{"grid": [[[1]]], "grid_k": [[[1]]], "grid_v": []}', '"grid_v" must be a list'),
    ],
)
def test_bad_files_are_named(text: str, said: str, tmp_path, capsys) -> None:
    file = write(tmp_path / "bad.json", text)
    assert main(["plot", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and said in error
    assert main(["plot", str(tmp_path / "none.json")]) == 2


def test_info(capsys) -> None:
    assert main(["info", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cpu"]["bits_verified"] and "scalar" in data["cpu"]["cpu_found"]
    assert bool(data["cuda"]) != bool(data.get("cuda_reason"))
    assert main(["info"]) == 0
    assert capsys.readouterr().out.startswith(f"ctxkv      {data['version']}")


def test_choices_and_source(tmp_path, capsys) -> None:
    file = write(tmp_path / "b.json", PEERS)
    options = ["--ops", "chain", "--heads", "16", "--programs", "ctxkv,floor"]
    assert main(["plot", str(file), *options]) == 0
    found = texts(tmp_path / "b.svg")
    assert "ctxkv" in found and "floor" in found and "seed" not in found
    assert plot.source_of(PEERS) in (tmp_path / "b.svg").read_text()
    assert plot.source_of(PEERS).encode() in (tmp_path / "b.png").read_bytes()
    assert plot.source_of({**PEERS, "gpu": "H100"}) != plot.source_of(PEERS)
    capsys.readouterr()
    assert main(["plot", str(file), "--heads", "2"]) == 2
    assert "chain with 16 KV heads" in capsys.readouterr().err


def test_floor_of_the_run() -> None:
    row = {"op": "norms", "heads": 2, "rows": 8, "median_us": 4.0, "copy_share": 0.5}
    panels = plot.read_bench({"results": [{**row, "floor_us": 1.5}]})
    assert panels["norms", 2]["floor"] == [(8, 1.5)]
    assert plot.read_bench({"results": [row]})["norms", 2]["floor"] == [(8, 2.0)]


def test_shapes_are_panels_of_their_own(tmp_path) -> None:
    """Two drafts with as many heads: neither's times are drawn in the other's panel."""
    rows = [
        {"op": "chain", "heads": 8, "shape": shape, "rows": 1, "us": {"ctxkv": us}}
        for shape, us in (("big", 27.0), ("a small one", 20.0))
    ]
    panels = plot.read_bench({"rows": rows})
    assert {key: lines["ctxkv"] for key, lines in panels.items()} == {
        ("chain", "big"): [(1, 27.0)], ("chain", "a small one"): [(1, 20.0)]}
    file = write(tmp_path / "b.json", {"rows": rows})
    assert main(["plot", str(file)]) == 0
    found = texts(tmp_path / "b.svg")
    assert found.index("chain, big") < found.index("chain, a small one")
    assert main(["plot", str(file), "--heads", "big"]) == 0
    assert "small" not in texts(tmp_path / "b.svg")
