"""The grids' threats: the library's, in the box of the stored records."""

from __future__ import annotations

import pytest

from experiments.cells import Cell
from experiments.methods import setting_names
from experiments.threats import BOX, FROM_DATA, grid_threat
from experiments.trained import settings_of, trained
from fgai.attacks import THREATS, make_attack
from fgai.errors import InputError
from support.graph_cases import small_data


@pytest.mark.parametrize("name", list(THREATS))
def test_the_grids_pin_the_box(name: str) -> None:
    for task in ("node", "graph"):
        ours, theirs = (make_attack(threat, task=task).budget for threat in (grid_threat(name), name))
        assert ours.box == (None if name in FROM_DATA else BOX) and theirs.box is None
        assert {**ours.to_dict(), "box": None} == theirs.to_dict()
    assert grid_threat(name).name == name


def test_unknown_threats_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'standard'"):
        grid_threat("standrad")


@pytest.mark.parametrize("method", ["at", "at-limits", "fgai", "fgai-injection", "limits", "vanilla"])
def test_trainings_of_the_grids_have_it_too(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    monkeypatch.setattr("experiments.trained.train_method", lambda *args, **options: told.update(options))
    cell = Cell(dataset="planted", method=method)
    trained(cell, small_data(), None, "cpu", None)
    adversary = "box" in setting_names(method, "GAT")
    assert told["settings"].get("box") == (BOX if adversary else None)
    if adversary:
        values = settings_of(cell)
        assert {**values["defaults"], **values["settings"]}["box"] == list(BOX)
    cell = Cell(dataset="planted", method="fgai", settings={"box": (0.0, 1.0)})
    trained(cell, small_data(), None, "cpu", None)
    assert told["settings"]["box"] == (0.0, 1.0)
