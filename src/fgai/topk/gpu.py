"""Top-k of every row on the GPU, without sorting: one program per row; nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.cache import cached_on

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

SHORT, LONG = 64, 512  # edges one warp loads at a time in short and long rows; more would not fit
NONE = tl.constexpr(2147483647)


@triton.jit
def _best(v, e, live, level, spot):
    """The first of the values v after (level, spot) in falling order, ties by position `e`; NONE if none."""
    good = live & ((v < level) | ((v == level) & (e > spot)))
    top = tl.max(tl.where(good, v, float("-inf")), axis=0)
    return top, tl.min(tl.where(good & (v == top), e, NONE), axis=0)


@triton.jit
def _scan(values, first, last, level, spot, kind: tl.constexpr, B: tl.constexpr):
    """`_best` over a long row, B edges at a time."""
    best, where = tl.full([], float("-inf"), dtype=kind), tl.full([], NONE, dtype=tl.int32)
    for start in range(first, last, B):
        e = start + tl.arange(0, B)
        live = e < last
        top, at = _best(tl.load(values + e, mask=live, other=0.0), e, live, level, spot)
        better = (at != NONE) & ((top > best) | (where == NONE))
        best, where = tl.where(better, top, best), tl.where(better, at, where)
    return best, where


@triton.jit
def _kth_largest(
    values, first, last, kind: tl.constexpr, K: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr
):
    """The K-th largest and its position; position NONE if the row has fewer."""
    level, spot = tl.full([], float("inf"), dtype=kind), tl.full([], -1, dtype=tl.int32)
    if last - first > SHORT:
        for _ in range(K):
            level, spot = _scan(values, first, last, level, spot, kind, LONG)
    else:
        e = first + tl.arange(0, SHORT)
        live = e < last
        v = tl.load(values + e, mask=live, other=0.0)
        for _ in range(K):
            level, spot = _best(v, e, live, level, spot)
    return level, spot


@triton.jit
def _in_top(v, e, level, spot):
    """Whether values v at positions e are in the top-k whose last one is (level, spot)."""
    return (v > level) | ((v == level) & (e <= spot)) | (spot == NONE)


@triton.jit
def _ends(rowptr, i):
    return tl.load(rowptr + i).to(tl.int32), tl.load(rowptr + i + 1).to(tl.int32)


@triton.jit
def _pick(rowptr, values, positions, K: tl.constexpr, LONG: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    first, last = _ends(rowptr, i)
    kind: tl.constexpr = values.dtype.element_ty
    level, spot = tl.full([], float("inf"), dtype=kind), tl.full([], -1, dtype=tl.int32)
    for slot in range(K):
        level, spot = _scan(values, first, last, level, spot, kind, LONG)
        tl.store(positions + i * K + slot, tl.where(spot == NONE, -1, spot).to(tl.int64))


@triton.jit
def _mark(rowptr, values, mask, K: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr):
    first, last = _ends(rowptr, tl.program_id(0).to(tl.int64))
    level, spot = _kth_largest(values, first, last, values.dtype.element_ty, K, SHORT, LONG)
    for start in range(first, last, SHORT):
        e = start + tl.arange(0, SHORT)
        v = tl.load(values + e, mask=e < last, other=0.0)
        tl.store(mask + e, _in_top(v, e, level, spot), mask=e < last)


@triton.jit
def _margin(
    rowptr, values, scale, gradient, sums, RADIUS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Σ_m relu(R − c(m) / m) / R of one row times `scale`; its gradient, written where it is not 0."""
    i = tl.program_id(0).to(tl.int64)
    first, last = _ends(rowptr, i)
    kind: tl.constexpr = values.dtype.element_ty
    j, m = tl.arange(0, BK), tl.arange(0, BM) + 1
    levels, spots = tl.zeros([BK], dtype=kind), tl.zeros([BK], dtype=tl.int32)
    count = tl.minimum(K, last - first - K)
    if count > 0:
        level, spot = tl.full([], float("inf"), dtype=kind), tl.full([], -1, dtype=tl.int32)
        if last - first > SHORT:
            for slot in range(0, K + count):
                level, spot = _scan(values, first, last, level, spot, kind, LONG)
                levels, spots = tl.where(j == slot, level, levels), tl.where(j == slot, spot, spots)
        else:
            e = first + tl.arange(0, SHORT)
            v = tl.load(values + e, mask=e < last, other=0.0)
            for slot in range(0, K + count):
                level, spot = _best(v, e, e < last, level, spot)
                levels, spots = tl.where(j == slot, level, levels), tl.where(j == slot, spot, spots)
        # Row m of this matrix adds the m weakest members and subtracts the m strongest outsiders.
        far = tl.where(j < K, K - j, j - K + 1)
        sign = tl.where(j < K, 1.0, -1.0).to(kind)
        matrix = tl.where(far[None, :] <= m[:, None], sign[None, :], 0.0)
        cost = tl.sum(matrix * levels[None, :], axis=1)
        short = RADIUS - cost / m
        active = (m <= count) & (short > 0)
        # NaN is never the largest: then an entry is missing, the sum is NaN and its gradient is not written.
        lost = tl.max(tl.where((j < K + count) & (spots == NONE), 1, 0), axis=0) > 0
        factor = tl.load(scale) / RADIUS
        total = tl.sum(tl.where(active, short, 0.0), axis=0) * factor
        tl.store(sums + i, tl.where(lost, float("nan"), total).to(kind))
        share = tl.where(active, 1.0 / m, 0.0) * factor
        here = (j < K + count) & (spots != NONE)
        tl.store(gradient + spots, -tl.sum(matrix * share[:, None], axis=0).to(kind), mask=here)
    else:
        tl.store(sums + i, tl.zeros([], dtype=kind))


