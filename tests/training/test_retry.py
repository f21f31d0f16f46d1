"""The check after training and the one retry."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import fgai
from fgai.attacks import EnsembleInjection, make_attack
from fgai.attention import limits_of, observe, prepared
from fgai.errors import DivergenceError, ReliabilityWarning
from fgai.graph import Graph
from fgai.metrics import overlap, sharpness
from fgai.models import GAT
from fgai.training import (
    FaithfulSettings,
    HardenSettings,
    History,
    fine_tuning,
    history_of,
    stability,
    train_method,
)
from fgai.training.resume import set_history
from fgai.training.stability import (
    ATTACK_STEPS,
    CHECK_MEMBERS,
    MAX_RATIO,
    MIN_AGREEMENT,
    MIN_OVERLAP,
    MIN_SHIFT,
    StabilityReport,
    _explanation_overlap,
    _prediction_shift,
)
from support.graph_cases import small_data
from support.task_cases import data as task_data

PASSED = StabilityReport(0.1, 0.6, 1.0, 1.0)
MOVED, WORSE, LOST = (
    replace(PASSED, **change) for change in ({"shift": 0.4}, {"shift": 0.5}, {"agreement": 0.3})
)


def vanilla_of(graph: Graph) -> GAT:
    torch.manual_seed(3)
    return GAT.for_data(graph).eval()


@pytest.mark.filterwarnings("ignore::fgai.errors.ReliabilityWarning")
def test_prediction_shift_is_the_mean_total_variation_on_validation_nodes() -> None:
    graph = small_data(nodes=150)
    graph = graph.replace(val_mask=graph.test_mask, test_mask=graph.val_mask)  # ten are too few to attack
    model = vanilla_of(graph)
    ready = prepared(model, graph)
    budget = replace(make_attack("ensemble", targets="val").budget, steps=ATTACK_STEPS)
    short = EnsembleInjection(budget, members=CHECK_MEMBERS, rules=("random",), baselines=())
    attacked = short.run(model, ready.replace(y=None), seed=5).graph
    with torch.no_grad():
        before, after = model(ready).softmax(1), model(attacked).softmax(1)[: graph.num_nodes]
    each = [float((before[i] - after[i]).abs().sum()) / 2 for i in graph.val_mask.nonzero().flatten()]
    assert _prediction_shift(model, ready, 5) == pytest.approx(sum(each) / len(each), rel=1e-5)


def test_labels_are_not_read() -> None:
    graph = small_data(nodes=150)
    graph = graph.replace(val_mask=graph.test_mask, test_mask=graph.val_mask)
    model = vanilla_of(graph)
    ready = prepared(model, graph)
    assert graph.y is not None
    other = ready.replace(y=(graph.y + 1) % graph.num_classes)
    assert _prediction_shift(model, ready, 5) == _prediction_shift(model, other, 5)


@pytest.mark.parametrize("task", ["link", "graph"])
def test_other_tasks_are_not_checked(task: str) -> None:
    graph = task_data(task)
    assert _prediction_shift(vanilla_of(graph), graph, 0) is None


def test_too_few_validation_nodes_are_not_checked() -> None:
    graph = small_data()
    few = torch.zeros(graph.num_nodes, dtype=torch.bool)
    few[:2] = True
    model = vanilla_of(graph)
    assert _prediction_shift(model, prepared(model, graph).replace(val_mask=few), 0) is None
    assert _prediction_shift(model, prepared(model, graph).replace(val_mask=None), 0) is None


def test_more_stable_is_relative_and_asks_nothing_of_a_stable_vanilla_model() -> None:
    assert (
        StabilityReport(MAX_RATIO * 0.4, 0.4).is_stable
        and not StabilityReport(MAX_RATIO * 0.4 + 1e-9, 0.4).is_stable
    )
    assert (
        StabilityReport(1.0, MIN_SHIFT / 2).is_stable
        and StabilityReport(None, 0.4).is_stable
        and StabilityReport(0.3).is_stable
    )
    assert (
        StabilityReport(agreement=MIN_AGREEMENT).is_close
        and not StabilityReport(agreement=MIN_AGREEMENT - 0.01).is_close
    )
    assert StabilityReport().passed and not StabilityReport(agreement=0.5).passed


def test_of_two_attempts_what_is_lost_counts_before_what_moves() -> None:
    lost, moved, better = (
        StabilityReport(0.1, 0.5, 0.5),
        StabilityReport(0.4, 0.5, 0.99),
        StabilityReport(0.3, 0.5, 0.98),
    )
    assert (
        moved.is_better_than(lost)
        and better.is_better_than(moved)
        and not lost.is_better_than(moved)
        and not moved.is_better_than(better)
    )
    with pytest.warns(ReliabilityWarning, match="agrees with the vanilla one on 50%"):
        lost.warn()


def test_explanations_that_are_lost_count_where_predictions_stay() -> None:
    kept, lost = (
        StabilityReport(0.2, 0.5, 0.99, MIN_OVERLAP),
        StabilityReport(0.1, 0.5, 0.99, MIN_OVERLAP - 0.01),
    )
    shaken = StabilityReport(0.4, 0.5, 0.99, 1.0)
    assert kept.passed and not lost.passed and lost.is_stable and not shaken.is_stable
    assert kept.is_better_than(lost) and not lost.is_better_than(kept)
    assert lost.is_better_than(shaken) and not shaken.is_better_than(lost)  # stability first
    with pytest.warns(ReliabilityWarning, match="keeps 84% of the vanilla one's top 5"):
        lost.warn()


def test_overlap_is_that_of_the_layer_that_says_most() -> None:
    graph = small_data(nodes=60)
    model = vanilla_of(graph)
    seen, other = prepared(model, graph), deepcopy(model)
    assert _explanation_overlap(model, model, seen) == 1.0
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.0)
    one, two = (observe(which, seen, heads="mean").attention for which in (model, other))
    said = [sharpness(layer.heads(), layer.rowptr) for layer in one]
    top = said.index(max(said))
    wanted = overlap(one.layers[top].ranking(), two.layers[top].ranking(), one.layers[top].rowptr, 5)
    assert _explanation_overlap(other, model, seen) == pytest.approx(wanted) and wanted < 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert _explanation_overlap(other, model, seen) is None  # nothing was said


@dataclass(frozen=True)
class Settings:
    """Counts the changes that `retry` makes."""

    halved: int = 0
    tighter: int = 0

    def slower(self) -> Settings:
        return replace(self, halved=self.halved + 1)

    def tightened(self, report: StabilityReport) -> Settings:
        assert not report.passed
        return replace(self, tighter=self.tighter + 1)


class TestRetry:
    """The function alone, with trainings and reports from a script."""

    def run(
        self, *script: StabilityReport | None, check: bool = True
    ) -> tuple[Any, list[Any], list[Settings]]:
        """Train by script: a report for every training that ends, None for one that diverges."""
        models: list[Any] = []
        used: list[Settings] = []
        reports: dict[Any, StabilityReport] = {}

        def train(settings: Settings, count: int) -> nn.Module:
            used.append(settings)
            assert count == len(used)
            if (report := script[count - 1]) is None:
                raise DivergenceError("training diverged in epoch 2")
            models.append(nn.Linear(1, 1))
            set_history(models[-1], History())
            reports[models[-1]] = report
            return models[-1]  # type: ignore[no-any-return]

        checked = reports.__getitem__ if check else None
        return fine_tuning.retry(train, checked, Settings()), models, used

    def test_one_training_where_it_is_enough(self) -> None:
        model, models, used = self.run(PASSED)
        assert models == [model] and used == [Settings()] and history_of(model).attempts == 1

    def test_a_second_with_tightened_settings(self) -> None:
        model, models, used = self.run(MOVED, PASSED)
        assert model is models[1] and used[1] == Settings(tighter=1) and history_of(model).attempts == 2

    def test_the_better_one_comes_back_with_a_warning(self) -> None:
        with pytest.warns(ReliabilityWarning, match="hardly more stable"):
            model, models, _ = self.run(MOVED, WORSE)
        assert model is models[0] and history_of(model).attempts == 2

    def test_a_model_that_lost_its_predictions_is_not_the_better_one(self) -> None:
        """A constant prediction cannot be moved: stability alone would choose it."""
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            model, models, _ = self.run(MOVED, LOST)
        assert model is models[0]

    def test_a_training_that_diverges_is_repeated_with_half_the_learning_rate(self) -> None:
        model, models, used = self.run(None, PASSED)
        assert models == [model] and used == [Settings(), Settings(halved=1)]
        assert history_of(model).attempts == 2

    def test_there_is_one_retry_in_all(self) -> None:
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            assert len(self.run(None, MOVED)[2]) == 2
        with pytest.raises(DivergenceError):
            self.run(None, None)

    def test_a_retry_that_diverges_leaves_the_first(self) -> None:
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            model, models, _ = self.run(MOVED, None)
        assert models == [model] and history_of(model).attempts == 2

    def test_without_a_check_only_divergence_repeats(self) -> None:
        assert len(self.run(LOST, check=False)[2]) == 1 and len(self.run(None, LOST, check=False)[2]) == 2


class TestTightened:
    def test_faithful_training_presses_on_what_failed(self) -> None:
        first = FaithfulSettings(shrink=0.1)
        moved, lost = first.tightened(MOVED), first.tightened(LOST)
        assert moved == first.replace(prediction_stability=2 * first.prediction_stability, shrink=0.4)
        assert lost == first.replace(closeness=5 * first.closeness, lr=0.0025)
        assert first.slower().lr == 0.0025

    def test_lost_explanations_get_more_similarity(self) -> None:
        first = FaithfulSettings()
        again = first.tightened(replace(PASSED, overlap=0.3))
        assert again == first.replace(similarity=2 * first.similarity)
        assert first.tightened(replace(MOVED, overlap=0.3)) == first.tightened(MOVED)

    def test_adversarial_training_gives_more_weight_to_the_attack(self) -> None:
        first = HardenSettings(attack_weight=0.4, shrink=0.1)
        assert first.tightened(MOVED) == first.replace(attack_weight=0.7, shrink=0.4)


class TestTrainings:
    """Which trainings are checked, and how."""

    GRAPH = small_data(nodes=60)
    SMALL: ClassVar[dict[str, Any]] = {"epochs": 3, "nodes": 2, "edges": 3}

    @pytest.fixture
    def checked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Models that were attacked, whose shifts are 0.6, 0.5 and 0.1."""
        seen: list[Any] = []

        def measured(model: Any, _: Graph, seed: int, box: Any) -> float:
            seen.append(model)
            return (0.6, 0.5, 0.1)[len(seen) - 1]

        monkeypatch.setattr(stability, "_prediction_shift", measured)
        monkeypatch.setattr(fine_tuning, "MIN_EPOCHS", 3)
        for bar in ("MIN_AGREEMENT", "MIN_OVERLAP"):
            monkeypatch.setattr(stability, bar, 0.0)  # a few epochs keep nothing
        return seen

    def test_a_second_faithful_training_has_its_own_draws_and_folder(
        self, checked: list[Any], tmp_path: Path
    ) -> None:
        vanilla = vanilla_of(self.GRAPH)
        model = fgai.make_faithful(
            vanilla, self.GRAPH, checkpoint=tmp_path / "run", progress=False, **self.SMALL
        )
        first, second = checked[1:]
        assert checked[0] is vanilla and model is second and history_of(model).attempts == 2
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        assert any(not torch.equal(one, two) for one, two in pairs)
        assert (tmp_path / "run" / "attempt-2").is_dir()

    @pytest.mark.parametrize("method", ["at", "harden"])
    def test_adversarial_training_keeps_no_explanations(
        self, method: str, checked: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def asked(*_: Any) -> float:
            raise AssertionError("explanations were compared")

        monkeypatch.setattr(stability, "_explanation_overlap", asked)
        model = train_method(
            method, "GAT", self.GRAPH, vanilla=vanilla_of(self.GRAPH), settings=self.SMALL, progress=False
        )
        assert model is checked[2] and bool(limits_of(model)) == (method == "harden")

    @pytest.mark.parametrize("given", [{"epochs": 2}, {"prediction_stability": 0.0}, {"check": False}])
    def test_trials_and_trainings_without_the_term_are_not_checked(
        self, given: dict[str, Any], checked: list[Any]
    ) -> None:
        fgai.make_faithful(vanilla_of(self.GRAPH), self.GRAPH, progress=False, **{**self.SMALL, **given})
        assert checked == []
