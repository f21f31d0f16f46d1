"""The built-in graph: fixed, well formed, and its informative edges inform."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from sklearn.linear_model import LogisticRegression

from fgai.datasets import fingerprint, info, load_dataset, planted
from fgai.datasets.planted import MARKER_WORDS, TOPIC_WORDS
from fgai.errors import InputError
from fgai.graph import Graph


def test_the_graph_is_fixed() -> None:
    # Numbers measured on this graph are comparable only while this stays the same.
    assert fingerprint(planted()) == "733dfdb44e513e7e809e952468aaaa90"
    assert fingerprint(load_dataset("planted", seed=4)) == fingerprint(planted())


@pytest.mark.parametrize(("seed", "nodes", "classes"), [(0, 2000, 5), (3, 311, 4), (9, 7, 2)])
def test_well_formed(seed: int, nodes: int, classes: int) -> None:
    graph = planted(seed, nodes, classes)
    assert (graph.num_nodes, graph.num_classes) == (nodes, classes)
    source, destination = graph.edge_index
    assert not bool((source == destination).any())
    pairs = set(zip(source.tolist(), destination.tolist(), strict=True))
    assert len(pairs) == graph.num_edges and pairs == {(b, a) for a, b in pairs}
    assert graph.y is not None and graph.edge_truth is not None and graph.features is not None
    counts = torch.bincount(graph.y)
    assert int(counts.max() - counts.min()) <= 1
    assert bool((graph.y[source] == graph.y[destination])[graph.edge_truth].all())
    assert graph.features.is_sparse and set(graph.features.stored.tolist()) == {1.0}


def test_matches_its_description() -> None:
    graph, about = planted(), info("planted")
    for field in ("num_nodes", "num_edges", "num_features", "num_classes"):
        assert getattr(graph, field) == getattr(about, field)


def test_seeds() -> None:
    assert fingerprint(planted(1, 300)) == fingerprint(planted(1, 300))
    assert fingerprint(planted(1, 300)) != fingerprint(planted(2, 300))
    one, two = load_dataset("planted", seed=1), load_dataset("planted", seed=2)
    assert one.train_mask is not None and two.train_mask is not None and one.test_mask is not None
    assert not torch.equal(one.train_mask, two.train_mask)
    assert int(one.train_mask.sum()) == 200 and int(one.test_mask.sum()) == 1600


def test_bad_sizes() -> None:
    for arguments in ({"seed": -1}, {"num_classes": 1}, {"num_nodes": 3}):
        with pytest.raises(InputError, match=next(iter(arguments))):
            planted(**arguments)


def test_a_source_is_informative_for_all_of_its_class_or_for_none() -> None:
    graph = planted()
    assert graph.y is not None and graph.edge_truth is not None and graph.features is not None
    source, destination = graph.edge_index
    alike = graph.y[source] == graph.y[destination]
    reliable = torch.zeros(graph.num_nodes, dtype=torch.bool)
    reliable[source[graph.edge_truth]] = True
    assert torch.equal(graph.edge_truth[alike], reliable[source[alike]])
    first = graph.num_classes * TOPIC_WORDS
    marked = graph.features.to_dense()[:, first : first + MARKER_WORDS].sum(dim=1)
    assert float(marked[reliable].mean()) < 1 < 3 < float(marked[~reliable].mean())


def average(graph: Graph, edges: torch.Tensor) -> np.ndarray:
    """Mean words over the sources of some edges, per node."""
    source, destination = graph.edge_index[:, edges].numpy()
    weights = sp.csr_matrix((np.ones(source.size), (destination, source)), shape=(graph.num_nodes,) * 2)
    total = np.maximum(np.asarray(weights.sum(axis=1)), 1)
    assert graph.features is not None
    return np.asarray(weights @ graph.features.to_dense().numpy() / total)


def test_informative_edges_inform_and_the_others_mislead() -> None:
    graph = load_dataset("planted", seed=0)
    assert graph.y is not None and graph.edge_truth is not None and graph.features is not None
    assert graph.train_mask is not None and graph.test_mask is not None
    every = torch.ones_like(graph.edge_truth)
    inputs = {
        "own words": graph.features.to_dense().numpy(),
        "informative": average(graph, graph.edge_truth),
        "all": average(graph, every),
        "misleading": average(graph, ~graph.edge_truth),
    }
    y, train, test = graph.y.numpy(), graph.train_mask.numpy(), graph.test_mask.numpy()
    f1 = {
        name: LogisticRegression(C=10.0, max_iter=500).fit(x[train], y[train]).score(x[test], y[test])
        for name, x in inputs.items()
    }
    assert f1["informative"] > f1["all"] + 0.1 > f1["misleading"] + 0.2
    assert f1["informative"] > f1["own words"] + 0.3
