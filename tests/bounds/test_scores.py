"""Scores relative to a level: exact over the destination's interval, and free of what is common to all."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import leaky_relu

from fgai.bounds.scores import _relative

number = st.floats(-4.0, 4.0)


@given(number, number, st.floats(0.0, 5.0), number, st.floats(-0.5, 1.5), st.floats(-2.0, 2.0))
@settings(max_examples=200, deadline=None)
def test_ends_are_those_of_a_fine_grid(
    x: float, start: float, width: float, level: float, slope: float, weight: float
) -> None:
    side = torch.linspace(start, start + width, 201, dtype=torch.float64)
    source, base, factor = (torch.tensor(value, dtype=torch.float64) for value in (x, level, weight))
    apart = (leaky_relu(source + side, slope) - leaky_relu(base + side, slope)) * factor
    middle = leaky_relu(base + (side[0] + side[-1]) / 2, slope) * factor
    for least, end in ((True, apart.min()), (False, apart.max())):
        found = _relative(source, (side[0], side[-1]), base, slope, factor, least=least)
        torch.testing.assert_close(found, end + middle, rtol=1e-9, atol=1e-9)


def test_where_the_activation_has_one_slope_the_destination_cancels() -> None:
    x, level = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64)
    side = (torch.tensor(0.0, dtype=torch.float64), torch.tensor(10.0, dtype=torch.float64))
    low, high = (_relative(x, side, level, 0.2, least=least) for least in (True, False))
    torch.testing.assert_close(low, high)
    torch.testing.assert_close(low.diff(), torch.tensor([1.0], dtype=torch.float64))
