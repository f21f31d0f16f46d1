"""Models that read edge features: fgai's call is the model's own on every graph attacks make of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attacks import DICE, PRBCD, TDGIA, Attack, FeaturePGD, PGDInjection, RandomEdges
from fgai.attacks.existing import _Flips, _random_pairs, _weighted_forward
from fgai.attention import call_model, observe, prepared
from fgai.graph import Graph
from support import attack_cases as cases
from support import own_cases as own
from support.forward import adding

Edges = dict[tuple[int, int], list[float]]


def as_dictionary(data: Any) -> Edges:
    """(source, destination) → attributes."""
    pairs = zip(*data.edge_index.tolist(), strict=True)
    return dict(zip(pairs, data.edge_attr.tolist(), strict=True))


def own_outputs(model: nn.Module, x: Tensor, edges: Edges) -> Tensor:
    """What the model says of edges in the order of a dictionary, without fgai."""
    ends = torch.tensor(list(edges)).t()
    with torch.no_grad():
        return model(x, ends, torch.tensor(list(edges.values())))


@pytest.mark.parametrize("conv", own.CONVS)
def test_attacked_graphs_equal_those_a_user_would_build(conv: str) -> None:
    model, data = own.own_model(conv), own.own_data()
    graph, edges = prepared(model, Graph.from_data(data)), as_dictionary(data)
    same = own_outputs(model, data.x, edges)
    torch.testing.assert_close(call_model(model, graph).detach(), same)
    assert torch.equal(call_model(model, graph).argmax(1), same.argmax(1))

    new = torch.rand(2, own.WIDTH, generator=torch.Generator().manual_seed(1))
    joined = graph.inject(torch.tensor([[0, 7, 3], [5, 1, 0]]), new)[0]
    ends = [(40, 0), (40, 7), (40, 3), (41, 5), (41, 1), (41, 0)]
    more = edges | {pair: [0.0, 0.0] for one in ends for pair in (one, one[::-1])}
    expected = own_outputs(model, torch.cat([data.x, new]), more)
    torch.testing.assert_close(call_model(model, joined).detach(), expected)
    assert float((expected[:40] - same).abs().max()) > 0.01

    gone = list(edges)[::3]
    places = [graph.edge_index.t().tolist().index(list(pair)) for pair in gone]
    fewer = {pair: value for pair, value in edges.items() if pair not in gone}
    left = graph.remove(torch.tensor(places))[0]
    torch.testing.assert_close(call_model(model, left).detach(), own_outputs(model, data.x, fewer))


@pytest.mark.parametrize("conv", own.CONVS)
def test_attributes_count_in_outputs_and_attention(conv: str) -> None:
    model = own.own_model(conv)
    graph = prepared(model, Graph.from_data(own.own_data()))
    seen, without = observe(model, graph), observe(model, graph.replace(edge_attr=0 * graph.edge_attr))
    assert float((seen.logits - without.logits).abs().max()) > 0.1
    for layer, other in zip(seen.attention, without.attention, strict=True):
        assert float((layer.values - other.values).abs().max()) > 0.01


@pytest.mark.many
@pytest.mark.parametrize("seed", [1, 2])
def test_another_order_of_edges_changes_nothing(seed: int) -> None:
    model, data = own.own_model(), own.own_data()
    options = {"nodes": 2, "edges": 3, "k": 2, "curves": False, "nulls": False}
    with cases.quiet():
        one, two = (
            fgai.evaluate(model, given, "standard", **options).to_dict()
            for given in (data, own.reordered(data, seed))
        )
    assert one["metrics"] == two["metrics"]
    assert one["metrics"]["f1"]["clean"] == own.own_accuracy(model, data)


@pytest.mark.parametrize("kind", [PGDInjection, TDGIA, RandomEdges, DICE, PRBCD, FeaturePGD])
def test_every_attack_keeps_attributes_with_their_edges(kind: type[Attack]) -> None:
    model, data = own.own_model(), own.own_data()
    with cases.quiet():
        result = cases.attack(kind).run(model, Graph.from_data(data), seed=1)
    before, after = as_dictionary(data), as_dictionary(result.graph)
    for pair, values in after.items():
        assert values == before.get(pair, [0.0, 0.0])


class Weighted(nn.Module):
    """Scales what it hears along an edge by the edge's weight, whatever its sign, and attends on top."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GATConv(own.WIDTH, own.CLASSES, edge_dim=1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_weight)


def test_a_search_over_partial_edges_leaves_the_users_weights_alone() -> None:
    torch.manual_seed(2)
    model, data = Weighted().eval(), own.own_data()
    data.edge_weight, data.edge_attr = data.edge_attr[:, 1] - 0.5, None
    graph = prepared(model, Graph.from_data(data))
    flips = _Flips(graph, graph.test_mask.nonzero().flatten())
    pairs = _random_pairs(flips.nodes.numel(), 9, torch.Generator().manual_seed(1))
    exact = flips.perturbation(pairs).apply(graph)[0]
    local = torch.cat([pairs, pairs.flip(0)], 1)
    there = torch.isin(fgai.sparse.edge_keys(*flips.nodes[local]), exact.keys)
    with torch.no_grad():
        logits, _ = _weighted_forward(model, *flips.weighted(local, there.float()))
        torch.testing.assert_close(logits, call_model(model, exact))
        assert not torch.allclose(logits, call_model(model, graph))
        doubled = call_model(model, graph.replace(edge_weight=2 * graph.edge_weight))
        assert not torch.allclose(doubled, call_model(model, graph))


@pytest.mark.many
@pytest.mark.parametrize("conv", own.CONVS)
def test_certificates_of_such_models_hold(conv: str) -> None:
    model, data = own.own_model(conv), own.own_data()
    certificate = fgai.certify_attention(model, data, radius=0.01).layer().prediction
    assert certificate.class_status == "exact"
    graph = prepared(model, Graph.from_data(data))
    seen = observe(model, graph)
    last, radius = seen.attention.last, certificate.class_radius
    rows, generator = last.destination, torch.Generator().manual_seed(0)
    flipped = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for share, _ in itertools.product((0.99, 3.0), range(40)):
        order = torch.rand(last.num_edges, generator=generator)
        highest = torch.zeros(graph.num_nodes).scatter_reduce(0, rows, order, "amax")
        lowest = torch.ones(graph.num_nodes).scatter_reduce(0, rows, order, "amin")
        sign = (order == highest[rows]).float() - (order == lowest[rows]).float()
        size = radius.nan_to_num(posinf=0.0).float()[rows] * share / 2  # l1: half onto one edge, half off one
        delta = (sign * size)[:, None]
        moved = observe(model, graph, perturb=adding({1: delta})).logits.argmax(1) != seen.logits.argmax(1)
        assert share > 1 or not bool(moved.any())
        flipped |= moved
    assert int(flipped.sum()) > 5  # and beyond the radius classes do change
