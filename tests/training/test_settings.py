"""Settings: single ones win over `config`, that over the defaults; unknown ones are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fgai.attention import limits_of
from fgai.errors import InputError
from fgai.models import GAT, GT
from fgai.training import (
    METHODS,
    FaithfulSettings,
    HardenSettings,
    Recipe,
    TrainConfig,
    VanillaRecipe,
    fine_tuning,
    harden,
    history_of,
    make_faithful,
    setting_names,
    train,
    train_method,
    untrained_model,
)
from support.graph_cases import small_data
from support.task_cases import data
from support.task_cases import untrained as task_model

GRAPH = small_data()
PHOTO = GRAPH.replace(name="amazon-photo")
SIZES: dict[str, Any] = {"hidden_channels": 2, "heads": 2}
Plan = Callable[..., tuple[nn.Module, Any, TrainConfig]]


def fresh() -> nn.Module:
    return untrained_model("GAT", GRAPH, **SIZES)


class PlannedError(Exception):
    """Raised instead of training: what would have been trained, and how."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a function that calls a training and says which model, recipe and config it came to."""

    def stop(model: nn.Module, recipe: Recipe, config: TrainConfig, **_: Any) -> None:
        raise PlannedError(model, recipe, config)

    monkeypatch.setattr(sys.modules["fgai.training.methods"], "fit", stop)
    monkeypatch.setattr(fine_tuning, "fit", stop)

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
        given = FaithfulSettings(k=3, nodes=2, similarity=4.0, epochs=9, lr=0.5)
        _, recipe, config = plan(make_faithful, fresh(), GRAPH, given, epochs=2, nodes=3)
        assert (config.epochs, config.lr) == (2, 0.5)
        assert recipe.settings == given.replace(epochs=2, nodes=3)

    @pytest.mark.parametrize("given", [None, TrainConfig(epochs=2)])
    def test_unknown_ones_are_refused_and_the_nearest_is_named(self, given: TrainConfig | None) -> None:
        with pytest.raises(InputError, match=r"`settings` must be one of epochs, .* got 'nonsense'"):
            train(fresh(), GRAPH, config=given, epochs=1, nonsense=3)
        with pytest.raises(InputError, match="got 'epoch'; did you mean 'epochs'"):
            train(fresh(), GRAPH, config=given, epoch=3)
        with pytest.raises(InputError, match="did you mean 'dropout'"):
            train("GAT", GRAPH, config=given, drop_out=0.3)

    def test_limits_alone_train_nothing(self) -> None:
        assert setting_names("limits", "GAT") == ["clip_share", "shrink"]
        with pytest.raises(InputError, match="`settings` must be one of clip_share, shrink"):
            train_method("limits", "GAT", GRAPH, settings={"epochs": 3})
        vanilla = train(fresh(), GRAPH, epochs=1)
        made = train_method("limits", "GAT", GRAPH, vanilla=vanilla, settings={"shrink": 0.1})
        assert limits_of(made) and not limits_of(vanilla) and history_of(made) == history_of(vanilla)

    def test_limits_take_a_model_without_history(self) -> None:
        assert not hasattr(train_method("limits", "GAT", GRAPH, vanilla=fresh().eval()), "history")

    def test_layer_norm_is_no_setting_of_ln(self) -> None:
        with pytest.raises(InputError, match=r"`settings` must be one of .* got 'norm'"):
            train_method("ln", "GAT", GRAPH, settings={"norm": "layer"})
        assert "norm" in setting_names("vanilla", "GAT")

    def test_an_unknown_method_has_no_settings(self) -> None:
        with pytest.raises(InputError, match=r"`method` must be one of .* did you mean 'harden'"):
            setting_names("hardn", "GAT")

    @pytest.mark.parametrize("method", [method for method in METHODS if method != "limits"])
    def test_methods_refuse_what_they_do_not_take(self, method: str) -> None:
        assert {"epochs", "lr"} <= set(setting_names(method, "GAT"))
        with pytest.raises(InputError, match="did you mean 'epochs'"):
            train_method(method, "GAT", GRAPH, settings={"epoch": 3})
        known = {"at": "nodes", "harden": "clip_share", "fgai": "similarity", "fgai-certified": "similarity"}
        taken = known.get(method, "dropout")
        refused = {"at": "clip_share", "harden": "dropout"}
        other = refused.get(method, "hidden_channels" if method.startswith("fgai") else "similarity")
        assert taken in setting_names(method, "GAT") and other not in setting_names(method, "GAT")


class TestDefaults:
    """Every graph has the same; a model and a task may have their own."""

    def test_of_a_vanilla_model(self, plan: Plan) -> None:
        model, recipe, config = plan(train, "GAT", PHOTO, seed=3)
        assert isinstance(recipe, VanillaRecipe) and config == TrainConfig() and isinstance(model, GAT)
        again = untrained_model("GAT", PHOTO, seed=3)
        for one, two in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, two)
        assert plan(train, "GAT", PHOTO, dropout=0.1)[0].config["dropout"] == 0.1

    def test_of_faithful_and_adversarial_training(self, plan: Plan) -> None:
        model = fresh()
        recipe = plan(make_faithful, model, PHOTO)[1]
        assert recipe.settings == FaithfulSettings(lr=0.005)
        assert plan(harden, model, PHOTO)[1].settings == HardenSettings(lr=0.005)
        config = recipe.settings.train_config
        assert (config.patience, config.validate_every, config.decay, config.weight_decay) == (
            200,
            20,
            1.0,
            0.0,
        )
        assert HardenSettings().train_config.weight_decay == 5e-4

    def test_gt_has_its_own_learning_rate(self, plan: Plan) -> None:
        model = untrained_model("GT", GRAPH, hidden_channels=4, heads=(2, 1))
        assert isinstance(model, GT)
        assert plan(train, model, GRAPH)[2].lr == 0.001
        assert plan(make_faithful, model, GRAPH)[2].lr == plan(harden, model, GRAPH)[2].lr == 0.001
        assert plan(make_faithful, model, GRAPH, lr=0.3)[2].lr == 0.3

    def test_small_graphs_have_few_nodes(self, plan: Plan) -> None:
        graphs, model = data("graph"), task_model("graph")
        settings = plan(make_faithful, model, graphs)[1].settings
        assert (settings.nodes, settings.edges, settings.k) == (1, 3, 2)
        assert plan(make_faithful, model, graphs, nodes=2)[1].settings.nodes == 2
        given = FaithfulSettings(nodes=4, edges=2)
        assert plan(make_faithful, model, graphs, given)[1].settings.k == 5, "given settings stay as they are"

    def test_presets_are_gone(self) -> None:
        for verb in (train, make_faithful, harden):
            with pytest.raises(InputError, match=r"`settings` must be one of .* got 'preset'"):
                verb(fresh(), GRAPH, preset="auto")
