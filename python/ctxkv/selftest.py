# SPDX-License-Identifier: Apache-2.0
# python -m ctxkv selftest: the golden cases through this binding, as the command line runs them.
from __future__ import annotations

import ctypes
import functools
import time
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from . import golden
from ._descriptors import Norm
from ._device import Device
from ._library import check, library
from ._tensor import Tensor, of
from .golden import Row
from .plans import Chain, Norms, Projection, Store

_RSQRT_HASH = 0xE97CB9514F40C1A6


class Tally:
    """Counts checks, tells the wrong ones."""

    def __init__(self, verbose: bool = False) -> None:
        self.passed = self.failed = 0
        self.verbose = verbose

    def check(self, name: str, what: str, got: int, want: int) -> None:
        good = got == want
        self.passed += good
        self.failed += not good
        if not good:
            print(f"FAIL {name}: {what}: {got:08x}, must be {want:08x}")
        elif self.verbose:
            print(f"pass {name}: {what}: {got:08x}")

    def broken(self, name: str, checks: int, error: Exception) -> None:
        self.failed += checks
        print(f"FAIL {name}: {error}")


def tensor(data: np.ndarray) -> Tensor:
    """A copy of an array in host memory that knows its dtype (uint16: BF16 bits)."""
    names = {np.dtype(np.uint16): "bf16", np.dtype(np.float32): "fp32", np.dtype(np.int64): "i64"}
    return Tensor.from_bytes(np.ascontiguousarray(data), data.shape, names[data.dtype])


def maybe(data: Optional[np.ndarray]) -> Optional[Tensor]:
    return None if data is None else tensor(data)


class Caches:
    """L caches [num_blocks, H, block_size, 2*head_dim] from 0x5A, with their K and V views."""

    def __init__(self, row: Row, dim: int) -> None:
        blocks, heads, size = row["num_blocks"], row["H"], row["block_size"]
        self.storage = [Tensor((blocks, heads, size, 2 * dim), fill=0x5A) for _ in range(row["L"])]
        strides = (heads * size * 2 * dim, 2 * dim, size * 2 * dim, 1)
        shape = (blocks, size, heads, dim)
        self.keys = [c.view(shape, strides) for c in self.storage]
        self.values = [c.view(shape, strides, dim) for c in self.storage]

    def check(self, tally: Tally, row: Row) -> None:
        for layer, cache in enumerate(self.storage):
            got, want = golden.crc(cache.tobytes()), row["crc_cache_per_layer"][layer]
            tally.check(row["name"], f"cache of layer {layer}", got, want)


def _slots(row: Row, count: int) -> list[Tensor]:
    places = row["num_blocks"] * row["block_size"]
    return [tensor(golden.slots(row["seed"], l, count, places)) for l in range(row["L"])]


# ---- Muse Spark --------------------------------------------------------------------------------
def muse_norms(row: Row, numerics: str = "pair") -> tuple[np.ndarray, dict[str, Any]]:
    """x and the arguments of `Norms` of a row of norms.csv or chain.csv."""
    layers, seed = row["L"], row["seed"]
    x = golden.bf16(seed, (row["T"], 8192), 1.0)
    if row.get("special"):
        golden.special_norm_rows(x)
    hidden = golden.gain(seed + 1, (8192,), row["hidden_gain"], row["hidden"])
    layer = golden.gain(seed + 2, (layers, 8192), row["layer_gain"], row["layer"])
    return x, {
        "num_layers": layers,
        "hidden": Norm("row", row["hidden_eps"], row["hidden_gain"], row["hidden"] in "BF"),
        "layer": Norm("row", row["layer_eps"], row["layer_gain"], row["layer"] in "BF"),
        "hidden_weight": maybe(hidden),
        "layer_weights": maybe(layer),
        "numerics": numerics,
    }


