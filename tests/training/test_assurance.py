"""The check after faithful training: what it measures, when it trains again, and what it tells the user."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from fgai.attacks import EnsembleInjection, make_attack
from fgai.attacks.search.members import SHORT_MEMBERS
from fgai.attention import observe, prepared
from fgai.errors import DivergenceError, InputError, ReliabilityWarning
from fgai.graph import Graph
from fgai.metrics import overlap, sharpness
from fgai.models import GAT
from fgai.training import FaithfulConfig, attempts, history_of, retry
from fgai.training.retry import (
    MAX_RATIO,
    MIN_AGREEMENT,
    MIN_OVERLAP,
    MIN_SHIFT,
    STEPS,
    _explanation_overlap,
    _prediction_shift,
    _Standing,
)
from support.graph_cases import small_data
from support.task_cases import data as task_data


def vanilla_of(graph: Graph) -> GAT:
    torch.manual_seed(3)
    return GAT.for_data(graph).eval()


@pytest.mark.filterwarnings("ignore::fgai.errors.ReliabilityWarning")
def test_prediction_shift_is_the_mean_total_variation_on_validation_nodes() -> None:
    graph = small_data(nodes=150)
    graph = graph.replace(val_mask=graph.test_mask, test_mask=graph.val_mask)  # ten are too few to attack
    model = vanilla_of(graph)
    ready = prepared(model, graph)
    budget = replace(make_attack("ensemble", targets="val").budget, steps=STEPS)
    short = EnsembleInjection(budget, members=SHORT_MEMBERS, rules=("random",), baselines=())
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
def test_other_tasks_are_not_judged(task: str) -> None:
    graph = task_data(task)
    assert _prediction_shift(vanilla_of(graph), graph, 0) is None


def test_too_few_validation_nodes_are_not_judged() -> None:
    graph = small_data()
    few = torch.zeros(graph.num_nodes, dtype=torch.bool)
    few[:2] = True
    model = vanilla_of(graph)
    assert _prediction_shift(model, prepared(model, graph).replace(val_mask=few), 0) is None
    assert _prediction_shift(model, prepared(model, graph).replace(val_mask=None), 0) is None


def test_more_stable_is_relative_and_asks_nothing_of_a_stable_vanilla_model() -> None:
    assert _Standing(MAX_RATIO * 0.4, 0.4).is_stable and not _Standing(MAX_RATIO * 0.4 + 1e-9, 0.4).is_stable
    assert (
        _Standing(1.0, MIN_SHIFT / 2).is_stable
        and _Standing(None, 0.4).is_stable
        and _Standing(0.3).is_stable
    )
    assert (
        _Standing(agreement=MIN_AGREEMENT).is_close and not _Standing(agreement=MIN_AGREEMENT - 0.01).is_close
    )
    assert _Standing().holds and not _Standing(agreement=0.5).holds


def test_of_two_attempts_what_is_lost_counts_before_what_moves() -> None:
    lost, moved, better = _Standing(0.1, 0.5, 0.5), _Standing(0.4, 0.5, 0.99), _Standing(0.3, 0.5, 0.98)
    assert moved.beats(lost) and better.beats(moved) and not lost.beats(moved) and not moved.beats(better)
    with pytest.warns(ReliabilityWarning, match="agrees with the vanilla one on 50%"):
        lost.warn()


def test_a_second_attempt_presses_on_what_failed() -> None:
    first = FaithfulConfig(divergence="probabilities").replace(epochs=200, prediction_stability=6.0)
    moved, lost = first.fallback(stable=False, close=True), first.fallback(stable=True, close=False)
    assert moved.divergence == "log" and moved.weights.prediction_stability == 12.0 and moved.soften > 0
    assert lost.weights.closeness == 5 * first.weights.closeness and lost.train.lr < first.train.lr
    assert lost.divergence == first.divergence and moved.weights.closeness == first.weights.closeness
    for other in (moved, lost):
        assert (other.train.epochs, other.nodes, other.steps) == (200, first.nodes, first.steps)
    assert moved.fallback(stable=False, close=True).divergence == "kl"
    assert first.replace(limits=False).fallback(stable=False, close=True).soften == 0


def test_explanations_that_are_lost_count_where_predictions_stay() -> None:
    kept, lost = _Standing(0.2, 0.5, 0.99, MIN_OVERLAP), _Standing(0.1, 0.5, 0.99, MIN_OVERLAP - 0.01)
    shaken = _Standing(0.4, 0.5, 0.99, 1.0)
    assert kept.holds and not lost.holds and lost.is_stable and not shaken.is_stable
    assert kept.beats(lost) and not lost.beats(kept)
    assert lost.beats(shaken) and not shaken.beats(lost)  # stability first
    with pytest.warns(ReliabilityWarning, match="keeps 89% of the vanilla one's top 5"):
        lost.warn()


def test_a_second_attempt_at_explanations_clips_less() -> None:
    first = FaithfulConfig(cut=0.02, soften=0.4)
    again = first.fallback(stable=True, close=True, alike=False)
    assert (again.cut, again.soften) == (0.01, 0.2)
    assert again.weights.similarity == 2 * first.weights.similarity
    both = first.fallback(stable=False, close=True, alike=False)
    assert both == first.fallback(stable=False, close=True)


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


class TestAttempts:
    """Which faithful model comes back, with the measurement replaced by a script."""

    def run(
        self, monkeypatch: pytest.MonkeyPatch, shifts: list[float], epochs: int = 3, **given: Any
    ) -> tuple[Any, list[Any]]:
        graph = small_data(nodes=60)
        model = vanilla_of(graph)
        script, seen = iter(shifts), []
        self.vanilla = model

        def measured(which: Any, _: Graph, seed: int, box: Any) -> float:
            assert box == given.get("box")
            seen.append(which)
            return next(script)

        monkeypatch.setattr(attempts, "MIN_EPOCHS", 3)
        for place in (retry,):
            monkeypatch.setattr(place, "_prediction_shift", measured)
        for bar in ("MIN_AGREEMENT", "MIN_OVERLAP"):
            monkeypatch.setattr(retry, bar, 0.0)  # a few epochs keep nothing
        return fgai.make_faithful(
            model, graph, epochs=epochs, nodes=2, edges=3, progress=False, **given
        ), seen

    def test_one_training_where_it_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        faithful, seen = self.run(monkeypatch, [0.6, 0.1])
        assert seen == [self.vanilla, faithful] and history_of(faithful).attempts == 1

    def test_the_attack_that_judges_has_the_box_of_the_adversary(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert len(self.run(monkeypatch, [0.6, 0.1], box=(-9.0, 9.0))[1]) == 2

    def test_a_second_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        faithful, seen = self.run(monkeypatch, [0.6, 0.5, 0.1], checkpoint=tmp_path / "run")
        assert faithful is seen[2] and history_of(faithful).attempts == 2
        assert any(
            not torch.equal(one, two)
            for one, two in zip(faithful.parameters(), seen[1].parameters(), strict=True)
        )

    def test_the_more_stable_one_comes_back_with_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(ReliabilityWarning, match="hardly more stable"):
            faithful, seen = self.run(monkeypatch, [0.6, 0.4, 0.5, 0.45])
        assert faithful is seen[1] and history_of(faithful).attempts == 3

    def test_a_single_attempt_only_warns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            faithful, seen = self.run(monkeypatch, [0.6, 0.4], max_attempts=1)
        assert seen == [self.vanilla, faithful] and history_of(faithful).attempts == 1

    @pytest.mark.parametrize(
        "given", [{"epochs": 2}, {"prediction_stability": 0.0}, {"adversary": "attention"}]
    )
    def test_trials_and_trainings_without_the_term_are_not_judged(
        self, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
    ) -> None:
        _, seen = self.run(monkeypatch, [], **given)
        assert seen == []

    def test_a_training_that_diverges_is_begun_again_with_smaller_steps(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        rates, train = [], attempts._trained

        def diverging(model: Any, graph: Graph, config: FaithfulConfig, *rest: Any) -> Any:
            rates.append(config.train.lr)
            if len(rates) == 1:
                raise DivergenceError("training diverged in epoch 2")
            return train(model, graph, config, *rest)

        monkeypatch.setattr(attempts, "_trained", diverging)
        faithful, seen = self.run(monkeypatch, [0.6, 0.1], lr=0.01, checkpoint=tmp_path / "run")
        assert rates == [0.01, 0.005] and seen[1] is faithful and history_of(faithful).attempts == 2
        assert (tmp_path / "run" / "attempt-2").is_dir()
        rates.clear()
        with pytest.raises(DivergenceError):
            self.run(monkeypatch, [], max_attempts=1)

    def test_a_second_attempt_that_diverges_leaves_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, train = [], attempts._trained

        def diverging(*given: Any) -> Any:
            if made:
                raise DivergenceError("training diverged in epoch 2")
            made.append(train(*given))
            return made[0]

        monkeypatch.setattr(attempts, "_trained", diverging)
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            faithful, _ = self.run(monkeypatch, [0.6, 0.5])
        assert faithful is made[0]

    def test_at_least_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="`max_attempts`"):
            self.run(monkeypatch, [], max_attempts=0)
