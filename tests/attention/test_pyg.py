"""The recorder on user-written PyG models: same attention, same output, nothing left behind."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import elu
from torch_geometric import EdgeIndex

from fgai.attention import AttentionMap, LayerAttention, record
from fgai.errors import AttentionError
from fgai.sparse import edge_keys
from support.attention_cases import (
    EDGES,
    FEATURES,
    HEADS,
    HIDDEN,
    KINDS,
    NODES,
    WITH_WEIGHTS,
    assert_equals_weights,
    assert_same_edges,
    assert_sums,
    assert_unchanged,
    make_conv,
    make_features,
    make_model,
    reference_model,
    snapshot,
    with_loops,
)
from support.forward import adding

X = make_features()


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
        assert_sums(layer)


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
    assert_sums(tape.attention)
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
    assert_same_edges(edges, tape.attention)


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
    assert_sums(tape.attention, tolerance=0.05)
    delta = torch.zeros(tape.attention[0].num_edges, HEADS)  # a delta takes the type of the attention
    with torch.autocast("cpu", dtype=torch.bfloat16), record(model, perturb=adding({0: delta})) as tape:
        assert torch.equal(model(x, EDGES), plain)


@pytest.mark.many
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


# Properties


@st.composite
def graphs(draw):
    nodes = draw(st.integers(1, 6))
    pair = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    edges = draw(st.lists(pair, max_size=12))
    index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T.contiguous()
    return nodes, index


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
    assert_sums(tape.attention)
    merged = AttentionMap(tuple(layer.merged() for layer in tape.attention))
    assert_sums(merged)
    assert not merged.last.has_duplicates


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
