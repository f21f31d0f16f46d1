"""Adversarial training gets the second attempt that faithful training gets, judged by the same attack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fgai.attention import limits_of
from fgai.errors import DivergenceError, InputError, ReliabilityWarning
from fgai.graph import Graph
from fgai.models import GAT
from fgai.training import adversarial, fit, history_of, retry, settings_for, train_method
from fgai.training.adversarial import _HardenedConfig
from fgai.training.settings import ADVERSARY_FIELDS, FIRMER, FaithfulConfig
from support.graph_cases import small_data

GRAPH = small_data(nodes=60)
SETTINGS = {"epochs": 3, "nodes": 2, "edges": 3, "attack_weight": 0.4}


@pytest.fixture(scope="module")
def vanilla() -> GAT:
    torch.manual_seed(3)
    return GAT.for_data(GRAPH).eval()


class Trial:
    """Adversarial training whose shifts under attack are read from a script.

    Attributes:
        seen: models that were attacked, in order.
        configs: of the attempts, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vanilla: GAT) -> None:
        self.vanilla, self.seen, self.configs = vanilla, list[Any](), list[_HardenedConfig]()
        self.script = iter(list[float]())
        trained = adversarial._Hardened.trained

        def noted(attempts: Any, config: _HardenedConfig, *rest: Any) -> Any:
            self.configs.append(config)
            return trained(attempts, config, *rest)

        def measured(which: Any, _: Graph, seed: int, box: Any) -> float:
            del seed, box
            self.seen.append(which)
            return next(self.script)

        monkeypatch.setattr(adversarial, "MIN_EPOCHS", 3)
        monkeypatch.setattr(adversarial._Hardened, "trained", noted)
        for place in (retry,):
            monkeypatch.setattr(place, "_prediction_shift", measured)

    def run(self, *shifts: float, method: str = "at", **given: Any) -> Any:
        """Train; `shifts` are those of the vanilla model, then of every attempt."""
        self.script = iter(shifts)
        settings = {**SETTINGS, **given.pop("settings", {})}
        return train_method(
            method, "GAT", GRAPH, vanilla=self.vanilla, settings=settings, progress=False, **given
        )


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, vanilla: GAT) -> Trial:
    return Trial(monkeypatch, vanilla)


@pytest.fixture
def any_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three epochs keep nothing."""
    monkeypatch.setattr(retry, "MIN_AGREEMENT", 0.0)


@pytest.mark.usefixtures("any_prediction")
class TestAttempts:
    def test_one_training_where_it_is_enough(self, trial: Trial) -> None:
        made = trial.run(0.6, 0.3)
        assert trial.seen == [trial.vanilla, made] and history_of(made).attempts == 1
        assert [config.weight for config in trial.configs] == [0.4]

    def test_a_second_gives_more_weight_to_the_attack(self, trial: Trial, tmp_path: Path) -> None:
        made = trial.run(0.6, 0.5, 0.1, checkpoint=tmp_path / "run")
        assert made is trial.seen[2] and history_of(made).attempts == 2
        first, second = trial.configs
        assert (first.weight, second.weight) == (0.4, 0.7)
        assert second == replace(first, weight=0.7), "the adversary's budget and the epochs stay"
        assert (tmp_path / "run" / "attempt-2").is_dir() and not limits_of(made)

    def test_with_limits_it_softens_more(self, trial: Trial) -> None:
        made = trial.run(0.6, 0.5, 0.1, method="at-limits", settings={"soften": 0.1, "cut": 0.01})
        first, second = (config.tightness for config in trial.configs)
        assert (first.soften, second.soften) == (0.1, FIRMER) and first.cut == second.cut == 0.01
        assert limits_of(made) and history_of(made).attempts == 2

    def test_the_more_stable_one_comes_back_with_a_warning(self, trial: Trial) -> None:
        with pytest.warns(ReliabilityWarning, match=r"adversarially trained .* raise `attack_weight` or"):
            made = trial.run(0.6, 0.4, 0.5, 0.45)
        assert made is trial.seen[1] and history_of(made).attempts == 3
        assert [config.weight for config in trial.configs] == pytest.approx([0.4, 0.7, 0.85])

    def test_a_single_attempt_only_warns(self, trial: Trial) -> None:
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            made = trial.run(0.6, 0.5, max_attempts=1)
        assert history_of(made).attempts == 1 and len(trial.configs) == 1

    def test_explanations_are_not_its_business(self, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
        def asked(*_: Any) -> float:
            raise AssertionError("explanations were compared")

        monkeypatch.setattr(retry, "_explanation_overlap", asked)
        assert history_of(trial.run(0.6, 0.1)).attempts == 1

    def test_trials_are_not_judged(self, trial: Trial) -> None:
        trial.run(settings={"epochs": 2})
        assert trial.seen == []

    def test_a_training_that_diverges_is_begun_again_with_smaller_steps(
        self, trial: Trial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rates = list[float]()

        def diverging(model: Any, recipe: Any, config: Any, **more: Any) -> Any:
            rates.append(config.lr)
            if len(rates) == 1:
                raise DivergenceError("training diverged in epoch 2")
            return fit(model, recipe, config, **more)

        monkeypatch.setattr(adversarial, "fit", diverging)
        assert history_of(trial.run(0.6, 0.1, settings={"lr": 0.01})).attempts == 2
        assert rates == [0.01, 0.005]

    def test_at_least_one(self, trial: Trial) -> None:
        with pytest.raises(InputError, match="`max_attempts`"):
            trial.run(max_attempts=0)


def test_a_model_that_lost_its_predictions_is_not_the_better_one(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant prediction cannot be moved: stability alone would choose it."""
    script = iter((0.95, 0.3, 0.2))
    found = retry._Standing

    def judged_by_script(made: Any, *_: Any, **__: Any) -> retry._Standing:
        return found(next(trial.script), 0.6, next(script))

    monkeypatch.setattr(retry, "_standing_of", judged_by_script)
    made = list[Any]()
    trained = adversarial._Hardened.trained
    monkeypatch.setattr(
        adversarial._Hardened, "trained", lambda *given: made.append(trained(*given)) or made[-1]
    )
    with pytest.warns(ReliabilityWarning, match="not-steadier"):
        assert trial.run(0.6, 0.5, 0.0, 0.0) is made[0]
    assert len(made) == 3


@pytest.mark.parametrize("model", ["GAT", "GATv2", "GT"])
@pytest.mark.parametrize("method", ["at", "at-limits"])
def test_epochs_and_adversary_are_those_of_faithful_training(method: str, model: str) -> None:
    for dataset in ("amazon-photo", "amazon-cs", "coauthor-cs", "coauthor-physics", "a graph nobody named"):
        faithful = FaithfulConfig().replace(**settings_for("fgai", model, dataset))
        for tuned in (True, False):  # a trial of the search has them, too
            chosen = settings_for(method, model, dataset, tuned=tuned)
            hard = _HardenedConfig.of(chosen, limits=method == "at-limits")
            assert hard.train.epochs == faithful.train.epochs
            assert hard.lean == faithful.lean
            for name in ADVERSARY_FIELDS:
                assert getattr(hard.budget, name) == getattr(faithful, name)
