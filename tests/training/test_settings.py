"""Settings: single ones win over `config`, `config` over the preset; unknown ones are refused."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fgai.attacks import Budget
from fgai.attention import limits_of, prepared
from fgai.errors import InputError
from fgai.models import GAT, GT
from fgai.training import (
    METHODS,
    Adversarial,
    FaithfulConfig,
    Recipe,
    TrainConfig,
    Vanilla,
    adversarial,
    attempts,
    history_of,
    make_faithful,
    preset,
    setting_names,
    train,
    train_method,
    untrained,
)
from fgai.training.settings import _preset_named
from support.graph_cases import small_data

GRAPH = small_data()
PHOTO = GRAPH.replace(name="amazon-photo")
SIZES: dict[str, Any] = {"hidden_channels": 2, "heads": 2}
Plan = Callable[..., tuple[nn.Module, Any, TrainConfig]]


def fresh() -> nn.Module:
    return untrained("GAT", GRAPH, **SIZES)


class PlannedError(Exception):
    """Raised instead of training: what would have been trained, and how."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a function that calls a training and says which model, recipe and config it came to."""

    def stop(model: nn.Module, recipe: Recipe, config: TrainConfig, **_: Any) -> None:
        raise PlannedError(model, recipe, config)

    monkeypatch.setattr(sys.modules["fgai.training.train"], "fit", stop)
    monkeypatch.setattr(attempts, "fit", stop)
    monkeypatch.setattr(adversarial, "fit", stop)

    def ask(work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        with pytest.raises(PlannedError) as found:
            work(*arguments, **settings)
        return found.value.args

    return ask


class TestMerging:
    def test_single_settings_win_over_config(self) -> None:
        model = train(fresh(), GRAPH, config=TrainConfig(epochs=3, lr=0.5), epochs=2, progress=False)
        assert len(history_of(model).terms) == 2

    def test_what_config_says_stays(self, plan: Plan) -> None:
        given = TrainConfig(epochs=3, lr=0.5, patience=7)
        assert plan(train, fresh(), GRAPH, config=given, epochs=2)[2] == given.replace(epochs=2)

    def test_in_faithful_training(self, plan: Plan) -> None:
        given = FaithfulConfig(k2=3, nodes=2).replace(similarity=4.0, epochs=9, lr=0.5)
        _, recipe, config = plan(make_faithful, fresh(), GRAPH, given, epochs=2, nodes=3)
        assert (config.epochs, config.lr) == (2, 0.5)
        assert (recipe.config.k2, recipe.config.nodes, recipe.config.weights.similarity) == (3, 3, 4.0)
        whole = given.replace(train=TrainConfig(epochs=8), patience=5)
        assert whole.train == TrainConfig(epochs=8, patience=5)

    @pytest.mark.parametrize("given", [None, TrainConfig(epochs=2)])
    def test_unknown_ones_are_refused_and_the_nearest_is_named(self, given: TrainConfig | None) -> None:
        with pytest.raises(InputError, match=r"`settings` must be one of epochs, .* got 'nonsense'"):
            train(fresh(), GRAPH, config=given, epochs=1, nonsense=3)
        with pytest.raises(InputError, match="got 'epoch'; did you mean 'epochs'"):
            train(fresh(), GRAPH, config=given, epoch=3)
        with pytest.raises(InputError, match="did you mean 'dropout'"):
            train("GAT", GRAPH, config=given, drop_out=0.3)

    def test_limits_alone_train_nothing(self) -> None:
        assert setting_names("limits", "GAT") == ["cut", "soften"]
        with pytest.raises(InputError, match="`settings` must be one of cut, soften"):
            train_method("limits", "GAT", GRAPH, settings={"epochs": 3})
        vanilla = train(fresh(), GRAPH, epochs=1)
        made = train_method("limits", "GAT", GRAPH, vanilla=vanilla, settings={"soften": 0.1})
        assert limits_of(made) and not limits_of(vanilla) and history_of(made) == history_of(vanilla)

    @pytest.mark.parametrize("method", [method for method in METHODS if method != "limits"])
    def test_methods_refuse_what_they_do_not_take(self, method: str) -> None:
        assert {"epochs", "lr"} <= set(setting_names(method, "GAT"))
        with pytest.raises(InputError, match="did you mean 'epochs'"):
            train_method(method, "GAT", GRAPH, settings={"epoch": 3})
        known = {"at": "nodes", "at-limits": "cut", "fgai": "similarity"}
        taken = known.get(method, "dropout")
        refused = {"at": "dropout", "at-limits": "dropout"}
        other = refused.get(method, "hidden_channels" if method.startswith("fgai") else "similarity")
        assert taken in setting_names(method, "GAT") and other not in setting_names(method, "GAT")


class TestPresets:
    def test_train_takes_that_of_the_data(self, plan: Plan) -> None:
        tuned = preset("vanilla", "GAT", "amazon-photo")
        model, recipe, config = plan(train, fresh(), PHOTO)
        assert isinstance(recipe, Vanilla)
        assert (config.lr, config.weight_decay) == (tuned["lr"], tuned["weight_decay"])
        assert model.config["dropout"] == 0.6 != tuned["dropout"], (
            "a model that exists keeps its architecture"
        )
        assert plan(train, fresh(), PHOTO, epochs=5)[2] == config.replace(epochs=5)

    def test_a_model_built_by_name_takes_the_rest_too(self, plan: Plan) -> None:
        tuned = preset("vanilla", "GAT", "amazon-photo")
        model, _, config = plan(train, "GAT", PHOTO, seed=3)
        assert isinstance(model, GAT) and model.config["dropout"] == tuned["dropout"] == 0.3
        assert config.weight_decay == tuned["weight_decay"]
        again = untrained("GAT", PHOTO, seed=3, dropout=0.3)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        assert plan(train, "GAT", PHOTO, dropout=0.1)[0].config["dropout"] == 0.1

    def test_none_takes_the_defaults(self, plan: Plan) -> None:
        model, _, config = plan(train, "GT", PHOTO, preset=None)
        assert isinstance(model, GT) and config == TrainConfig()
        assert model.config == untrained("GT", PHOTO).config
        assert plan(make_faithful, fresh(), PHOTO, preset=None)[1].config == FaithfulConfig()

    def test_another_dataset_by_name(self, plan: Plan) -> None:
        wanted = preset("fgai", "GAT", "coauthor-physics")
        recipe = plan(make_faithful, fresh(), PHOTO, preset="coauthor-physics")[1]
        assert recipe.config == FaithfulConfig().replace(**wanted)
        assert recipe.config != plan(make_faithful, fresh(), PHOTO, edges=5)[1].config
        with pytest.raises(InputError, match="did you mean 'coauthor-cs'"):
            make_faithful(fresh(), GRAPH, preset="coauthor-c")

    def test_a_model_nobody_tuned_has_the_general_one_alone(self) -> None:
        general = preset("vanilla", "Net", "amazon-photo")
        assert _preset_named("auto", "vanilla", "Net", "amazon-photo", "node") == general
        with pytest.raises(InputError, match="`preset` must be one of auto, got 'GAT'"):
            _preset_named("GAT", "vanilla", "Net", "amazon-photo", "node")

    def test_config_takes_the_place_of_the_training_half(self, plan: Plan) -> None:
        model, _, config = plan(train, "GAT", PHOTO, config=TrainConfig(lr=0.5))
        assert config == TrainConfig(lr=0.5) and model.config["dropout"] == 0.3

    def test_recipes_have_their_own(self, plan: Plan) -> None:
        model = fresh()
        recipe = Adversarial(prepared(model, PHOTO), Budget(nodes=2, edges=3, targets="fit"))
        # What is the recipe's own is given with it.
        known = {
            field.name for field in dataclasses.fields(TrainConfig)
        }  # the recipe's own are given with it
        wanted = {k: v for k, v in preset("at", "GAT", "amazon-photo").items() if k in known}
        assert plan(train, model, PHOTO, recipe=recipe)[2] == TrainConfig(**wanted)
