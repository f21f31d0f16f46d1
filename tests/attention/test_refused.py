"""Models and inputs that cannot be recorded are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv, GATv2Conv, HeteroConv, TransformerConv, to_hetero

from fgai.attention import record
from fgai.errors import AttentionError
from support.attention_cases import (
    EDGES,
    FEATURES,
    HIDDEN,
    NODES,
    WITH_WEIGHTS,
    TwoLayers,
    assert_unchanged,
    make_conv,
    make_features,
    snapshot,
)

X = make_features()


@pytest.mark.parametrize("kind", WITH_WEIGHTS)
def test_bipartite_is_refused(kind):
    conv = make_conv(kind, (FEATURES, FEATURES + 1), HIDDEN, heads=2).double()
    before = snapshot(conv)
    pair = (X, make_features(4, FEATURES + 1))
    edges = torch.tensor([[0, 5, 6], [1, 3, 3]])
    conv(pair, edges)
    with pytest.raises(AttentionError, match="bipartite"), record(conv):
        conv(pair, edges)
    with pytest.raises(AttentionError, match="bipartite"), record(conv):
        conv(x=pair, edge_index=edges)
    assert_unchanged(before, conv)


def test_a_pair_of_the_same_features_is_not_bipartite():
    conv = GATv2Conv(FEATURES, HIDDEN).double().eval()
    with record(conv) as tape:
        conv((X, X), EDGES)
    assert tape.attention.last.num_nodes == NODES


def test_heterogeneous_is_refused():
    convs = {("a", "to", "a"): GATConv(FEATURES, HIDDEN), ("b", "to", "b"): GATConv(FEATURES, HIDDEN)}
    with pytest.raises(AttentionError, match="HeteroConv: heterogeneous"), record(HeteroConv(convs)):
        pass
    kinds = (["a", "b"], [("a", "to", "a"), ("b", "to", "b")])
    model = to_hetero(TwoLayers("gat").double(), kinds)
    before = snapshot(model)
    with pytest.raises(AttentionError, match="heterogeneous"), record(model):
        model({"a": X, "b": X}, {("a", "to", "a"): EDGES, ("b", "to", "b"): EDGES})
    assert_unchanged(before, model)


def test_other_kinds_of_edges_are_refused():
    class SparseTensor:
        """Stands in for torch_sparse.SparseTensor."""

    from fgai.attention.pyg import message_edges

    with pytest.raises(AttentionError, match="SparseTensor, which cannot be recorded"):
        message_edges(GATConv(2, 3), SparseTensor())
    with pytest.raises(AttentionError, match="sparse_csc"):
        message_edges(GATConv(2, 3), torch.eye(3).to_sparse_csc())


def test_scripted_replicated_and_foreign_models_are_refused():
    scripted = nn.Sequential(torch.jit.trace(nn.Linear(2, 3), torch.ones(1, 2)), GATConv(3, 2))
    with pytest.raises(AttentionError, match="TorchScript"), record(scripted):
        pass
    with pytest.raises(AttentionError, match="replicated"), record(nn.DataParallel(GATConv(3, 2))):
        pass
    with (
        pytest.raises(
            AttentionError, match=r"no attention layer.*GATConv.*its modules are Linear, ReLU, Sequential"
        ),
        record(nn.Sequential(nn.Linear(2, 3), nn.ReLU())),
    ):
        pass


def test_layers_that_hide_their_attention_are_refused():
    class OwnUpdate(GATConv):
        def edge_update(self, alpha_j, index):
            return torch.ones_like(alpha_j)

    class OwnMessage(TransformerConv):
        def message(self, value_j):
            return value_j

    class OwnForward(GATConv):
        def forward(self, x, edge_index):
            return self.lin(x)

    for conv, match in ((OwnUpdate(FEATURES, 2), "edge_update"), (OwnMessage(FEATURES, 2), "message")):
        model = nn.ModuleList([GATConv(FEATURES, 2), conv])
        before = snapshot(model)
        with pytest.raises(AttentionError, match=f"replaces `{match}`"), record(model):
            pass
        assert_unchanged(before, model)
    model = OwnForward(FEATURES, 2).double()
    with pytest.raises(AttentionError, match="without showing its attention"), record(model):
        model(X, EDGES)
    decomposed = TransformerConv(FEATURES, 4, decomposed_layers=2)
    with pytest.raises(AttentionError, match="decomposed_layers=2"), record(decomposed):
        pass


def test_activation_checkpointing_is_refused():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(TwoLayers):
        def forward(self, x, edge_index):
            hidden = checkpoint(self.conv1, x, edge_index, use_reentrant=False)
            return self.conv2(elu(hidden), edge_index)

    model = Checkpointed("gat").double()
    with pytest.raises(AttentionError, match="checkpointing"), record(model):
        model(X, EDGES).sum().backward()
