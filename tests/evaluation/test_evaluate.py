"""The protocol: what is compared, what is kept, and what is said when numbers mislead."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

import fgai
from fgai import metrics
from fgai.attacks import RandomInjection, Threat
from fgai.attention import (
    AttentionMap,
    GraphModel,
    LayerAttention,
    call_model,
    evaluating,
    observe,
    prepared,
    touched_rows,
)
from fgai.errors import FgaiWarning
from fgai.evaluation import EvaluationRecord, evaluate
from fgai.graph import Graph
from fgai.metrics.removal import _fidelity_of_top, _removal_curves, combined
from fgai.metrics.views import AttentionPair, Views
from support import attack_cases as cases
from support.evaluate_cases import KINDS, THREAT, record_of, tiny_threat, whole_record


@contextmanager
def told(code: str) -> Iterator[None]:
    """Expect a warning of this code; tiny models give others too, which are no news here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert code in {getattr(entry.message, "code", "") for entry in caught}


@pytest.fixture
def whole() -> EvaluationRecord:
    return whole_record()


# The numbers of a record, against independent ones.


def test_scores_equal_sklearn(whole: EvaluationRecord) -> None:
    graph, model = cases.tiny_graph(), cases.trained("gat", "faithful")
    with evaluating(model), torch.no_grad():
        guess = call_model(model, prepared(model, graph)).argmax(1)
    mask = graph.test_mask
    assert graph.y is not None
    expected = f1_score(graph.y[mask], guess[mask], average="micro")
    assert whole.value("f1.clean") == pytest.approx(expected)
    scored, right = whole.node_values("scored"), whole.node_values("correct_attacked")
    assert whole.value("f1.attacked") == pytest.approx(right[scored].mean())


def test_per_node_values_are_behind_the_means(whole: EvaluationRecord) -> None:
    graph = cases.tiny_graph()
    for name, path in (
        ("overlap_prediction", "overlap.prediction"),
        ("overlap_explanation", "overlap.explanation"),
        ("overlap_vanilla", "similarity.overlap"),
        ("sharpness", "sharpness.clean"),
    ):
        values = np.nanmean(whole.node_values(name), axis=1)
        np.testing.assert_allclose(values, whole.value(f"{path}.layers"), rtol=1e-5)
    touched = whole.node_values("touched")
    np.testing.assert_allclose(touched.mean(1), whole.value("touched.layers"))
    near = np.where(touched, whole.node_values("overlap_prediction"), np.nan)
    expected = whole.value("overlap_touched.prediction.layers")
    np.testing.assert_allclose(np.nanmean(near, axis=1), expected, rtol=1e-5)
    np.testing.assert_array_equal(whole.node_values("degree"), graph.adjacency.degree)
    assert whole.value("g_tvd.probs") == pytest.approx(whole.node_values("tvd").mean(), rel=1e-4)
    few = graph.adjacency.degree.numpy() + 1 <= cases.K  # with the loop the model adds
    np.testing.assert_array_equal(np.isnan(whole.node_values("overlap_prediction")), np.stack([few, few]))


def test_summaries_of_layers() -> None:
    nan = float("nan")
    views = cast(Views, SimpleNamespace(sharpest=0))
    assert Views.by_layer(views, [0.25, nan, 0.75]) == {
        "layers": [0.25, pytest.approx(nan, nan_ok=True), 0.75],
        "last": 0.75,
        "all": 0.5,
        "sharpest": 0.25,
    }


def test_the_sharpest_layer_is_the_parents(whole: EvaluationRecord) -> None:
    vanilla = record_of("gat")
    sharp = vanilla.value("sharpness.clean.layers")
    assert whole.value("sharpest") == sharp.index(max(sharp))
    assert whole.value("sharpness.vanilla.layers") == sharp and vanilla.get("sharpness.vanilla") is None


def test_a_model_is_similar_to_itself() -> None:
    model = cases.trained("gatv2", "vanilla")
    record = record_of(model, vanilla=model)
    for name in ("overlap", "overlap_graph", "rank_correlation"):
        assert record.value(f"similarity.{name}.layers") == pytest.approx([1.0, 1.0])


