"""Attention maps, the recorder on fgai's own models, calling models, and leaving them as they were."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fgai.attention import (
    call_model,
    evaluating,
    find_layers,
    record,
)
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from support.attention_cases import (
    EDGES,
    FEATURES,
    NODES,
    assert_same_edges,
    assert_sums,
    assert_unchanged,
    make_features,
    make_model,
    snapshot,
)
from support.forward import adding, seen_by

X = make_features()
UNIQUE = torch.unique(EDGES, dim=1)


def make_graph(**fields):
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    return Graph.from_edges(UNIQUE, NODES, X.float(), y=labels, **fields)


def make_own(kind, **options):
    torch.manual_seed(2)
    if kind == "gt":
        return GT(FEATURES, 3, hidden_channels=8, heads=(2, 1), encodings=2, **options)
    return {"gat": GAT, "gatv2": GATv2}[kind](FEATURES, 3, hidden_channels=4, heads=2, **options)


# fgai's own models


@pytest.mark.parametrize("kind", ["gat", "gatv2", "gt"])
def test_own_models_record_and_perturb(kind):
    model = make_own(kind, dropout=0.3, attention_dropout=0.4).eval()
    graph = model.prepare(make_graph())
    before = snapshot(model)
    plain = model(graph)
    logits, attention = seen_by(model, graph)
    assert torch.equal(logits, plain)
    assert [w.num_heads for w in attention] == [2, 1]
    assert_sums(attention)
    assert all(w.adjacency is graph.adjacency for w in attention)
    assert attention.last.keys is graph.keys
    zeros = {0: torch.zeros(graph.num_edges), 1: torch.zeros(graph.num_edges, 1)}
    assert torch.equal(seen_by(model, graph, adding(zeros))[0], plain)
    moved, perturbed = seen_by(model, graph, adding({1: torch.full((graph.num_edges,), 0.5)}))
    torch.testing.assert_close(perturbed.last.values, attention.last.values + 0.5)
    assert not torch.allclose(moved, plain)
    assert_unchanged(before, model)


@pytest.mark.parametrize("kind", ["gat", "gatv2", "gt"])
def test_own_models_in_training_record_before_dropout(kind):
    model = make_own(kind, dropout=0.0, attention_dropout=0.5).train()
    graph = model.prepare(make_graph())
    torch.manual_seed(0)
    plain = model(graph)
    torch.manual_seed(0)
    logits, attention = seen_by(model, graph)
    assert torch.equal(logits, plain)
    assert_sums(attention)
    grads = torch.autograd.grad((attention[0].values ** 2).sum(), list(model.parameters()), allow_unused=True)
    assert any(g is not None and float(g.abs().sum()) > 0 for g in grads)


def test_own_model_is_unchanged_when_forward_raises():
    model = make_own("gat")
    before = snapshot(model)
    with pytest.raises(InputError), record(model):
        model(make_graph().replace(features=None))

    def fail(*_):
        raise RuntimeError("from the perturbation")

    with pytest.raises(RuntimeError, match="from the perturbation"), record(model, perturb=fail):
        model(make_graph())
    assert_unchanged(before, model)


def test_own_layer_compiled_by_the_user():
    model = make_own("gat").eval()
    graph = model.prepare(make_graph())
    plain = model(graph)
    model.convs[1] = torch.compile(model.convs[1], backend="eager")
    logits, attention = seen_by(model, graph)
    assert torch.equal(logits, plain)
    assert [w.name for w in attention] == ["convs.0", "convs.1"]
    assert list(find_layers(model)) == ["convs.0", "convs.1"]


# Calling models


def test_call_model_gives_user_models_features_and_edges():
    graph = make_graph()
    model = make_model("gat").float()
    torch.testing.assert_close(call_model(model, graph), model(X.float(), graph.edge_index))
    logits, attention = seen_by(model, graph)
    assert torch.equal(logits, call_model(model, graph))
    looped, _ = graph.add_self_loops()
    assert torch.equal(attention.last.keys, looped.keys)
    again, same = seen_by(model, looped)  # PyG replaces loops that are there already
    assert_same_edges(same, attention)
    torch.testing.assert_close(again, logits)


@pytest.mark.parametrize("kind", ["own", "user"])
def test_gradient_reaches_injected_features_and_attention_is_aligned(kind):
    graph, _ = make_graph().add_self_loops()
    model = make_own("gat").eval() if kind == "own" else make_model("gat").float()
    rows = torch.zeros(2, FEATURES, requires_grad=True)
    attacked, _ = graph.inject(torch.tensor([[0, 2], [1, 5]]), rows)
    _, clean = seen_by(model, graph)
    logits, attention = seen_by(model, attacked)
    before, after = clean.restrict(graph.keys), attention.restrict(graph.keys)
    assert before.last.num_edges == graph.num_edges
    (logits[:NODES].sum() + (before[0].values - after[0].values).abs().sum()).backward()
    assert rows.grad is not None
    assert bool((rows.grad.abs().sum(dim=1) > 0).all())


def test_call_model_refuses_what_it_cannot_call():
    class Pair(nn.Module):
        def forward(self, x, edge_index):
            return x, edge_index

    with pytest.raises(InputError, match="Pair must return one tensor of logits, got tuple"):
        call_model(Pair(), make_graph())
    with pytest.raises(InputError, match="no node features"):
        call_model(make_model("gat"), make_graph().replace(features=None))
    with pytest.raises(AttentionError, match=r"its modules are Linear"):
        seen_by(nn.Linear(2, 3), make_graph())


# Leaving a model as it was


def make_mixed():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.Linear(3, 4)))
    model[1].eval()
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_evaluating_restores_every_flag(root, fails):
    model = make_mixed()
    model.training = root
    flags = [m.training for m in model.modules()]
    grads = [p.requires_grad for p in model.parameters()]
    with pytest.raises(RuntimeError) if fails else nullcontext(), evaluating(model, freeze=True) as same:
        assert same is model
        assert not any(m.training for m in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
        if fails:
            raise RuntimeError
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == grads
    with evaluating(model):
        assert [p.requires_grad for p in model.parameters()] == grads
    assert [m.training for m in model.modules()] == flags


def test_evaluating_goes_through_the_models_own_train():
    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = Merging(2, 3)
    with evaluating(model):
        assert model.merged
    assert not model.merged
    assert model.training
