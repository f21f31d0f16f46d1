"""Models by name: a class registered from outside is trained, saved, loaded, defended, found by commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from fgai.cli.options import Training
from fgai.cli.train import _settings
from fgai.errors import CheckpointError, InputError
from fgai.models import GAT, MODELS, register_model
from fgai.training import train_method, untrained_model
from support import attack_cases as cases


class Narrow(GAT):
    """A network of somebody else's."""

    @classmethod
    def sizes(cls, graph: Any, task: str) -> dict[str, Any]:
        return {**super().sizes(graph, task), "hidden_channels": 3, "heads": 2}


@pytest.fixture
def narrow() -> Iterator[str]:
    register_model(Narrow)
    yield "Narrow"
    del MODELS["Narrow"]


def test_fgais_own_are_there() -> None:
    assert {"GAT", "GATv2", "GT", "GCN"} <= set(MODELS)
    assert all(kind.__name__ == name for name, kind in MODELS.items())


def test_built_trained_saved_and_loaded_by_name(narrow: str, tmp_path: Path) -> None:
    graph = cases.tiny_graph()
    fresh = untrained_model(narrow, graph, seed=3)
    assert type(fresh) is Narrow and fresh.config["hidden_channels"] == 3
    trained = train_method("vanilla", narrow, graph, settings={"epochs": 3}, progress=False)
    back = fgai.load_model(fgai.save_model(trained, tmp_path / "narrow"))
    assert type(back) is Narrow
    torch.testing.assert_close(back(graph), trained(graph))


def test_commands_know_its_arguments(narrow: str) -> None:
    assert _settings(Training(set_=["hidden_channels=5"]), "GAT", "vanilla") == {"hidden_channels": 5}
    assert _settings(Training(set_=["epochs=2"]), narrow, "vanilla") == {"epochs": 2}


def test_unregistered_classes_are_not_saved(tmp_path: Path) -> None:
    graph = cases.tiny_graph()
    with pytest.raises(CheckpointError, match="register_model"):
        fgai.save_model(Narrow.for_data(graph), tmp_path / "narrow")
    with pytest.raises(InputError, match="Narrow"):
        untrained_model("Narrow", graph)


def test_a_name_belongs_to_one_class() -> None:
    other = type("GAT", (Narrow,), {"__module__": "elsewhere"})
    with pytest.raises(InputError, match="already"):
        register_model(other)
    assert MODELS["GAT"] is GAT
    assert register_model(GAT) is GAT  # once more is no other


@pytest.mark.parametrize("wrong", [torch.nn.Linear, "GAT", None])
def test_only_models_are_registered(wrong: Any) -> None:
    with pytest.raises(InputError, match="AttentionModel"):
        register_model(wrong)
