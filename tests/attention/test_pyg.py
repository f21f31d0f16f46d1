"""The recorder on user-written PyG models: same attention, same output, nothing left behind."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import dropout, elu
from torch_geometric import EdgeIndex
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GAT, GATConv, GATv2Conv, HeteroConv, MessagePassing, TransformerConv, to_hetero
from torch_geometric.utils import softmax

from fgai.attention import LayerAttention, record, register_adapter
from fgai.errors import AttentionError, InputError
from fgai.sparse import edge_keys
from support.attention_cases import (
    CLASSES,
    EDGES,
    FEATURES,
    HEADS,
    HIDDEN,
    KINDS,
    NODES,
    WITH_WEIGHTS,
    TwoLayers,
    assert_unchanged,
    make_conv,
    make_features,
    make_model,
    reference_model,
    snapshot,
    sort_edges,
    with_loops,
)

X = make_features()


def assert_equals_weights(layer, weights, edges=None):
    """One recorded layer equals what `return_attention_weights` gave, edge by edge, bit by bit."""
    given_edges, values = weights
    expected_edges, expected = sort_edges(given_edges if edges is None else edges, values)
    assert torch.equal(torch.stack([layer.source, layer.destination]), expected_edges)
    assert torch.equal(layer.values, expected)


# What is recorded


@pytest.mark.parametrize("kind", WITH_WEIGHTS)
def test_equals_return_attention_weights(kind):
    model = make_model(kind)
    hidden, first = model.conv1(X, EDGES, return_attention_weights=True)
    out, second = model.conv2(elu(hidden), EDGES, return_attention_weights=True)
    with record(model) as tape:
        logits = model(X, EDGES)
    assert torch.equal(logits, out)
    assert [w.name for w in tape.attention] == ["conv1", "conv2"]
    assert [w.num_heads for w in tape.attention] == [HEADS, 1]
    assert_equals_weights(tape.attention[0], first)
    assert_equals_weights(tape.attention.last, second)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_dense_reference(kind):
    model = make_model(kind)
    edges = with_loops(kind, EDGES, NODES)
    out, attention = reference_model(kind, model, X, edges, {})
    with record(model) as tape:
        logits = model(X, EDGES)
    torch.testing.assert_close(logits, out, rtol=0, atol=1e-10)
    for layer, expected in zip(tape.attention, attention, strict=True):
        assert torch.equal(layer.keys, edge_keys(*edges))
        torch.testing.assert_close(layer.values, expected, rtol=0, atol=1e-10)
        assert layer.num_nodes == NODES
        layer.check_sums()


@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_records_before_dropout_and_draws_the_same_numbers(kind):
    model = make_model(kind, dropout=0.6)
    with record(model) as tape:
        model(X, EDGES)
    evaluated = tape.attention[0].values
    model.train()
    outputs = []
    for recorded in (False, True):
        torch.manual_seed(3)
        random.seed(3)
        if recorded:
            with record(model) as tape:
                outputs.append(model(X, EDGES))
        else:
            outputs.append(model(X, EDGES))
    assert torch.equal(*outputs)
    tape.attention.check_sums()
    assert torch.equal(tape.attention[0].values, evaluated)
    assert model.training
    assert model.conv1.dropout == 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_recorded_values_and_to_them(kind):
    model = make_model(kind)
    with record(model) as tape:
        logits = model(X, EDGES)
    target = (tape.attention[0].values ** 2).sum()
    grads = torch.autograd.grad(target, list(model.conv1.parameters()), allow_unused=True, retain_graph=True)
    assert any(g is not None and float(g.abs().sum()) > 0 for g in grads)
    to_attention = torch.autograd.grad(logits[2, 0], [w.values for w in tape.attention])
    # The output layer reads out linearly: the gradient is the value of the edge's source.
    value = model.conv2.lin_value if kind == "transformer" else model.conv2
    value = value if kind == "transformer" else getattr(value, "lin_l" if kind == "gatv2" else "lin")
    with torch.no_grad():
        expected = value(elu(model.conv1(X, EDGES)))[:, 0][tape.attention.last.source]
    rows = tape.attention.last.destination == 2
    torch.testing.assert_close(to_attention[1][:, 0], torch.where(rows, expected, 0.0))
    assert float(to_attention[0].abs().sum()) > 0


# What perturbing does


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_perturbing_by_zero_changes_no_bit(kind, training):
    model = make_model(kind, dropout=0.5).train(training)
    edges = with_loops(kind, EDGES, NODES).shape[1]
    zeros = [torch.zeros(edges), torch.zeros(edges, 1, dtype=torch.float64)]
    outputs = []
    for perturb in (None, zeros, dict(enumerate(zeros)), lambda i, w, s, d: w + 0.0):
        torch.manual_seed(5)
        random.seed(5)
        with record(model, perturb=perturb) as tape:
            outputs.append((model(X, EDGES), *(w.values for w in tape.attention)))
    torch.manual_seed(5)
    random.seed(5)
    plain = model(X, EDGES)
    for logits, first, second in outputs:
        assert torch.equal(logits, plain)
        assert torch.equal(first, outputs[0][1])
        assert torch.equal(second, outputs[0][2])


@pytest.mark.parametrize("kind", KINDS)
def test_perturbing_changes_output_as_the_dense_reference_says(kind):
    model = make_model(kind)
    edges = with_loops(kind, EDGES, NODES)
    generator = torch.Generator().manual_seed(7)
    deltas = {
        0: torch.randn(edges.shape[1], HEADS, dtype=torch.float64, generator=generator),
        1: torch.randn(edges.shape[1], 1, dtype=torch.float64, generator=generator),
    }
    out, attention = reference_model(kind, model, X, edges, deltas)
    with record(model, perturb=deltas) as tape:
        logits = model(X, EDGES)
    torch.testing.assert_close(logits, out, rtol=0, atol=1e-10)
    for index, expected in enumerate(attention):
        torch.testing.assert_close(tape.unperturbed[index].values, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(tape.attention[index].values, expected + deltas[index], rtol=0, atol=1e-10)


def test_gradient_reaches_the_delta():
    model = make_model("gat")
    delta = torch.zeros(with_loops("gat", EDGES, NODES).shape[1], dtype=torch.float64, requires_grad=True)
    with record(model, perturb={1: delta}) as tape:
        model(X, EDGES)[2, 0].backward()
    assert torch.equal(delta.grad != 0, tape.attention.last.destination == 2)


def test_delta_with_edges_is_matched_by_key():
    model = make_model("transformer")
    unique = torch.unique(EDGES, dim=1)
    small = LayerAttention.from_edges(torch.tensor([[0.5], [-0.25]]).double(), [3, 2], [3, 5], NODES)
    with record(model, perturb={0: small}) as tape:
        model(X, unique)
    moved = tape.attention[0].values - tape.unperturbed[0].values
    for key, row in zip(tape.attention[0].keys, moved, strict=True):
        expected = {int(k): float(v) for k, v in zip(small.keys, small.values, strict=True)}.get(
            int(key), 0.0
        )
        torch.testing.assert_close(row, torch.full((HEADS,), expected, dtype=torch.float64))
    with record(model) as tape:
        model(X, unique)
    with record(model, perturb=tape.attention.detach()) as doubled:  # a whole map, layer by layer
        model(X, unique)
    assert torch.equal(doubled.attention[0].values, 2 * tape.attention[0].values)
    assert torch.equal(doubled.attention[1].values, doubled.unperturbed[1].values + tape.attention[1].values)
    foreign = LayerAttention.from_edges(torch.ones(1, 1).double(), [6], [0], NODES)
    with pytest.raises(AttentionError, match="6 → 0"), record(model, perturb={0: foreign}):
        model(X, unique)
    with pytest.raises(AttentionError, match="duplicates"), record(model, perturb={0: small}):
        model(X, EDGES)


def test_function_sees_sorted_edges():
    model = make_model("gatv2")
    seen = []

    def look(index, attention, source, destination):
        seen.append((index, attention.shape, edge_keys(source, destination)))
        return attention

    with record(model, perturb=look) as tape:
        model(X, EDGES)
    assert [s[0] for s in seen] == [0, 1]
    for (_, shape, keys), layer in zip(seen, tape.attention, strict=True):
        assert shape == layer.values.shape
        assert torch.equal(keys, layer.keys)
        assert bool((keys[1:] >= keys[:-1]).all())


@pytest.mark.parametrize(
    ("perturb", "error", "match"),
    [
        ({0: torch.zeros(4)}, AttentionError, "must have shape"),
        ({5: torch.zeros(4)}, AttentionError, "names layer 5, but only 2"),
        ([None], AttentionError, "has 1 deltas, but 2"),
        ({-1: torch.zeros(4)}, InputError, "from 0 on"),
        ({0: "much"}, InputError, "Tensor or a LayerAttention"),
        (3.0, InputError, "must be a function"),
        (lambda i, w, s, d: w[1:], AttentionError, "must return"),
        (lambda i, w, s, d: None, AttentionError, "got NoneType"),
    ],
)
def test_perturbations_that_do_not_fit_are_refused(perturb, error, match):
    model = make_model("gat")
    before = snapshot(model)
    with pytest.raises(error, match=match), record(model, perturb=perturb):
        model(X, EDGES)
    assert_unchanged(before, model)


# What is left behind: nothing


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

        def double(i, w, s, d):
            return 2 * w

        def plus(i, w, s, d):
            return w + 1

        with record(model, perturb=double) as outer:
            with record(model, perturb=plus) as inner:
                logits = model(X, EDGES)
            assert torch.equal(inner.unperturbed[0].values, outer.attention[0].values)
            assert torch.equal(inner.attention[0].values, 2 * outer.unperturbed[0].values + 1)
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
    tape.attention.check_sums()


@pytest.mark.parametrize("kind", KINDS)
def test_inside_an_explanation_mask(kind):
    model = make_model(kind)
    set_masks(model, torch.linspace(0.1, 0.9, EDGES.shape[1]).double(), EDGES)
    before = snapshot(model)
    masked = model(X, EDGES)
    with record(model) as tape:
        assert torch.equal(model(X, EDGES), masked)
    tape.attention.check_sums()
    assert_unchanged(before, model)
    clear_masks(model)
    assert not torch.equal(model(X, EDGES), masked)


# Odd kinds of input: supported


@pytest.mark.parametrize("kind", WITH_WEIGHTS)
def test_edge_attr(kind):
    width = 3
    model = make_model(kind, edge_dim=width)
    edge_attr = make_features(EDGES.shape[1], width, seed=4)
    _, weights = model.conv1(X, EDGES, edge_attr, return_attention_weights=True)
    plain = model(X, EDGES, edge_attr)
    with record(model) as tape:
        logits = model(X, EDGES, edge_attr)
    assert torch.equal(logits, plain)
    assert_equals_weights(tape.attention[0], weights)


def test_transformer_with_missing_edge_attr_is_refused():
    model = make_model("transformer", edge_dim=3)
    with pytest.raises(AttentionError, match="without `edge_attr`"), record(model):
        model(X, EDGES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_adjacency(kind, layout):
    unique = torch.unique(EDGES, dim=1)
    ones = torch.ones(unique.shape[1], dtype=torch.float64)
    adj_t = torch.sparse_coo_tensor(unique.flip(0), ones, (NODES, NODES)).coalesce()
    model = make_model(kind)
    with record(model) as tape:
        expected = model(X, unique)
    wanted = tape.attention
    matrix = adj_t if layout == "coo" else adj_t.to_sparse_csr()
    with record(model) as tape:
        logits = model(X, matrix)
    torch.testing.assert_close(logits, expected)
    for mine, theirs in zip(tape.attention, wanted, strict=True):
        mine.require_same_edges(theirs)
        torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.parametrize("kind", ["gat", "transformer"])
def test_edge_index_class(kind):
    model = make_model(kind)
    special, _ = EdgeIndex(EDGES, sparse_size=(NODES, NODES)).sort_by("col")
    with record(model) as tape:
        logits = model(X, special)
    edges = tape.attention
    torch.testing.assert_close(logits, model(X, EDGES))
    with record(model) as tape:
        model(X, EDGES)
    edges.require_same_edges(tape.attention)


@pytest.mark.parametrize("kind", KINDS)
def test_reverse_flow(kind):
    forward, backward = make_model(kind), make_model(kind, flow="target_to_source")
    with record(forward) as tape:
        expected = forward(X, EDGES)
    wanted = tape.attention
    with record(backward) as tape:
        logits = backward(X, EDGES.flip(0))
    torch.testing.assert_close(logits, expected)
    for mine, theirs in zip(tape.attention, wanted, strict=True):
        mine.require_same_edges(theirs)
        torch.testing.assert_close(mine.values, theirs.values)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    model, x = make_model(kind).float(), X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(x, EDGES)
        with record(model, perturb=lambda i, w, s, d: w + 0.0) as tape:
            logits = model(x, EDGES)
        if kind in WITH_WEIGHTS:
            _, weights = model.conv1(x, EDGES, return_attention_weights=True)
            assert_equals_weights(tape.attention[0], weights)
    assert torch.equal(logits, plain)
    tape.attention.check_sums(tolerance=0.05)
    delta = torch.zeros(tape.attention[0].num_edges, HEADS)  # a delta takes the type of the attention
    with torch.autocast("cpu", dtype=torch.bfloat16), record(model, perturb={0: delta}) as tape:
        assert torch.equal(model(x, EDGES), plain)


@pytest.mark.parametrize("how", ["wrapped", "in place", "inside", "around"])
def test_compiled_models_run_uncompiled_inside(how):
    model = make_model("gat")
    plain = model(X, EDGES)
    recorded = call = model
    if how == "wrapped":
        recorded = call = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    elif how == "inside":
        model.conv1 = torch.compile(model.conv1, backend="eager")
    else:
        call = torch.compile(lambda x, edge_index: model(x, edge_index), backend="eager")
    torch.testing.assert_close(call(X, EDGES), plain)
    before = snapshot(model)
    with record(recorded) as tape:
        logits = call(X, EDGES)
    assert torch.equal(logits, plain)
    assert [w.name for w in tape.attention] == ["conv1", "conv2"]
    with record(recorded, perturb=lambda i, w, s, d: 0 * w):
        assert not torch.equal(call(X, EDGES), plain)
    torch.testing.assert_close(call(X, EDGES), plain)
    assert_unchanged(before, model)
    torch.compiler.reset()


# Odd kinds of input: refused by name


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
            AttentionError, match=r"no attention layer.*GATConv.*looked at: Linear, ReLU, Sequential"
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


# The protocol for other layers


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


# Properties


@st.composite
def graphs(draw):
    nodes = draw(st.integers(1, 6))
    pair = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    edges = draw(st.lists(pair, max_size=12))
    index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T.contiguous()
    return nodes, index


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(WITH_WEIGHTS), st.integers(1, 3), st.booleans())
def test_property_recorded_is_what_the_layer_returns(graph, kind, heads, loops):
    nodes, edges = graph
    torch.manual_seed(0)
    options = {"add_self_loops": loops} if kind != "transformer" else {}
    conv = make_conv(kind, FEATURES, HIDDEN, heads=heads, **options).double().eval()
    x = make_features(nodes)
    out, weights = conv(x, edges, return_attention_weights=True)
    with record(conv, perturb=lambda i, w, s, d: w + 0.0) as tape:
        recorded = conv(x, edges)
    assert torch.equal(recorded, out)
    assert_equals_weights(tape.attention.last, weights)
    tape.attention.check_sums()
    merged = tape.attention.merged()
    merged.check_sums()
    assert not merged.last.has_duplicates


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_property_relabelling_nodes_and_shuffling_edges_commutes(graph, kind, rng):
    nodes, edges = graph
    torch.manual_seed(0)
    conv = make_conv(kind, FEATURES, HIDDEN, heads=2).double().eval()
    x = make_features(nodes)
    relabel = torch.tensor(rng.sample(range(nodes), nodes))
    shuffle = torch.tensor(rng.sample(range(edges.shape[1]), edges.shape[1]), dtype=torch.long)
    moved_x = torch.empty_like(x)
    moved_x[relabel] = x
    with record(conv) as tape:
        out = conv(x, edges)
    plain = tape.attention.last
    with record(conv) as tape:
        moved_out = conv(moved_x, relabel[edges][:, shuffle])
    moved = tape.attention.last.merged()
    back = LayerAttention.from_edges(
        plain.values, relabel[plain.source], relabel[plain.destination], nodes
    ).merged()
    moved.require_same_edges(back)
    torch.testing.assert_close(moved.values, back.values)
    torch.testing.assert_close(moved_out[relabel], out)
