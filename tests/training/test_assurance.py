"""The check after faithful training: what it measures, when it trains again, and what it tells the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from fgai.attacks import make_attack
from fgai.attention import prepared
from fgai.errors import InputError, ReliabilityWarning
from fgai.graph import Graph
from fgai.models import GAT
from fgai.training import FaithfulConfig, History, attempts, history_of
from fgai.training.assurance import HELPED, WORTH, helped, moved
from support.graph_cases import small_data
from support.task_cases import data as task_data


def parent_of(graph: Graph) -> GAT:
    torch.manual_seed(3)
    return GAT.for_data(graph).eval()


def test_moved_is_the_mean_total_variation_on_validation_nodes() -> None:
    graph = small_data(nodes=150)
    graph = graph.replace(val_mask=graph.test_mask, test_mask=graph.val_mask)  # ten are too few to attack
    model = parent_of(graph)
    ready = prepared(model, graph)
    attacked = make_attack("standard", targets="val").run(model, ready, seed=5).graph
    with torch.no_grad():
        before, after = model(ready).softmax(1), model(attacked).softmax(1)[: graph.num_nodes]
    each = [
        float((before[i] - after[i]).abs().sum()) / 2 for i in range(graph.num_nodes) if graph.val_mask[i]
    ]
    assert moved(model, ready, 5) == pytest.approx(sum(each) / len(each), rel=1e-5)


@pytest.mark.parametrize("task", ["link", "graph"])
def test_other_tasks_are_not_judged(task: str) -> None:
    graph = task_data(task)
    assert moved(parent_of(graph), graph, 0) is None


def test_too_few_validation_nodes_are_not_judged() -> None:
    graph = small_data()
    few = torch.zeros(graph.num_nodes, dtype=torch.bool)
    few[:2] = True
    model = parent_of(graph)
    assert moved(model, prepared(model, graph).replace(val_mask=few), 0) is None
    assert moved(model, prepared(model, graph).replace(val_mask=None), 0) is None


def test_helped_is_relative_and_asks_nothing_of_a_steady_parent() -> None:
    assert helped(HELPED * 0.4, 0.4) and not helped(HELPED * 0.4 + 1e-9, 0.4)
    assert helped(1.0, WORTH / 2) and helped(None, 0.4) and helped(0.3, None)


def test_a_second_try_has_the_same_budget_and_cannot_saturate() -> None:
    first = FaithfulConfig(divergence="probabilities").replace(epochs=200, prediction_stability=6.0)
    second = first.again()
    assert second.divergence == "log" and second.replace(divergence="probabilities") == first


class TestTries:
    """Which twin comes back, with the measurement replaced by a script."""

    def run(
        self, monkeypatch: pytest.MonkeyPatch, shifts: list[float], epochs: int = 3, **given: Any
    ) -> tuple[Any, list[Any]]:
        graph = small_data(nodes=60)
        model = parent_of(graph)
        script, seen = iter(shifts), []
        self.parent = model

        def measured(which: Any, _: Graph, seed: int) -> float:
            seen.append(which)
            return next(script)

        monkeypatch.setattr(attempts, "TRIAL", 3)
        monkeypatch.setattr(attempts, "moved", measured)
        return fgai.make_faithful(
            model, graph, epochs=epochs, nodes=2, edges=3, progress=False, **given
        ), seen

    def test_one_training_where_it_helped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        twin, seen = self.run(monkeypatch, [0.6, 0.1])
        assert seen == [self.parent, twin] and history_of(twin).attempts == 1

    def test_a_second_where_it_did_not(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        twin, seen = self.run(monkeypatch, [0.6, 0.5, 0.1], checkpoint=tmp_path / "run")
        assert twin is seen[2] and history_of(twin).attempts == 2
        assert any(
            not torch.equal(one, two)
            for one, two in zip(twin.parameters(), seen[1].parameters(), strict=True)
        )

    def test_the_steadier_twin_comes_back_and_the_user_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(ReliabilityWarning, match="hardly helped"):
            twin, seen = self.run(monkeypatch, [0.6, 0.4, 0.5])
        assert twin is seen[1] and history_of(twin).attempts == 2

    def test_a_single_attempt_is_only_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.warns(ReliabilityWarning, match="not-steadier"):
            twin, seen = self.run(monkeypatch, [0.6, 0.4], max_attempts=1)
        assert seen == [self.parent, twin] and history_of(twin).attempts == 1

    @pytest.mark.parametrize(
        "given", [{"epochs": 2}, {"prediction_stability": 0.0}, {"adversary": "attention"}]
    )
    def test_trials_and_trainings_without_the_term_are_not_judged(
        self, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
    ) -> None:
        _, seen = self.run(monkeypatch, [], **given)
        assert seen == []

    def test_a_history_of_before_is_read(self) -> None:
        values = {**History(stopped="patience").to_dict(), "tries": 2}
        del values["attempts"]
        assert History.from_dict(values).attempts == 2

    def test_at_least_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match="`max_attempts`"):
            self.run(monkeypatch, [], max_attempts=0)
