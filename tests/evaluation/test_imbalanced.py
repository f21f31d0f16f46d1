"""Graphs with a rare class: what is reported, and what an attack is judged by."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics as sk
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import fgai
from fgai import Graph
from fgai.attacks import Budget, EnsembleInjection, Threat
from fgai.attention import observe, prepared
from fgai.evaluation import EvaluationRecord
from fgai.large import evaluate_store
from fgai.reports.words import meaning
from fgai.tasks import task_of
from support import attack_cases as cases

NODES = 300


class Short(EnsembleInjection):
    def __init__(self, budget: Budget, objective: Any = "prediction", *, k: int = 5) -> None:
        super().__init__(budget, objective, k=k, members=cases.SHORT_MEMBERS, rules=("random",), baselines=())


SHORT = Threat("short", Short, Budget(nodes=8, edges=10, steps=20, box=(-3.0, 3.0)), "for tests")


class Majority(nn.Module):
    """Names class 0 wherever it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(6, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return 0.01 * self.conv(x, edge_index) + torch.tensor([9.0, 0.0])  # type: ignore[no-any-return]


@cache
def fraud(share: float = 0.08) -> Graph:
    """A ring of nodes with chords between equals; features tell the rare class 1 apart."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.arange(NODES) % round(1 / share) == 0).long()
    x = 0.6 * torch.randn(NODES, 6, generator=generator) + 2 * y[:, None] * torch.tensor([1, -1, 1, 0, 0, 0])
    chords = torch.randint(NODES, (2, 20 * NODES), generator=generator)
    chords = chords[:, (y[chords[0]] == y[chords[1]]) & ((y[chords[0]] == 1) | (chords[0] % 8 == 0))]
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    part = torch.arange(NODES) // 6 % 3
    edges = torch.cat([ring, chords[:, chords[0] != chords[1]]], 1).unique(dim=1)
    masks = {f"{name}_mask": part == place for place, name in enumerate(("train", "val", "test"))}
    return Graph.from_edges(edges, NODES, x, undirected=True, y=y, name="fraud", **masks)


@cache
def model() -> nn.Module:
    return fgai.train("GAT", fraud(), epochs=60, progress=False)


@cache
def record() -> EvaluationRecord:
    with cases.quiet():
        return fgai.evaluate(model(), fraud(), SHORT, k=2, curves=False, nulls=False, per_node=True)


def test_the_headline_depends_on_the_largest_class() -> None:
    task = task_of(fraud())
    assert task.headline_for(fraud()) == "balanced_accuracy" and task.headline == "f1"
    assert task.headline_for(fraud(0.5)) == "f1"
    y = torch.tensor([0] * 7 + [1] * 3 + [-1] * 5)
    edges = torch.zeros(2, 0, dtype=torch.long)
    at_most = Graph.from_edges(edges, 15, torch.ones(15, 1), y=y)
    above = at_most.replace(y=torch.tensor([0] * 8 + [1] * 3 + [-1] * 4))
    unknown = at_most.replace(y=torch.full((15,), -1))
    heads = [task.headline_for(graph) for graph in (at_most, above, unknown, at_most.replace(y=None))]
    assert heads == ["f1", "balanced_accuracy", "f1", "f1"]
    attacked, _ = above.inject(torch.tensor([[0, 1]]), torch.ones(1, 1))
    assert task.headline_for(attacked) == "balanced_accuracy"


def test_scores_equal_sklearn() -> None:
    found = record()
    scored = found.node_values("scored").astype(bool)
    truth = found.node_values("label")[scored]
    for view in ("clean", "attacked"):
        guess = found.node_values(f"predicted_{view}")[scored]
        assert found.value(f"balanced_accuracy.{view}") == pytest.approx(
            sk.balanced_accuracy_score(truth, guess)
        )
        assert found.value(f"macro_f1.{view}") == pytest.approx(sk.f1_score(truth, guess, average="macro"))
        assert found.value(f"recall.{view}") == pytest.approx(
            sk.recall_score(truth, guess, average=None).tolist()
        )
        assert found.value(f"f1.{view}") == pytest.approx(sk.accuracy_score(truth, guess))
    changed = found.node_values("predicted_clean") != found.node_values("predicted_attacked")
    assert found.value("changed.attacked") == pytest.approx(float(changed[scored].mean()))
    assert found.value("recall.support") == [int((truth == c).sum()) for c in (0, 1)]
    assert found.value("balanced_accuracy.chance") == 0.5 and found.value("f1.chance") > 0.8
    assert found.config["headline"] == "balanced_accuracy"


def test_the_attack_is_judged_by_balanced_accuracy() -> None:
    found = record()
    ledger = found.ledgers["prediction"]
    worst = ledger["damages"][ledger["won"]]
    assert worst == pytest.approx(1 - found.value("balanced_accuracy.attacked"))
    assert worst == max(ledger["damages"])
    for row, damage in zip(ledger["members"], ledger["damages"][1:], strict=True):
        assert row["damage"] == pytest.approx(damage, abs=1e-5)  # the search's own count
    assert found.value("balanced_accuracy.attacked") < found.value("balanced_accuracy.clean")


def test_naming_the_majority_is_chance() -> None:
    torch.manual_seed(0)
    with cases.quiet():
        found = fgai.evaluate(Majority().eval(), fraud(), "random", nodes=2, edges=2, k=2, curves=False)
    (said,) = (entry["message"] for entry in found.warnings if entry["code"] == "chance-level")
    assert "clean balanced accuracy is 0.500; always naming" in said and said.endswith("scores 0.500")
    assert found.value("balanced_accuracy.clean") == 0.5 and found.value("f1.clean") > 0.8
    assert found.value("recall.clean") == [1.0, 0.0]


def test_tables_and_report_say_how_many_of_the_rare_class_are_missed(tmp_path: Path) -> None:
    with cases.quiet():
        made = fgai.compare({"GAT": model(), "other": model()}, fraud(), SHORT, k=2, curves=False)
        page = fgai.report(
            {"GAT": model()},
            fraud(),
            tmp_path / "page.html",
            threat=SHORT,
            k=2,
            class_names=["fine", "Fraud"],
        )
    found = made["GAT"]
    count = found.value("recall.support")[1]
    shares = [found.value(f"recall.{view}.1") for view in ("clean", "attacked")]
    missed = [round(count * (1 - share)) for share in shares]
    text = made.to_markdown()
    assert all(words in text for words in ("Recall by class", "balanced accuracy attacked", "changed"))
    rows = next(table for table in made.tables() if table.title == "Recall by class").rows
    assert rows[1][:5] == [1, count, shares[0], shares[1], missed[1]]
    expected = (
        f"Of the {count} tested nodes of class Fraud, the rarest, GAT misses {missed[0]} without the attack"
        f" and {missed[1]} under it."
    )
    assert expected in meaning(page)
    assert expected in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "balanced accuracy on the tested nodes" in " ".join(meaning(page))


def test_balanced_graphs_keep_micro_f1() -> None:
    graph = cases.tiny_graph()
    with cases.quiet():
        found = fgai.evaluate(
            cases.trained("gat", "vanilla"), graph, "random", nodes=2, edges=2, k=2, curves=False, nulls=False
        )
    assert found.config["headline"] == "f1" and "chance" in found.metrics["f1"]
    assert set(found.metrics["balanced_accuracy"]) == {"clean", "attacked", "attacked_explanation"}


def test_a_class_without_tested_nodes() -> None:
    graph = fraud()
    assert graph.y is not None and graph.test_mask is not None
    graph = graph.replace(test_mask=graph.test_mask & (graph.y == 0))
    with cases.quiet():
        found = fgai.evaluate(model(), graph, "random", nodes=2, edges=2, k=2, curves=False, nulls=False)
    assert found.value("recall.clean")[1] is None and found.value("recall.support")[1] == 0
    assert found.value("balanced_accuracy.clean") == found.value("recall.clean")[0]
    assert len(next(table for table in found.tables() if table.title == "Recall by class").rows) == 1


@pytest.mark.filterwarnings(r"ignore:\[(flat|weak)-attention\]")
def test_stored_graphs(tmp_path: Path) -> None:
    stored = fgai.large.write_store(fraud(), tmp_path / "fraud")
    found = evaluate_store(model(), stored, k=2)
    logits = observe(model(), prepared(model(), fraud())).logits
    assert fraud().y is not None and fraud().test_mask is not None
    guess, truth = (one[fraud().test_mask].numpy() for one in (logits.argmax(1), fraud().y))
    assert found.balanced_accuracy["test"] == pytest.approx(sk.balanced_accuracy_score(truth, guess))
    assert found.macro_f1["test"] == pytest.approx(sk.f1_score(truth, guess, average="macro"))
