"""A cell run again beside its record: which numbers agree, and what cannot be repeated."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import Cell, Store, run_cell
from experiments.rerun import find, measured, rerun
from experiments.store import slim
from fgai.cli import app
from fgai.errors import DataError, InputError
from support import bench_cases as cases

CELL = cases.tiny(threats=("random",))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("results"))
    assert run_cell(CELL, made)["status"] == "done"
    return made


def changed(store: Store, folder: Path, by: float) -> Store:
    """The same record with another clean F1."""
    record = copy.deepcopy(store.read(CELL))
    assert record is not None
    record["evaluations"]["random"]["metrics"]["f1"]["clean"] += by
    other = Store(folder)
    other.write(CELL, record)
    return other


def test_numbers_that_agree_and_one_that_does_not(store: Store, tmp_path: Path) -> None:
    _, same = rerun(CELL, store)
    assert len(same) > 20 and all(number.agrees for number in same)
    assert not any("seconds" in number.path or ".layers." in number.path for number in same)
    _, other = rerun(CELL, changed(store, tmp_path, 0.3))
    assert [number.path for number in other if not number.agrees] == ["random.f1.clean"]
    assert store.path(CELL).exists() and store.pack() == 1
    assert all(number.agrees for number in rerun(CELL, store)[1]), "packed"


def test_every_kind_but_costs_measures_something() -> None:
    for kind in ("evaluate", "search", "certify", "inject", "collective", "vote", "alone", "explainers"):
        cell = Cell(kind=kind, method="limits" if kind in ("inject", "collective") else "vanilla")
        assert dict(measured(slim({"cell": cell.to_dict(), **cases.body_of(cell)}))), kind


def test_what_cannot_be_repeated(tmp_path: Path) -> None:
    made, cost = Store(tmp_path), cases.tiny(kind="cost")
    with pytest.raises(DataError, match="has no record of GAT-vanilla-s0"):
        rerun(CELL, made)
    made.write(CELL, {**cases.body_of(CELL), "earlier": True})
    with pytest.raises(DataError, match=r"settings from before .* cannot repeat it"):
        rerun(CELL, made)
    made.write(cost, cases.body_of(cost))
    with pytest.raises(InputError, match="'cost' has only times"):
        rerun(cost, made)


def test_cells_are_found_by_key_and_by_the_name_of_their_record() -> None:
    cell = find("5c6a81cc3bd8")
    assert (cell.dataset, cell.method) == ("planted", "vanilla")
    assert find(cell.path.stem) == find(cell.path.name) == cell
    with pytest.raises(InputError, match="no grid has a cell 'GAT-x-s0-5c6a'"):
        find("GAT-x-s0-5c6a")


def test_the_command_fails_where_numbers_differ(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.command.find", lambda _: CELL)
    for folder, code, words in (
        (store.root, 0, "agree within 0.02"),
        (changed(store, tmp_path, 0.3).root, 1, "differs"),
    ):
        done = CliRunner().invoke(app, ["bench", "again", CELL.key, "--results", str(folder)])
        assert done.exit_code == code and words in done.stdout, done.stderr
