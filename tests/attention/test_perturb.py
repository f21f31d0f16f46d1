"""Perturbing the attention of PyG models: what it changes, and what does not fit."""

from __future__ import annotations

import random

import pytest
import torch

from fgai.attention import record
from fgai.errors import AttentionError, InputError
from fgai.sparse import edge_keys
from support.attention_cases import (
    EDGES,
    HEADS,
    KINDS,
    NODES,
    assert_unchanged,
    make_features,
    make_model,
    reference_model,
    snapshot,
    with_loops,
)
from support.forward import adding

X = make_features()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_perturbing_by_zero_changes_no_bit(kind, training):
    model = make_model(kind, dropout=0.5).train(training)
    edges = with_loops(kind, EDGES, NODES).shape[1]
    zeros = [torch.zeros(edges), torch.zeros(edges, 1, dtype=torch.float64)]
    outputs = []
    for perturb in (None, adding(dict(enumerate(zeros))), lambda i, w, s, d: w + 0.0):
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
    computed = []

    def perturb(index, w, source, destination):
        computed.append(w)
        return adding(deltas)(index, w, source, destination)

    with record(model, perturb=perturb) as tape:
        logits = model(X, EDGES)
    torch.testing.assert_close(logits, out, rtol=0, atol=1e-10)
    for index, expected in enumerate(attention):
        torch.testing.assert_close(computed[index], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(tape.attention[index].values, expected + deltas[index], rtol=0, atol=1e-10)


def test_gradient_reaches_the_delta():
    model = make_model("gat")
    delta = torch.zeros(with_loops("gat", EDGES, NODES).shape[1], dtype=torch.float64, requires_grad=True)
    with record(model, perturb=adding({1: delta})) as tape:
        model(X, EDGES)[2, 0].backward()
    assert torch.equal(delta.grad != 0, tape.attention.last.destination == 2)


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
        ({0: torch.zeros(4)}, InputError, "must be a function .* got dict"),
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
