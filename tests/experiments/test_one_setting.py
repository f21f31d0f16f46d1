"""Tables of the methods with one setting: Definition 1, and each part of the training removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.cells import Cell, read_grid
from experiments.one_setting import definition, pairs, terms, whole_calls
from experiments.store import Store
from fgai.certificates import ALL_FOUR, PROPERTIES
from fgai.records import Table
from support import bench_cases as cases


def proof(shares: tuple[float | None, float], top: float) -> dict[str, Any]:
    """A record of `certify` in which everything holds at the same share of the nodes, by layer."""
    held: dict[str, list[Any]] = {name: list(shares) for name in (*PROPERTIES, ALL_FOUR)}
    layers = [{"topk": {"share": top}}] * 2
    return {"certificate": {"layers": layers}, "definition": {"r001": held, "r01": held}}


def filled(tmp_path: Path, values: dict[str, dict[str, Any]]) -> Store:
    store = Store(tmp_path)
    for cell in read_grid("definition"):
        if (cell.model, cell.dataset) == ("GAT", "amazon-photo") and cell.row in values:
            store.write(cell, {**cases.body_of(cell), **values[cell.row]})
    return store


def test_definition_compares_with_vanilla_pair_by_pair(tmp_path: Path) -> None:
    values = {"vanilla": proof((0.5, 0.4), 0.1), "fgai, one setting": proof((0.4, 0.6), 0.2)}
    table = definition(filled(tmp_path, values))[0]
    assert isinstance(table, Table)
    assert [row[:3] for row in table.rows] == [
        ["GAT", "amazon-photo", "vanilla"],
        ["GAT", "amazon-photo", "FGAI, one setting"],
    ]
    assert list(table.rows[1][7:10]) == pytest.approx([0.6, 0.2, 0.4])


def test_what_is_unknown_is_not_zero(tmp_path: Path) -> None:
    values = {"vanilla": proof((None, 0.4), 0.1), "fgai, one setting": proof((None, 0.3), 0.1)}
    table = definition(filled(tmp_path, values))[0]
    assert isinstance(table, Table)
    assert [row[9] for row in table.rows] == ["unknown", "unknown"]


def test_terms_are_paired_by_seed(tmp_path: Path) -> None:
    def body(cell: Cell) -> dict[str, Any]:
        made: dict[str, Any] = cases.body_of(cell)
        whole = cell.row == "fgai, one setting"
        metrics = made["evaluations"]["ensemble"]["metrics"]
        metrics["f1"]["attacked"] = 0.8 + 0.01 * cell.seed - (0.0 if whole else 0.1 + 0.001 * cell.seed)
        return made

    store = Store(tmp_path)
    for cell in read_grid("terms"):
        if cell.dataset == "cora" and cell.row in ("fgai, one setting", "fgai(no similarity)"):
            store.write(cell, body(cell))
    (table,) = terms(store)
    assert isinstance(table, Table)
    rows = {row[2]: row for row in table.rows if row[1] == "cora"}
    assert rows["FGAI, one setting"][4] == "0.820"
    change = str(rows["FGAI(no similarity)"][4])
    assert change.startswith("**-0.102 [") and rows["FGAI(no margin)"][4] is None


def test_cost_is_a_multiple_of_training(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for cell in read_grid("whole"):
        if cell.dataset == "cora" and cell.method in ("vanilla", "fgai"):
            seconds = {"vanilla": 2.0, "fgai": 7.0}[cell.method]
            store.write(cell, {**cases.body_of(cell), "whole_seconds": seconds})
    (table,) = whole_calls(store)
    assert isinstance(table, Table)
    assert ["cora", "FGAI", 7.0, 3.5] in [list(row) for row in table.rows]
    assert ["cora", "harden", None, None] in [list(row) for row in table.rows]


def test_pairs_show_what_methods_averages(tmp_path: Path) -> None:
    cells = [cell for grid in ("methods", "endpoints", "node") for cell in read_grid(grid)]
    some = [cell for cell in cells if (cell.model, cell.dataset) == ("GAT", "amazon-cs") and cell.seed < 2]
    (table,) = pairs(cases.fill(Store(tmp_path), some))
    assert isinstance(table, Table)
    found = {row[2]: row[3:6] for row in table.rows}
    assert list(found) == ["vanilla", "limits, one setting", "AT", "harden", "FGAI, one setting"]
    assert found["FGAI, one setting"] == pytest.approx([0.92, 0.905, 0.875])
    assert found["vanilla"] == pytest.approx([0.92, 0.405, 0.375])
    assert {tuple(row[:2]) for row in table.rows} == {("GAT", "amazon-cs")}
