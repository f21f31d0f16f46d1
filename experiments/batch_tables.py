"""Faithful training in mini-batches beside that of the whole graph, under every search we have."""

from __future__ import annotations

from typing import Any

from experiments.build import name_of
from experiments.cells import Cell as Case
from experiments.cells import read_grid
from experiments.fingerprint import earlier_note
from experiments.sheet import Sheet
from experiments.store import Store
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table, look_up

WHOLE, BATCHES = "fgai, whole graph", "batches"
"""The row to compare with, and how the rows that are compared with it end."""
BAR = 0.01
"""Micro-F1 that mini-batches may cost."""


def batches(store: Store) -> list[Sheet | Table]:
    """F1, clean and under `ensemble`, of both ways to train, and how much mini-batches cost."""
    cells = read_grid("batches")
    scores = {(cell.dataset, cell.row): _scores(record) for cell, record in store.finished(cells)}
    columns = [Column(name) for name in ("dataset", "method")]
    columns += [quantity("f1.clean", "clean")]
    columns += [quantity("f1.attacked", title) for title in ("random endpoints", "chosen")]
    columns += [Column(f"{title} − whole") for title in ("clean", "random", "chosen")]
    columns += [Column(f"within {BAR:g}")]
    body = [
        [dataset, name_of(row), *scores[dataset, row], *_beside(dataset, row, scores)]
        for dataset, row in scores
    ]
    body.sort(key=lambda row: [cell.dataset for cell in cells].index(str(row[0])))
    notes = [
        "GAT, seed 0; both faithful models come from the same vanilla one. “random endpoints”: F1 under"
        " the worst of every search of `ensemble` there; “chosen”: the same where rules chose them. “−"
        " whole”: micro-F1 of the training in mini-batches minus that on the whole graph; within where it"
        f" costs at most {BAR:g}. {'; '.join(_sizes(cell) for cell in cells if cell.settings)}."
    ]
    if missing := len(cells) - len(scores):
        notes.append(f"{missing} of {len(cells)} cells are missing.")
    notes += earlier_note(store, cells)
    return [Table("Faithful training in mini-batches", columns, body or [[None] * len(columns)], notes)]


def _scores(record: dict[str, Any]) -> list[float | None]:
    """F1: clean, under the worst search at random endpoints, and at chosen ones."""
    metrics = record["evaluations"]["ensemble"]["metrics"]
    return [look_up(metrics, f"f1.{name}") for name in ("clean", "attacked_random", "attacked_chosen")]


def _beside(dataset: str, row: str, scores: dict[tuple[str, str], list[float | None]]) -> list[Cell]:
    """What mini-batches cost beside the whole graph, and whether that is within the bar."""
    whole = scores.get((dataset, WHOLE))
    if not row.endswith(BATCHES) or whole is None:
        return [None] * 4
    pairs = zip(scores[dataset, row], whole, strict=True)
    apart = [None if one is None or two is None else one - two for one, two in pairs]
    within = all(value >= -BAR for value in apart if value is not None)
    return [*(None if value is None else f"{value:+.3f}" for value in apart), "yes" if within else "no"]


def _sizes(cell: Case) -> str:
    settings = cell.settings
    return (
        f"{cell.dataset}, {name_of(cell.row)}: {settings['epochs']} epochs in batches of"
        f" {settings['batch_size']} nodes with {settings['fan_out']} neighbours"
    )
