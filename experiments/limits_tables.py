"""Models behind limits: what holds under every search we have, and what it costs in attention."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.attack_tables import RANDOM, reached
from experiments.build import name_of
from experiments.cells import read_grid
from experiments.run import earlier_note
from experiments.sheet import Sheet
from experiments.store import Store
from fgai.metrics import NOTHING, quantity
from fgai.records import Cell, Column, Table, look_up

GRIDS = ("limits", "injection")
PLAIN = "vanilla"


def limits(store: Store) -> list[Sheet | Table]:
    """F1 under attack, similarity and sharpness of models behind limits."""
    cells = [cell for grid in GRIDS for cell in read_grid(grid) if cell.kind == "attack"]
    records = [store.read(cell) for cell in cells]
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, record in zip(cells, records, strict=True):
        if record is not None and record["status"] == "done":
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
        " worst endpoints. Similarity to the vanilla model: mean over layers whose vanilla attention is not"
        " flat to 1e-6. Sharpness in units of the vanilla model's: of the mean over layers."
    ]
    missing = sum(record is None for record in records)
    if missing:
        notes.append(f"{missing} of {len(cells)} cells are missing.")
    notes += earlier_note(store, cells)
    body = [_row(*key, found, sharp) for key, found in rows.items()]
    return [Table("Behind limits", columns, body or [[None] * len(columns)], notes)]


def _row(
    model: str,
    dataset: str,
    row: str,
    records: list[dict[str, Any]],
    sharp: dict[tuple[str, str, int], list[float]],
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

    told = [_attention(record, sharp) for record in records]
    alike, kept = ([one[i] for one in told if one is not None] for i in (0, 1))
    lost = worst("explanation", "ensemble", random=None)
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
        f"{fmean(alike):.2f}" if alike else None,
        f"{fmean(kept):.2f}" if kept else None,
        str(len(records)),
    ]


def _attention(
    record: dict[str, Any], sharp: dict[tuple[str, str, int], list[float]]
) -> tuple[float, float] | None:
    """Overlap with the parent's top 5 where its layers say something, and sharpness in units of its own."""
    cell, metrics = record["cell"], record["evaluations"]["ensemble"]["metrics"]
    alike = look_up(metrics, "similarity.overlap.layers")
    parent = look_up(metrics, "sharpness.vanilla.layers")
    parent = parent or sharp.get((cell["model"], cell["dataset"], cell["seed"]))
    if alike is None or parent is None:
        return None
    said = [value for value, old in zip(alike, parent, strict=True) if old > NOTHING]
    return fmean(said or alike), sum(look_up(metrics, "sharpness.clean.layers")) / sum(parent)


def _vanilla_sharpness(store: Store) -> dict[tuple[str, str, int], list[float]]:
    """Of the vanilla models, by model, dataset and seed: this grid's own, or those of the grid `attack`."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for record in store.records("attack"):
        cell = record["cell"]
        if cell["method"] != PLAIN or "ensemble" not in record["evaluations"]:
            continue
        key = (cell["model"], cell["dataset"], cell["seed"])
        value = look_up(record["evaluations"]["ensemble"]["metrics"], "sharpness.clean.layers")
        if value is not None and (cell["label"] or key not in found):
            found[key] = value
    return found