def norms(device: Device, row: Row, tally: Tally) -> None:
    x, arguments = muse_norms(row)
    given = tensor(x)
    for numerics, column in (("pair", "crc_stock_sm90"), ("packed", "crc_packed")):
        out = Tensor((row["L"], *x.shape))
        Norms(device, **{**arguments, "numerics": numerics}).run(given, out)
        tally.check(row["name"], column[4:], golden.crc(out.tobytes()), row[column][0])


def store(device: Device, row: Row, tally: Tally) -> None:
    layers, rows, heads, seed = row["L"], row["T"], row["H"], row["seed"]
    kv = golden.bf16(seed, (layers, rows, 2 * heads * 64), 4.0)
    if row["special"]:
        golden.special_store_rows(kv)
    data = tensor(kv)
    strides = (rows * 2 * heads * 64, 2 * heads * 64, 64, 1)
    k = data.view((layers, rows, heads, 64), strides)
    v = data.view((layers, rows, heads, 64), strides, heads * 64)
    rope, most = bool(row["rope"]), row["max_position"]
    plan = Store(
        device, num_layers=layers, num_kv_heads=heads, k_eps=row["eps"],
        rope="gptj" if rope else "none",
        cos_sin=tensor(golden.bf16(seed + 2, (most, 64), 1.0)) if rope else None,
    )
    caches = Caches(row, 64)
    plan.bind_caches(caches.keys, caches.values)
    where = tensor(golden.positions(seed + 1, rows, most)) if rope else None
    plan.run(k, v, where, _slots(row, row["R"]))
    caches.check(tally, row)


def chain(device: Device, row: Row, tally: Tally) -> None:
    layers, rows, heads, seed = row["L"], row["T"], row["H"], row["seed"]
    x, arguments = muse_norms(row)
    given, normed = tensor(x), Tensor((layers, rows, 8192))
    Norms(device, **arguments).run(given, normed)
    tally.check(row["name"], "norms", golden.crc(normed.tobytes()), row["crc_norms"][0])
    weights = tensor(golden.bf16(seed + 3, (layers, 2 * heads * 64, 8192), 2.0**-5))
    project = {"weights": weights, "num_layers": layers, "num_kv_heads": heads}
    kv = Tensor((layers, rows, 2 * heads * 64))
    Projection(device, **project).run(normed, kv)
    tally.check(row["name"], "projection", golden.crc(kv.tobytes()), row["crc_projection"][0])
    table = tensor(golden.bf16(seed + 5, (row["max_position"], 64), 1.0))
    plan = Chain(
        device, norms=arguments, projection=project, max_rows=rows,
        store={
            "num_layers": layers, "num_kv_heads": heads, "k_eps": row["k_eps"], "rope": "gptj",
            "cos_sin": table,
        },
    )
    caches = Caches(row, 64)
    plan.bind_caches(caches.keys, caches.values)
    plan.run(
        given, tensor(golden.positions(seed + 4, rows, row["max_position"])), _slots(row, rows)
    )
    caches.check(tally, row)


# ---- the Qwen3 family --------------------------------------------------------------------------
def _weighted_norms(row: Row, layers: int) -> tuple[Tensor, dict[str, Any]]:
    width, seed = row["D"], row["seed"]
    weight = tensor(golden.gain(seed + 1, (width,), 0.0, "b"))
    return tensor(golden.bf16(seed, (row["T"], width), 1.0)), {
        "num_layers": layers, "hidden_size": width, "hidden": Norm("rms", row["eps"]),
        "layer": Norm("absent", 0.0), "hidden_weight": weight,
    }


def weighted_norms(device: Device, row: Row, tally: Tally) -> None:
    x, arguments = _weighted_norms(row, 1)
    out = Tensor((1, row["T"], row["D"]))
    Norms(device, **arguments).run(x, out)
    tally.check(row["name"], "norm", golden.crc(out.tobytes()), row["crc"][0])


