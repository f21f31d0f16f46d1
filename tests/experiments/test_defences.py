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
from experiments.tables import TABLES, render
from experiments.trained import settings_of
from fgai.records import Table
from support import bench_cases as cases


def rows_of(name: str, store: Store) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(name, store, "csv"))))


def test_rivals_stand_side_by_side(tmp_path: Path) -> None:
    cells = [cell for name in ("defences", "baselines", "alone") for cell in read_grid(name)]
    some = [cell for cell in cells if (cell.dataset, cell.seed) != ("amazon-cs", 1)]
    (table,) = TABLES["baselines"](cases.fill(Store(tmp_path), some))
    assert isinstance(table, Table)
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert list(rows) == [
        *("vanilla", "limits, one setting", "AT", "harden", "FGAI, one setting"),
        *("GCN", "GCN + SVD", "Soft-Median", "RUNG", "GCN + GNNGuard ‡", "GCN + Pro-GNN ‡"),
        *("GAT + GNNGuard ‡", "GAT + Pro-GNN ‡", "GAT + GNN-SVD ‡", "without edges"),
    ]
    both, one = "0.920 → 0.505", "0.920 → 0.500"
    assert rows["GCN + SVD"] == [both, one, both, both, "0.920 → 0.504", "1 or 2"] and rows["RUNG"][-1] == "1"
    assert rows["without edges"] == [*["0.800 → 0.800"] * 5, "4 or 5"]
    assert rows["GCN + Pro-GNN ‡"] == [one, None, None, None, None, "1"] and rows["harden"] == [None] * 6
    (note,) = table.notes
    assert "22 of 24 cells of the grid `baselines` are run" in note and "run for 0 of 4" in note


def test_where_edges_bring_little_attention_is_not_needed(tmp_path: Path) -> None:
    names, store = ("amazon-photo", "cora"), Store(tmp_path)
    for cell in (*read_grid("alone"), *read_grid("endpoints"), *read_grid("methods")):
        if cell.dataset in names and cell.method in ("", "vanilla") and cell.seed < 2:
            body = cases.body_of(cell)
            if cell.kind == "alone" and cell.dataset == "cora":
                body["alone"]["accuracy"] = 0.9
            store.write(cell, body)
    (table,) = TABLES["edges"](store)
    assert isinstance(table, Table)
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert rows["amazon-photo"] == [pytest.approx(0.8), pytest.approx(0.92), pytest.approx(0.12), "yes"]
    assert rows["cora"][-1] == "no" and rows["pubmed"] == [None] * 4


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
