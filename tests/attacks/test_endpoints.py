"""Endpoints of new nodes that lean towards some nodes of the graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fgai.attacks import draw_endpoints
from fgai.errors import InputError


class TestEndpointsThatLean:
    """Nodes with a larger weight are drawn more often; rows stay distinct."""

    def test_as_often_as_their_weight(self) -> None:
        weights = torch.tensor([1.0, 3.0, 9.0, 1.0])
        nodes = torch.tensor([0, 1, 2])
        ends = draw_endpoints(nodes, 20_000, 1, torch.Generator().manual_seed(0), weights=weights)
        share = torch.bincount(ends.flatten(), minlength=4) / 20_000
        assert share.tolist() == pytest.approx([1 / 13, 3 / 13, 9 / 13, 0.0], abs=0.01)

    @given(st.integers(3, 30), st.integers(1, 3), st.integers(0, 2**31))
    def test_distinct_within_a_row(self, pool: int, each: int, seed: int) -> None:
        weights = 10.0 ** -torch.arange(pool).double()  # one node takes nearly all
        ends = draw_endpoints(
            torch.arange(pool), 5, each, torch.Generator().manual_seed(seed), weights=weights
        )
        assert all(len(set(row)) == each for row in ends.tolist())

    @pytest.mark.parametrize(
        ("weights", "match"),
        [
            (torch.ones(2, 2), "`weights` must be a vector"),
            (torch.ones(4, dtype=torch.long), "`weights` must be a vector"),
            (torch.ones(2), "`nodes`"),
            (torch.tensor([1.0, 0.0, 1.0]), "positive and finite"),
            (torch.tensor([1.0, float("nan"), 1.0]), "positive and finite"),
        ],
    )
    def test_bad_weights(self, weights: torch.Tensor, match: str) -> None:
        with pytest.raises(InputError, match=match):
            draw_endpoints(torch.arange(3), 1, 2, torch.Generator(), weights=weights)
