"""Recording leaves nothing behind: after errors, in nested blocks, over several passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import elu
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GAT, GATConv

from fgai.attention import record
from fgai.errors import AttentionError
from support.attention_cases import (
    CLASSES,
    EDGES,
    FEATURES,
    HIDDEN,
    KINDS,
    NODES,
    TwoLayers,
    assert_equals_weights,
    assert_sums,
    assert_unchanged,
    make_conv,
    make_features,
    make_model,
    snapshot,
)

X = make_features()


class Broken(TwoLayers):
    def forward(self, x, edge_index):
        self.conv1(x, edge_index)
        raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_model_is_unchanged_when_forward_raises(kind, training):
    model = Broken(kind, dropout=0.4).double().train(training)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="on purpose"), record(model) as tape:
        model(X, EDGES)
    assert_unchanged(before, model)
    with pytest.raises(AttentionError, match="nothing is recorded"):
        _ = tape.attention


@pytest.mark.parametrize("kind", KINDS)
def test_model_is_unchanged_when_the_layer_or_the_perturbation_raises(kind):
    model = make_model(kind, dropout=0.4).eval()
    before = snapshot(model)

    def fail(*_):
        raise RuntimeError("from the perturbation")

    with pytest.raises(RuntimeError, match="from the perturbation"), record(model, perturb=fail):
        model(X, EDGES)
    assert_unchanged(before, model)
    with pytest.raises(IndexError), record(model):
        model(X, EDGES + 2)
    assert_unchanged(before, model)
    with record(model) as tape:  # a failed forward inside the block spoils nothing
        with pytest.raises(IndexError):
            model(X, EDGES + 2)
        logits = model(X, EDGES)
    assert torch.equal(logits, model(X, EDGES))
    assert len(tape.attention) == 2
    assert_unchanged(before, model)


def test_several_forwards_keep_the_last_and_reuse_edges():
    model = make_model("gat")
    other = EDGES[:, :6]
    with record(model) as tape:
        model(X, EDGES)
        first = tape.attention
        model(2 * X, EDGES)
        second = tape.attention
        model(X, other)
        third = tape.attention
        tape.clear()
        with pytest.raises(AttentionError, match="nothing is recorded"):
            _ = tape.attention
    assert first[0].source is second[0].source
    assert not torch.equal(first[0].values, second[0].values)
    assert third[0].num_edges < first[0].num_edges
    assert len(third) == 2


def test_nested_blocks_perturb_outside_in():
    for kind in KINDS:
        model = make_model(kind)
        before = snapshot(model)
        computed = []

        def double(i, w, s, d, computed=computed):
            computed.append(w)
            return 2 * w

        def plus(i, w, s, d, computed=computed):
            computed.append(w)
            return w + 1

        with record(model, perturb=double) as outer:
            with record(model, perturb=plus) as inner:
                logits = model(X, EDGES)
            assert torch.equal(computed[1], outer.attention[0].values)
            assert torch.equal(inner.attention[0].values, 2 * computed[0] + 1)
            with record(model, perturb=lambda i, w, s, d: w + 1):
                assert torch.equal(model(X, EDGES), logits)
        with record(model, perturb=lambda i, w, s, d: 2 * w + 1):
            assert torch.equal(model(X, EDGES), logits)
        assert_unchanged(before, model)


def test_a_layer_used_twice_gives_two_entries():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GATConv(FEATURES, FEATURES, heads=2, concat=False)

        def forward(self, x, edge_index):
            return self.conv(self.conv(x, edge_index), edge_index)

    model = Shared().double().eval()
    with record(model) as tape:
        model(X, EDGES)
    assert [w.name for w in tape.attention] == ["conv", "conv:2"]
    _, weights = model.conv(model.conv(X, EDGES), EDGES, return_attention_weights=True)
    assert_equals_weights(tape.attention.last, weights)


def test_parts_called_on_their_own():
    model = make_model("gat")
    with record(model) as tape:
        model.conv2(elu(model.conv1(X, EDGES)), EDGES)
        assert len(tape.attention) == 2
        model(X, EDGES)
        with pytest.raises(AttentionError, match="outside the recorded model's forward"):
            model.conv1(X, EDGES)
        tape.clear()
        model.conv1(X, EDGES)
        assert len(tape.attention) == 1


def test_a_single_layer_is_a_model():
    conv = make_conv("transformer", FEATURES, HIDDEN, heads=2).double().eval()
    before = snapshot(conv)
    with record(conv) as tape:
        out, weights = conv(X, EDGES, return_attention_weights=True)
    assert out.shape == (NODES, 2 * HIDDEN)
    assert tape.attention.last.name == "TransformerConv"
    assert_equals_weights(tape.attention.last, weights)
    assert_unchanged(before, conv)


def test_pyg_model_zoo_gat():
    torch.manual_seed(0)
    model = GAT(FEATURES, HIDDEN * 2, num_layers=3, out_channels=CLASSES, heads=2, v2=True).double().eval()
    with record(model) as tape:
        logits = model(X, EDGES)
    assert torch.equal(logits, model(X, EDGES))
    assert [w.name for w in tape.attention] == ["convs.0", "convs.1", "convs.2"]
    assert_sums(tape.attention)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_an_explanation_mask(kind):
    model = make_model(kind)
    set_masks(model, torch.linspace(0.1, 0.9, EDGES.shape[1]).double(), EDGES)
    before = snapshot(model)
    masked = model(X, EDGES)
    with record(model) as tape:
        assert torch.equal(model(X, EDGES), masked)
    assert_sums(tape.attention)
    assert_unchanged(before, model)
    clear_masks(model)
    assert not torch.equal(model(X, EDGES), masked)
