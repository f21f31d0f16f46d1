"""Faithful training in mini-batches: cells that ask for it, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import Store, read_grid, run_cell, trained
from experiments.batch_tables import WHOLE
from experiments.cells import Cell
from experiments.tables import TABLES
from fgai.records import Table
from fgai.training import train_method
from support import bench_cases as cases

BATCHES = "fgai, batches"
SIZES = {"batch_size": 600, "fan_out": [3, 2]}


def test_sizes_of_a_cell_reach_the_training_and_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def noted(method: str, *args: Any, **options: Any) -> Any:
        asked.append({"method": method, **options})
        return train_method(method, *args, **{**options, "settings": {**options["settings"], "epochs": 1}})

    monkeypatch.setattr(trained, "train_method", noted)
    cell = cases.tiny(method="fgai", kind="attack", label=BATCHES, settings={"epochs": 1, **SIZES})
    record = run_cell(cell, Store(tmp_path / "records"))
    assert record["status"] == "done", record.get("trace")
    parent, own = asked
    assert parent["method"] == "vanilla" and "batch_size" not in parent
    assert {name: own[name] for name in SIZES} == SIZES
    assert own["settings"]["epochs"] == 1 and not SIZES.keys() & own["settings"].keys()
    assert record["training"]["settings"].items() >= SIZES.items()
    whole = cases.tiny(method="fgai", kind="attack")
    assert trained.model_path(tmp_path, cell) != trained.model_path(tmp_path, whole)


def record_of(cell: Cell, clean: float, random: float, chosen: float) -> dict[str, Any]:
    """A record with F1 at random endpoints and at chosen ones."""
    scores = {"clean": clean, "attacked_random": random, "attacked_chosen": chosen}
    return {**cases.body_of(cell), "evaluations": {"ensemble": {"metrics": {"f1": scores}}}}


def test_the_table_says_what_batches_cost(tmp_path: Path) -> None:
    scores = {"vanilla": (0.93, 0.5, 0.4), WHOLE: (0.92, 0.9, 0.85), BATCHES: (0.925, 0.88, 0.86)}
    scores["fgai, larger batches"] = (0.92, 0.895, 0.845)
    store = Store(tmp_path)
    for cell in read_grid("batches"):
        if cell.dataset != "arxiv-tape":
            store.write(cell, record_of(cell, *scores[cell.row]))
    (found,) = TABLES["batches"](store)
    assert isinstance(found, Table)
    rows = {tuple(row[:2]): list(row[2:]) for row in found.rows}
    assert [row[0] for row in found.rows] == ["amazon-photo"] * 4 + ["coauthor-physics"] * 3
    assert rows["amazon-photo", "vanilla"] == [0.93, 0.5, pytest.approx(0.4), *[None] * 4]
    batches = rows["coauthor-physics", "FGAI, batches"]
    assert batches[3:] == ["+0.005", "-0.020", "+0.010", "no"]
    assert "5 of 12 cells are missing." in found.notes
    for cell in read_grid("batches"):
        if cell.row == BATCHES and cell.dataset == "amazon-photo":
            store.write(cell, record_of(cell, 0.92, 0.891, 0.85))
    (found,) = TABLES["batches"](store)
    assert isinstance(found, Table)
    assert [row[-1] for row in found.rows] == [None, None, "yes", "yes", None, None, "no"]
