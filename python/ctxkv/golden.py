# SPDX-License-Identifier: Apache-2.0
# The golden cases' generator and tables (tests/golden/README.md), on numpy.
from __future__ import annotations

import csv
import zlib
from pathlib import Path
from typing import Any, Iterator

import numpy as np

_U = np.uint64
_STEP = 1 << 22  # numbers made at a time, to bound memory


def mix(seed: int, first: int, count: int) -> np.ndarray:
    """splitmix64's outputs first .. first+count-1 for a seed, uint64."""
    with np.errstate(over="ignore"):
        index = np.arange(first + 1, first + count + 1, dtype=_U)
        z = _U(seed) + index * _U(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
    return z ^ (z >> _U(31))


def value(seed: int, count: int, scale: float, first: int = 0) -> np.ndarray:
    """FP32 ((z >> 40)/2^23 - 1) * 2^-(z & 7) * scale, exactly."""
    z = mix(seed, first, count)
    unit = (z >> _U(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return np.ldexp(unit, -(z & _U(7)).astype(np.int32)) * np.float32(scale)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """FP32 to BF16 bits, nearest even; NaN to 0x7FFF."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FFF), rounded)


def to_f32(bits: np.ndarray) -> np.ndarray:
    """BF16 bits as FP32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16(seed: int, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """BF16 bits of value(seed, i, scale) in row-major order."""
    count = int(np.prod(shape))
    out = np.empty(count, np.uint16)
    for first in range(0, count, _STEP):
        part = min(_STEP, count - first)
        out[first : first + part] = round_bf16(value(seed, part, scale, first))
    return out.reshape(shape)


def gain(seed: int, shape: tuple[int, ...], centre: float, kind: str) -> Any:
    """Weights of kind n (None), b, B (BF16 bits) or f, F (FP32)."""
    if kind == "n":
        return None
    x = np.float32(0 if centre != 0 else 1) + value(seed, int(np.prod(shape)), 0.5)
    return (x if kind in "fF" else round_bf16(x)).reshape(shape)


def positions(seed: int, count: int, max_position: int) -> np.ndarray:
    return (mix(seed, 0, count) % _U(max_position)).astype(np.int64)


def slots(seed: int, layer: int, count: int, places: int) -> np.ndarray:
    """Layer `layer`'s slots: a stable argsort, with -1 at 0, 5, 10, ... in odd layers."""
    order = np.argsort(mix(seed + 10 + layer, 0, places), kind="stable")[:count].astype(np.int64)
    if layer % 2:
        order[::5] = -1
    return order


def special_norm_rows(x: np.ndarray) -> None:
    """The eight hostile rows of norms.csv, in place."""
    x[0] = 0
    x[1] = round_bf16(np.float32([3.0e38]))
    x[2, 17] = 0x7F80
    x[3, 4099] = 0x7FC0
    x[4] = round_bf16(to_f32(x[4]) * np.float32(2.0**-120))
    x[5] = 1
    x[6, ::2] = 0x8000
    x[7] = round_bf16(to_f32(x[7]) * np.float32(2.0**60))


def special_store_rows(kv: np.ndarray) -> None:
    """The seven hostile rows of store.csv in [L, T, columns], in place."""
    kv[:, 0] = 0
    kv[:, 1] = round_bf16(to_f32(kv[:, 1]) * np.float32(2.0**-70))
    kv[:, 2, 3] = 0x7F80
    kv[:, 3, 5] = 0x7FC0
    kv[:, 4] = round_bf16(np.float32([3.0e38]))
    kv[:, 5, ::3] = 0x8000
    kv[:, 6] = 1


def crc(data: Any) -> int:
    return zlib.crc32(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())


class Row(dict[str, Any]):
    """A row of a table: integers, floats, kinds, and checksums as lists of ints."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


_FLOATS = {"hidden_eps", "layer_eps", "k_eps", "eps", "hidden_gain", "layer_gain", "theta"}
_TEXTS = {"name", "hidden", "layer"}


def _cell(column: str, text: str) -> Any:
    if column.startswith("crc") or column == "inv_freq_bits":
        return [int(word, 16) for word in text.split()]
    if column in _TEXTS:
        return text
    return float(text) if column in _FLOATS else int(text)


def table(path: Path) -> Iterator[Row]:
    """The rows of a golden csv; ValueError with file and line where one is malformed."""
    with open(path, newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                yield Row((column, _cell(column, text)) for column, text in row.items())
            except (TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{path}:{line}: {error}") from None
