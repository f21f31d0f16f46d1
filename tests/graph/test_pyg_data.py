"""From PyG's `Data` to a graph: nothing is lost without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset

import fgai
from experiments.defences import GNNGuard
from fgai.datasets import random_split
from fgai.errors import InputError
from fgai.graph import Graph
from support.graph_cases import small_data

GRAPH = small_data()


def data_with(**fields: Any) -> Data:
    data = GRAPH.to_data()
    for name, value in fields.items():
        setattr(data, name, value)
    return data


def test_types_of_edges_are_refused() -> None:
    data = data_with(edge_type=torch.ones(GRAPH.num_edges, dtype=torch.long))
    words = "`data.edge_type` would be lost.*set `data.edge_type = None`"
    for refusing in (Graph.from_data, fgai.GAT.for_data, fgai.GAT.for_data(GRAPH)):
        with pytest.raises(InputError, match=words):
            refusing(data)
    data.edge_type = None
    assert Graph.from_data(data).num_edges == GRAPH.num_edges


def test_attributes_of_edges_are_refused_by_models_that_do_not_read_them() -> None:
    data = data_with(edge_attr=torch.ones(GRAPH.num_edges, 2))
    graph, model = Graph.from_data(data), fgai.GAT.for_data(GRAPH)
    doors = {
        "for_data": lambda: fgai.GAT.for_data(data),
        "a defence": lambda: GNNGuard.for_data(data),
        "model(data)": lambda: model(data),
        "model(graph)": lambda: model(graph),
        "train": lambda: fgai.train("GAT", data, epochs=1),
        "evaluate": lambda: fgai.evaluate(model, data, "random", nodes=2, edges=3),
    }
    for door in doors.values():
        with pytest.raises(InputError, match=r"GAT does not read `edge_attr`.*set `data.edge_attr = None`"):
            door()


class One(InMemoryDataset):
    """A dataset of a single graph, as PyG's are."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.slices = self.collate([GRAPH.to_data()])


def test_a_dataset_in_place_of_its_graph_is_refused() -> None:
    with pytest.raises(InputError, match=r"got the dataset One; give its graph: `dataset\[0\]`"):
        fgai.train("GAT", One(), epochs=1)
    assert Graph.from_data(One()[0]).num_nodes == GRAPH.num_nodes


def test_several_labels_per_node_are_refused_by_their_shape() -> None:
    with pytest.raises(InputError, match=r"one class number per node, shape \[40\], got \(40, 3\)"):
        Graph.from_data(data_with(y=torch.ones(GRAPH.num_nodes, 3, dtype=torch.long)))
    with pytest.raises(InputError, match=r"class numbers \(torch.long\), got torch.float32"):
        Graph.from_data(data_with(y=torch.ones(GRAPH.num_nodes)))


@pytest.mark.parametrize("layout", ["coo", "csr", "hybrid"])
def test_sparse_features_are_read(layout: str) -> None:
    dense = GRAPH.to_data().x * (torch.rand(40, 6, generator=torch.Generator().manual_seed(1)) < 0.4)
    ways = {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "hybrid": lambda: dense.to_sparse(1)}
    graph = Graph.from_data(data_with(x=ways[layout]()))
    assert graph.features.is_sparse == (layout != "hybrid")
    assert torch.equal(graph.features.to_dense(), dense)
    model = fgai.GAT.for_data(graph).eval()
    torch.testing.assert_close(model(graph), model(Graph.from_data(data_with(x=dense))))


def test_a_split_of_a_graph_is_that_of_its_labels() -> None:
    wanted = random_split(GRAPH.y, 3)
    for given in (GRAPH, GRAPH.to_data()):
        assert all(torch.equal(a, b) for a, b in zip(random_split(given, 3), wanted, strict=True))
    with pytest.raises(InputError, match="a graph with labels `y`, got Data"):
        random_split(Data(num_nodes=3))
