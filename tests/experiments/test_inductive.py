"""Inductive cells: test nodes are not there in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from experiments import Store, run
from experiments.run import run_cell
from experiments.trained import training_graph
from fgai import Graph
from fgai.training import load_model
from support import bench_cases as cases


def changed(graph: Graph) -> Graph:
    """The same graph with other features and edges of its test nodes."""
    assert graph.features is not None and graph.test_mask is not None
    generator = torch.Generator().manual_seed(0)
    x = graph.features.to_dense().clone()
    x[graph.test_mask] = torch.rand(x[graph.test_mask].shape, generator=generator)
    source, destination = graph.edge_index
    kept = graph.edge_index[:, ~(graph.test_mask[source] & graph.test_mask[destination])]
    test = graph.test_mask.nonzero().flatten()
    more = torch.stack([test, torch.randint(graph.num_nodes, test.shape, generator=generator)])
    fields = {name: getattr(graph, name) for name in ("y", "train_mask", "val_mask", "test_mask")}
    edges = torch.cat([kept, more[:, more[0] != more[1]]], 1)
    return Graph.from_edges(edges, graph.num_nodes, x, undirected=True, name=graph.name, **fields)


def test_the_training_graph_is_the_rest_of_the_graph() -> None:
    data = fgai.load_dataset("planted")
    assert data.test_mask is not None and data.y is not None and data.train_mask is not None
    found = training_graph(data)
    nodes = (~data.test_mask).nonzero().flatten()
    assert found.num_nodes == len(nodes) and found.test_mask is None and found.name == data.name
    pairs = {(int(nodes[a]), int(nodes[b])) for a, b in found.edge_index.T.tolist()}
    here = set(nodes.tolist())
    assert pairs == {(a, b) for a, b in data.edge_index.T.tolist() if a in here and b in here}
    assert found.y is not None and torch.equal(found.y, data.y[nodes])
    assert int(found.train_mask.sum()) == int(data.train_mask.sum())  # type: ignore[union-attr]
    assert found.features is not None and data.features is not None
    assert torch.equal(found.features.to_dense(), data.features.to_dense()[nodes])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("vanilla", {"epochs": 3}),
        ("limits", {}),
        ("harden", {"epochs": 2, "nodes": 3, "edges": 3}),
        ("fgai", {"epochs": 2, "nodes": 3, "edges": 3}),
    ],
)
def test_test_nodes_change_neither_weights_nor_limits(
    method: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cases.tiny(kind="attack", task="inductive", method=method, settings=settings, threats=("random",))
    data, weights, scores = fgai.load_dataset("planted"), [], []
    for name, graph in (("one", data), ("other", changed(data))):
        monkeypatch.setattr(run, "load_dataset", lambda *_, graph=graph, **__: graph)
        record = run_cell(cell, Store(tmp_path / name), cache=tmp_path / name / "cache")
        assert record["status"] == "done", record
        models = sorted((tmp_path / name / "cache").glob("*.safetensors"))
        assert any(f"-{method}-" in path.name for path in models)
        weights.append([load_model(path).state_dict() for path in models])
        scores.append(record["evaluations"]["random"]["metrics"]["f1"]["clean"])
    assert scores[0] != scores[1], "test nodes are predicted where they are"
    for first, second in zip(*weights, strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert method == "vanilla" or any("limits" in name for name in weights[0][-1] | weights[0][0])
