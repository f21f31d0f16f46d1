"""Values on edges keep to their edges: from any order, through every edit, against a dictionary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Batch, Data

import fgai
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.graph.fingerprint import fingerprint
from fgai.tasks.batch import _take_graphs
from support.graph_cases import MAX_NODES, Sample, edge_sets, edge_tensor

Values = dict[tuple[int, int], tuple[float, float]]
NEW = (0.0, 1.0)
"""What edges that edits add have: an attribute of 0 (in every column) and a weight of 1."""


def valued(nodes: int, edges: list[tuple[int, int]], seed: int = 0, **options: Any) -> tuple[Graph, Values]:
    """A graph whose edges come in a random order with values of their own, and the same as a dictionary."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(edges), generator=generator).tolist()
    shuffled = [edges[place] for place in order]
    attributes = torch.rand(len(edges), generator=generator) + 1
    weights = torch.rand(len(edges), generator=generator) + 2
    graph = Graph.from_edges(
        edge_tensor(shuffled),
        nodes,
        torch.arange(3.0 * nodes).view(nodes, 3),
        edge_attr=torch.stack([attributes, -attributes], dim=1),
        edge_weight=weights,
        **options,
    )
    pairs = zip(attributes.tolist(), weights.tolist(), strict=True)
    return graph, dict(zip(shuffled, pairs, strict=True))


def assert_values(graph: Graph, wanted: Values) -> None:
    """Every edge has the values the dictionary has for it, and no other edge is there."""
    attributes, weights = graph.edge_attr, graph.edge_weight
    assert attributes.shape == (graph.num_edges, 2) and weights.shape == (graph.num_edges,)
    assert torch.equal(attributes[:, 1], -attributes[:, 0])
    ends = zip(*graph.edge_index.tolist(), strict=True) if graph.num_edges else ()
    pairs = zip(attributes[:, 0].tolist(), weights.tolist(), strict=True)
    assert dict(zip(ends, pairs, strict=True)) == wanted


@given(edge_sets(), st.integers(0, 2**20))
def test_the_order_of_the_edges_is_of_no_account(sample: Sample, seed: int) -> None:
    nodes, edges = sample
    first, wanted = valued(nodes, edges, seed)
    assert_values(first, wanted)
    data = first.to_data()
    order = torch.randperm(first.num_edges, generator=torch.Generator().manual_seed(seed))
    mixed = Data(
        x=data.x,
        edge_index=data.edge_index[:, order],
        edge_attr=data.edge_attr[order],
        edge_weight=data.edge_weight[order],
    )
    again = Graph.from_data(mixed)
    assert_values(again, wanted)
    assert torch.equal(again.edge_attr, first.edge_attr) and fingerprint(again) == fingerprint(first)


@given(edge_sets(min_nodes=2), st.data())
def test_every_edit_keeps_values_with_their_edges(sample: Sample, data: st.DataObject) -> None:
    nodes, edges = sample
    graph, wanted = valued(nodes, edges)
    node = st.integers(0, nodes - 1)
    if data.draw(st.booleans(), "loops"):
        graph = graph.add_self_loops()[0]
        wanted = {**{(i, i): NEW for i in range(nodes)}, **wanted}
        assert_values(graph, wanted)
    gone = data.draw(st.sets(st.integers(0, graph.num_edges - 1)) if graph.num_edges else st.just(set()))
    ends = graph.edge_index.t().tolist()
    graph = graph.remove(torch.tensor(sorted(gone), dtype=torch.long))[0]
    wanted = {edge: value for edge, value in wanted.items() if list(edge) not in [ends[i] for i in gone]}
    assert_values(graph, wanted)
    pairs = data.draw(st.lists(st.tuples(node, node), max_size=4))
    graph = graph.inject_edges(edge_tensor(pairs))[0]
    wanted = {**dict.fromkeys(pairs, NEW), **wanted}
    assert_values(graph, wanted)
    rows = data.draw(st.lists(st.lists(node, min_size=2, max_size=2, unique=True), min_size=1, max_size=3))
    loops = [(nodes + i, nodes + i) for i in range(len(rows))] if graph.has_loops else []
    graph = graph.inject(torch.tensor(rows))[0]
    new = [(nodes + i, old) for i, row in enumerate(rows) for old in row]
    wanted |= {edge: NEW for one in new for edge in (one, one[::-1])} | dict.fromkeys(loops, NEW)
    assert_values(graph, wanted)


def test_a_change_keeps_the_values_of_the_edges_that_stay() -> None:
    graph, wanted = valued(MAX_NODES, [(0, 1), (1, 0), (1, 2), (2, 1), (4, 3), (3, 4)])
    change = GraphChange(edges=torch.tensor([[0], [5]]), removed=torch.tensor([[1], [2]]))
    for pair in ((1, 2), (2, 1)):
        del wanted[pair]
    assert_values(change.apply(graph)[0], wanted | {(0, 5): NEW, (5, 0): NEW})
    joined = GraphChange(endpoints=torch.tensor([[0, 3]])).apply(graph)[0]
    assert joined.edge_attr.count_nonzero() == 2 * graph.num_edges and joined.num_edges == graph.num_edges + 4


