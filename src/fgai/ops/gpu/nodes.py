"""Operations of the GPU by node: halves of the additive score, dropout, clipping, how far rows moved."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.gpu.plan import _seed_on
from fgai.ops.gpu.tiles import _wide_sizes, factor, inside, narrow, one, wide
from fgai.ops.reference import _odds

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


# Numbers in a tile of nodes × heads × channels, and programs that share the nodes in the backward pass.
TILE = 2048
PROGRAMS = 1024


@triton.jit
def _halves(values, left_weight, right_weight, left, right, N, H: tl.constexpr, C: tl.constexpr,
            BH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    live = n < N
    v = wide(values, n, h, c, live, H, C)
    at, good = n[:, None] * H + h[None, :], live[:, None] & (h[None, :] < H)
    tl.store(left + at, tl.sum(v * one(left_weight, 0, h, c, H, C)[None, :, :], axis=2), mask=good)
    tl.store(right + at, tl.sum(v * one(right_weight, 0, h, c, H, C)[None, :, :], axis=2), mask=good)


@triton.jit
def _halves_back(values, left_weight, right_weight, d_left, d_right, d_values, shares, N, blocks, step,
                 H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    inner, fits = h[:, None] * C + c[None, :], inside(h, c, H, C)
    kind: tl.constexpr = values.dtype.element_ty
    share_left, share_right = tl.zeros([BH, BC], dtype=kind), tl.zeros([BH, BC], dtype=kind)
    left, right = one(left_weight, 0, h, c, H, C), one(right_weight, 0, h, c, H, C)
    for block in range(tl.program_id(0), blocks, step):
        n = (block * BN + tl.arange(0, BN)).to(tl.int64)
        live = n < N
        v = wide(values, n, h, c, live, H, C)
        dl, dr = narrow(d_left, n, h, live, H), narrow(d_right, n, h, live, H)
        flow = dl[:, :, None] * left[None, :, :] + dr[:, :, None] * right[None, :, :]
        where = n[:, None, None] * (H * C) + inner[None, :, :]
        tl.store(d_values + where, flow, mask=live[:, None, None] & fits[None, :, :])
        share_left += tl.sum(dl[:, :, None] * v, axis=0)
        share_right += tl.sum(dr[:, :, None] * v, axis=0)
    at = shares + tl.program_id(0).to(tl.int64) * (2 * H * C) + inner
    tl.store(at, share_left, mask=fits)
    tl.store(at + H * C, share_right, mask=fits)


class _NodeScores(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, left_weight: Tensor, right_weight: Tensor) -> tuple[Tensor, Tensor]:
        values, left_weight, right_weight = (t.contiguous() for t in (values, left_weight, right_weight))
        count, heads, channels = values.shape
        sizes = _wide_sizes(heads, channels, 1, TILE, TILE)
        rows = sizes.pop("BE")
        ctx.sizes = {**sizes, "BN": rows}
        ctx.save_for_backward(values, left_weight, right_weight)
        left, right = (values.new_empty(count, heads) for _ in range(2))
        if count:
            _halves[(-(-count // rows),)](values, left_weight, right_weight, left, right, count, **ctx.sizes)
        return left, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, left_weight, right_weight = ctx.saved_tensors
        d_left, d_right = (g.contiguous() for g in gradients)
        count, d_values = len(values), torch.empty_like(values)
        blocks = -(-count // ctx.sizes["BN"])
        step = min(blocks, PROGRAMS)
        shares = values.new_empty(step, 2, *left_weight.shape)
        if count:
            _halves_back[(step,)](
                values, left_weight, right_weight, d_left, d_right, d_values, shares, count, blocks, step,
                **ctx.sizes,
            )  # fmt: skip
        d_weights = shares.sum(0)
        return d_values, d_weights[0], d_weights[1]


node_scores = _NodeScores.apply


@triton.jit
def _drop(values, out, seed, count, LIMIT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kind: tl.constexpr = values.dtype.element_ty
    numbers = tl.load(values + at, mask=at < count, other=0.0)
    tl.store(out + at, numbers * factor(at, tl.load(seed), LIMIT, SCALE, kind), mask=at < count)


def _dropped(values: Tensor, p: float, seed: Tensor) -> Tensor:
    values = values.contiguous()
    out, count = torch.empty_like(values), values.numel()
    limit, scale = _odds(p)
    if count:
        _drop[(-(-count // 1024),)](values, out, seed, count, LIMIT=limit, SCALE=scale, BLOCK=1024)
    return out


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        return _dropped(values, p, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(gradients[0], ctx.p, ctx.saved_tensors[0]), None, None


def dropout(values: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """See `fgai.ops.reference.dropout`."""
    return _Dropout.apply(values, p, _seed_on(values, seed))  # type: ignore[no-any-return]


SHIFT_TILE = 1024


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
        rows = max(1, SHIFT_TILE // wide)
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
        flow, needs = slope * gradients[0], ctx.needs_input_grad
        if not needs[0]:
            return None, flow, None, None, None
        return flow, -flow if needs[1] else None, None, None, None


def mean_shift(one: Tensor, two: Tensor, scale: float, log: bool, share: float = 1.0) -> Tensor:
    """Mean over rows of `½ Σ_c |one − two| / scale`, or of the logarithm of 1 + it, divided by `share`."""
    return _Shift.apply(one, two, scale, log, share)  # type: ignore[no-any-return]


@triton.jit
def _ball(low, high):
    """The middle of a range and one over half of it; 0 where it has no width, or no end."""
    half = (high - low) / 2
    finite = half < float("inf")
    counts = finite & (half > 0)
    return tl.where(finite, (low + high) / 2, 0.0), tl.where(counts, 1 / tl.where(counts, half, 1.0), 0.0)


@triton.jit
def _clip(x, low, high, radius, out, inside, scale, N, D, NOTED: tl.constexpr, BN: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    n, k = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64), tl.arange(0, BD)
    fits, live = k < D, n < N
    at, good = n[:, None] * D + k[None, :], live[:, None] & fits[None, :]
    least, most = tl.load(low + k, mask=fits, other=0.0), tl.load(high + k, mask=fits, other=0.0)
    centre, unit = _ball(least, most)
    value = tl.load(x + at, mask=good, other=0.0)
    said = tl.where(value >= least[None, :], value, least[None, :])  # NaN is not, so it becomes the lower end
    said = tl.where(said > most[None, :], most[None, :], said)
    if NOTED:
        tl.store(inside + at, said == value, mask=good)
    limit = tl.load(radius)
    if limit < float("inf"):
        away = tl.where(good, said - centre[None, :], 0.0)
        size = away * unit[None, :]
        length = tl.sqrt(tl.sum(size * size, axis=1))
        shrunk = length > limit
        factor = tl.where(shrunk, limit / tl.where(shrunk, length, 1.0), 1.0)
        tl.store(scale + n, factor, mask=live)
        said = tl.where(shrunk[:, None], centre[None, :] + factor[:, None] * away, said)
    tl.store(out + at, said, mask=good)


@triton.jit
def _clip_back(gradient, inside, scale, said, low, high, radius, out, N, D, NOTED: tl.constexpr,
          BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    n, k = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64), tl.arange(0, BD)
    fits, live = k < D, n < N
    at, good = n[:, None] * D + k[None, :], live[:, None] & fits[None, :]
    flow = tl.load(gradient + at, mask=good, other=0.0)
    limit = tl.load(radius)
    if limit < float("inf"):
        least, most = tl.load(low + k, mask=fits, other=0.0), tl.load(high + k, mask=fits, other=0.0)
        centre, unit = _ball(least, most)
        away = tl.where(good, tl.load(said + at, mask=good, other=0.0) - centre[None, :], 0.0)
        factor = tl.load(scale + n, mask=live, other=1.0)[:, None]
        along = tl.sum(flow * away, axis=1)[:, None]
        turned = along * away * ((unit / limit) * (unit / limit))[None, :]
        flow = tl.where(factor < 1, factor * (flow - turned), flow)
    if NOTED:
        flow = tl.where(tl.load(inside + at, mask=good, other=0) != 0, flow, 0.0)
    tl.store(out + at, flow, mask=good)


def clip_rows(
    x: Tensor, bounds: tuple[Tensor, Tensor, Tensor], out: Tensor, *, noted: bool = False
) -> tuple[Tensor | None, Tensor]:
    """As `fgai.ops.clip._clip_rows`; what it notes is returned whether rows were moved or not."""
    rows, width = x.shape[0], bounds[0].numel()
    inside = torch.empty(x.shape if noted else (1,), dtype=torch.bool, device=x.device)
    scale = x.new_empty(rows)
    if rows:
        sizes = _clip_sizes(width)
        _clip[(-(-rows // sizes["BN"]),)](
            x, *bounds, out, inside.view(torch.uint8), scale, rows, width, NOTED=noted, **sizes
        )
    return inside if noted else None, scale


def clip_rows_back(
    gradient: Tensor,
    inside: Tensor | None,
    scale: Tensor | None,
    said: Tensor,
    bounds: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """As `fgai.ops.clip._clip_rows_back`."""
    assert scale is not None
    rows, width, out = said.shape[0], bounds[0].numel(), torch.empty_like(said)
    marks = scale if inside is None else inside.view(torch.uint8)
    if rows:
        sizes = _clip_sizes(width)
        _clip_back[(-(-rows // sizes["BN"]),)](
            gradient.contiguous(), marks, scale, said, *bounds, out, rows, width,
            NOTED=inside is not None, **sizes,
        )  # fmt: skip
    return out


def _clip_sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BN": max(1, TILE // block), "BD": block}