def _weighted_store(row: Row, seed_table: int) -> dict[str, Any]:
    dim, layers = row["head_dim"], row["L"]
    return {
        "num_layers": layers, "num_kv_heads": row["H"], "head_dim": dim, "k_norm": "rms",
        "k_eps": row["eps"], "rope": "neox",
        "k_norm_weight": tensor(golden.gain(row["seed"] + 3, (layers, dim), 0.0, "b")),
        "cos_sin": tensor(golden.bf16(seed_table, (row["max_position"], dim), 1.0)),
    }


def weighted_store(device: Device, row: Row, tally: Tally) -> None:
    layers, rows, heads, dim, seed = (row[n] for n in ("L", "T", "H", "head_dim", "seed"))
    width = 2 * heads * dim
    data = tensor(golden.bf16(seed, (rows, layers, width), 4.0))
    shape, strides = (layers, rows, heads, dim), (width, layers * width, dim, 1)
    plan = Store(device, **_weighted_store(row, seed + 2))
    caches = Caches(row, dim)
    plan.bind_caches(caches.keys, caches.values)
    where = tensor(golden.positions(seed + 1, rows, row["max_position"]))
    k, v = data.view(shape, strides), data.view(shape, strides, heads * dim)
    plan.run(k, v, where, _slots(row, row["R"]))
    caches.check(tally, row)


def weighted_chain(device: Device, row: Row, tally: Tally) -> None:
    layers, rows, heads, dim, seed = (row[n] for n in ("L", "T", "H", "head_dim", "seed"))
    width = 2 * heads * dim
    x, arguments = _weighted_norms(row, layers)
    normed = Tensor((1, rows, row["D"]))
    Norms(device, **arguments).run(x, normed)
    tally.check(row["name"], "norm", golden.crc(normed.tobytes()), row["crc_norm"][0])
    weights = tensor(golden.bf16(seed + 4, (layers, width, row["D"]), 2.0**-5))
    project = {
        "weights": weights, "num_layers": layers, "num_kv_heads": heads, "head_dim": dim,
        "hidden_size": row["D"],
    }
    kv = Tensor((rows, layers, width))
    look = kv.view((layers, rows, width), (width, layers * width, 1))
    Projection(device, **project).run(normed, look)
    tally.check(row["name"], "projection", golden.crc(kv.tobytes()), row["crc_projection"][0])
    plan = Chain(
        device, norms=arguments, projection=project, max_rows=rows,
        store=_weighted_store(row, seed + 6),
    )
    caches = Caches(row, dim)
    plan.bind_caches(caches.keys, caches.values)
    plan.run(x, tensor(golden.positions(seed + 5, rows, row["max_position"])), _slots(row, rows))
    caches.check(tally, row)


# ---- arithmetic that no device takes part in ---------------------------------------------------
def rsqrt(tally: Tally) -> None:
    """FNV-1a over ctxkv_rsqrt of 2^24 inputs. The hash needs the bytes one after the other."""
    function = library().ctxkv_rsqrt
    inputs = np.arange(0x3F800000, 0x40800000, dtype=np.uint32).view(np.float32)
    results = [np.array([function(x, ftz) for x in inputs.tolist()], np.float32) for ftz in (0, 1)]
    state = 1469598103934665603
    for byte in results[0].tobytes():
        state = (state ^ byte) * 1099511628211 & 0xFFFFFFFFFFFFFFFF
    tally.check("rsqrt", "FNV-1a of 2^24 results", state, _RSQRT_HASH)
    same = results[0].tobytes() == results[1].tobytes()
    tally.check("rsqrt, ftz", "FNV-1a of 2^24 results", state if same else ~state, _RSQRT_HASH)


