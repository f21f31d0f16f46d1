"""The tables of one attention layer, from the numbers that `benchmarks/kernels.py` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.sheet import Sheet
from experiments.store import Store
from fgai.records import Column, Table

FOLDER = Path(__file__).parents[1] / "benchmarks"
MEASURED = {"kernels-gpu.json": "an H200", "kernels-cpu.json": "two CPU cores, a busy machine"}
_Found = dict[str, dict[str, Any]]
_TITLES = {
    "fgai, ms": lambda found: _seconds(found["fgai"]) * 1e3,
    "eager ÷ fgai": lambda found: _seconds(found["eager"]) / _seconds(found["fgai"]),
    "compiled ÷ fgai": lambda found: _seconds(found["compiled"]) / _seconds(found["fgai"]),
    "memory, compiled ÷ fgai": lambda found: found["compiled"]["bytes"] / found["fgai"]["bytes"],
    "forward, of copy bandwidth, %": lambda found: 100 * _bandwidth(found["fgai"]),
}


def kernels(_: Store) -> list[Sheet | Table]:
    """One row per graph and size; the three scores side by side."""
    return [_layers(FOLDER / name, where) for name, where in MEASURED.items()]


def _layers(path: Path, where: str) -> Table:
    cases: dict[tuple[str, str], dict[str, _Found]] = {}
    for found in json.loads(path.read_text()):
        graph, size, score, _dtype = found["case"]
        cases.setdefault((size, graph), {})[score] = found
    rows: list[list[str | float | int | None]] = [
        [f"{graph}, {size}", *(_each(scores, number) for number in _TITLES.values())]
        for (size, graph), scores in sorted(cases.items(), key=lambda case: ("8x8" not in case[0], case[0]))
    ]
    columns = [Column("graph, heads x channels"), *(Column(title) for title in _TITLES)]
    return Table(f"One attention layer on {where}", columns, rows)


def _each(scores: dict[str, _Found], number: Callable[[_Found], float]) -> str:
    values = [number(scores[score]) for score in ("additive", "dynamic", "dot")]
    return "/".join(f"{value:.0f}" if value >= 20 else f"{value:.3g}" for value in values)


def _seconds(way: dict[str, Any]) -> float:
    return float(min(way["seconds"], way.get("captured", math.inf)))


def _bandwidth(ours: dict[str, Any]) -> float:
    return float(ours["moved"] / ours["kernel"] / ours["copy"])
