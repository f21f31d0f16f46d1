"""Adapters for other layers."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout
from torch_geometric.nn import GATConv, MessagePassing
from torch_geometric.utils import softmax

from fgai.attention import record, register_adapter
from fgai.errors import AttentionError, InputError
from fgai.sparse import edge_keys
from support.attention_cases import (
    EDGES,
    FEATURES,
    assert_unchanged,
    make_features,
    snapshot,
    sort_edges,
)

X = make_features()


class Neighbours(MessagePassing):
    """Attention by a learned weight per node, dropped out, in a layer fgai does not know."""

    def __init__(self, channels):
        super().__init__(aggr="add", node_dim=0)
        self.score = nn.Linear(channels, 2)

    def attend(self, x, edge_index):
        return softmax(self.score(x)[edge_index[0]], edge_index[1], num_nodes=x.shape[0])

    def forward(self, x, edge_index):
        attention = dropout(self.attend(x, edge_index), 0.5, self.training)
        return self.propagate(edge_index, x=x, weight=attention.mean(dim=1))

    def message(self, x_j, weight):
        return x_j * weight[:, None]


@contextmanager
def neighbours_adapter(layer, tap):
    attend = layer.attend

    def tapped(x, edge_index):
        return tap(attend(x, edge_index), edge_index[0], edge_index[1], x.shape[0])

    layer.attend = tapped
    try:
        yield
    finally:
        del layer.attend


def test_register_adapter():
    class Unknown(Neighbours):
        pass

    model = nn.ModuleDict({"inner": Unknown(FEATURES)}).double()
    with pytest.raises(AttentionError, match="Unknown"), record(model):
        pass
    register_adapter(Unknown, neighbours_adapter)
    layer = model["inner"]
    before = snapshot(layer)
    for mode in (True, False):
        layer.train(mode)
        with record(layer) as tape:
            layer(X, EDGES)
        expected_edges, expected = sort_edges(EDGES, layer.attend(X, EDGES))
        assert torch.equal(tape.attention.last.values, expected)
        assert torch.equal(tape.attention.last.keys, edge_keys(*expected_edges))
    layer.train()
    with record(layer, perturb=lambda i, w, s, d: 0 * w):
        assert torch.equal(layer(X, EDGES), torch.zeros_like(X))
    assert_unchanged(before, layer)


def test_register_adapter_refuses_nonsense():
    with pytest.raises(InputError, match="class of modules"):
        register_adapter(GATConv(2, 3), neighbours_adapter)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be a function"):
        register_adapter(nn.Linear, "adapter")  # type: ignore[arg-type]


def test_adapter_with_wrong_shape_is_named():
    class Flat(Neighbours):
        pass

    @contextmanager
    def flat_adapter(layer, tap):
        layer.attend = lambda x, e: tap(torch.ones(e.shape[1]), e[0], e[1], x.shape[0])
        try:
            yield
        finally:
            del layer.attend

    register_adapter(Flat, flat_adapter)
    layer = Flat(FEATURES).double()
    with pytest.raises(AttentionError, match="one row per edge"), record(layer):
        layer(X, EDGES)
