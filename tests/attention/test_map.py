"""The attention of all layers, reduced to one, and two maps aligned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fgai.attention import AttentionMap, LayerAttention
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.sparse import Adjacency, edge_keys
from support.attention_cases import EDGES, FEATURES, NODES, assert_same_edges, make_features, make_map

X = make_features()
UNIQUE = torch.unique(EDGES, dim=1)


def test_map_reads_and_reduces():
    attention = make_map(heads=(3, 2))
    assert len(attention) == 2
    assert attention.last is attention[1] is attention[-1]
    assert [w.name for w in attention] == ["layer0", "layer1"]
    assert repr(attention) == "AttentionMap(layer0 [10 × 3], layer1 [10 × 2])"
    assert torch.equal(attention.heads(1)[0].values[:, 0], attention[0].values[:, 1])
    assert [w.num_heads for w in attention.heads()] == [1, 1]
    with pytest.raises(AttentionError, match="layer 2 was asked for"):
        attention[2]


@pytest.mark.parametrize("how", ["last", "mean", "max"])
def test_over_layers(how):
    attention = make_map(heads=(3, 2, 1))
    rows = [[float(v[e]) for v in (w.heads() for w in attention)] for e in range(EDGES.shape[1])]
    loops = {"last": lambda r: r[-1], "mean": lambda r: sum(r) / len(r), "max": max}[how]
    combined = attention.over_layers(how)
    assert combined.values.shape == (EDGES.shape[1], 1)
    torch.testing.assert_close(
        combined.values[:, 0], torch.tensor([loops(r) for r in rows], dtype=torch.float64)
    )
    combined.require_same_edges(attention.last)


def test_over_layers_with_different_edges_raises():
    mixed = AttentionMap((make_map()[0], make_map(EDGES[:, :-2])[0]))
    for how in ("mean", "max"):
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
    assert LayerAttention.from_adjacency(adjacency, values).to("meta").rowptr.device.type == "meta"


# Two maps


def test_align_matches_by_source_and_destination():
    mine = make_map(UNIQUE, seed=1)
    shuffled = torch.cat([torch.tensor([[7, 1], [0, 7]]), UNIQUE.flip(1)[:, 2:]], dim=1)
    theirs = make_map(shuffled, num_nodes=8, seed=2)
    with pytest.raises(AttentionError, match="different edges"):
        assert_same_edges(mine, theirs)
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


def test_align_equals_restrict_to_the_original_edges():
    graph = Graph.from_edges(UNIQUE, NODES, X.float())
    attacked, _ = graph.inject(torch.tensor([[0, 2], [3, 6]]), torch.zeros(2, FEATURES))
    before, after = make_map(graph.edge_index), make_map(attacked.edge_index, num_nodes=NODES + 2, seed=3)
    by_key = before.restrict(graph.keys), after.restrict(graph.keys)
    for mine, theirs in zip(by_key, before.align(after), strict=True):
        assert_same_edges(mine, theirs)
        assert torch.equal(mine.last.values, theirs.last.values)
    assert torch.equal(by_key[0].last.keys, graph.keys)
    assert after.restrict(graph.keys[[4, 1]]).last.num_edges == 2


def test_align_refuses_what_has_no_answer():
    mine = make_map(UNIQUE)
    with pytest.raises(AttentionError, match="one map has 2 layers, the other 1"):
        mine.align(AttentionMap((mine.last,)))
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
    one_more = make_map(
        UNIQUE[:, sorted(range(UNIQUE.shape[1]), key=lambda e: UNIQUE[:, e].flip(0).tolist())[:-1]]
    )
    with pytest.raises(AttentionError, match="one has 1 edges more"):
        mine.last.require_same_edges(one_more.last)


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
