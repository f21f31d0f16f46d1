"""A cell run once more: which numbers of its record come out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from experiments.cells import Cell, grid_names, read_grid
from experiments.fingerprint import change_of
from experiments.run import run_cell
from experiments.store import Store, slim
from fgai.errors import DataError, FgaiError, InputError

ABOUT = (
    "about", "cell", "data", "fingerprint", "key", "protocol", "schema", "seconds", "status", "training",
    "warnings", "whole_seconds",
)  # fmt: skip
"""What a record says of itself; all else is measured."""
PASSED_OVER = ("seconds", "null", "chance", "curve", "curve_plus", "curve_minus")
"""What depends on the machine or on no model, and what others sum up; layers too, where there is `all`."""
TOLERANCE = 0.02
"""By which numbers may differ, two points of F1."""


class Number(NamedTuple):
    """A number of a record, and what it is now; None where it is not measured any more."""

    path: str
    recorded: float
    now: float | None
    agrees: bool


def find(name: str) -> Cell:
    """Return the cell of a key, or of the name of a record's file, from the grids that come with fgai."""
    key = name.removesuffix(".json").rpartition("-")[2]
    for grid in grid_names():
        for cell in read_grid(grid):
            if cell.key == key:
                return cell
    raise InputError(f"no grid has a cell {name!r}; `fgai bench run GRID` names those it runs")


def rerun(
    cell: Cell,
    store: Store,
    *,
    tolerance: float = TOLERANCE,
    device: str = "cpu",
    root: Path | str | None = None,
    cache: Path | None = None,
) -> tuple[dict[str, Any], list[Number]]:
    """Run a cell again and compare; return the new record and the numbers of both.

    Raises:
        DataError: there is no good record, or this version would train or attack otherwise.
        FgaiError: the cell failed.
    """
    record = store.read(cell)
    if record is None or record["status"] != "done":
        raise DataError(f"{store.root} has no record of {cell.path.stem}")
    if (change := change_of(record, cell)) is not None:
        raise DataError(f"{cell.path.stem} was run with {change}; this version cannot repeat it")
    then = dict(measured(slim(record)))
    if not then:
        raise InputError(f"a cell of kind {cell.kind!r} has only times, which nobody can repeat")
    with TemporaryDirectory() as folder:
        made = run_cell(cell, Store(folder), device=device, root=root, cache=cache)
    if made["status"] != "done":
        raise FgaiError(f"{cell.path.stem} failed: {made['error']}")
    now = dict(measured(slim(made)))
    return made, [
        Number(
            path,
            value,
            other,
            other is not None and isclose(value, other, rel_tol=tolerance, abs_tol=tolerance),
        )
        for path, value in then.items()
        for other in [now.get(path)]
    ]


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a packed record measures, with their dotted paths; see `PASSED_OVER`."""
    for name, value in record.items():
        if name == "evaluations":
            yield from _numbers({threat: one["metrics"] for threat, one in value.items()}, "")
        elif name not in ABOUT:
            yield from _numbers(value, name)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, part in value.items() if "all" not in value else [("all", value["all"])]:
            if name not in PASSED_OVER:
                yield from _numbers(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
