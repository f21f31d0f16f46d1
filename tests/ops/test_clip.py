"""Clipping: ranges by channel, a radius as a whole, and gradients that are true."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fgai.errors import InputError
from fgai.ops import clip, range_norm

INFINITE = torch.tensor(torch.inf)


def plain(x: Tensor, low: Tensor, high: Tensor, radius: Tensor, *, straight: bool) -> Tensor:
    """The same from torch's own operations."""
    clipped = torch.maximum(torch.minimum(x, high), low)
    if straight:
        clipped = x + (clipped - x).detach()
    if torch.isinf(radius):
        return clipped
    middle, half = (low + high) / 2, (high - low) / 2
    unit = torch.where(half > 0, 1 / half.clamp(min=1e-30), 0.0)
    loud = ((clipped - middle) * unit).flatten(1).square().sum(1).sqrt()
    factor = (radius / loud.clamp(min=1e-30)).clamp(max=1).view(-1, *[1] * (x.dim() - 1))
    return torch.where(factor < 1, middle + (clipped - middle) * factor, clipped)


def case(shape: tuple[int, ...], dtype: torch.dtype, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, some far outside; a range with a channel of no width; a radius."""
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(*shape, generator=generator, dtype=dtype)
    low = -torch.rand(*shape[1:], generator=generator, dtype=dtype) - 0.5
    high = torch.rand(*shape[1:], generator=generator, dtype=dtype) + 0.5
    low.view(-1)[0] = high.view(-1)[0] = 0.3
    radius = torch.tensor(share * low.numel() ** 0.5, dtype=dtype)
    return x, low, high, radius


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.85, torch.inf])
@pytest.mark.parametrize("shape", [(700, 8, 8), (300, 5), (1, 1, 3), (0, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_is_what_torch_would_do(
    shape: tuple[int, ...], dtype: torch.dtype, share: float, straight: bool
) -> None:
    x, low, high, radius = case(shape, dtype, share)
    results = []
    for function in (clip, plain):
        rows = x.clone().requires_grad_()
        out = function(rows * 1, low, high, radius, straight=straight)
        out.backward(torch.cos(torch.arange(x.numel(), dtype=dtype)).view_as(x))
        results.append((out.detach(), rows.grad))
    with torch.no_grad():
        results.append((clip(x, low, high, radius), results[0][1]))
    for out, gradient in results[1:]:
        torch.testing.assert_close(results[0][0], out)
        torch.testing.assert_close(results[0][1], gradient)


def test_strided_rows_take_the_way_without_a_kernel() -> None:
    x, low, high, radius = case((50, 6, 4), torch.float64, 0.6)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    given = x.clone().requires_grad_()
    torch.testing.assert_close(clip(strided, low, high, radius), clip(given, low, high, radius))
    weights = torch.rand_like(x)
    (one,) = torch.autograd.grad((clip(strided, low, high, radius) * weights).sum(), strided)
    (two,) = torch.autograd.grad((clip(given, low, high, radius) * weights).sum(), given)
    torch.testing.assert_close(one, two)


def test_gradients_equal_differences() -> None:
    x, low, high, radius = case((6, 3, 2), torch.float64, 0.7)
    assert torch.autograd.gradcheck(lambda rows: clip(rows, low, high, radius), x.requires_grad_())


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=6, max_size=6),
    st.floats(0.1, 3.0),
)
def test_no_input_leaves_range_or_radius(numbers: list[float], size: float) -> None:
    x, radius = torch.tensor(numbers).view(2, 3), torch.tensor(size)
    low, high = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([1.0, 4.0, 2.0])
    out = clip(x, low, high, radius)
    assert bool(((out >= low) & (out <= high)).all())
    assert bool((range_norm(out, low, high) <= size * (1 + 1e-5)).all())


def test_rows_inside_keep_their_bits() -> None:
    x, low, high, _ = case((90, 4, 4), torch.float32, 1.0)
    inside = clip(x, low, high)
    norm = range_norm(inside, low, high)
    radius = norm.sort().values[44:46].mean()
    out, within = clip(inside, low, high, radius), norm < radius
    assert torch.equal(out[within], inside[within]) and not bool((out == inside)[~within].all(1).any())
    assert torch.equal(clip(inside, low, high, INFINITE), inside)


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=30),
    st.floats(-5, 5),
    st.floats(0, 5),
)
def test_clipping_never_leaves_the_range(numbers: list[float], low: float, width: float) -> None:
    x = torch.tensor(numbers)
    out = clip(x, torch.tensor(low), torch.tensor(low + width))
    assert bool(((out >= torch.tensor(low)) & (out <= torch.tensor(low + width))).all())
    inside = (x >= torch.tensor(low)) & (x <= torch.tensor(low + width))
    assert torch.equal(out[inside], x[inside])


def test_gradients_are_true_or_pass_straight_through() -> None:
    x = torch.tensor([-2.0, -1.0, 0.3, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    low, high = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    (true,) = torch.autograd.grad((clip(x, low, high) * torch.arange(5)).sum(), x)
    (straight,) = torch.autograd.grad((clip(x, low, high, straight=True) * torch.arange(5)).sum(), x)
    assert true.tolist() == [0, 1, 2, 3, 0] and straight.tolist() == [0, 1, 2, 3, 4]
    inner = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: clip(v, low, high), inner)


def test_a_radius_is_a_scalar() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(InputError, match="`radius` must be a scalar"):
        clip(x, torch.zeros(3), torch.ones(3), torch.ones(3))