def test_a_parent_of_another_depth_is_told() -> None:
    graph = cases.tiny_graph()
    deep = fgai.GAT.for_data(graph, num_layers=3, hidden_channels=2, heads=2)
    with cases.quiet(), pytest.warns(FgaiWarning, match="3 attention layers, the model 2.*all_four"):
        record = record_of("gat", vanilla=deep)
    assert record.get("similarity") is None
    shares = record.value("definition.r01")
    assert [shares[name]["last"] for name in ("same_explanation", "all_four")] == [None, None]


@pytest.mark.many
@pytest.mark.parametrize(
    ("model", "kind"), [*((m, "inject") for m in cases.ATTENTION), *(("gat", k) for k in KINDS)]
)
def test_every_model_under_every_kind_of_threat(model: str, kind: str) -> None:
    record = record_of(model, tiny_threat(kind))
    assert record.threat["name"] == kind
    shares = record.value("touched.layers")
    assert 0 < shares[0] <= shares[1] <= 1
    assert record.value("overlap_touched.prediction.all") <= record.value("overlap.prediction.all") + 1e-9
    assert set(record.ledgers) == {"prediction", "explanation"}
    assert EvaluationRecord.from_dict(json.loads(record.to_json())) == record


def test_the_seed_has_an_effect_and_fixes_everything() -> None:
    first, same, other = (record_of("gat", seed=seed) for seed in (5, 5, 6))
    assert first.metrics == same.metrics
    assert first.metrics != other.metrics
    for ledger in (first.ledgers, same.ledgers):
        for entry in ledger.values():
            entry.pop("seconds")
    assert first.ledgers == same.ledgers


def test_validation_targets_leave_test_nodes_alone() -> None:
    graph = cases.tiny_graph()
    record = record_of("gat", targets="val", per_node=True)
    np.testing.assert_array_equal(record.node_values("scored"), graph.val_mask)
    blind = graph.replace(y=torch.where(graph.test_mask, (graph.y + 1) % 3, graph.y))  # type: ignore[operator, arg-type]
    again = record_of("gat", targets="val", graph=blind)
    assert record.value("f1") == again.value("f1")


# What must not change the numbers.