def test_small_graphs_bring_their_values_along() -> None:
    one, ones = valued(3, [(0, 1), (2, 1), (2, 2)], seed=1)
    two, twos = valued(4, [(3, 0), (1, 2)], seed=2)
    pair = [graph.to_data() for graph in (one, two)]
    both = Graph.from_data(
        Batch.from_data_list([data.update({"y": torch.tensor([i])}) for i, data in enumerate(pair)])
    )
    assert_values(both, ones | {(3 + a, 3 + b): value for (a, b), value in twos.items()})
    assert_values(_take_graphs(both, torch.tensor([1])), twos)


def test_both_directions_of_an_undirected_edge_have_its_values() -> None:
    graph, wanted = valued(5, [(0, 1), (2, 3)], undirected=True)
    assert_values(graph, wanted | {edge[::-1]: value for edge, value in wanted.items()})


def test_duplicates_must_agree() -> None:
    edges = torch.tensor([[0, 1, 0, 2], [1, 2, 1, 0]])
    with pytest.warns(fgai.FgaiWarning, match="1 duplicate edges"):
        graph = Graph.from_edges(edges, 3, edge_attr=torch.tensor([4.0, 5.0, 4.0, 6.0]))
    assert graph.edge_attr.tolist() == [6.0, 4.0, 5.0]
    for name, remedy in (("edge_attr", "edge_attr, reduce"), ("edge_weight", "edge_weight, reduce")):
        with pytest.raises(InputError, match=rf"1 duplicate edges have different `{name}`.*{remedy}"):
            Graph.from_edges(edges, 3, **{name: torch.tensor([4.0, 5.0, 4.5, 6.0])})
    with pytest.raises(InputError, match="duplicate edges have different"):
        Graph.from_edges(
            torch.tensor([[0, 1], [1, 0]]), 2, undirected=True, edge_attr=torch.tensor([1.0, 2.0])
        )


NAN = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [0.0, 0.0]])
BAD: dict[str, tuple[str, Any, str]] = {
    "too short": ("edge_attr", torch.ones(2, 2), r"shape \[3\] or \[3, D\], got \(2, 2\)"),
    "a number": ("edge_attr", torch.tensor(1.0), r"one entry per column of `edge_index`"),
    "too deep": ("edge_attr", torch.ones(3, 2, 2), r"got \(3, 2, 2\)"),
    "not finite": ("edge_attr", NAN, r"`edge_attr` must be finite, got 1 NaN.*row 1"),
    "no tensor": ("edge_attr", [1.0, 2.0, 3.0], "must be a dense tensor, got list"),
    "wide weights": ("edge_weight", torch.ones(3, 1), r"shape \[3\], got \(3, 1\)"),
    "infinite weight": (
        "edge_weight",
        torch.tensor([1.0, float("inf"), 2.0]),
        "`edge_weight` must be",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused(case: str) -> None:
    name, values, words = BAD[case]
    data = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]))
    data[name] = values
    with pytest.raises(InputError, match=words):
        Graph.from_data(data)


def test_values_enter_the_fingerprint_and_move_with_the_graph() -> None:
    graph, _ = valued(4, [(0, 1), (2, 3), (3, 1)])
    bare = graph.replace(edge_attr=None, edge_weight=None)
    others = [
        bare,
        graph.replace(edge_attr=None),
        graph.replace(edge_weight=None),
        graph.replace(edge_attr=2 * graph.edge_attr),
        graph.replace(edge_weight=2 * graph.edge_weight),
    ]
    assert len({fingerprint(one) for one in (graph, *others)}) == 1 + len(others)
    moved = graph.to("meta")
    assert moved.edge_attr.device.type == moved.edge_weight.device.type == "meta"
    assert bare.add_self_loops()[0].edge_attr is None


def test_gradients_reach_values_through_edits() -> None:
    graph, _ = valued(4, [(0, 1), (2, 3), (3, 1)])
    attributes: Tensor = graph.edge_attr.clone().requires_grad_()
    given = graph.replace(edge_attr=attributes, edge_weight=None)
    one, two = (given.derived("self-loops", lambda g: g.add_self_loops()[0]) for _ in range(2))
    assert one is not two
    one.edge_attr.sum().backward()
    assert torch.equal(attributes.grad, torch.ones_like(attributes))


def test_negative_weights_are_refused_by_fgais_own_models_alone() -> None:
    data = Data(
        x=torch.rand(4, 3),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        y=torch.tensor([0, 1, 0, 1]),
        edge_weight=torch.tensor([0.5, -1.0, 2.0]),
    )
    model = fgai.GAT.for_data(data).eval()
    with pytest.raises(InputError, match="`edge_weight` of 'graph' must be at least 0 for GAT"):
        fgai.attention.prepared(model, Graph.from_data(data))
    data.edge_weight = data.edge_weight.abs()
    weighted = model(data)
    data.edge_weight = None
    assert not torch.equal(weighted, model(data))
