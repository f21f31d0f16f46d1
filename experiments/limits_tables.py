"""Models behind limits: what holds under every search we have, and what it costs in attention."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.attack_tables import RANDOM, reached
from experiments.build import name_of
from experiments.cells import Cell as GridCell
from experiments.cells import read_grid
from experiments.fingerprint import change_of
from experiments.sheet import Sheet
from experiments.store import Store
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table, look_up

GRIDS = ("limits", "injection")
PLAIN = "vanilla"


def limits(store: Store) -> list[Sheet | Table]:
    """F1 under attack, similarity and sharpness of models behind limits."""
    cells = [cell for grid in GRIDS for cell in read_grid(grid) if cell.kind == "attack"]
    records = [store.read(cell) for cell in cells]
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, record in zip(cells, records, strict=True):
        if record is not None and record["status"] == "done" and change_of(record, cell) is None:
            rows.setdefault((cell.model, cell.dataset, cell.row), []).append(record)
    sharp = _vanilla_sharpness(store)
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns.append(quantity("f1.clean", "clean").column)
    titles = ("`ensemble`", "chosen", "`ensemble-strong`", "chosen", "`values`")
    columns += [quantity("f1.attacked", title).column for title in titles]
    columns += [Column("top 5 lost"), Column("similarity"), Column("sharpness ÷ vanilla"), Column("seeds")]
    notes = [
        "Means over seeds. `ensemble` and `ensemble-strong`: the worst of every search at random endpoints;"
        " “chosen”: the worst at endpoints chosen by rules. `values`: any features at all, random endpoints."
        " “top 5 lost”: under the explanation objective of `ensemble`, nodes in reach, mean over layers, the"
        " worst endpoints. Similarity to the vanilla model, and sharpness in units of its own: mean over"
        " layers."
    ]
    missing = len(cells) - sum(map(len, rows.values()))
    if missing:
        notes.append(f"{missing} of {len(cells)} cells are missing, or of other settings or older searches.")
    body = [_row(*key, found, sharp) for key, found in rows.items()]
    return [Table("Behind limits", columns, body or [[None] * len(columns)], notes)]


def _row(
    model: str,
    dataset: str,
    row: str,
    records: list[dict[str, Any]],
    sharp: dict[tuple[str, str, int], float],
) -> list[Cell]:
    def mean(path: str, threat: str = "ensemble") -> float | None:
        found = [
            look_up(r["evaluations"][threat]["metrics"], path) for r in records if threat in r["evaluations"]
        ]
        known = [value for value in found if value is not None]
        return fmean(known) if known else None

    def worst(objective: str, threat: str, *, random: bool | None) -> float | None:
        found = [
            max(max(one.damages.values()) for one in group)
            for record in records
            if (group := [
                one
                for one in reached(record, threat, objective)
                if random is None or (one.rule == RANDOM) == random
            ])
        ]  # fmt: skip
        return fmean(found) if found else None

    def score(threat: str, random: bool) -> float | None:
        found = worst("prediction", threat, random=random)
        return None if found is None else 1 - found

    ratios = [
        own / sharp[key]
        for record in records
        if (key := (model, dataset, record["cell"]["seed"])) in sharp
        and (own := look_up(record["evaluations"]["ensemble"]["metrics"], "sharpness.clean.all")) is not None
    ]
    lost, alike = worst("explanation", "ensemble", random=None), mean("similarity.overlap.all")
    return [
        model,
        dataset,
        name_of(row),
        mean("f1.clean"),
        score("ensemble", True),
        score("ensemble", False),
        score("ensemble-strong", True),
        score("ensemble-strong", False),
        mean("f1.attacked", "values"),
        None if lost is None else f"{lost:.3f}",
        None if alike is None else f"{alike:.2f}",
        f"{fmean(ratios):.2f}" if ratios else None,
        str(len(records)),
    ]


def _vanilla_sharpness(store: Store) -> dict[tuple[str, str, int], float]:
    """Of the vanilla models, by model, dataset and seed: this grid's own, or those of the grid `node`."""
    found: dict[tuple[str, str, int], float] = {}
    for record in store.records("attack"):
        cell = record["cell"]
        if cell["method"] != PLAIN or "ensemble" not in record["evaluations"]:
            continue
        if change_of(record, GridCell.from_dict(cell)) is not None:
            continue
        key = (cell["model"], cell["dataset"], cell["seed"])
        value = look_up(record["evaluations"]["ensemble"]["metrics"], "sharpness.clean.all")
        if value is not None and (cell["label"] or key not in found):
            found[key] = value
    return found
