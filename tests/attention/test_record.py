"""Attention maps, the recorder on fgai's own models, calling models, and leaving them as they were."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fgai.attention import (
    AttentionMap,
    LayerAttention,
    call_model,
    evaluating,
    find_layers,
    frozen_state,
    record,
)
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.sparse import Adjacency, edge_keys
from support.attention_cases import (
    EDGES,
    FEATURES,
    NODES,
    assert_unchanged,
    make_features,
    make_model,
    snapshot,
)
from support.forward import seen_by

X = make_features()
UNIQUE = torch.unique(EDGES, dim=1)


def make_graph(**fields):
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    return Graph.from_edges(UNIQUE, NODES, X.float(), y=labels, **fields)


def make_own(kind, **options):
    torch.manual_seed(2)
    if kind == "gt":
        return GT(FEATURES, 3, width=8, heads=(2, 1), encodings=2, **options)
    return {"gat": GAT, "gatv2": GATv2}[kind](FEATURES, 3, channels=4, heads=2, **options)


def make_map(edges=EDGES, heads=(3, 1), num_nodes=NODES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for index, count in enumerate(heads):
        values = torch.rand(edges.shape[1], count, generator=generator, dtype=torch.float64)
        layers.append(LayerAttention.from_edges(values, edges[0], edges[1], num_nodes, f"layer{index}"))
    return AttentionMap(tuple(layers))


# One layer


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
    layer = LayerAttention.on(adjacency, values[order], "conv")
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


def test_check_sums_names_the_worst_node():
    adjacency, _ = Adjacency.build(EDGES, NODES)
    good = 1.0 / adjacency.degree[adjacency.destination].double()[:, None].expand(-1, 2)
    layer = LayerAttention.on(adjacency, good, "conv")
    layer.check_sums()
    assert layer.sums()[6].tolist() == [0.0, 0.0]  # the isolated node attends to nothing
    bad = good.clone()
    bad[adjacency.destination == 4, 1] += 0.2
    with pytest.raises(AttentionError, match=r"'conv'.*at node 4 it is 0\.2"):
        layer.with_values(bad).check_sums()
    layer.with_values(bad).check_sums(tolerance=0.3)
    with pytest.raises(AttentionError, match="node 4"):
        layer.with_values(torch.where(bad > good, float("nan"), good)).check_sums()


# All layers


def test_map_reads_and_reduces():
    attention = make_map(heads=(3, 2))
    assert len(attention) == 2
    assert attention.last is attention.layer(1) is attention[-1]
    assert [w.name for w in attention] == ["layer0", "layer1"]
    assert repr(attention) == "AttentionMap(layer0 [10 × 3], layer1 [10 × 2])"
    assert [v.shape for v in attention.reduce()] == [(10,), (10,)]
    assert torch.equal(attention.reduce("last", "max")[0], attention.last.heads("max"))
    assert torch.equal(attention.reduce(0, 2)[0], attention[0].values[:, 2])
    assert [w.num_heads for w in attention.heads()] == [1, 1]
    with pytest.raises(AttentionError, match="layer 2 was asked for"):
        attention.layer(2)
    with pytest.raises(InputError, match="`layers` must be one of all, last"):
        attention.reduce("first")


@pytest.mark.parametrize("how", ["last", "mean", "max", "sum"])
def test_over_layers(how):
    attention = make_map(heads=(3, 2, 1))
    rows = [[float(v[e]) for v in attention.reduce()] for e in range(EDGES.shape[1])]
    loops = {"last": lambda r: r[-1], "mean": lambda r: sum(r) / len(r), "max": max, "sum": sum}[how]
    combined = attention.over_layers(how)
    assert combined.values.shape == (EDGES.shape[1], 1)
    torch.testing.assert_close(
        combined.values[:, 0], torch.tensor([loops(r) for r in rows], dtype=torch.float64)
    )
    combined.require_same_edges(attention.last)


def test_over_layers_with_different_edges_raises():
    mixed = AttentionMap((make_map()[0], make_map(EDGES[:, :-2])[0]))
    for how in ("mean", "max", "sum"):
        with pytest.raises(AttentionError, match="different edges"):
            mixed.over_layers(how)
    assert mixed.over_layers("last").num_edges == 8
    with pytest.raises(InputError, match="`how` must be one of"):
        mixed.over_layers("median")


def test_detach_and_to():
    values = torch.rand(EDGES.shape[1], 2, requires_grad=True)
    attention = AttentionMap((LayerAttention.from_edges(values, EDGES[0], EDGES[1], NODES),))
    assert attention.last.values.requires_grad
    assert not attention.detach().last.values.requires_grad
    moved = attention.to("meta")
    assert moved.last.values.device.type == moved.last.source.device.type == "meta"
    adjacency, _ = Adjacency.build(EDGES, NODES)
    assert LayerAttention.on(adjacency, values).to("meta").rowptr.device.type == "meta"


# Two maps


def test_align_matches_by_source_and_destination():
    mine = make_map(UNIQUE, seed=1)
    shuffled = torch.cat([torch.tensor([[7, 1], [0, 7]]), UNIQUE.flip(1)[:, 2:]], dim=1)
    theirs = make_map(shuffled, num_nodes=8, seed=2)
    with pytest.raises(AttentionError, match="stands on different edges"):
        mine.require_same_edges(theirs)
    a, b = mine.align(theirs)
    common = set(mine.last.keys.tolist()) & set(theirs.last.keys.tolist())
    for before, first, after, second in zip(mine, a, theirs, b, strict=True):
        assert first.keys.tolist() == second.keys.tolist() == sorted(common)
        assert first.num_nodes == second.num_nodes == NODES
        for short, full in ((first, before), (second, after)):
            by_key = dict(zip(full.keys.tolist(), full.values, strict=True))
            for key, row in zip(short.keys.tolist(), short.values, strict=True):
                assert torch.equal(row, by_key[key])
    back_b, back_a = theirs.align(mine)
    assert torch.equal(back_a.last.values, a.last.values)
    assert torch.equal(back_b.last.values, b.last.values)


def test_align_through_keys_and_edge_map():
    graph = Graph.from_edges(UNIQUE, NODES, X.float())
    attacked, edge_map = graph.inject(torch.tensor([[0, 2], [3, 6]]), torch.zeros(2, FEATURES))
    before, after = make_map(graph.edge_index), make_map(attacked.edge_index, num_nodes=NODES + 2, seed=3)
    by_key = before.align(after, keys=graph.keys)
    by_map = before.align(after, edge_map=edge_map)
    by_default = before.align(after)
    for pair in (by_map, by_default):
        for side in (0, 1):
            by_key[side].require_same_edges(pair[side])
            assert torch.equal(by_key[side].last.values, pair[side].last.values)
    assert torch.equal(by_key[0].last.keys, graph.keys)
    part = before.align(after, keys=graph.keys[[4, 1]])
    assert part[0].last.num_edges == part[1].last.num_edges == 2
    with pytest.raises(InputError, match="not both"):
        before.align(after, keys=graph.keys, edge_map=edge_map)


def test_align_refuses_what_has_no_answer():
    mine = make_map(UNIQUE)
    with pytest.raises(AttentionError, match="one map has 2 layers, the other 1"):
        mine.align(mine.select("last"))
    with pytest.raises(AttentionError, match="has 3 heads"):
        mine.align(make_map(UNIQUE, heads=(2, 1)))
    with pytest.raises(AttentionError, match="edge 0 → 1 occurs more than once"):
        make_map().align(mine)
    with pytest.raises(AttentionError, match="0 → 1 occurs more than once"):
        mine.align(make_map())
    with pytest.raises(AttentionError, match="no edge in common"):
        mine.align(make_map(torch.tensor([[6, 5], [6, 5]])))
    with pytest.raises(AttentionError, match="use `to`"):
        mine.align(mine.to("meta"))
    with pytest.raises(AttentionError, match=r"1 of 2 edges asked for.*6 → 0"):
        mine.restrict(edge_keys(torch.tensor([6, 1]), torch.tensor([0, 0])))
    graph = Graph.from_edges(UNIQUE, NODES)
    _, edge_map = graph.remove(torch.tensor([0]))
    with pytest.raises(AttentionError, match="computed on other graphs"):
        mine.align(mine, edge_map=edge_map)
    shifted = (UNIQUE + 1) % NODES
    with pytest.raises(AttentionError, match="different edges"):
        mine.align(make_map(shifted[:, 1:]), edge_map=edge_map)
    one_more = make_map(
        UNIQUE[:, sorted(range(UNIQUE.shape[1]), key=lambda e: UNIQUE[:, e].flip(0).tolist())[:-1]]
    )
    with pytest.raises(AttentionError, match="one has 1 edges more"):
        mine.require_same_edges(one_more)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_property_align_agrees_with_dictionaries(data):
    nodes = data.draw(st.integers(1, 5))
    pair = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    maps, tables = [], []
    for seed in range(2):
        edges = data.draw(st.lists(pair, unique=True, max_size=12))
        index = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T
        values = torch.rand(len(edges), 2, generator=torch.Generator().manual_seed(seed))
        maps.append(AttentionMap((LayerAttention.from_edges(values, index[0], index[1], nodes),)))
        tables.append(dict(zip(edges, values.tolist(), strict=True)))
    common = sorted(tables[0].keys() & tables[1].keys(), key=lambda e: (e[1], e[0]))
    if not common and any(tables):
        with pytest.raises(AttentionError, match="no edge in common"):
            maps[0].align(maps[1])
        return
    for short, table in zip(maps[0].align(maps[1]), tables, strict=True):
        assert list(zip(short.last.source.tolist(), short.last.destination.tolist(), strict=True)) == common
        assert short.last.values.tolist() == [table[edge] for edge in common]


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
    attention.check_sums()
    assert all(w.adjacency is graph.adjacency for w in attention)
    assert attention.last.keys is graph.keys
    zeros = [torch.zeros(graph.num_edges), torch.zeros(graph.num_edges, 1)]
    assert torch.equal(seen_by(model, graph, zeros)[0], plain)
    moved, perturbed = seen_by(model, graph, {1: torch.full((graph.num_edges,), 0.5)})
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
    attention.check_sums()
    grads = torch.autograd.grad((attention[0].values ** 2).sum(), list(model.parameters()), allow_unused=True)
    assert any(g is not None and float(g.abs().sum()) > 0 for g in grads)


def test_own_model_is_unchanged_when_forward_raises():
    model = make_own("gat")
    earlier = []
    model.convs[0].tap = lambda attention, adjacency: (earlier.append(attention.shape), attention)[1]
    before = snapshot(model)
    with pytest.raises(InputError), record(model):
        model(make_graph().replace(features=None))

    def fail(*_):
        raise RuntimeError("from the perturbation")

    with pytest.raises(RuntimeError, match="from the perturbation"), record(model, perturb=fail):
        model(make_graph())
    assert_unchanged(before, model)
    assert len(earlier) == 1  # a tap that was there is called first


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
    same.require_same_edges(attention)
    torch.testing.assert_close(again, logits)


@pytest.mark.parametrize("kind", ["own", "user"])
def test_gradient_reaches_injected_features_and_attention_is_aligned(kind):
    graph, _ = make_graph().add_self_loops()
    model = make_own("gat").eval() if kind == "own" else make_model("gat").float()
    rows = torch.zeros(2, FEATURES, requires_grad=True)
    attacked, _ = graph.inject(torch.tensor([[0, 2], [1, 5]]), rows)
    _, clean = seen_by(model, graph)
    logits, attention = seen_by(model, attacked)
    before, after = clean.align(attention, keys=graph.keys)
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
    with pytest.raises(AttentionError, match=r"looked at: Linear"):
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
    with pytest.raises(RuntimeError) if fails else nullcontext(), frozen_state(model) as same:
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
