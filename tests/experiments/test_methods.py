"""Methods that only the experiments have, by name: trained, named by the package, loaded from older files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fgai
from experiments import read_grid
from experiments.defences import DEFENCES
from experiments.methods import METHODS, VARIANTS, _presets, setting_names, settings_for, train_method
from fgai import training
from fgai.cli import app
from fgai.errors import CheckpointError, InputError
from fgai.training.methods import EXPERIMENTS
from support import task_cases as cases

OWN = (*VARIANTS, *DEFENCES)


@pytest.mark.many
@pytest.mark.parametrize(
    ("method", "settings", "terms"),
    [
        ("fgai-paper", {"steps": 3}, {"prediction_stability", "explanation_stability"}),
        ("fgai-injection", {"nodes": 5, "edges": 5}, {"explanation_stability", "prediction_stability"}),
    ],
)
def test_both_methods_of_the_paper_train_on_planted(
    method: str, settings: dict[str, Any], terms: set[str]
) -> None:
    data = fgai.load_dataset("planted")
    vanilla = fgai.train("GAT", data, epochs=15, progress=False)
    made = train_method(
        method, "GAT", data, vanilla=vanilla, progress=False, settings={"epochs": 12, **settings}
    )
    history = training.history_of(made)
    assert {"closeness", "similarity", *terms} <= set(history.terms[-1])
    assert len(history.terms) == 12 and all(math.isfinite(row["total"]) for row in history.terms)
    assert not torch.equal(made(data), vanilla(data))
    kept = (made(data).argmax(1) == vanilla(data).argmax(1)).float().mean()
    assert kept > 0.7
    assert not any(".limits." in name for name in made.state_dict())


@pytest.mark.parametrize("method", VARIANTS)
@pytest.mark.parametrize("task", ["link", "graph"])
def test_variants_train_on_every_task(task: str, method: str) -> None:
    small: dict[str, Any] = {"epochs": 2, "steps": 2} | ({"edges": 3} if method == "fgai-injection" else {})
    made = train_method(
        method, "GAT", cases.data(task), vanilla=cases.trained(task), settings=small, progress=False
    )
    assert made.task == task


@pytest.mark.parametrize("method", OWN)
def test_the_package_names_the_command_that_runs_them(method: str) -> None:
    grid = EXPERIMENTS[method]
    assert method not in training.METHODS and method in {cell.method for cell in read_grid(grid)}
    with pytest.raises(InputError, match=f"checkout of fgai with `fgai bench run {grid}`"):
        training.train_method(method, "GAT", fgai.load_dataset("planted"))
    result = CliRunner().invoke(app, ["train", "--method", method])
    assert result.exit_code == 2 and f"fgai bench run {grid}" in result.stderr


def test_the_packages_own_methods_are_passed_on() -> None:
    assert set(METHODS) == {*training.METHODS, "at-limits", *OWN}
    for method in training.METHODS:
        assert setting_names(method, "GAT") == training.setting_names(method, "GAT")
    with pytest.raises(InputError, match="`method` must be one of"):
        train_method("gnn-guard", "GAT", fgai.load_dataset("planted"))


def test_tables_lay_special_over_general() -> None:
    assert settings_for("at", "GAT", "amazon-photo") != settings_for("at", "GAT", "unknown")
    assert settings_for("at-limits", "GAT", "amazon-photo")["weight_decay"] == 0.005, "that of `at`"
    assert settings_for("vanilla", "GT", "unknown")["lr"] == 0.001
    for method in ("fgai", "limits", "harden"):  # one setting for every graph
        assert settings_for(method, "GAT", "amazon-photo") == {}


def test_every_table_has_settings_of_its_method() -> None:
    for task, tables in (("node", _presets()), ("link", _presets()["link"]), ("graph", _presets()["graph"])):
        for method, models in tables.items():
            if method in ("link", "graph", "fgai-features"):
                continue
            for model in ("GAT", "GATv2", "GT"):
                for dataset in ("", *models.get(model, {})):
                    assert {*settings_for(method, model, dataset, task)} <= {*setting_names(method, model)}


def test_tuned_hardening_is_a_method_of_the_tables() -> None:
    data = fgai.load_dataset("planted")
    vanilla = fgai.train("GAT", data, epochs=2, progress=False)
    small: dict[str, Any] = {"epochs": 2, "nodes": 3, "edges": 3}
    one = train_method("at-limits", "GAT", data, vanilla=vanilla, settings=small, progress=False)
    two = fgai.harden(vanilla, data, attack_weight=0.5, progress=False, **small)
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_defence_saved_by_its_class_name_is_loaded_by_its_factory(tmp_path: Path) -> None:
    """As `save_model` wrote defences when they were part of the package: no factory in the file."""
    data, kind = fgai.load_dataset("planted"), DEFENCES["gnnguard"]
    fgai.models.register_model(kind)
    try:
        path = fgai.save_model(kind.for_data(data, hidden_channels=3), tmp_path / "guard")
    finally:
        del fgai.models.MODELS["GNNGuard"]
    with pytest.raises(CheckpointError, match=r"holds a GNNGuard, expected .*factory"):
        fgai.load_model(path)
    assert type(fgai.load_model(path, factory="experiments.defences:GNNGuard")) is kind