class Scaled(GraphModel):
    """A model with its logits multiplied."""

    def __init__(self, model: Any, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def prepare(self, graph: Graph) -> Graph:
        return self.model.prepare(graph)  # type: ignore[no-any-return]

    def forward(self, graph: Graph) -> Tensor:
        return self.factor * self.model(graph)  # type: ignore[no-any-return]


def test_small_logits_buy_no_stability() -> None:
    model = cases.trained("gat", "vanilla").double()
    graph = cases.tiny_graph()
    assert graph.features is not None
    graph = graph.replace(features=graph.features.to("cpu", torch.float64))
    try:
        # A random threat: the same perturbation whatever the scale of the gradients.
        plain_, small = (
            record_of(m, tiny_threat("random"), graph=graph)
            for m in (Scaled(model, 1.0), Scaled(model, 0.01))
        )
    finally:
        model.float()
    assert small.value("f1") == plain_.value("f1")
    assert small.value("g_tvd.rel") == pytest.approx(plain_.value("g_tvd.rel"), rel=1e-9)
    assert small.value("g_tvd.logits") == pytest.approx(0.01 * plain_.value("g_tvd.logits"), rel=1e-9)
    assert small.value("g_jsd") == plain_.value("g_jsd")


@pytest.mark.parametrize("model", ["gat", "pyg"])
def test_relabelling_changes_nothing(model: str) -> None:
    """Metrics of the same perturbation, before and after the nodes got other numbers."""
    network, graph = cases.trained(model, "vanilla"), cases.tiny_graph()
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    where = order.argsort()  # old number → new number
    fields = {n: getattr(graph, n)[order] for n in ("y", "train_mask", "val_mask", "test_mask")}
    assert graph.features is not None
    other = Graph.from_edges(
        where[graph.edge_index], graph.num_nodes, graph.features.to_dense()[order], **fields
    )
    extra = torch.tensor([[3, 8, 12], [20, 4, 8]])
    new = 0.5 * torch.ones(2, graph.num_features)
    found = []
    for shown, ends in ((graph, extra), (other, where[extra])):
        ready = prepared(network, shown)
        before, after = (
            observe(network, ready).averaged(),
            observe(network, ready.inject(ends, new)[0]).averaged(),
        )
        pairs = AttentionPair(before.attention, after.attention, 5).layers
        touched = touched_rows(before.attention, after.attention)
        assert shown.y is not None
        right = before.logits.argmax(1) == shown.y
        found.append(
            [metrics.g_jsd(p.before, p.after) for p in pairs]
            + [metrics.overlap(p.before, p.after, p.rowptr, 2) for p in pairs]
            + [metrics.sharpness(p.after, p.rowptr) for p in pairs]
            + [float(rows.double().mean()) for rows in touched]
            + list(_fidelity_of_top(network, after, torch.arange(30), 2).values())
            + _removal_curves(network, after, combined(after.attention), "node", right, shown.y)["curve_plus"]
        )
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_attention_that_did_not_move_scores_exactly_zero_and_one() -> None:
    """The misalignment trap: injected edges re-sort the arrays, the attention on old edges stays."""
    graph = prepared(cases.trained("gat", "vanilla"), cases.tiny_graph())
    before = observe(cases.trained("gat", "vanilla"), graph).averaged().attention
    attacked, edge_map = graph.inject(torch.tensor([[3, 8, 12, 5], [20, 4, 8, 1]]), torch.ones(2, 6))
    layers = []
    for layer in before:
        values = torch.rand(attacked.num_edges, 1, generator=torch.Generator().manual_seed(1))
        values[edge_map.after] = layer.values[edge_map.before]
        layers.append(LayerAttention.from_adjacency(attacked.adjacency, values, layer.name))
    after = AttentionMap(tuple(layers))
    for pair in AttentionPair(before, after, 5).layers:
        assert metrics.g_jsd(pair.before, pair.after) == 0.0
        assert metrics.overlap(pair.before, pair.after, pair.rowptr, 2) == 1.0
    # By array position, as has been done elsewhere, almost every edge meets another one.
    prefix = after[0].values[: graph.num_edges, 0]
    assert metrics.g_jsd(before[0].values[:, 0], prefix) > 0


class Blind(cases.PygModel):
    """A user's model that never looks beyond the first 30 nodes."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.load_state_dict(cases.trained("pyg", "vanilla").state_dict())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        seen = super().forward(x[:30], edge_index[:, (edge_index < 30).all(0)])
        return torch.cat([seen, seen.new_zeros(x.shape[0] - 30, 3)])


def test_an_attack_without_effect_leaves_every_number_at_rest() -> None:
    graph = cases.tiny_graph()
    model = Blind()
    with told("zero-gradient"):
        record = evaluate(model, graph, THREAT, k=2, curves=False, nulls=False)
    assert record.value("g_jsd.layers") == [0.0, 0.0]
    assert record.value("overlap.prediction.layers") == [1.0, 1.0]
    assert record.value("overlap.explanation.layers") == [1.0, 1.0]
    assert record.value("overlap_graph.prediction.all") == 1.0
    assert record.value("rank_correlation.prediction.all") == 1.0
    assert record.value("touched.all") == 0.0
    assert record.value("overlap_touched.prediction.all") is None
    assert record.value("g_tvd") == {"logits": 0.0, "probs": 0.0, "rel": 0.0}
    assert record.value("f1.clean") == record.value("f1.attacked")
    assert "zero-gradient" in {entry["code"] for entry in record.warnings}


# Null rows and ground truth.


def test_null_rows_say_nothing(whole: EvaluationRecord) -> None:
    assert whole.value("null.uniform.sharpness.all") == 0.0
    assert whole.value("null.uniform.overlap.all") == 1.0
    assert whole.value("null.uniform.f_slope.node.clean.gap") == 0.0
    assert "g_jsd" not in whole.value("null.random")
    chance = whole.value("overlap.chance.all")
    assert abs(whole.value("null.random.overlap.all") - chance) < 0.35
    assert abs(whole.value("null.random.similarity.overlap.all") - chance) < 0.35


def test_ground_truth_is_measured_where_there_is_one() -> None:
    graph = cases.tiny_graph()
    source, destination = graph.edge_index
    assert graph.y is not None
    truth = (graph.y[source] == graph.y[destination]) & (torch.arange(graph.num_edges) % 3 > 0)
    network = cases.trained("gat", "vanilla")
    record = record_of(network, graph=graph.replace(edge_truth=truth), nulls=True)
    ready = prepared(network, graph)
    attention = observe(network, ready).averaged().attention
    for (index, layer), (name, how) in product(enumerate(attention), (("auc", "log"), ("auc_mean", "mean"))):
        weights = dict(zip(layer.keys.tolist(), layer.heads(how).tolist(), strict=True))
        told = {int(d) for d in destination[truth]}
        pairs = [
            (weights[int(key)], bool(t))
            for key, t, d in zip(graph.keys, truth, destination, strict=True)
            if int(d) in told
        ]
        wins = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a, good in pairs
            if good
            for b, bad in pairs
            if not bad
        ]
        assert record.value(f"truth.{name}.layers.{index}") == pytest.approx(sum(wins) / len(wins))
    assert record.value("null.uniform.truth.auc_node.all") == pytest.approx(0.5)


# Warnings.


class Wrapped(nn.Module):
    """A user's model with something done to its logits."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.model = copy.deepcopy(cases.trained("pyg", "vanilla"))
        self.change = change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.change(self.model(x, edge_index))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda y: y.softmax(1), "probabilities"),
        (lambda y: y.log_softmax(1), "log-probabilities"),
        (lambda y: y + 0.1 * torch.randn_like(y), "not-deterministic"),
        (lambda y: y * 0 + torch.tensor([0.0, 0.0, 5.0]), "chance-level"),
    ],
)
def test_misleading_models_are_told(change: Any, code: str) -> None:
    with told(code):
        record = evaluate(Wrapped(change), cases.tiny_graph(), THREAT, k=2, curves=False, nulls=False)
    assert code in {entry["code"] for entry in record.warnings}


