"""Scores relative to a level: exact over the destination's interval, and free of what is common to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import leaky_relu

import fgai
from fgai.attention import prepared
from fgai.bounds.intervals import LayerBounds, layer_ranges
from fgai.bounds.scores import _relative_scores, _ScoreBounds, score_bounds
from fgai.models import GAT, GATv2

number = st.floats(-4.0, 4.0)


@given(number, number, st.floats(0.0, 5.0), number, st.floats(-0.5, 1.5), st.floats(-2.0, 2.0))
@settings(max_examples=60)
def test_ends_are_those_of_a_fine_grid(
    x: float, start: float, width: float, level: float, slope: float, weight: float
) -> None:
    side = torch.linspace(start, start + width, 201, dtype=torch.float64)
    source, base, factor = (torch.tensor(value, dtype=torch.float64) for value in (x, level, weight))
    apart = (leaky_relu(source + side, slope) - leaky_relu(base + side, slope)) * factor
    middle = leaky_relu(base + (side[0] + side[-1]) / 2, slope) * factor
    for least, end in ((True, apart.min()), (False, apart.max())):
        found = _relative_scores(source, (side[0], side[-1]), base, slope, factor, least=least)
        torch.testing.assert_close(found, end + middle, rtol=1e-9, atol=1e-9)


def test_where_the_activation_has_one_slope_the_destination_cancels() -> None:
    x, level = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64)
    side = (torch.tensor(0.0, dtype=torch.float64), torch.tensor(10.0, dtype=torch.float64))
    low, high = (_relative_scores(x, side, level, 0.2, least=least) for least in (True, False))
    torch.testing.assert_close(low, high)
    torch.testing.assert_close(low.diff(), torch.tensor([1.0], dtype=torch.float64))


def exact_and_as_intervals(kind: Any, place: int) -> list[_ScoreBounds]:
    """Scores of a layer from certain sides, and from the same as intervals whose ends are two tensors."""
    graph = fgai.load_dataset("planted")
    torch.manual_seed(0)
    few = {"hidden_channels": 3, "heads": 2}  # intervals hold a number for every edge, head and channel
    model = fgai.limit(kind.for_data(graph, **few), graph, 0.02, shrink=0.2).double()
    assert graph.features is not None
    seen = prepared(model, graph.replace(features=graph.features.to("cpu", torch.float64)))
    layer, x = model.convs[place], seen.features
    if place:
        x = torch.randn(graph.num_nodes, layer.value.weight.shape[0], dtype=torch.float64)
    read = LayerBounds.exact(layer, x)
    twice = LayerBounds(
        read.low,
        read.high,
        (read.source[0], read.source[0].clone()),
        (read.destination[0], read.destination[0].clone()),
    )
    made = [list(score_bounds(layer, layer_ranges(layer), one, one, seen.adjacency)) for one in (read, twice)]
    apart = LayerBounds(twice.low, twice.high, twice.source, twice.destination)
    made.append(list(score_bounds(layer, layer_ranges(layer), twice, apart, seen.adjacency)))
    assert all(len(one) == 1 for one in made)
    return [one[0] for one in made]


@pytest.mark.parametrize("kind", [GAT, GATv2])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_certain_is_what_intervals_of_no_width_give(kind: Any, place: int) -> None:
    fast, *slow = exact_and_as_intervals(kind, place)
    for one in slow:
        for name in ("low", "high", "new", "new_margins"):
            torch.testing.assert_close(getattr(fast, name), getattr(one, name), atol=1e-10, rtol=1e-10)
