"""Graphs made from a graph, once: moved to a device, with loops or encodings."""

from __future__ import annotations

import torch

from support.graph_cases import build


def test_moving_to_where_it_is_copies_nothing() -> None:
    graph = build(5, [(0, 1), (1, 2), (3, 3)])
    assert graph.to("cpu") is graph and graph.to(torch.device("cpu")) is graph
    assert graph.to("meta") is not graph


def test_derived_graphs_are_made_once_and_kept_with_the_graph() -> None:
    graph = build(5, [(0, 1), (1, 2), (3, 3)])
    made = graph.derived("self-loops", lambda one: one.add_self_loops()[0])
    assert made.has_loops and graph.derived("self-loops", lambda one: one) is made
    assert graph.derived("other", lambda one: one.replace(name="other")).name == "other"
    assert "_derived" not in graph.replace(name="again").__dict__
    weighted = graph.replace(edge_weight=torch.ones(3))
    first, second = (weighted.derived("self-loops", lambda one: one.add_self_loops()[0]) for _ in range(2))
    assert first is not second and first.edge_weight is not None
