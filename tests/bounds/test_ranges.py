"""A range says what the limits it stands for do, and lets gradients reach the nodes at its ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fgai.attention import Limits
from fgai.bounds.intervals import Range, _maximum, _minimum


def said(seed: int, rows: int = 40) -> torch.Tensor:
    return torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 10_000), st.floats(0.0, 0.2), st.floats(0.0, 0.8))
def test_measures_and_hears_what_limits_do(seed: int, clip_share: float, shrink: float) -> None:
    x, later = said(seed), 3 * said(seed + 1)
    limits = Limits(2, 3).double()
    limits.measure(x, clip_share, shrink)
    found = Range.measure(x, clip_share, shrink)
    assert torch.equal(found.low, limits.low)
    assert torch.equal(found.high, limits.high)
    assert found.radius is not None
    torch.testing.assert_close(found.radius, limits.radius, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(found.clip(later), limits(later.clone()), rtol=1e-7, atol=1e-9)


def test_limits_without_a_radius_clip_alone() -> None:
    limits = Limits(2, 3, derived=True).double()
    limits.measure(said(0))
    found, later = Range.from_limits(limits), 3 * said(1)
    assert found.radius is None
    assert torch.equal(found.clip(later), later.clamp(limits.low, limits.high))


def test_gradients_reach_the_nodes_at_the_ends_alone() -> None:
    x = said(3).requires_grad_()
    found = Range.measure(x, 0.0, 0.0, with_norm=False)
    found.high.sum().backward()
    assert x.grad is not None
    assert int(x.grad.count_nonzero()) == 6
    ends = x.detach()[x.grad.bool()].sort().values
    assert torch.allclose(ends, found.high.detach().flatten().sort().values, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_channel_without_width_is_no_louder(dtype: torch.dtype) -> None:
    x = torch.ones(5, 1, 2, dtype=dtype)
    found = Range.measure(x, 0.0, 0.0)
    assert torch.equal(found.clip(x), x)
    assert torch.equal(found.clip(9 * x), x)


def test_the_smaller_and_the_larger_hide_nothing_from_a_certificate() -> None:
    x, y = torch.tensor([1.0, 2.0, torch.nan, 0.0]), torch.tensor([2.0, 1.0, 0.0, torch.nan])
    with torch.no_grad():
        assert (
            _minimum(x, y).isnan().tolist() == _maximum(x, y).isnan().tolist() == [False, False, True, True]
        )
    assert _minimum(x, y)[:2].tolist() == [1.0, 1.0] and _maximum(x, y)[:2].tolist() == [2.0, 2.0]


def test_equals_give_the_whole_gradient_to_one() -> None:
    x, y = (torch.tensor([1.0, 3.0], requires_grad=True) for _ in range(2))
    (_minimum(x, y) + 10 * _maximum(x, y)).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad.tolist() == [1.0, 1.0] and y.grad.tolist() == [10.0, 10.0]
