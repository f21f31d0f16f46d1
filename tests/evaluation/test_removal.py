"""Touched nodes against a slow search; removal curves against graphs without the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fgai import metrics
from fgai.attention import (
    AttentionMap,
    LayerAttention,
    call_model,
    evaluating,
    observe,
    prepared,
    touched_rows,
)
from fgai.attention.reach import _reach_and_moved
from fgai.graph import Graph
from fgai.metrics.removal import _predict_without, _removal_curves, combined
from fgai.metrics.views import AttentionPair
from support import attack_cases as cases
from support.evaluate_cases import KINDS, tiny_threat
from support.graph_cases import build, edge_sets


def slow_touched(graph: Graph, attacked: Graph, changed: list[int], depth: int) -> list[list[bool]]:
    """Breadth-first over sets: the definition, with neither tensors nor tricks."""
    old = set(zip(*graph.edge_index.tolist(), strict=True)) if graph.num_edges else set()
    new = set(zip(*attacked.edge_index.tolist(), strict=True)) if attacked.num_edges else set()
    moved = set(range(graph.num_nodes, attacked.num_nodes)) | set(changed)
    out = []
    for _ in range(depth):
        rows = set(moved) | {d for s, d in new if s in moved} | {d for s, d in old ^ new}
        moved = rows
        out.append([node in rows for node in range(graph.num_nodes)])
    return out


def as_attention(graph: Graph, depth: int) -> AttentionMap:
    layer = LayerAttention.from_adjacency(graph.adjacency, torch.ones(graph.num_edges, 1))
    return AttentionMap((layer,) * depth)


@given(edge_sets(min_nodes=2), st.data())
def test_touched_nodes_equal_a_breadth_first_search(
    case: tuple[int, list[tuple[int, int]]], data: Any
) -> None:
    nodes, edges = case
    graph, depth = build(nodes, edges), data.draw(st.integers(1, 4))
    node = st.integers(0, nodes - 1)
    changed: list[int] = []
    kind = data.draw(st.sampled_from(["inject", "edges", "remove", "features"]))
    if kind == "inject":
        attacked = graph.inject(torch.tensor([[data.draw(node)], [data.draw(node)]]))[0]
    elif kind == "edges":
        attacked = graph.inject_edges(torch.tensor([[data.draw(node)], [data.draw(node)]]))[0]
    elif kind == "remove" and graph.num_edges:
        attacked = graph.remove(torch.tensor([data.draw(st.integers(0, graph.num_edges - 1))]))[0]
    else:
        attacked, changed = graph, data.draw(st.lists(node, max_size=3, unique=True))
    given_rows = torch.tensor(changed, dtype=torch.long) if changed else None
    found = touched_rows(as_attention(graph, depth), as_attention(attacked, depth), given_rows)
    assert [rows.tolist() for rows in found] == slow_touched(graph, attacked, changed, depth)


@pytest.mark.parametrize(("model", "kind"), cases.pairwise(cases.ATTENTION, tuple(KINDS)))
def test_attention_out_of_reach_did_not_move(model: str, kind: str) -> None:
    """The theory behind `touched`: everywhere else the rows are what they were."""
    network, threat = cases.trained(model, "vanilla"), tiny_threat(kind)
    graph = prepared(network, cases.tiny_graph())
    with cases.quiet():
        result = cases.attack(threat.attack).run(network, graph)
    before, after = (
        observe(network, graph).averaged().attention,
        observe(network, result.graph).averaged().attention,
    )
    touched = _reach_and_moved(before, after, result.change.rows)[0]
    assert all(
        torch.equal(*pair)
        for pair in zip(touched, touched_rows(before, after, result.change.rows), strict=True)
    )
    for rows, pair in zip(touched, AttentionPair(before, after, 5).layers, strict=True):
        moved = (pair.before - pair.after).abs() > 1e-6
        ends = torch.repeat_interleave(torch.arange(graph.num_nodes), pair.rowptr.diff())
        assert not bool(moved[~rows[ends]].any())
        assert bool(moved.any())


# Curves and fidelity.


@pytest.mark.parametrize("model", ["gat", "gatv2", "gt"])
def test_masking_attention_is_removing_edges(model: str) -> None:
    network = cases.trained(model, "vanilla")
    graph = prepared(network, cases.tiny_graph())
    view = observe(network, graph).averaged()
    gone = torch.arange(0, graph.num_edges, 3)
    left = graph.remove(gone)[0]
    with evaluating(network), torch.no_grad():
        expected = network.read_out(network.embed(left), left)  # type: ignore[operator]
    assert not left.has_loops
    found = _predict_without(network, view, graph.keys[gone])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_masking_attention_is_removing_edges_in_a_users_model() -> None:
    network, graph = cases.trained("pyg", "vanilla"), cases.tiny_graph()
    view = observe(network, graph).averaged()
    gone = torch.arange(0, graph.num_edges, 4)
    with evaluating(network), torch.no_grad():
        expected = call_model(network, graph.remove(gone)[0])
    found = _predict_without(network, view, graph.keys[gone])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["graph", "node"])
def test_curves_equal_a_loop_over_graphs(scope: str) -> None:
    network = cases.trained("gat", "vanilla")
    graph = prepared(network, cases.tiny_graph())
    view = observe(network, graph).averaged()
    assert graph.y is not None
    right = view.logits.argmax(1) == graph.y
    scored = view.attention.last if scope == "graph" else view.attention.over_layers("mean")
    found = _removal_curves(network, view, scored, scope, right, graph.y)
    weights, ends = scored.values[:, 0].tolist(), list(zip(*graph.edge_index.tolist(), strict=True))
    for largest, name in ((True, "curve_plus"), (False, "curve_minus")):
        shares = []
        for fraction in metrics.FRACTIONS:
            gone: list[int] = []
            rows = [range(graph.num_edges)]
            if scope == "node":
                rows = [[e for e, (s, d) in enumerate(ends) if d == i and s != d] for i in range(30)]  # type: ignore[misc]
            for row in rows:
                ranked = sorted(row, key=lambda e: -weights[e] if largest else weights[e])
                gone += ranked[: int(fraction * len(ranked) + 0.5 + 1e-9)]
            left = graph.remove(torch.tensor(sorted(gone), dtype=torch.long))[0]
            with evaluating(network), torch.no_grad():
                guess = network.read_out(network.embed(left), left).argmax(1)  # type: ignore[operator]
            shares.append(float((guess == graph.y)[right].double().mean()))
        assert found[name] == pytest.approx(shares)
    slope = np.polyfit(metrics.FRACTIONS, found["curve_minus"], 1)[0]
    assert found["minus"] == pytest.approx(slope, abs=1e-9)
    assert found["gap"] == pytest.approx(found["minus"] - found["plus"])


def test_layers_on_different_edges_are_ranked_on_common_ones() -> None:
    few = LayerAttention.from_edges(torch.tensor([[0.4], [0.6]]), [0, 1], [2, 2], num_nodes=3)
    many = LayerAttention.from_edges(torch.tensor([[0.2], [0.2], [0.6]]), [0, 1, 2], [2, 2, 2], num_nodes=3)
    mean = combined(AttentionMap((few, many)))
    assert mean.source.tolist() == [0, 1]
    assert mean.values.flatten().tolist() == pytest.approx([0.3, 0.4])
