"""Defences in the bench: the table, the cost beside the paper's, a cell that really runs."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from experiments import Store, read_grid
from experiments.defences import DEFENCES
from experiments.memory import PeakMemory
from experiments.results import Results
from experiments.run import run_cell
from experiments.tables import render
from experiments.trained import settings_of
from support import bench_cases as cases


def rows_of(name: str, store: Store) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(name, store, "csv"))))


def test_table_has_every_method_and_threat(tmp_path: Path) -> None:
    store = cases.fill(Store(tmp_path), read_grid("defences"))
    rows = rows_of("defences", store)
    names = [row["method"] for row in rows if row["model"] == "GAT"]
    assert names == ["vanilla", "LN", "AT", "FGAI", "GNNGuard", "GNN-SVD", "Pro-GNN"]
    assert [r["method"] for r in rows if r["model"] == "GCN"] == ["vanilla", "GNNGuard", "GNN-SVD", "Pro-GNN"]
    fgai = next(row for row in rows if row["method"] == "FGAI")
    values = {name.split(" (")[0]: value for name, value in fgai.items()}
    assert float(values["F1 standard"]) == pytest.approx(0.9)
    assert float(values["F1 strong"]) == pytest.approx(0.7)
    assert float(values["F1 adaptive"]) == pytest.approx(0.9)
    assert float(values["F1 ensemble"]) == pytest.approx(0.9)
    assert float(values["attacks s"]) == pytest.approx(4.0) and values["device"] == "cpu"


def test_defences_stay_out_of_the_papers_tables(tmp_path: Path) -> None:
    store = cases.fill(Store(tmp_path), read_grid("defences"))
    plain = Results.read(store)
    assert plain.models() == ["GAT"]
    assert plain.rows("GAT", "amazon-photo") == ["vanilla", "ln", "at", "fgai"]
    assert "GCN" in Results.read(store, defences=True).models()


def test_cost_stands_beside_the_papers(tmp_path: Path) -> None:
    store = cases.fill(Store(tmp_path), read_grid("cost"))
    rows = {(row["dataset"], row["method"]): row for row in rows_of("cost", store) if row["model"] == "GAT"}
    for dataset in ("amazon-photo", "coauthor-physics", "arxiv-tape"):
        names = [method for where, method in rows if where == dataset]
        assert names == ["vanilla", "LN", "AT", "FGAI", "Pro-GNN", "GNN-SVD", "GNNGuard"]
    paper = {key: row["paper s"] for key, row in rows.items()}
    assert float(paper["amazon-photo", "GNNGuard"]) == 1500
    assert float(paper["arxiv-tape", "FGAI"]) == 1200
    assert paper["arxiv-tape", "Pro-GNN"] == ""


@pytest.mark.parametrize("method", DEFENCES)
def test_cells_of_defences_run(method: str, tmp_path: Path) -> None:
    cell = cases.tiny(method=method, model="GCN", settings={"epochs": 2, "hidden_channels": 5})
    record = run_cell(cell, Store(tmp_path), cache=tmp_path / "cache")
    assert record["status"] == "done", record.get("error")
    own = DEFENCES[method].defaults()
    assert own.items() <= record["training"]["defaults"].items()
    assert settings_of(cell)["parent"] == {}
    assert record["training"]["peak_memory"] >= record["training"]["base_memory"]


def test_peak_memory_sees_what_was_held() -> None:
    with PeakMemory("cpu") as memory:
        block = bytearray(64_000_000)
        for start in range(0, len(block), 4096):
            block[start] = 1
        memory._done.wait(0.1)
    if memory.base is not None and memory.peak is not None:
        assert memory.peak - memory.base > 30_000_000
