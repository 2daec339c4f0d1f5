# SPDX-License-Identifier: Apache-2.0
# python -m ctxkv plot: a benchmark as time against rows, a diagnosis as heat maps; SVG and PNG.
"""Reads two kinds of JSON. A benchmark: {"results" or "rows": [{"op", "heads", "rows", "us"}]},
with "median_us", "p10_us", "p90_us" and "floor_us" (`ctxkv bench --json`), or "us" by program
({"ctxkv": .., "stock": .., "floor": ..}, bench/results). A
diagnosis (`ctxkv diagnose --json`): "grid" [L][H][T], the elements of a layer's head and row that
differ (-1: not stored), or "grid_k" and "grid_v" apart, beside "verdict" and "explained"."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Union

# Okabe and Ito's colours, told apart by all kinds of eyes; a marker of its own for each as well.
_STYLES = {
    "ctxkv": ("#0072B2", "o", "-"),
    "seed": ("#E69F00", "s", "-"),
    "stock": ("#D55E00", "^", "-"),
    "cublas": ("#CC79A7", "D", "-"),
    "onednn": ("#009E73", "v", "-"),
    "torch": ("#56B4E9", "P", "-"),
    "floor": ("#000000", "", "--"),
}
# (op, heads or the name of a shape) -> program -> [(rows, microseconds)]
_Panels = dict[tuple[str, Union[int, str]], dict[str, list[tuple[int, float]]]]
_SPARE = ["#009E73", "#56B4E9", "#F0E442", "#CC79A7"]
_OP_ORDER = ["norms", "projection", "store", "chain"]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError(f"plot needs matplotlib ({error}): pip install matplotlib") from None
    matplotlib.use("Agg")
    # The same bytes for the same numbers: no date, no random names.
    matplotlib.rcParams["svg.hashsalt"] = "ctxkv"
    from matplotlib import pyplot

    return pyplot


def source_of(data: dict[str, Any]) -> str:
    """What a picture says of the numbers it was made from: a digest of them."""
    text = json.dumps(data, sort_keys=True)
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _save(figure: Any, stem: Path, data: dict[str, Any]) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
    source = {"Source": source_of(data)}
    figure.savefig(paths[0], metadata={"Date": None, **source}, bbox_inches="tight")
    figure.savefig(paths[1], dpi=150, metadata={"Software": None, **source}, bbox_inches="tight")
    return paths


def _series(row: dict[str, Any]) -> dict[str, float]:
    us = row.get("us", row.get("median_us"))
    if isinstance(us, dict):
        # A number, or [median, p10, p90].
        found = {
            name: float(value[0] if isinstance(value, list) else value)
            for name, value in us.items() if value is not None
        }
    else:
        found = {"ctxkv": float(row["median_us"] if us is None else us)}
        # Measured in the same run; older files know only a copy of the same bytes.
        copied = found["ctxkv"] * float(row.get("copy_share") or 0)
        found["floor"] = float(row.get("floor_us") or copied)
    return {name: value for name, value in found.items() if value > 0}


def read_bench(data: dict[str, Any]) -> _Panels:
    """(op, heads) -> program -> [(rows, microseconds)], sorted; ValueError naming a bad entry."""
    panels: _Panels = {}
    for index, row in enumerate(data.get("results", data.get("rows", []))):
        try:
            key = (str(row["op"]), row.get("shape") or int(row.get("heads", 0) or 0))
            rows, series = int(row["rows"]), _series(row)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"measurement {index} lacks op, rows or us: {error!r}") from None
        if rows > 0:
            for name, value in series.items():
                panels.setdefault(key, {}).setdefault(name, []).append((rows, value))
    if not panels:
        raise ValueError("holds no measurement with rows and us")
    for lines in panels.values():
        for points in lines.values():
            points.sort()
    return panels


def _style(name: str, index: int) -> dict[str, Any]:
    colour, marker, line = _STYLES.get(name, (_SPARE[index % len(_SPARE)], "x", "-"))
    width = 2.2 if name == "ctxkv" else 1.3
    return {"color": colour, "marker": marker, "linestyle": line, "linewidth": width}


def _label(heads: Union[int, str]) -> str:
    return f"{heads} KV heads" if isinstance(heads, int) else heads


@dataclass
class Choice:
    """Which panels and lines of a benchmark to draw; empty: all."""

    ops: Sequence[str] = ()
    heads: Sequence[Union[int, str]] = ()
    programs: Sequence[str] = ()

    def of(self, panels: _Panels) -> _Panels:
        found: _Panels = {}
        for (op, heads), lines in panels.items():
            if (self.ops and op not in self.ops) or (self.heads and heads not in self.heads):
                continue
            kept = {n: p for n, p in lines.items() if not self.programs or n in self.programs}
            if kept:
                found[op, heads] = kept
        if not found:
            known = sorted(f"{op} with {_label(heads)}" for op, heads in panels)
            programs = sorted({name for lines in panels.values() for name in lines})
            raise ValueError(
                f"--ops, --heads, --programs: leave nothing of {', '.join(known)} by "
                f"{', '.join(programs)}")
        return found


def _bench(data: dict[str, Any], stem: Path, choice: Choice) -> list[Path]:
    pyplot, panels = _pyplot(), choice.of(read_bench(data))
    ops = sorted({op for op, _ in panels}, key=lambda o: (_OP_ORDER + [o]).index(o))
    # As many heads rise; shapes stay as they come in the file.
    heads = list(dict.fromkeys(count for _, count in panels))
    heads.sort(key=lambda count: count if isinstance(count, int) else 0)
    # One op: its panels side by side.
    shape = (1, len(heads)) if len(ops) == 1 else (len(heads), len(ops))
    figure, axes = pyplot.subplots(
        *shape, figsize=(3.6 * shape[1] + 0.6, 2.7 * shape[0] + 0.9), squeeze=False,
        layout="constrained",
    )
    known: dict[str, Any] = {}
    for i, count in enumerate(heads):
        for j, op in enumerate(ops):
            axis = axes[0][i] if len(ops) == 1 else axes[i][j]
            lines = panels.get((op, count))
            if lines is None:
                axis.set_axis_off()
                continue
            for index, (name, points) in enumerate(sorted(lines.items())):
                (drawn,) = axis.plot(*zip(*points), label=name, **_style(name, index))
                known.setdefault(name, drawn)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            rows = sorted({at for points in lines.values() for at, _ in points})
            axis.set_xticks(rows[:: -(-len(rows) // 7)], minor=False)
            axis.xaxis.set_major_formatter("{x:.0f}")
            axis.set_title(op + (f", {_label(count)}" if count else ""), fontsize=10)
            axis.grid(True, which="both", alpha=0.25)
            axis.set_xlabel("rows")
            axis.set_ylabel("µs")
    order = sorted(known, key=lambda n: (list(_STYLES) + [n]).index(n))
    figure.legend(
        [known[n] for n in order], order, loc="outside lower center", ncols=max(len(order), 1),
        frameon=False,
    )
    where = data.get("name") or data.get("machine") or data.get("gpu") or data.get("device") or ""
    figure.suptitle(f"context K/V chain on {where}" if where else "context K/V chain")
    paths = _save(figure, stem, data)
    pyplot.close(figure)
    return paths


def read_grid(data: dict[str, Any], name: str = "grid") -> list[list[list[int]]]:
    """[L][H][T] of a diagnosis; ValueError where its shape is uneven."""
    grid: Any = data.get(name)
    good = isinstance(grid, list) and grid and all(
        isinstance(layer, list) and layer and all(isinstance(row, list) for row in layer)
        for layer in grid
    )
    if not good:
        raise ValueError(f'"{name}" must be a list [layers][heads][rows]')
    sizes = {len(row) for layer in grid for row in layer}
    if len(sizes) != 1 or len({len(layer) for layer in grid}) != 1:
        raise ValueError(f'"{name}" must have as many heads and rows in every layer')
    return grid


def _grids(data: dict[str, Any]) -> dict[str, list[list[list[int]]]]:
    """K and V apart where the diagnosis tells them apart, else their sum."""
    if "grid_k" in data and "grid_v" in data:
        return {"K": read_grid(data, "grid_k"), "V": read_grid(data, "grid_v")}
    return {"K and V": read_grid(data)}


def _heat(axis: Any, cells: list[list[int]], colours: Any, scale: Any) -> Any:
    heads, rows = len(cells), max(len(cells[0]), 1)
    image = axis.imshow(
        [row or [-1] for row in cells], aspect="auto", interpolation="nearest", cmap=colours,
        norm=scale, extent=(-0.5, rows - 0.5, heads - 0.5, -0.5),
    )
    axis.set_yticks(range(0, heads, max(1, heads // 8)))
    axis.set_xticks(range(0, rows, max(1, rows // 8)))
    return image


def _diagnosis(data: dict[str, Any], stem: Path) -> list[Path]:
    pyplot, grids = _pyplot(), _grids(data)
    from matplotlib.colors import Normalize

    most = max((n for g in grids.values() for layer in g for row in layer for n in row), default=0)
    colours = pyplot.get_cmap("cividis").copy()
    colours.set_under("#dddddd")
    scale = Normalize(0, max(most, 1))
    first = next(iter(grids.values()))
    layers, heads = len(first), len(first[0])
    height = min(max(0.22 * heads, 0.9), 3.0)
    figure, axes = pyplot.subplots(
        layers, len(grids), figsize=(2 + 5 * len(grids), height * layers + 1), squeeze=False,
        sharex=True, sharey=True, layout="constrained",
    )
    for column, (part, grid) in enumerate(grids.items()):
        axes[0, column].set_title(part, fontsize=10)
        axes[-1, column].set_xlabel("row of the call")
        for layer in range(layers):
            image = _heat(axes[layer, column], grid[layer], colours, scale)
            if column == 0:
                axes[layer, 0].set_ylabel(f"layer {layer}\nKV head", fontsize=8)
    bar = figure.colorbar(image, ax=axes.ravel().tolist(), extend="min")
    bar.set_label("elements that differ\n(grey: not stored)")
    figure.suptitle(_verdict(data), fontsize=10)
    paths = _save(figure, stem, data)
    pyplot.close(figure)
    return paths


def _verdict(data: dict[str, Any]) -> str:
    if data.get("equal"):
        return "all bits equal"
    verdict = data.get("verdict") or []
    names = verdict if isinstance(verdict, str) else " + ".join(map(str, verdict))
    share = data.get("explained")
    text = names or "no known fault"
    return text if share is None else f"{text}: {100 * float(share):.0f} % of the rows explained"


def plot(
    path: Path, out: Optional[Path] = None, choice: Choice = Choice()
) -> list[Path]:
    """Draws the file; returns the pictures' paths.

    out: their stem, beside the file by default. choice: what of a benchmark.
    ValueError where the file is no such JSON or nothing is left of it; RuntimeError without
    matplotlib."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold one JSON object")
    stem = out or path.with_suffix("")
    try:
        return _diagnosis(data, stem) if "grid" in data else _bench(data, stem, choice)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
