"""`Graph`: every edit against a slow edge list, identity of edges, and what is refused at the door."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from fgai.errors import FgaiWarning, InputError
from fgai.graph import Graph
from fgai.sparse import Adjacency, EdgeMap, Features, match_edges
from support.graph_cases import Edge, Sample, build, edge_sets, edge_tensor, in_order, listed


def assert_structure(adjacency: Adjacency, edges: set[Edge]) -> None:
    """The sorted edges and both pointers equal what plain Python makes of the edge set."""
    wanted = in_order(edges)
    assert list(zip(adjacency.source.tolist(), adjacency.destination.tolist(), strict=True)) == wanted
    assert adjacency.keys.tolist() == [d * 2**32 + s for s, d in wanted]
    rows, columns = adjacency.rowptr.tolist(), adjacency.colptr.tolist()
    csc = adjacency.csc.tolist()
    assert len(rows) == len(columns) == adjacency.num_nodes + 1
    for node, (a, b) in enumerate(pairwise(rows)):
        assert wanted[a:b] == [e for e in wanted if e[1] == node]
    for node, (a, b) in enumerate(pairwise(columns)):
        assert [wanted[p] for p in csc[a:b]] == sorted(e for e in edges if e[0] == node)
    assert adjacency.degree.tolist() == [sum(d == n for _, d in edges) for n in range(adjacency.num_nodes)]
    for long, short in zip(
        (adjacency.rowptr, adjacency.source, adjacency.colptr, adjacency.csc, adjacency.destination),
        adjacency.index32,
        strict=True,
    ):
        assert short.dtype == torch.int32
        assert short.tolist() == long.tolist()


def assert_map(edge_map: EdgeMap, before: Graph, after: Graph) -> None:
    """The map pairs exactly the edges both graphs have, each with itself."""
    old, new = listed(before), listed(after)
    pairs = list(zip(edge_map.before.tolist(), edge_map.after.tolist(), strict=True))
    assert all(old[a] == new[b] for a, b in pairs)
    assert [old[a] for a, _ in pairs] == in_order(set(old) & set(new))
    assert (edge_map.num_before, edge_map.num_after) == (len(old), len(new))
    ia, ib = match_edges(before.keys, after.keys)
    assert torch.equal(ia, edge_map.before) and torch.equal(ib, edge_map.after)


class TestBuild:
    @given(edge_sets(), st.randoms(use_true_random=False))
    def test_order_of_the_input_does_not_matter(self, sample: Sample, random: object) -> None:
        nodes, edges = sample
        shuffled = list(edges)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        assert_structure(build(nodes, shuffled).adjacency, set(edges))

    @given(edge_sets())
    def test_undirected_adds_every_reverse_once(self, sample: Sample) -> None:
        nodes, edges = sample
        graph = build(nodes, edges, undirected=True)
        assert_structure(graph.adjacency, set(edges) | {(d, s) for s, d in edges})

    @given(edge_sets(min_nodes=2), st.randoms(use_true_random=False))
    def test_relabelling_nodes_commutes(self, sample: Sample, random: object) -> None:
        nodes, edges = sample
        names = list(range(nodes))
        random.shuffle(names)  # type: ignore[attr-defined]
        renamed = build(nodes, [(names[s], names[d]) for s, d in edges])
        assert set(listed(renamed)) == {(names[s], names[d]) for s, d in listed(build(nodes, edges))}

    def test_duplicates_are_merged_with_a_warning(self) -> None:
        with pytest.warns(FgaiWarning, match="2 duplicate edges of 'pairs'"):
            graph = build(4, [(0, 1), (2, 3), (0, 1), (3, 2), (2, 3)], name="pairs")
        assert listed(graph) == [(0, 1), (3, 2), (2, 3)]

    def test_truth_of_merged_edges_is_any_of_them(self) -> None:
        truth = torch.tensor([False, True, True, False, False])
        with pytest.warns(FgaiWarning):
            graph = build(4, [(0, 1), (2, 3), (0, 1), (3, 2), (2, 1)], edge_truth=truth)
        assert graph.edge_truth is not None
        assert dict(zip(listed(graph), graph.edge_truth.tolist(), strict=True)) == {
            (0, 1): True,
            (2, 1): False,
            (3, 2): False,
            (2, 3): True,
        }

    def test_truth_follows_the_reverse_edges(self) -> None:
        graph = build(3, [(0, 1), (1, 2)], edge_truth=torch.tensor([True, False]), undirected=True)
        assert graph.edge_truth is not None
        assert {e for e, t in zip(listed(graph), graph.edge_truth.tolist(), strict=True) if t} == {
            (0, 1),
            (1, 0),
        }

    def test_raw_adjacency_keeps_duplicates_in_order(self) -> None:
        edges = edge_tensor([(2, 1), (0, 1), (2, 1), (1, 0), (2, 1)])
        adjacency, order = Adjacency.build(edges, 3)
        assert order.tolist() == [3, 1, 0, 2, 4]
        assert adjacency.rowptr.tolist() == [0, 1, 5, 5]

    def test_isolated_nodes_stay(self) -> None:
        graph = build(5, [(1, 3)])
        assert graph.num_nodes == 5
        assert graph.adjacency.degree.tolist() == [0, 0, 0, 1, 0]
        assert not graph.has_loops

    def test_one_node_without_edges(self) -> None:
        graph = build(1, [])
        assert (graph.num_nodes, graph.num_edges, graph.num_classes, graph.num_graphs) == (1, 0, 0, 1)
        assert listed(graph.add_self_loops()[0]) == [(0, 0)]

    def test_sparse_and_dense_features_hold_the_same(self) -> None:
        dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
        matrix = scipy.sparse.csr_matrix(dense.numpy())
        edges = edge_tensor([(0, 1)])
        for given_features in (dense, matrix, matrix.tocoo(), dense.numpy(), Features.dense(dense)):
            graph = Graph.from_edges(edges, 2, given_features)
            assert graph.features is not None
            torch.testing.assert_close(graph.features.to_dense(), dense)
        counts = Graph.from_edges(edges, 2, dense.long())
        assert counts.features is not None and counts.features.dtype == torch.float32

    def test_repr_names_the_sizes(self) -> None:
        text = repr(build(4, [(0, 1), (1, 2)], y=torch.tensor([0, 1, 2, -1]), name="tiny"))
        assert text == "Graph('tiny', nodes=4, edges=2, features=3, classes=3)"


class TestEdits:
    @given(edge_sets(min_nodes=2), st.data())
    def test_inject(self, sample: Sample, data: st.DataObject) -> None:
        nodes, edges = sample
        each = data.draw(st.integers(1, min(nodes, 4)))
        made = data.draw(st.integers(1, 3))
        row = st.lists(st.integers(0, nodes - 1), min_size=each, max_size=each, unique=True)
        targets = [data.draw(row) for _ in range(made)]
        loops = data.draw(st.booleans())
        if loops:
            edges = [*edges, *((n, n) for n in range(nodes) if (n, n) not in edges)]
        graph = build(nodes, edges)
        extra = -torch.ones(made, 3).cumsum(0)
        changed, edge_map = graph.inject(torch.tensor(targets), extra)
        new = {(nodes + m, t) for m, row_ in enumerate(targets) for t in row_}
        new |= {(d, s) for s, d in new}
        has_loops = all((n, n) in edges for n in range(nodes))
        new |= {(nodes + m, nodes + m) for m in range(made)} if has_loops else set()
        assert_structure(changed.adjacency, set(edges) | new)
        assert_map(edge_map, graph, changed)
        assert changed.has_loops == has_loops
        assert changed.features is not None and graph.features is not None
        torch.testing.assert_close(changed.features.to_dense(), torch.cat([graph.features.to_dense(), extra]))

    @given(edge_sets(), st.data())
    def test_inject_edges(self, sample: Sample, data: st.DataObject) -> None:
        nodes, edges = sample
        node = st.integers(0, nodes - 1)
        more = data.draw(st.lists(st.tuples(node, node), max_size=12))  # repeats and known edges included
        graph = build(nodes, edges)
        changed, edge_map = graph.inject_edges(edge_tensor(more))
        assert_structure(changed.adjacency, set(edges) | set(more))
        assert_map(edge_map, graph, changed)

    @given(edge_sets())
    def test_add_self_loops(self, sample: Sample) -> None:
        nodes, edges = sample
        graph = build(nodes, edges)
        looped, edge_map = graph.add_self_loops()
        assert_structure(looped.adjacency, set(edges) | {(n, n) for n in range(nodes)})
        assert_map(edge_map, graph, looped)
        assert looped.has_loops
        again, _ = looped.add_self_loops()
        assert torch.equal(again.keys, looped.keys)

    @given(edge_sets(), st.data())
    def test_remove(self, sample: Sample, data: st.DataObject) -> None:
        nodes, edges = sample
        graph = build(nodes, edges)
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(edges), max_size=len(edges))))
        mask = mask.bool()
        gone = {e for e, out in zip(listed(graph), mask.tolist(), strict=True) if out}
        for positions in (mask, mask.nonzero().flatten()):
            changed, edge_map = graph.remove(positions)
            assert_structure(changed.adjacency, set(edges) - gone)
            assert_map(edge_map, graph, changed)
            assert changed.num_nodes == nodes

    @given(edge_sets(), st.data())
    def test_inject_then_remove_gives_the_graph_back(self, sample: Sample, data: st.DataObject) -> None:
        nodes, edges = sample
        node = st.integers(0, nodes - 1)
        more = data.draw(st.lists(st.tuples(node, node), min_size=1, max_size=8))
        graph = build(nodes, edges)
        grown, edge_map = graph.inject_edges(edge_tensor(more))
        fresh = torch.ones(grown.num_edges, dtype=torch.bool)
        fresh[edge_map.after] = False
        back, _ = grown.remove(fresh)
        assert torch.equal(back.keys, graph.keys)
        assert torch.equal(back.adjacency.csc, graph.adjacency.csc)

    @given(edge_sets(min_nodes=2), st.randoms(use_true_random=False))
    def test_injection_commutes_with_relabelling(self, sample: Sample, random: object) -> None:
        nodes, edges = sample
        names = list(range(nodes))
        random.shuffle(names)  # type: ignore[attr-defined]
        targets = torch.tensor([[0, 1], [1, nodes - 1 if nodes > 2 else 0]])
        renamed_targets = torch.tensor(names)[targets]
        first, _ = build(nodes, edges).inject(targets)
        second, _ = build(nodes, [(names[s], names[d]) for s, d in edges]).inject(renamed_targets)
        full = [*names, nodes, nodes + 1]
        assert {(full[s], full[d]) for s, d in listed(first)} == set(listed(second))

    def test_edits_leave_the_original_alone(self) -> None:
        graph = build(4, [(0, 1), (2, 1), (3, 0)], y=torch.tensor([0, 1, 0, 1]))
        keys, features = graph.keys.clone(), graph.features
        graph.inject(torch.tensor([[0, 2]]))
        graph.remove(torch.tensor([1]))
        graph.add_self_loops()
        assert torch.equal(graph.keys, keys) and graph.features is features
        assert graph.num_nodes == 4

    def test_injected_nodes_have_no_label_no_mask_no_truth(self) -> None:
        mask = torch.tensor([True, False, True])
        graph = build(
            3,
            [(0, 1), (2, 1)],
            y=torch.tensor([0, 1, 0]),
            train_mask=mask,
            test_mask=~mask,
            batch=torch.tensor([0, 0, 1]),
            edge_truth=torch.tensor([True, False]),
        )
        changed, _ = graph.inject(torch.tensor([[2], [1]]))
        assert changed.y is not None and changed.y.tolist() == [0, 1, 0, -1, -1]
        assert changed.train_mask is not None and changed.train_mask.tolist() == [
            True,
            False,
            True,
            False,
            False,
        ]
        assert changed.test_mask is not None and changed.test_mask.tolist() == [
            False,
            True,
            False,
            False,
            False,
        ]
        assert changed.val_mask is None
        assert changed.batch is not None and changed.batch.tolist() == [0, 0, 1, 1, 0]
        assert changed.edge_truth is not None
        assert [e for e, t in zip(listed(changed), changed.edge_truth.tolist(), strict=True) if t] == [(0, 1)]
        assert changed.features is not None
        assert changed.features.to_dense()[3:].abs().sum() == 0

    def test_truth_survives_edge_edits(self) -> None:
        truth = torch.tensor([True, False, True])
        graph = build(3, [(0, 1), (2, 1), (1, 2)], edge_truth=truth)
        grown, _ = graph.add_self_loops()
        assert grown.edge_truth is not None
        assert [e for e, t in zip(listed(grown), grown.edge_truth.tolist(), strict=True) if t] == [
            (0, 1),
            (1, 2),
        ]
        fewer, _ = grown.remove(torch.tensor([listed(grown).index((0, 1))]))
        assert fewer.edge_truth is not None and fewer.edge_truth.sum() == 1

    def test_gradients_reach_injected_features(self) -> None:
        extra = torch.full((2, 3), 0.5, requires_grad=True)
        changed, _ = build(4, [(0, 1)]).inject(torch.tensor([[0, 3], [1, 2]]), extra)
        assert changed.features is not None
        (3 * changed.features.to_dense()).sum().backward()
        assert extra.grad is not None
        torch.testing.assert_close(extra.grad, torch.full((2, 3), 3.0))

    def test_replace_keeps_the_edges(self) -> None:
        graph = build(3, [(0, 1)]).add_self_loops()[0]
        other = graph.replace(name="other")
        assert other.adjacency is graph.adjacency and other.has_loops and other.name == "other"

    def test_to_moves_and_keeps_everything(self) -> None:
        graph = build(3, [(0, 1), (2, 1)], y=torch.tensor([0, 1, 1]))
        assert torch.equal(graph.to("cpu").keys, graph.keys)
        meta = graph.to("meta")
        assert meta.device.type == "meta" and meta.y is not None and meta.y.device.type == "meta"


class TestPyG:
    def test_round_trip(self) -> None:
        y = torch.tensor([0, 1, -1, 1])
        graph = build(4, [(2, 1), (0, 3)], y=y, train_mask=y == 0, edge_truth=torch.tensor([True, False]))
        data = graph.to_data()
        back = Graph.from_data(data)
        assert torch.equal(back.keys, graph.keys)
        assert back.y is not None and torch.equal(back.y, y)
        assert back.train_mask is not None and back.train_mask.tolist() == [True, False, False, False]
        assert back.edge_truth is not None and graph.edge_truth is not None
        assert torch.equal(back.edge_truth, graph.edge_truth)
        assert back.features is not None and graph.features is not None
        torch.testing.assert_close(back.features.to_dense(), graph.features.to_dense())

    def test_label_column_becomes_a_vector(self) -> None:
        data = Data(x=torch.ones(3, 2), edge_index=edge_tensor([(0, 1)]), y=torch.tensor([[0], [1], [1]]))
        y = Graph.from_data(data).y
        assert y is not None and y.shape == (3,)

    def test_foreign_containers_are_refused(self) -> None:
        with pytest.raises(InputError, match="HeteroData"):
            Graph.from_data(HeteroData())
        with pytest.raises(InputError, match="edge_index"):
            Graph.from_data(Data(x=torch.ones(3, 2)))


EDGES = edge_tensor([(0, 1), (2, 1), (1, 2)])
GOOD = torch.ones(3, 2)


def _nan() -> Tensor:
    features = GOOD.clone()
    features[2, 1] = float("nan")
    return features


BAD = {
    "no nodes": ({"edge_index": EDGES[:, :0], "num_nodes": 0}, "at least one node"),
    "edge out of range": ({"edge_index": EDGES, "num_nodes": 2}, "0..1, got 0..2"),
    "negative edge": ({"edge_index": EDGES - 1, "num_nodes": 3}, "got -1..1"),
    "float edges": ({"edge_index": EDGES.float(), "num_nodes": 3}, "integers"),
    "bool edges": ({"edge_index": EDGES.bool(), "num_nodes": 3}, "integers"),
    "transposed edges": ({"edge_index": EDGES.t(), "num_nodes": 3}, r"\[2, num_edges\], got \(3, 2\)"),
    "edge list": ({"edge_index": [[0], [1]], "num_nodes": 3}, "got list"),
    "NaN feature": ({"features": _nan()}, "1 NaN or infinite entries, the first in row 2"),
    "infinite feature": ({"features": GOOD * float("inf")}, "6 NaN or infinite"),
    "NaN in sparse": ({"features": scipy.sparse.csr_matrix(_nan().numpy())}, "NaN or infinite"),
    "features of too few nodes": ({"features": GOOD[:2]}, "3 rows, one per node, got 2"),
    "features with three axes": ({"features": GOOD[None]}, "shape"),
    "features of a strange type": ({"features": "words"}, "tensor, a scipy sparse matrix"),
    "one class": ({"y": torch.zeros(3, dtype=torch.long)}, "at least two classes, got 1"),
    "no label at all": ({"y": torch.full((3,), -1)}, "at least two classes, got 0"),
    "label below -1": ({"y": torch.tensor([0, 1, -7])}, "-1 for unknown, got -7"),
    "labels of too few nodes": ({"y": torch.tensor([0, 1])}, r"per node \(3\), got 2"),
    "float labels": ({"y": torch.tensor([0.0, 1.0, 1.0])}, r"class numbers.*use `y.long\(\)`"),
    "mask of wrong length": ({"train_mask": torch.ones(4, dtype=torch.bool)}, r"`train_mask`.*\(3\), got 4"),
    "indices as mask": ({"test_mask": torch.tensor([0, 2, 1])}, "boolean vector.*index_to_mask"),
    "few indices as mask": ({"test_mask": torch.tensor([0, 2])}, "per node.*index_to_mask"),
    "several masks at once": (
        {"val_mask": torch.ones(3, 5, dtype=torch.bool)},
        r"boolean vector.*`val_mask\[:, 0\]`",
    ),
    "truth of wrong length": ({"edge_truth": torch.ones(2, dtype=torch.bool)}, r"\[3\], got \(2,\)"),
}


@pytest.mark.parametrize("case", BAD, ids=BAD.keys())
def test_bad_input_is_refused(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(InputError, match=message):
        Graph.from_edges(**{"edge_index": EDGES, "num_nodes": 3, "features": GOOD, **arguments})  # type: ignore[arg-type]


BAD_EDITS = {
    "targets not a matrix": (lambda g: g.inject(torch.tensor([0, 1])), "shape"),
    "targets out of range": (lambda g: g.inject(torch.tensor([[0, 3]])), "0..2"),
    "a target twice": (lambda g: g.inject(torch.tensor([[1, 1]])), "distinct"),
    "features too wide": (lambda g: g.inject(torch.tensor([[0], [1]]), torch.ones(2, 5)), r"\[M, 2\]"),
    "features of too few nodes": (lambda g: g.inject(torch.tensor([[0], [1]]), torch.ones(1, 2)), "2 rows"),
    "edges out of range": (lambda g: g.inject_edges(torch.tensor([[0], [3]])), "0..2"),
    "position out of range": (lambda g: g.remove(torch.tensor([0, 3])), "0..2"),
    "mask of wrong length": (lambda g: g.remove(torch.ones(4, dtype=torch.bool)), r"\[3\]"),
    "fractional position": (lambda g: g.remove(torch.tensor([0.5])), "integers"),
}


@pytest.mark.parametrize("case", BAD_EDITS, ids=BAD_EDITS.keys())
def test_bad_edits_are_refused(case: str) -> None:
    edit, message = BAD_EDITS[case]
    with pytest.raises(InputError, match=message):
        edit(Graph.from_edges(EDGES, 3, GOOD))


def test_numpy_integers_make_a_graph() -> None:
    edges = torch.from_numpy(np.array([[0, 1], [1, 2]], dtype=np.int32))
    assert listed(Graph.from_edges(edges, 3)) == [(0, 1), (1, 2)]
