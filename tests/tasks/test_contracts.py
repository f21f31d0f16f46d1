"""The contracts of attacks, recipes and metrics, over nodes, links and graphs alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fgai.attacks import (
    DICE,
    PRBCD,
    TDGIA,
    THREATS,
    AdaptiveInjection,
    Attack,
    Budget,
    PGDInjection,
    RandomEdges,
    RandomInjection,
    Threat,
    check_budget,
    make_attack,
)
from fgai.attention import evaluating, observe, prepared
from fgai.certificates import certify_attention
from fgai.errors import InputError
from fgai.evaluation import EvaluationRecord, compare, evaluate
from fgai.metrics import METRICS, AttentionPair, Views
from fgai.metrics.ranking import _item_overlaps
from fgai.reports.build import make_report
from fgai.reports.page import render
from fgai.tasks import TASKS, task_of
from fgai.training import TrainConfig, fit, make_faithful, train, train_method
from fgai.training.recipes import VanillaRecipe
from support import attack_cases
from support import task_cases as cases
from support.forward import seen_by
from support.training_cases import Calling

OTHER_TASKS_FIRST = (pytest.param("node", marks=pytest.mark.slow), "link", "graph")
"""Nodes are slow here: the tests of attacks, training and evaluation are about them."""
ONLY_NODES = (DICE, TDGIA)
ONE_GRAPH = (PRBCD,)
BUDGETS: dict[type[Attack], Budget] = {
    **attack_cases.BUDGETS,
    RandomEdges: Budget(edges=2),
}
INJECTIONS = (RandomInjection, PGDInjection, AdaptiveInjection, *attack_cases.REPORTED)
for kind in INJECTIONS:
    BUDGETS[kind] = replace(attack_cases.BUDGETS[kind], nodes=2, edges=3)
TINY = Threat("tiny", PGDInjection, BUDGETS[PGDInjection], "2 nodes × 3 edges")


def refused(kind: type[Attack], task: str) -> bool:
    return (kind in ONLY_NODES and task != "node") or (kind in ONE_GRAPH and task == "graph")


@pytest.mark.parametrize("task", OTHER_TASKS_FIRST)
@pytest.mark.parametrize("kind", list(BUDGETS), ids=lambda kind: kind.name)
def test_every_attack_keeps_its_contract(kind: type[Attack], task: str) -> None:
    model, graph = cases.trained(task), cases.data(task)
    attack = kind(BUDGETS[kind], k=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if refused(kind, task):
        with pytest.raises(InputError):
            attack.run(model, graph, seed=3)
        return
    with attack_cases.quiet():
        result, again, other = (attack.run(model, graph, seed=seed) for seed in (3, 3, 4))
    seen = prepared(model, task_of(graph).view(graph, "test"))
    check_budget(result.change, attack.budget, seen)
    assert result.value == again.value and result.ledger.curve == again.ledger.curve
    assert result.ledger.curve != other.ledger.curve
    if kind in attack_cases.REPORTED:
        assert result.ledger.damages[result.ledger.won] == max(result.ledger.damages)
        assert result.ledger.steps <= attack.max_steps
        for row, damage in result.ledger.proposals():
            assert row is None or row["damage"] == pytest.approx(damage, abs=1e-6), row
    else:
        assert result.value >= result.noise
    assert torch.equal(seen.keys[result.edge_map.before], result.graph.keys[result.edge_map.after])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with evaluating(model), torch.no_grad():
        rows = seen_by(model, result.graph)[0].shape[0]
    assert rows == task_of(result.graph).count(result.graph)


@pytest.mark.parametrize("objective", ["margin", "explanation", "intruders"])
@pytest.mark.parametrize("task", OTHER_TASKS_FIRST)
def test_every_objective_climbs(objective: str, task: str) -> None:
    attack = PGDInjection(replace(BUDGETS[PGDInjection], steps=6), objective, k=2)
    with attack_cases.quiet():
        result = attack.run(cases.trained(task), cases.data(task), seed=1)
    assert result.value >= result.start - 1e-6 and result.ledger.gradient > 0


@pytest.mark.parametrize("name", list(THREATS))
def test_threats_have_a_budget_small_graphs_can_meet(name: str) -> None:
    budget = make_attack(name, task="graph").budget
    alone = refused(THREATS[name].attack, "graph")
    assert alone or (budget.nodes <= 3 and budget.edges <= 4)
    assert make_attack(name, task="link").budget == make_attack(name).budget


@pytest.mark.many
@pytest.mark.parametrize("recipe", ["vanilla", "adversarial", "faithful"])
@pytest.mark.parametrize("task", OTHER_TASKS_FIRST)
def test_every_recipe_runs_and_is_seeded(task: str, recipe: str) -> None:
    model = cases.trained(task, recipe)
    assert not model.training and model.history.terms  # type: ignore[union-attr]
    for terms in model.history.terms:  # type: ignore[union-attr]
        assert all(math.isfinite(value) for value in terms.values())  # type: ignore[union-attr]
    fresh = cases.trained.__wrapped__(task, recipe)
    for name, value in fresh.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)


@pytest.mark.many
@pytest.mark.parametrize("task", ["link", "graph"])
@pytest.mark.parametrize("model", ["gatv2", "gt", "mine"])
def test_every_model_learns_every_task(task: str, model: str) -> None:
    trained = cases.trained(task, "vanilla", model)
    first, last = (trained.history.terms[i]["total"] for i in (0, -1))  # type: ignore[union-attr]
    assert last < first
    faithful = make_faithful(trained, cases.data(task), nodes=2, edges=3, epochs=2, progress=False)
    assert type(faithful) is type(trained)


@pytest.mark.parametrize("task", ["link", "graph"])
def test_killed_and_resumed_is_bit_equal(task: str, tmp_path: Any) -> None:
    graph = cases.data(task)
    seen = prepared(cases.untrained(task), task_of(graph).view(graph, "fit"))
    config = TrainConfig(epochs=6, lr=0.02)

    def run(folder: Any, stop: int | None = None) -> torch.nn.Module:
        model = cases.untrained(task)

        def maybe(epoch: int, values: dict[str, float]) -> None:
            if epoch == stop:
                raise KeyboardInterrupt

        fit(
            model,
            VanillaRecipe(seen),
            config,
            seed=2,
            checkpoint=folder,
            checkpoint_every=1,
            progress=False,
            tracker=Calling(maybe),
        )
        return model

    whole = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop=2)
    resumed = run(tmp_path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("task", ["link", "graph"])
def test_faithful_training_reads_no_labels(task: str) -> None:
    graph, model = cases.data(task), cases.trained(task)
    hidden = graph.replace(graph_y=None)
    if graph.links is not None:
        # Which pairs are links is the graph itself; what nobody may read is which validation pairs are.
        links = graph.links
        flipped = torch.where(links.part == 2, 1 - links.y, links.y)
        hidden = graph.replace(links=replace(links, y=flipped))
    options: dict[str, Any] = {"nodes": 2, "edges": 3, "epochs": 2, "progress": False}
    one, two = (make_faithful(model, data, **options) for data in (graph, hidden))
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("method", ["vanilla", "ln", "at", "fgai"])
@pytest.mark.parametrize("task", ["link", "graph"])
def test_every_method_by_name(task: str, method: str) -> None:
    small: dict[str, Any] = {"epochs": 2}
    if method not in ("vanilla", "ln"):
        small |= {"nodes": 2, "edges": 3}
    vanilla = cases.trained(task)
    model = train_method(method, "GAT", cases.data(task), vanilla=vanilla, settings=small, progress=False)
    assert model.task == task


def whole(task: str) -> EvaluationRecord:
    with attack_cases.quiet():
        return evaluate(
            cases.trained(task, "faithful"),
            cases.data(task),
            TINY,
            vanilla=cases.trained(task),
            k=2,
            per_node=True,
        )


@pytest.mark.many
@pytest.mark.parametrize("task", OTHER_TASKS_FIRST)
def test_every_metric_stays_in_its_range(task: str) -> None:
    record = whole(task)
    for name in TASKS[task].scores:
        values = record.value(name)
        assert set(values) - {"chance"} == {"clean", "attacked", "attacked_explanation"}
        assert all(0 <= value <= 1 for value in values.values())
    ranges = {"overlap": "overlap", "overlap_touched": "overlap", "rank_correlation": "rank_correlation"}
    for path, metric in ranges.items():
        spec = METRICS[metric]
        for attack in ("prediction", "explanation"):
            value = record.value(f"{path}.{attack}.all")
            assert value is None or spec.low <= value <= spec.high
    assert record.value("g_jsd.all") >= 0 and 0 <= record.value("g_tvd.probs") <= 1
    assert set(record.value("f_slope")) == {"graph", "node"}
    count = task_of(cases.data(task)).count(task_of(cases.data(task)).view(cases.data(task), "test"))
    prefix = "" if task == "node" else "item_"
    assert record.node_values(f"{prefix}predicted_clean").shape == (count,)
    assert EvaluationRecord.from_dict(record.to_dict()).to_dict() == record.to_dict()
    assert "| model" in record.to_markdown() or record.to_markdown()


@pytest.mark.parametrize("task", ["link", "graph"])
def test_explanations_of_links_and_graphs_equal_a_loop(task: str) -> None:
    k, model, graph = 2, cases.trained(task), cases.data(task)
    with attack_cases.quiet():
        result = PGDInjection(TINY.budget).run(model, graph, seed=2)
    seen = prepared(model, task_of(graph).view(graph, "test"))
    clean, attacked = (observe(model, g).averaged() for g in (seen, result.graph))
    compared, rows = AttentionPair(clean.attention, attacked.attention, k), task_of(seen).rows(seen, "test")
    pairs = compared.layers
    views = Views(graph=seen, observations={"clean": clean}, target=None, rows=rows, measured=rows, k=k)
    found = _item_overlaps(views, compared)
    ranks, shown = pairs[0].ranks, pairs[0].shown
    ends = seen.adjacency.destination.tolist()

    def top(values: torch.Tensor, edges: list[int]) -> set[int]:
        return set(sorted(edges, key=lambda e: (-float(values[e]), e))[:k])

    if task == "link":
        assert seen.links is not None
        into = {node: [e for e, end in enumerate(ends) if end == node] for node in range(seen.num_nodes)}
        for name, label in (("links", 1), ("pairs", 0)):
            shares = []
            for row in rows.tolist():
                if int(seen.links.y[row]) != label:
                    continue
                explained = [n for n in seen.links.pairs[:, row].tolist() if len(into[n]) > k]
                kept = sum(len(top(ranks[0], into[n]) & top(ranks[1], into[n])) for n in explained)
                shares += [kept / (k * len(explained))] if explained else []
            assert found[name]["layers"][0] == pytest.approx(sum(shares) / len(shares))
        return
    assert seen.batch is not None
    degree = seen.adjacency.degree
    shares = []
    for group in rows.tolist():
        edges = [e for e, end in enumerate(ends) if int(seen.batch[end]) == group]
        weight = degree[seen.adjacency.destination].float()
        kept = top(shown[0] * weight, edges) & top(shown[1] * weight, edges)
        shares.append(len(kept) / k)
    assert found["graphs"]["layers"][0] == pytest.approx(sum(shares) / len(shares))


@pytest.mark.parametrize("task", ["link", "graph"])
def test_validation_leaves_the_test_part_alone(task: str) -> None:
    graph, model = cases.data(task), cases.trained(task)
    hidden = graph.replace(graph_y=None if graph.graph_y is None else graph.graph_y.clone())
    if graph.links is not None:
        links = graph.links
        hidden = graph.replace(links=replace(links, y=torch.where(links.part == 2, 0, links.y)))
    else:
        assert graph.test_mask is not None and graph.batch is not None and hidden.graph_y is not None
        hidden.graph_y[torch.unique(graph.batch[graph.test_mask])] = 0
    options: dict[str, Any] = {"k": 2, "curves": False, "nulls": False, "targets": "val"}
    with attack_cases.quiet():
        one, two = (evaluate(model, data, TINY, **options) for data in (graph, hidden))
    assert one.metrics == two.metrics


@pytest.mark.parametrize("task", ["link", "graph"])
def test_models_of_another_task_are_refused(task: str) -> None:
    with pytest.raises(InputError, match="task"):
        evaluate(cases.trained("node"), cases.data(task), TINY)


@pytest.mark.many
@pytest.mark.parametrize("task", OTHER_TASKS_FIRST)
def test_models_are_compared_in_tables_of_the_task(task: str) -> None:
    models = {"GAT": cases.trained(task), "FGAI": cases.trained(task, "faithful")}
    with attack_cases.quiet():
        text = compare(models, cases.data(task), TINY, k=2, curves=False).to_markdown()
    for other in cases.TASKS:
        heading = {"node": "F1 clean", "link": "AP clean", "graph": "| accuracy clean"}[other]
        assert (heading in text) == (other == task)


@pytest.mark.parametrize("task", cases.TASKS)
def test_training_on_a_view_is_training_on_the_whole(task: str) -> None:
    graph = cases.data(task)
    options: dict[str, Any] = {"epochs": 3, "progress": False}
    one = train(cases.untrained(task), graph, **options)
    two = train(cases.untrained(task), task_of(graph).view(graph, "fit"), **options)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name


@pytest.mark.parametrize("task", cases.TASKS)
def test_the_explanations_are_certified_for_every_task(task: str) -> None:
    model, graph = cases.trained(task), cases.data(task)
    record = certify_attention(model, graph, vanilla=model, radius=0.01, k1=2, k2=2, alpha=1.0, beta=0.5)
    assert len(record.layers) == 2
    assert record.layer().prediction.class_status in ("exact", "bound")
    assert record.shares()["all_four"] is not None


@pytest.mark.many
@pytest.mark.parametrize("task", ["link", "graph"])
def test_reports_are_made_for_every_task(task: str) -> None:
    models = {"GAT": cases.trained(task), "FGAI": cases.trained(task, "faithful")}
    options: dict[str, Any] = {"k": 2, "curves": False, "per_node": True}
    with attack_cases.quiet():
        both = compare(models, cases.data(task), "standard" if task == "graph" else TINY, **options)
        attacks = {name: PGDInjection(TINY.budget).run(m, cases.data(task)) for name, m in models.items()}
        report = make_report(both, models=models, data=cases.data(task), attacks=attacks)
    page = render(report)
    words = {"link": "ROC-AUC on the tested links", "graph": "Tested graphs classified right"}
    assert words[task] in page and "nodes classified right" not in page