def test_flat_attention_is_told() -> None:
    model = copy.deepcopy(cases.trained("gat", "vanilla"))
    with torch.no_grad():
        for conv in model.convs:  # type: ignore[union-attr]
            conv.source_weight.zero_()
    with told("flat-attention"):
        record = evaluate(model, cases.tiny_graph(), tiny_threat("random"), k=2, curves=False, nulls=False)
    assert record.value("sharpness.clean.all") == pytest.approx(0.0, abs=1e-6)


def test_a_k_no_node_can_meet_is_told() -> None:
    with told("no-ranked-nodes"):
        record = evaluate(
            cases.trained("gat", "vanilla"), cases.tiny_graph(), THREAT, k=29, curves=False, nulls=False
        )
    assert record.value("overlap.prediction.all") is None


def test_a_split_that_leaks_is_told() -> None:
    graph = cases.tiny_graph()
    leaky = graph.replace(train_mask=graph.train_mask | graph.test_mask)  # type: ignore[operator]
    with told("split-overlap"):
        evaluate(cases.trained("gat", "vanilla"), leaky, THREAT, k=2, curves=False, nulls=False)


def test_a_budget_that_reaches_everyone_is_told() -> None:
    threat = Threat("all", RandomInjection, fgai.attacks.Budget(nodes=2, edges=15), "joins every test node")
    with told("budget-hits-all"):
        evaluate(cases.trained("gat", "vanilla"), cases.tiny_graph(), threat, k=2, curves=False, nulls=False)


def test_every_code_has_its_entry_in_the_docs() -> None:
    root = Path(fgai.__file__).parents[2]
    page = root / "docs" / "reliability.md"
    if not page.exists():
        pytest.skip("the docs are not beside the package")
    pattern = re.compile(r'(?:ReliabilityWarning\(|warn\(|code, text = )\s*"([a-z-]+)"')
    sources = sorted(Path(fgai.__file__).parent.rglob("*.py"))
    codes = {code for path in sources for code in pattern.findall(path.read_text(encoding="utf-8"))}
    told = set(re.findall(r"^## `([a-z-]+)`", page.read_text(encoding="utf-8"), flags=re.M))
    assert codes and codes <= told, sorted(codes - told)


def test_a_model_that_is_right_nowhere_has_no_slopes() -> None:
    network, graph = cases.trained("gat", "vanilla"), cases.tiny_graph()
    with evaluating(network), torch.no_grad():
        wrong = (call_model(network, prepared(network, graph)).argmax(1) + 1) % 3
    record = record_of(network, graph=graph.replace(y=wrong), nulls=True, curves=True)
    assert record.value("f1.clean") == 0.0
    assert record.value("f_slope.node.clean.gap") is None
    assert EvaluationRecord.from_dict(record.to_dict()).value("f_slope.node.clean.plus") is None
