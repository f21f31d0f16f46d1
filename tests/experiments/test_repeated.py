"""Cells that were run twice: what the table says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import Cell, Store, read_grid, sample
from experiments.repeated import REPEATED, differences, numbers, repeated
from fgai.errors import InputError
from fgai.records import Table
from support import bench_cases as cases


def attacked(seed: int, *threats: str) -> Cell:
    """A cell of the node grid."""
    return Cell(kind="attack", model="GAT", dataset="amazon-photo", method="fgai", seed=seed, threats=threats)


def shifted(body: dict[str, Any], by: float) -> dict[str, Any]:
    """The record with other attacked scores, and the same clean ones."""
    for evaluation in body["evaluations"].values():
        evaluation["metrics"]["f1"]["attacked"] += by
    return body


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two seeds of one model under two threats, a trial, and all of the first seed once more."""
    store, again = Store(tmp_path), Store(tmp_path / REPEATED)
    for seed in (0, 1):
        cell = attacked(seed, "ensemble", "values")
        store.write(cell, cases.body_of(cell))
        if seed == 0:
            again.write(cell, shifted(cases.body_of(cell), -0.004))
    trial = Cell(kind="search", method="fgai", dataset="cora", settings={"lr": 0.1})
    for folder in (store, again):
        folder.write(trial, cases.body_of(trial))
    return store


def test_differences_are_of_the_same_cell_and_threat(store: Store) -> None:
    found = list(differences(store, Store(store.root / REPEATED)))
    hit = [one for one in found if one.cell.kind == "attack" and one.name == "attacked score"]
    assert len(hit) == 2 and all(one.size == pytest.approx(0.004) for one in hit)
    assert all(one.spread == pytest.approx(0.01 / 2**0.5) for one in hit), "seeds are 0.01 apart"
    assert all(one.size == 0 for one in found if one.name == "clean score")
    (trial,) = (one for one in found if one.cell.kind == "search" and one.name == "attacked score")
    assert trial.spread is None, "one seed has no spread"
    Store(store.root / REPEATED).pack()
    again = list(differences(store, Store(store.root / REPEATED)))
    assert [one.size for one in again] == pytest.approx([one.size for one in found], abs=1e-8)


def test_the_table_has_a_row_for_each_number_of_a_kind(store: Store) -> None:
    (table,) = repeated(store)
    assert isinstance(table, Table)
    rows = {(row[0], row[1]): list(row[2:]) for row in table.rows}
    cells, compared, equal, mean, size, largest, where, _ = rows["attack", "attacked score"]
    assert (cells, compared, equal) == (1, 2, 0)
    assert mean == pytest.approx(-0.004) and size == largest == pytest.approx(0.004)
    assert where == "fgai, GAT on amazon-photo"
    assert rows["search", "clean score"][:3] == [1, 1, 1]
    assert {name for kind, name in rows if kind == "attack"} > {"as vanilla", "top 5 kept"}


def test_cells_of_the_same_code_are_told_from_others(store: Store) -> None:
    """Beside the two of the fixture, of which one moved."""
    again, old, unnamed = Store(store.root / REPEATED), ("old", "GPU"), (None, "GPU")
    both = [
        (old, ("new", "GPU"), 0.0),
        (old, ("old", "CPU"), 0.1),
        (old, old, 0.0),
        (old, old, 0.1),
        (unnamed, unnamed, 0.0),
    ]
    for seed, (first, second, by) in enumerate(both, 2):
        cell = attacked(seed, "ensemble")
        for folder, (code, device), shift in ((store, first, 0.0), (again, second, by)):
            body = shifted(cases.body_of(cell), shift)
            body["fingerprint"], body["about"] = {"code": code}, {"device": device}
            folder.write(cell, body)
    alike = {one.cell.seed: one.alike for one in differences(store, again)}
    assert [alike[seed] for seed in range(2, 7)] == [False, False, True, True, False]
    (table,) = repeated(store)
    assert isinstance(table, Table)
    assert "2 of 3 cells where code" in table.notes[1] and "2 of the 4 others" in table.notes[1]


def test_a_cell_without_a_first_record_is_passed_over(store: Store) -> None:
    cell = attacked(3, "ensemble")
    Store(store.root / REPEATED).write(cell, cases.body_of(cell))
    assert all(one.cell.seed == 0 for one in differences(store, Store(store.root / REPEATED)))


def test_without_a_second_folder(tmp_path: Path) -> None:
    (table,) = repeated(Store(tmp_path))
    assert isinstance(table, Table) and not table.rows and table.notes == ("No cell was run twice.",)
    assert numbers({"status": "done"}) == {}


def test_a_sample_is_always_the_same_draw_in_their_order() -> None:
    cells = read_grid("node")
    drawn = sample(cells, 30)
    assert drawn == sample(cells, 30) and len({cell.key for cell in drawn}) == 30
    assert drawn == [cell for cell in cells if cell in drawn] != cells[:30]
    assert sample(cells[:3], 9) == cells[:3]
    with pytest.raises(InputError, match="`sample` must be 1 or more"):
        sample(cells, 0)