def pick_leaders(values: Tensor, rowptr: Tensor, count: int) -> Tensor:
    """Positions [N, count] of the largest of every row, -1 where a row has fewer; see `leaders`."""
    positions = rowptr.new_empty(rowptr.numel() - 1, count)
    if positions.numel():
        _pick[(positions.shape[0],)](rowptr, values, positions, K=count, LONG=LONG, num_warps=1)
    return positions


def pick_mask(values: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """The top-k of every row as a mask [E]; see `topk_mask`."""
    mask = torch.empty(values.shape[0], dtype=torch.bool, device=values.device)
    if values.numel():
        _mark[(rowptr.numel() - 1,)](rowptr, values, mask, K=k, SHORT=SHORT, LONG=LONG, num_warps=1)
    return mask


def _per_swap(rowptr: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    def make() -> Tensor:
        return 1.0 / (rowptr.diff() - k).clamp(min=0, max=k).sum().clamp(min=1).to(dtype)

    return cached_on(rowptr, ("topk swaps", k, dtype), make)


def margins(values: Tensor, rowptr: Tensor, k: int, radius: float) -> tuple[Tensor, Tensor, None]:
    """`swap_margin` and its gradient, which needs no further factor."""
    values = values.contiguous()
    gradient, sums = torch.zeros_like(values), values.new_empty(rowptr.numel() - 1)
    sizes = {"K": k, "BK": triton.next_power_of_2(2 * k), "BM": triton.next_power_of_2(k)}
    _margin[(len(sums),)](
        rowptr, values, _per_swap(rowptr, k, values.dtype), gradient, sums,
        RADIUS=radius, **sizes, SHORT=SHORT, LONG=LONG, num_warps=1,
    )  # fmt: skip
    return sums.sum(), gradient, None


SLOTS = 256


@triton.jit
def _sides(scores, exists, members, e, live):
    """Scores of the outsiders and negative scores of the members; −∞ for all other edges."""
    v = tl.load(scores + e, mask=live, other=0.0)
    counts = tl.load(exists + e, mask=live, other=0) != 0
    inside = tl.load(members + e, mask=live, other=0) != 0
    below = float("-inf")
    return tl.where(counts & (inside == 0), v, below), tl.where(counts & inside, -v, below)


@triton.jit
def _store_pair(exists, members, gaps, strong, weak, slot, high, far, low, near):
    """Store a pair; no pair where one of the two is an edge that does not count."""
    pair = (far != NONE) & (near != NONE)
    pair &= (tl.load(exists + far, mask=pair, other=0) != 0) & (
        tl.load(members + far, mask=pair, other=1) == 0
    )
    pair &= (tl.load(exists + near, mask=pair, other=0) != 0) & (
        tl.load(members + near, mask=pair, other=0) != 0
    )
    tl.store(gaps + slot, tl.where(pair, high + low, 0.0))
    tl.store(strong + slot, tl.where(pair, far, -1))
    tl.store(weak + slot, tl.where(pair, near, -1))


@triton.jit
def _find_pairs(
    rowptr, rows, scores, exists, members, gaps, strong, weak, K: tl.constexpr, SHORT: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, last = _ends(rowptr, tl.load(rows + row))
    kind: tl.constexpr = scores.dtype.element_ty
    high, low = tl.full([], float("inf"), dtype=kind), tl.full([], float("inf"), dtype=kind)
    far, near = tl.full([], -1, dtype=tl.int32), tl.full([], -1, dtype=tl.int32)
    if last - first > SHORT:
        for slot in range(K):
            best, where = tl.full([], float("-inf"), dtype=kind), tl.full([], NONE, dtype=tl.int32)
            least, whose = tl.full([], float("-inf"), dtype=kind), tl.full([], NONE, dtype=tl.int32)
            for start in range(first, last, LONG):
                e = start + tl.arange(0, LONG)
                out, own = _sides(scores, exists, members, e, e < last)
                top, spot = _best(out, e, e < last, high, far)
                better = (spot != NONE) & ((top > best) | (where == NONE))
                best, where = tl.where(better, top, best), tl.where(better, spot, where)
                top, spot = _best(own, e, e < last, low, near)
                better = (spot != NONE) & ((top > least) | (whose == NONE))
                least, whose = tl.where(better, top, least), tl.where(better, spot, whose)
            high, far, low, near = best, where, least, whose
            _store_pair(exists, members, gaps, strong, weak, row * K + slot, high, far, low, near)
    else:
        e = first + tl.arange(0, SHORT)
        out, own = _sides(scores, exists, members, e, e < last)
        for slot in range(K):
            high, far = _best(out, e, e < last, high, far)
            low, near = _best(own, e, e < last, low, near)
            _store_pair(exists, members, gaps, strong, weak, row * K + slot, high, far, low, near)


@triton.jit
def _scatter_gradient(gradient, strong, weak, d_scores, count, B: tl.constexpr):
    slot = tl.program_id(0) * B + tl.arange(0, B)
    far = tl.load(strong + slot, mask=slot < count, other=-1)
    near = tl.load(weak + slot, mask=slot < count, other=-1)
    flow = tl.load(gradient + slot, mask=far >= 0, other=0.0)
    tl.store(d_scores + far, flow, mask=far >= 0)
    tl.store(d_scores + near, -flow, mask=far >= 0)


class _SwapGaps(Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, exists: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        gaps = scores.new_empty(len(rows), k)
        strong, weak = (torch.empty(gaps.shape, dtype=torch.int32, device=scores.device) for _ in range(2))
        if gaps.numel():
            sides = (each.contiguous().view(torch.uint8) for each in (exists, members))
            _find_pairs[(len(rows),)](
                rowptr, rows, scores.contiguous(), *sides, gaps, strong, weak,
                K=k, SHORT=SHORT, LONG=LONG, num_warps=1,
            )  # fmt: skip
        real = strong >= 0
        ctx.save_for_backward(strong, weak)
        ctx.edges = len(scores)
        ctx.mark_non_differentiable(real)
        return gaps, real

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (strong, weak), gradient = ctx.saved_tensors, gradients[0].contiguous()
        d_scores, count = gradient.new_zeros(ctx.edges), gradient.numel()
        if count:
            _scatter_gradient[(triton.cdiv(count, SLOTS),)](gradient, strong, weak, d_scores, count, B=SLOTS)
        return d_scores, *(None for _ in range(5))


swap_gaps = _SwapGaps.apply
