"""Mini-batches: parts of a graph whose outputs and attention are those of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fgai
from fgai.attention import observe, prepared
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large import Batches, MiniBatch, NeighbourSampler, StoredGraph, write_store
from fgai.large.sampling import _mini_batch
from support.graph_cases import small_data


@pytest.fixture
def graph() -> Graph:
    return small_data(nodes=70, width=5)


@pytest.fixture
def stored(graph: Graph, tmp_path: Path) -> StoredGraph:
    return write_store(graph, tmp_path / "stored")


def model_for(graph: Graph, name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_channels": 4, "heads": 2} if name != "GT" else {"hidden_channels": 8, "encodings": 0}
    return getattr(fgai, name)(graph.num_features, 3, **sizes).eval()


@pytest.mark.parametrize("name", ["GAT", "GATv2", "GT"])
def test_all_neighbours_give_the_whole_graphs_outputs(name: str, graph: Graph, stored: StoredGraph) -> None:
    model = model_for(graph, name)
    whole = observe(model, prepared(model, graph))
    for source in (graph, stored):
        for batch in Batches(source, NeighbourSampler(source, [-1, -1]), batch_size=16):
            seen = observe(model, prepared(model, batch.graph))
            found = seen.logits[: batch.num_seeds]
            torch.testing.assert_close(found, whole.logits[batch.seeds], atol=1e-5, rtol=0)


def test_attention_of_a_batch_is_that_of_the_graphs_edges(graph: Graph) -> None:
    model = model_for(graph, "GAT")
    whole = observe(model, prepared(model, graph)).attention.last
    batch = _mini_batch(graph, NeighbourSampler(graph, [-1, -1]).sample(torch.tensor([3, 50, 8])))
    layer = observe(model, prepared(model, batch.graph)).attention.last
    edges, places = batch.match(layer.keys)
    assert len(edges) == batch.graph.num_edges < layer.num_edges  # the model's loops are in neither
    into_seeds = layer.destination[places] < batch.num_seeds
    where = torch.searchsorted(whole.keys, graph.keys[edges[into_seeds]])
    torch.testing.assert_close(layer.values[places][into_seeds], whole.values[where], atol=1e-5, rtol=0)
    assert int(into_seeds.sum()) > 5


def same(one: MiniBatch, two: MiniBatch) -> bool:
    fields = ("nodes", "edges")
    graphs = (one.graph, two.graph)
    assert one.graph.features is not None and two.graph.features is not None
    return (
        all(torch.equal(getattr(one, name), getattr(two, name)) for name in fields)
        and torch.equal(*(graph.keys for graph in graphs))
        and torch.equal(one.graph.features.to_dense(), two.graph.features.to_dense())
    )


def test_workers_change_nothing(graph: Graph, stored: StoredGraph) -> None:
    found = [
        list(Batches(source, NeighbourSampler(source, [3, 2], seed=2), batch_size=13, workers=workers))
        for source in (graph, stored)
        for workers in (0, 2)
    ]
    assert len(found[0]) == 6
    for others in found[1:]:
        assert all(same(*pair) for pair in zip(found[0], others, strict=True))


def test_every_epoch_has_its_order(graph: Graph) -> None:
    batches = Batches(graph, NeighbourSampler(graph, [2]), graph.train_mask, batch_size=7)
    orders = []
    for batches.sampler.epoch in (0, 1, 0):
        orders.append(torch.cat([batch.seeds for batch in batches]))
    assert torch.equal(orders[0], orders[2]) and not torch.equal(orders[0], orders[1])
    wanted = graph.train_mask.nonzero().flatten()
    assert all(torch.equal(order.sort().values, wanted) for order in orders)


def test_a_pass_of_some_seeds_takes_the_first_of_the_order(graph: Graph) -> None:
    sampler = NeighbourSampler(graph, [2])
    every = torch.cat([batch.seeds for batch in Batches(graph, sampler, batch_size=7)])
    some = Batches(graph, sampler, batch_size=7, max_seeds=16)
    assert len(some) == 3 and torch.equal(torch.cat([batch.seeds for batch in some]), every[:16])
    assert len(Batches(graph, sampler, batch_size=7, max_seeds=1000)) == 10
    (first,) = Batches(graph, sampler, batch_size=7, max_seeds=2, shuffle=False)
    assert first.seeds.tolist() == [0, 1]
    with pytest.raises(InputError, match="`max_seeds` must be at least 1"):
        Batches(graph, sampler, max_seeds=0)


def test_global_draws_are_left_alone(graph: Graph) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    list(Batches(graph, NeighbourSampler(graph, [2])))
    assert torch.equal(torch.rand(3), wanted)


def test_a_batch_larger_than_the_graph_holds_all_of_it(graph: Graph) -> None:
    (batch,) = Batches(graph, NeighbourSampler(graph, [-1]), batch_size=1000, shuffle=False)
    assert torch.equal(batch.nodes, torch.arange(70))
    assert torch.equal(batch.edges, torch.arange(graph.num_edges))


def test_values_come_along(tmp_path: Path) -> None:
    edges = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 1, 2]])
    graph = Graph.from_edges(
        edges, 5, torch.eye(5), edge_attr=torch.rand(5, 2), edge_weight=torch.rand(5),
        y=torch.tensor([0, 1, 1, 0, -1]),
    )  # fmt: skip
    for source in (graph, write_store(graph, tmp_path / "s")):
        batch = _mini_batch(source, NeighbourSampler(source, [-1]).sample(torch.tensor([2, 4])))
        assert torch.equal(batch.graph.edge_attr, graph.edge_attr[batch.edges])
        assert torch.equal(batch.graph.edge_weight, graph.edge_weight[batch.edges])
        assert batch.graph.y.tolist() == [1, -1, 0, 1] and batch.nodes.tolist() == [2, 4, 0, 1]


def test_sparse_features_stay_sparse(tmp_path: Path) -> None:
    data = fgai.datasets.planted(num_nodes=100)
    for source in (data, write_store(data, tmp_path / "s")):
        batch = _mini_batch(source, NeighbourSampler(source, [4]).sample(torch.tensor([7, 7, 99])))
        assert isinstance(batch.graph.features.base, fgai.sparse.SparseRows)
        wanted = data.features.to_dense()[batch.nodes]
        assert torch.equal(batch.graph.features.to_dense(), wanted)


def test_refused(graph: Graph) -> None:
    other = small_data(nodes=30)
    sampler = NeighbourSampler(graph, [2])
    with pytest.raises(InputError, match="`sampler` must draw from"):
        Batches(other, sampler)
    with pytest.raises(InputError, match="`sample` must be drawn from"):
        _mini_batch(other, sampler.sample(torch.tensor([69])))
    with pytest.raises(InputError, match="`nodes` must be"):
        Batches(graph, sampler, torch.zeros(70, dtype=torch.bool))
    with pytest.raises(InputError, match="`batch_size` must be at least 1"):
        Batches(graph, sampler, batch_size=0)
    with pytest.raises(InputError, match="positional encodings"):
        _mini_batch(graph.replace(positional=torch.zeros(70, 2)), sampler.sample(torch.tensor([0])))
