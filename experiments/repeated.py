"""Cells run once more, by the code of today: how far their records are from the first ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from experiments.cells import KINDS, TASKS, Cell
from experiments.sheet import Sheet
from experiments.statistics import estimate
from experiments.store import Store
from fgai.records import Column, Table, look_up

REPEATED = "repeat"
"""Folder of the second records, within that of the first."""
SEEDS = range(5)
"""Over which a number's spread is taken."""
WHOLE = {
    "clean score": ("scores.f1", "validation.clean"),
    "attacked score": ("validation.attacked",),
}
"""Numbers of a whole record by name, and where they may stand: the first that does is taken."""
EVALUATED = {
    "clean score": ("f1.clean", "accuracy.clean", "roc_auc.clean"),
    "attacked score": ("f1.attacked", "accuracy.attacked", "roc_auc.attacked"),
    "as vanilla": ("similarity.overlap.all",),
    "top 5 kept": ("overlap_touched.prediction.all",),
}
"""Numbers of each evaluation of a record, likewise."""


class Difference(NamedTuple):
    """A number of one cell, in its first record and in its second.

    Attributes:
        cell: that was run twice.
        name: of the number.
        first: value.
        second: value.
        spread: standard deviation of the number over the seeds of the first records, if there are several.
        alike: the same code made both, on the same kind of device.
    """

    cell: Cell
    name: str
    first: float
    second: float
    spread: float | None
    alike: bool

    @property
    def size(self) -> float:
        """How far they are apart."""
        return abs(self.second - self.first)


def numbers(record: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The numbers of a record that are compared, by name and by threat."""
    parts = {"": (record, WHOLE)}
    for threat, evaluation in record.get("evaluations", {}).items():
        parts[threat] = (evaluation.get("metrics", {}), EVALUATED)
    found: dict[tuple[str, str], float] = {}
    for threat, (values, names) in parts.items():
        for name, paths in names.items():
            held = [value for path in paths if (value := look_up(values, path)) is not None]
            if held:
                found[name, threat] = held[0]
    return found


def differences(first: Store, second: Store) -> Iterator[Difference]:
    """Compare every record of a folder with that of the same cell in another; cells it lacks are passed over.

    Args:
        first: folder.
        second: folder, whose cells are compared.
    """
    for kind, task in itertools.product(KINDS, TASKS):
        for record in second.records(Cell(kind=kind, task=task).folder):
            cell = Cell.from_dict(record["cell"])
            before = first.read(cell)
            if before is None or before["status"] != "done":
                continue
            seeds = [numbers(other) for seed in SEEDS if (other := first.read(replace(cell, seed=seed)))]
            was, alike = numbers(before), _made_alike(before, record)
            for key, value in numbers(record).items():
                spread = estimate(other[key] for other in seeds if key in other)
                if key in was and spread is not None:
                    std = spread.std if spread.seeds > 1 else None
                    yield Difference(cell, key[0], was[key], value, std, alike)


def _made_alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether both records name the same code and the same kind of device."""
    parts = [[look_up(one, path) for path in ("fingerprint.code", "about.device")] for one in (first, second)]
    return None not in parts[0] and parts[0] == parts[1]


def repeated(store: Store) -> list[Sheet | Table]:
    """How far today's code gives the records again: cells that were run once more."""
    title, again = "Cells run once more by the code of today", Store(store.root / REPEATED)
    found: dict[tuple[str, str, str], list[Difference]] = {}
    for one in differences(store, again):
        found.setdefault((one.cell.kind, one.cell.task, one.name), []).append(one)
    columns = [
        Column("kind"), Column("number"), Column("cells", "d"), Column("compared", "d"), Column("equal", "d"),
        Column("difference, mean", "+.4f"), Column("size, median", ".4f"),
        Column("size, largest", ".4f"), Column("where"), Column("std over seeds", ".4f"),
    ]  # fmt: skip
    rows: list[Sequence[str | float | int | None]] = []
    for (kind, task, name), held in found.items():
        worst = max(held, key=lambda one: one.size)
        spreads = [one.spread for one in held if one.spread is not None]
        rows.append(
            [
                f"{kind} {task}".strip(),
                name,
                len({one.cell.key for one in held}),
                len(held),
                sum(one.size == 0 for one in held),
                fmean(one.second - one.first for one in held),
                median(one.size for one in held),
                worst.size,
                f"{worst.cell.row}, {worst.cell.model} on {worst.cell.dataset}",
                median(spreads) if spreads else None,
            ]
        )
    notes = [
        "The record of a cell that was run again is compared with the one the tables are made of, under every"
        " threat it names. std over seeds: of the same number, median over these cells.",
        _unchanged([one for held in found.values() for one in held]),
    ]
    return [Table(title, columns, rows, tuple(notes) if rows else ("No cell was run twice.",))]


def _unchanged(found: Sequence[Difference]) -> str:
    """How many cells came out equal: of those whose code had changed in between, and of the others."""
    moved = {one.cell.key for one in found if one.size > 0}
    changed = {one.cell.key for one in found if not one.alike}
    same = {one.cell.key for one in found} - changed
    return (
        f"Equal in every number: {len(changed - moved)} of {len(changed)} cells where code that trains was"
        f" changed in between or the device is another, {len(same - moved)} of the {len(same)} others."
    )
