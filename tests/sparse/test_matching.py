"""Edges of two graphs matched by key, against dictionaries."""

from __future__ import annotations

import pytest
from hypothesis import given

from fgai.errors import AttentionError
from fgai.sparse import Adjacency, match_edges
from support.graph_cases import Sample, build, edge_sets, edge_tensor, in_order, listed


class TestMatching:
    @given(edge_sets(min_nodes=2), edge_sets(min_nodes=2))
    def test_match_edges_is_the_intersection(self, first: Sample, second: Sample) -> None:
        a, b = build(*first), build(*second)
        ia, ib = match_edges(a.keys, b.keys)
        common = in_order(set(first[1]) & set(second[1]))
        assert [listed(a)[i] for i in ia.tolist()] == common
        assert [listed(b)[i] for i in ib.tolist()] == common

    def test_parallel_edges_have_no_partner(self) -> None:
        adjacency, _ = Adjacency.build(edge_tensor([(0, 1), (0, 1), (2, 0)]), 3)
        with pytest.raises(AttentionError, match="duplicates"):
            match_edges(adjacency.keys, build(3, [(0, 1)]).keys)
