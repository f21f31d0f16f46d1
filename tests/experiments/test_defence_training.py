"""Defences through the common loop: by seed, resumed, saved, evaluated."""

# mypy: disable-error-code="arg-type, index, operator, no-any-return, union-attr"

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.defences import DEFENCES, ProGNN, Regularised
from experiments.methods import preset, settings_for, train_method
from fgai.attacks import Budget, PGDInjection, Threat
from fgai.attention import prepared
from fgai.errors import InputError, ReliabilityWarning
from fgai.evaluation import evaluate
from fgai.training import TrainConfig, fit, load_model, save_model
from support.graph_cases import small_data
from support.training_cases import Calling

GRAPH = small_data()
SHORT: dict[str, Any] = {"epochs": 4, "hidden_channels": 3}
OTHERS = {"soft-median": ("temperature", 0.2), "rung": ("gamma", 2.0)}


def trained(method: str, model: str = "GCN", seed: int = 0, **changes: Any) -> nn.Module:
    return train_method(method, model, GRAPH, seed=seed, progress=False, settings={**SHORT, **changes})


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("method", DEFENCES)
class TestMethod:
    def test_same_seed_same_weights_and_saved_is_equal(self, method: str, tmp_path: Path) -> None:
        one, two, other = (trained(method, seed=seed) for seed in (3, 3, 4))
        assert_same_weights(one, two)
        assert not torch.equal(one(GRAPH), other(GRAPH))
        kind = DEFENCES[method]
        saved = save_model(one, tmp_path / "model", factory=kind, arguments=one.config)
        back = load_model(saved, factory=kind)
        assert type(back) is DEFENCES[method] and back.config == json.loads(json.dumps(one.config))
        assert torch.equal(back(GRAPH), one(GRAPH))

    def test_learns(self, method: str) -> None:
        model = trained(method, epochs=40, lr=0.05, hidden_channels=8, dropout=0.0)
        assert GRAPH.y is not None and GRAPH.test_mask is not None
        right = (model(GRAPH).argmax(1) == GRAPH.y)[GRAPH.test_mask].float().mean()
        assert right > 0.6
        terms = model.history.terms
        assert terms[-1]["cross_entropy"] < terms[0]["cross_entropy"]

    @pytest.mark.many
    def test_every_metric_is_measured(self, method: str) -> None:
        model = trained(method, "GAT", heads=2) if method not in OTHERS else trained(method)
        threat = Threat("few", PGDInjection, Budget(nodes=2, edges=3, steps=2, step_size=0.3), "a test")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReliabilityWarning)
            record = evaluate(model, GRAPH, threat, k=2)
        paths = ("f1.clean", "f1.attacked", "g_tvd.rel", "g_jsd.last", "overlap.explanation.all")
        for name in paths if method != "rung" else paths[:3]:
            assert math.isfinite(float(record.value(name)))

    def test_settings_of_its_own(self, method: str) -> None:
        name, value = {"gnnguard": ("threshold", 0.2), **OTHERS}.get(method, ("rank", 7))
        assert trained(method, epochs=2, **{name: value}).config[name] == value
        with pytest.raises(InputError, match="`settings` must be one of"):
            trained(method, ranks=7)

    def test_takes_the_vanilla_models_preset(self, method: str) -> None:
        chosen = settings_for(method, "GAT", "coauthor-cs")
        assert preset("vanilla", "GAT", "coauthor-cs").items() <= chosen.items()


@pytest.mark.parametrize("after", [0, 2, 3])
def test_killed_training_resumes_to_the_same_weights(after: int, tmp_path: Path) -> None:
    config = TrainConfig(epochs=5, validate_every=2, lr=0.02)

    def made() -> tuple[ProGNN, Regularised]:
        torch.manual_seed(0)
        model = ProGNN.for_data(GRAPH, base="GCN", hidden_channels=3, rank=4)
        return model, Regularised(prepared(model, GRAPH))

    whole, recipe = made()
    fit(whole, recipe, config, seed=2, progress=False)

    class KilledError(Exception):
        pass

    def kill(epoch: int, terms: dict[str, float]) -> None:
        if epoch == after:
            raise KilledError

    options: dict[str, Any] = {"seed": 2, "progress": False, "checkpoint": tmp_path, "checkpoint_every": 2}
    model, recipe = made()
    with pytest.raises(KilledError):
        fit(model, recipe, config, tracker=Calling(kill), **options)
    model, recipe = made()
    fit(model, recipe, config, **options)
    assert_same_weights(model, whole)


def test_structure_learning_moves_the_corrections() -> None:
    model = trained("pro-gnn", epochs=10, rank=4)
    assert isinstance(model, ProGNN)
    assert float(model.correction.detach().abs().max()) > 0
    assert set(model.history.terms[0]) >= {"cross_entropy", "fidelity", "sparsity", "smoothness", "low_rank"}