def inv_freq(_: Device, row: Row, tally: Tally) -> None:
    name = f"inv_freq, theta {row['theta']:g}, rotary_dim {row['rotary_dim']}"
    values = (ctypes.c_float * (row["rotary_dim"] // 2))()
    check(library().ctxkv_rope_inv_freq(row["theta"], row["rotary_dim"], values))
    got, want = np.frombuffer(values, np.uint32), np.array(row["inv_freq_bits"], np.uint32)
    wrong = np.flatnonzero(got != want)
    first = int(wrong[0]) if wrong.size else got.size - 1
    tally.check(name, f"entry {first}", int(got[first]), int(want[first]))


def rope(_: Device, row: Row, tally: Tally) -> None:
    lib, dim, count = library(), row["rotary_dim"], row["positions"]
    name = f"rope, theta {row['theta']:g}, rotary_dim {dim}, {count} positions"
    frequencies = (ctypes.c_float * (dim // 2))()
    check(lib.ctxkv_rope_inv_freq(row["theta"], dim, frequencies))
    floats = np.empty((2, count, dim // 2), np.float32)
    pointer = ctypes.POINTER(ctypes.c_float)
    cos, sin, step = floats[0].ctypes.data, floats[1].ctypes.data, dim // 2 * 4
    for position in range(count):
        at = position * step
        lib.ctxkv_rope_row(
            frequencies, dim // 2, position, ctypes.cast(cos + at, pointer),
            ctypes.cast(sin + at, pointer),
        )
    tally.check(name, "cos", golden.crc(floats[0]), row["crc_cos_fp32"][0])
    tally.check(name, "sin", golden.crc(floats[1]), row["crc_sin_fp32"][0])
    table = Tensor((count, dim))
    look = of(table, "table")
    check(lib.ctxkv_rope_table(row["theta"], dim, count, ctypes.byref(look)))
    tally.check(name, "table", golden.crc(table.tobytes()), row["crc_table_bf16"][0])


Case = Callable[[Device, Row, Tally], None]
# File, case, checks of one row.
TABLES: list[tuple[str, Case, Callable[[Row], int]]] = [
    ("inv_freq.csv", inv_freq, lambda row: 1),
    ("rope.csv", rope, lambda row: 3),
    ("norms.csv", norms, lambda row: 2),
    ("store.csv", store, lambda row: row["L"]),
    ("chain.csv", chain, lambda row: 2 + row["L"]),
    ("weighted_norms.csv", weighted_norms, lambda row: 1),
    ("weighted_store.csv", weighted_store, lambda row: row["L"]),
    ("weighted_chain.csv", weighted_chain, lambda row: 2 + row["L"]),
]


def _part(name: str, tally: Tally, work: Callable[[], None]) -> None:
    passed, failed, start = tally.passed, tally.failed, time.perf_counter()
    work()
    print(
        f"{name:<29} {tally.passed - passed:4} passed {tally.failed - failed:4} failed  "
        f"{time.perf_counter() - start:6.2f} s", flush=True,
    )


def _rows(
    path: Path, case: Case, checks: Callable[[Row], int], device: Device, tally: Tally
) -> None:
    for row in golden.table(path):
        try:
            case(device, row, tally)
        except (ValueError, RuntimeError) as error:
            tally.broken(row.get("name", path.name), checks(row), error)


def run(folder: Path, verbose: bool = False, quick: bool = False) -> int:
    """Runs every table of the folder on the CPU; 0 if all passed, 1 if not, 2 without tables.
    quick: without the 2^24 reciprocal square roots."""
    found = [entry for entry in TABLES if (folder / entry[0]).exists()]
    if not found:
        print(f"ctxkv: {folder} holds no golden csv file (norms.csv, ...)")
        return 2
    device, tally = Device("cpu"), Tally(verbose)
    if not quick:
        _part("rsqrt, 2^24", tally, lambda: rsqrt(tally))
    for file, case, checks in found:
        _part(file, tally, functools.partial(_rows, folder / file, case, checks, device, tally))
    print(f"{tally.passed} passed, {tally.failed} failed")
    return int(tally.failed > 0 or tally.passed == 0)


__all__ = ["TABLES", "Caches", "Tally", "maybe", "muse_norms", "run", "tensor"]
