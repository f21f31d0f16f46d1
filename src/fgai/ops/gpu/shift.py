"""How far predictions moved and the gradient of that, in one GPU kernel: a loss of faithful training."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

TILE = 1024


@triton.jit
def _shift(one, two, slope, sums, N, scale, size, way, C: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
           LOG: tl.constexpr):  # fmt: skip
    """Size · Σ_n f(½ Σ_c |one − two| / scale) over rows, f the identity or log(1 + x), and its slope.

    `way` is 1 for the slope in `one`, −1 for that in `two`.
    """
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    c = tl.arange(0, BC)
    good = (n < N)[:, None] & (c < C)[None, :]
    at = n[:, None] * C + c[None, :]
    moved = tl.load(one + at, mask=good, other=0.0) - tl.load(two + at, mask=good, other=0.0)
    distance = tl.sum(tl.abs(moved), axis=1) / (2 * scale)
    steep = tl.full([BN], 1.0, dtype=moved.dtype) / (2 * scale)
    if LOG:
        steep = steep / (1 + distance)
        # log(1 + x) is x for x too small to be seen beside 1.
        grown = 1 + distance
        near = grown == 1
        distance = tl.where(near, distance, tl.log(grown) * (distance / tl.where(near, 1.0, grown - 1)))
    sign = (moved > 0).to(moved.dtype) - (moved < 0).to(moved.dtype)
    tl.store(slope + at, sign * steep[:, None] * (way * size), mask=good)
    tl.store(sums + tl.program_id(0), tl.sum(distance, axis=0) * size)


class _Shift(Function):
    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, scale: float, log: bool, share: float) -> Tensor:
        one, two = one.contiguous(), two.contiguous()
        count, width = one.shape
        wide = triton.next_power_of_2(width)
        rows = max(1, TILE // wide)
        blocks = -(-count // rows)
        slope, sums = torch.empty_like(one), one.new_empty(blocks)
        size, way = 1 / (count * share), 1.0 if ctx.needs_input_grad[0] else -1.0
        _shift[(blocks,)](one, two, slope, sums, count, scale, size, way, C=width, BC=wide, BN=rows, LOG=log)
        ctx.save_for_backward(slope)
        return sums.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        flow, wanted = slope * gradients[0], ctx.needs_input_grad
        if not wanted[0]:
            return None, flow, None, None, None
        return flow, -flow if wanted[1] else None, None, None, None


def mean_shift(one: Tensor, two: Tensor, scale: float, log: bool, share: float = 1.0) -> Tensor:
    """Mean over rows of `½ Σ_c |one − two| / scale`, or of the logarithm of 1 + it, divided by `share`."""
    return _Shift.apply(one, two, scale, log, share)  # type: ignore[no-any-return]
