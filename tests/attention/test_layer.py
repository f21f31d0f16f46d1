"""The attention of one layer: sorted, with keys, pointers, heads and sums."""

from __future__ import annotations

import pytest
import torch

from fgai.attention import LayerAttention
from fgai.errors import InputError
from fgai.sparse import Adjacency
from support.attention_cases import EDGES, NODES, assert_sums, make_features, make_map

X = make_features()
UNIQUE = torch.unique(EDGES, dim=1)


def test_layer_is_sorted_with_keys_and_pointers():
    values = torch.arange(2 * EDGES.shape[1], dtype=torch.float64).view(-1, 2)
    layer = LayerAttention.from_edges(values, EDGES[0], EDGES[1], NODES, "conv")
    rows = sorted((int(d), int(s), e) for e, (s, d) in enumerate(EDGES.T))
    assert layer.destination.tolist() == [d for d, _, _ in rows]
    assert layer.source.tolist() == [s for _, s, _ in rows]
    assert torch.equal(layer.values, values[[e for _, _, e in rows]])  # parallel edges keep their order
    assert layer.keys.tolist() == [d * 2**32 + s for d, s, _ in rows]
    counts = [int((EDGES[1] == node).sum()) for node in range(NODES)]
    assert layer.degree.tolist() == counts
    assert layer.rowptr.tolist() == [sum(counts[:node]) for node in range(NODES + 1)]
    assert layer.has_duplicates
    assert "edges=10, heads=2, nodes=7" in repr(layer)


def test_layer_on_adjacency_shares_its_structure():
    adjacency, order = Adjacency.build(EDGES, NODES)
    values = torch.rand(EDGES.shape[1], 2)
    layer = LayerAttention.from_adjacency(adjacency, values[order], "conv")
    other = LayerAttention.from_edges(values, EDGES[0], EDGES[1], NODES, "conv")
    assert layer.keys is adjacency.keys
    assert layer.rowptr is adjacency.rowptr
    layer.require_same_edges(other)
    assert torch.equal(layer.values, other.values)
    assert torch.equal(layer.degree, other.degree)
    assert layer.to("cpu") is layer


def test_layer_refuses_shapes_that_do_not_fit():
    values = torch.rand(3, 2)
    ends = torch.tensor([0, 1, 1])
    with pytest.raises(InputError, match=r"\[edges, heads\]"):
        LayerAttention(values[:, 0], ends, ends, 2)
    with pytest.raises(InputError, match="one entry per row"):
        LayerAttention(values, ends[1:], ends, 2)
    with pytest.raises(InputError, match="must have shape"):
        LayerAttention.from_edges(values, ends[1:], ends, 2)
    with pytest.raises(InputError, match="must name nodes"):
        LayerAttention.from_edges(values, ends, ends + 1, 2)


def test_heads():
    layer = make_map()[0]
    torch.testing.assert_close(
        layer.heads("mean"), (layer.values[:, 0] + layer.values[:, 1] + layer.values[:, 2]) / 3
    )
    assert layer.heads("max").tolist() == [max(row) for row in layer.values.tolist()]
    assert torch.equal(layer.heads(1), layer.values[:, 1])
    with pytest.raises(InputError, match="below 3"):
        layer.heads(3)
    with pytest.raises(InputError, match="did you mean 'mean'"):
        layer.heads("meen")


def test_merged_adds_parallel_edges_up():
    layer = make_map()[0]
    expected: dict[int, torch.Tensor] = {}
    for key, row in zip(layer.keys.tolist(), layer.values, strict=True):
        expected[key] = expected.get(key, torch.zeros(3, dtype=torch.float64)) + row
    merged = layer.merged()
    assert merged.keys.tolist() == sorted(expected)
    torch.testing.assert_close(merged.values, torch.stack([expected[key] for key in sorted(expected)]))
    torch.testing.assert_close(merged.sums(), layer.sums())
    assert merged.merged() is merged


def test_a_node_without_edges_attends_to_nothing():
    adjacency, _ = Adjacency.build(EDGES, NODES)
    values = 1.0 / adjacency.degree[adjacency.destination].double()[:, None].expand(-1, 2)
    layer = LayerAttention.from_adjacency(adjacency, values, "conv")
    assert_sums(layer)
    assert layer.sums()[6].tolist() == [0.0, 0.0]
