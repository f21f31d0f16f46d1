"""The operations on the GPU one by one, with hand-written backward passes; clipping of rows.

One program per node or per block of edges, no atomics: every sum over the edges of a node is made by one
program in edge order. Heads and channels are padded to powers of two in the kernels; no array of edges ×
heads × channels is written. With INDIRECT, rows are sources and position k stands for edge `edge[k]`;
without, rows are destinations and position k is edge k.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.gpu.attend import _load_side
from fgai.ops.gpu.plan import (
    _factor,
    _head_tile,
    _inside,
    _leaky,
    _load_heads,
    _load_row,
    _load_rows,
    _row_tile,
    _seed_tensor,
    _zeros_after,
)
from fgai.ops.reference import ADDITIVE, DOT, Bounds, Clipped, Score, _Dropout, _limit_and_scale
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import active_rows

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

TILE = 2048  # numbers in a tile of nodes × heads × channels
PROGRAMS = 1024  # programs of a sum over all nodes


def _tile(kind: int, like: Tensor) -> dict[str, int]:
    """Sizes of the tiles of a kernel on `like` [N, H], or [N, H, C] unless the score is additive."""
    if kind == ADDITIVE:
        return {**_head_tile(like.shape[1], 1024), "C": 1, "BC": 1}
    heads, channels = like.shape[1:]
    return _row_tile(heads, channels, 1, 64, 4096)


def _edge_scores(terms: Score, adjacency: Adjacency, rate: float = 1.0) -> Tensor:
    """The scores [E, H], with `rate` in place of 1 / √C."""
    kind, near, far, weight, slope = terms
    index, edges = adjacency.index32, adjacency.num_edges
    near, far, sizes = near.contiguous(), far.contiguous(), _tile(kind, far)
    out = far.new_empty(edges, far.shape[1])
    if edges:
        _scores_kernel[(-(-edges // sizes["BE"]),)](
            index.source, index.destination, near, far, near if weight is None else weight, out, edges,
            SLOPE=slope, RATE=rate, SCORE=kind, **sizes,
        )  # fmt: skip
    return out


def _row_sums(
    terms: Score,
    adjacency: Adjacency,
    gradient: Tensor,
    rows: int,
    outgoing: bool,
    part: Tensor | None = None,
) -> Tensor:
    """Σ over the edges of a node before `rows` of `gradient` [E, H] times the slope of the score in its side.

    That slope is the other side itself for the dot-product score. `part` gets the weight's gradient by row.
    """
    kind, near, far, weight, slope = terms
    own, other = (t.contiguous() for t in ((far, near) if outgoing else (near, far)))
    index, out = adjacency.index32, _zeros_after(own, rows)
    ends = index.rowptr, index.source, index.source
    if outgoing:
        ends = index.colptr, index.csc, index.destination
    if rows:
        _sums_kernel[(rows,)](
            *ends, gradient.contiguous(), own, other, own if weight is None else weight, out,
            out if part is None else part, SLOPE=slope, SCORE=kind, WEIGHT=part is not None,
            INDIRECT=outgoing, **_tile(kind, own),
        )  # fmt: skip
    return out


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, adjacency: Adjacency) -> Tensor:
        scores = scores.contiguous()
        out, sizes = torch.empty_like(scores), _head_tile(scores.shape[1], 1024)
        if rows := active_rows(adjacency).with_edges:
            _softmax_forward[(rows,)](adjacency.index32.rowptr, scores, out, **sizes)
        ctx.save_for_backward(out)
        ctx.adjacency = adjacency
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (attention,) = ctx.saved_tensors
        out, adjacency = torch.empty_like(attention), ctx.adjacency
        pointer, gradient = adjacency.index32.rowptr, gradients[0].contiguous()
        if rows := active_rows(adjacency).with_edges:
            _softmax_backward[(rows,)](pointer, attention, gradient, out, **_head_tile(out.shape[1], 1024))
        return out, None


class _Aggregate(Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
        ctx.save_for_backward(attention, values)
        ctx.adjacency = adjacency
        rows = active_rows(adjacency).with_edges
        return _row_sums(Score(DOT, values, values, None, 0.0), adjacency, attention, rows, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        attention, values = ctx.saved_tensors
        d_out, adjacency = gradients[0].contiguous(), ctx.adjacency
        d_attention = d_values = None
        if ctx.needs_input_grad[0]:
            d_attention = _edge_scores(Score(DOT, d_out, values, None, 0.0), adjacency)
        if ctx.needs_input_grad[1]:
            rows = active_rows(adjacency).with_grad
            d_values = _row_sums(Score(DOT, d_out, d_out, None, 0.0), adjacency, attention, rows, True)
        return d_attention, d_values, None


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
        adjacency, kind, slope = ctx.options = options
        near, far = near.contiguous(), far.contiguous()
        weight = None if weight is None else weight.contiguous()
        ctx.save_for_backward(near, far, weight)
        return _edge_scores(Score(kind, near, far, weight, slope), adjacency, near.shape[-1] ** -0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (near, far, weight), (adjacency, kind, slope) = ctx.saved_tensors, ctx.options
        gradient, (needs_near, needs_far, learned) = gradients[0].contiguous(), ctx.needs_input_grad[:3]
        if kind == DOT:
            gradient = gradient * near.shape[-1] ** -0.5
        terms, (rows, with_edges) = Score(kind, near, far, weight, slope), active_rows(adjacency)
        near_rows, part = (with_edges, _zeros_after(near, with_edges)) if learned else (rows, None)
        d_near = d_far = None
        if needs_near or learned:
            d_near = _row_sums(terms, adjacency, gradient, near_rows, False, part)
        if needs_far:
            d_far = _row_sums(terms, adjacency, gradient, rows, True)
        return d_near, d_far, None if part is None else part.sum(0), None, None, None


edge_softmax, aggregate = _EdgeSoftmax.apply, _Aggregate.apply


def score(terms: Score, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.score`."""
    kind, near, far, weight, slope = terms
    return _Score.apply(near, far, weight, adjacency, kind, slope)  # type: ignore[no-any-return]


@triton.jit
def _scores_kernel(
    source, destination, near, far, weight, out, E, SLOPE: tl.constexpr, RATE: tl.constexpr,
    SCORE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
    BE: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    live = e < E
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    if SCORE == 0:
        s = _leaky(_load_heads(far, j, h, live, H) + _load_heads(near, i, h, live, H), SLOPE)
    else:
        one, two = _load_rows(far, j, h, c, live, H, C), _load_rows(near, i, h, c, live, H, C)
        if SCORE == 1:
            s = tl.sum(_load_row(weight, 0, h, c, H, C)[None, :, :] * _leaky(one + two, SLOPE), axis=2)
        else:
            s = tl.sum(two * one, axis=2) * RATE
    tl.store(out + e[:, None].to(tl.int64) * H + h[None, :], s, mask=live[:, None] & (h[None, :] < H))


@triton.jit
def _sums_kernel(
    ptr, edge, node, gradient, own, other, weight, out, weight_part, SLOPE: tl.constexpr,
    SCORE: tl.constexpr, WEIGHT: tl.constexpr, INDIRECT: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Row i of `_row_sums`."""
    i = tl.program_id(0).to(tl.int64)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    kind: tl.constexpr = own.dtype.element_ty
    total = tl.zeros([BH], dtype=kind) if SCORE == 0 else tl.zeros([BH, BC], dtype=kind)
    mine = _load_side(own, i, h, c, H, C, SCORE)
    w = _load_row(weight, 0, h, c, H, C) if SCORE == 1 else mine
    part = tl.zeros([BH, BC], dtype=kind)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if INDIRECT else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        g = _load_heads(gradient, e.to(tl.int64), h, live, H)
        if SCORE == 0:
            s = mine[None, :] + _load_heads(other, j, h, live, H)
            total += tl.sum(tl.where(s > 0, g, g * SLOPE), axis=0)
        elif SCORE == 1:
            s = mine[None, :, :] + _load_rows(other, j, h, c, live, H, C)
            flow = g[:, :, None] * w[None, :, :]
            total += tl.sum(tl.where(s > 0, flow, flow * SLOPE), axis=0)
            if WEIGHT:
                part += tl.sum(g[:, :, None] * _leaky(s, SLOPE), axis=0)
        else:
            total += tl.sum(g[:, :, None] * _load_rows(other, j, h, c, live, H, C), axis=0)
    if SCORE == 0:
        tl.store(out + i * H + h, total, mask=h < H)
    else:
        where, fits = i * (H * C) + h[:, None] * C + c[None, :], _inside(h, c, H, C)
        tl.store(out + where, total, mask=fits)
        if WEIGHT:
            tl.store(weight_part + where, part, mask=fits)


@triton.jit
def _softmax_forward(ptr, scores, out, H: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr):
    """Softmax of scores [E, H] over each row, with the maximum and the sum found in one pass."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    top = tl.full([BH], float("-inf"), dtype=scores.dtype.element_ty)
    total = tl.zeros([BH], dtype=scores.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        good = (k < last)[:, None] & (h[None, :] < H)
        s = tl.load(scores + k[:, None].to(tl.int64) * H + h[None, :], mask=good, other=float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(s - level[None, :]), axis=0)
        top = higher
    level = tl.where(top == float("-inf"), 0.0, top)
    safe = tl.where(total > 0, total, 1.0)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        good = (k < last)[:, None] & (h[None, :] < H)
        where = k[:, None].to(tl.int64) * H + h[None, :]
        s = tl.load(scores + where, mask=good, other=0.0)
        tl.store(out + where, tl.exp(s - level[None, :]) / safe[None, :], mask=good)


@triton.jit
def _softmax_backward(ptr, attention, gradient, out, H: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr):
    """∂s = a · (g − Σ_row a g)."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    mean = tl.zeros([BH], dtype=attention.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        a = _load_heads(attention, k.to(tl.int64), h, k < last, H)
        mean += tl.sum(a * _load_heads(gradient, k.to(tl.int64), h, k < last, H), axis=0)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        a = _load_heads(attention, k.to(tl.int64), h, k < last, H)
        g = _load_heads(gradient, k.to(tl.int64), h, k < last, H)
        where, good = k[:, None].to(tl.int64) * H + h[None, :], (k < last)[:, None] & (h[None, :] < H)
        tl.store(out + where, a * (g - mean[None, :]), mask=good)


@triton.jit
def _node_scores(values, far_weight, near_weight, far, near, N, H: tl.constexpr, C: tl.constexpr,
            BH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    live = n < N
    v = _load_rows(values, n, h, c, live, H, C)
    at, good = n[:, None] * H + h[None, :], live[:, None] & (h[None, :] < H)
    tl.store(far + at, tl.sum(v * _load_row(far_weight, 0, h, c, H, C)[None, :, :], axis=2), mask=good)
    tl.store(near + at, tl.sum(v * _load_row(near_weight, 0, h, c, H, C)[None, :, :], axis=2), mask=good)


@triton.jit
def _node_scores_back(values, far_weight, near_weight, d_far, d_near, d_values, shares, N, blocks, step,
                 H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    inner, fits = h[:, None] * C + c[None, :], _inside(h, c, H, C)
    kind: tl.constexpr = values.dtype.element_ty
    share_far, share_near = tl.zeros([BH, BC], dtype=kind), tl.zeros([BH, BC], dtype=kind)
    far, near = _load_row(far_weight, 0, h, c, H, C), _load_row(near_weight, 0, h, c, H, C)
    for block in range(tl.program_id(0), blocks, step):
        n = (block * BN + tl.arange(0, BN)).to(tl.int64)
        live = n < N
        v = _load_rows(values, n, h, c, live, H, C)
        df, dn = _load_heads(d_far, n, h, live, H), _load_heads(d_near, n, h, live, H)
        flow = df[:, :, None] * far[None, :, :] + dn[:, :, None] * near[None, :, :]
        where = n[:, None, None] * (H * C) + inner[None, :, :]
        tl.store(d_values + where, flow, mask=live[:, None, None] & fits[None, :, :])
        share_far += tl.sum(df[:, :, None] * v, axis=0)
        share_near += tl.sum(dn[:, :, None] * v, axis=0)
    at = shares + tl.program_id(0).to(tl.int64) * (2 * H * C) + inner
    tl.store(at, share_far, mask=fits)
    tl.store(at + H * C, share_near, mask=fits)


class _NodeScores(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, far_weight: Tensor, near_weight: Tensor) -> tuple[Tensor, Tensor]:
        values, far_weight, near_weight = (t.contiguous() for t in (values, far_weight, near_weight))
        count, heads, channels = values.shape
        sizes = _row_tile(heads, channels, 1, TILE, TILE)
        rows = sizes.pop("BE")
        ctx.sizes = {**sizes, "BN": rows}
        ctx.save_for_backward(values, far_weight, near_weight)
        far, near = (values.new_empty(count, heads) for _ in range(2))
        if count:
            _node_scores[(-(-count // rows),)](values, far_weight, near_weight, far, near, count, **ctx.sizes)
        return far, near

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, far_weight, near_weight = ctx.saved_tensors
        d_far, d_near = (g.contiguous() for g in gradients)
        count, d_values = len(values), torch.empty_like(values)
        blocks = -(-count // ctx.sizes["BN"])
        step = min(blocks, PROGRAMS)
        shares = values.new_empty(step, 2, *far_weight.shape)
        if count:
            _node_scores_back[(step,)](
                values, far_weight, near_weight, d_far, d_near, d_values, shares, count, blocks, step,
                **ctx.sizes,
            )  # fmt: skip
        d_weights = shares.sum(0)
        return d_values, d_weights[0], d_weights[1]


node_scores = _NodeScores.apply


@triton.jit
def _dropout(values, out, seed, count, LIMIT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kind: tl.constexpr = values.dtype.element_ty
    numbers = tl.load(values + at, mask=at < count, other=0.0)
    tl.store(out + at, numbers * _factor(at, tl.load(seed), LIMIT, SCALE, kind), mask=at < count)


def _run_dropout(values: Tensor, p: float, seed: Tensor) -> Tensor:
    values = values.contiguous()
    out, count = torch.empty_like(values), values.numel()
    limit, scale = _limit_and_scale(p)
    if count:
        _dropout[(-(-count // 1024),)](values, out, seed, count, LIMIT=limit, SCALE=scale, BLOCK=1024)
    return out


def dropout(values: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """See `fgai.ops.reference.dropout`."""
    return _Dropout.apply(_run_dropout, values, p, _seed_tensor(values, seed))  # type: ignore[no-any-return]


@triton.jit
def _ball(low, high):
    """The middle of a range and one over half of it; 0 where it has no width, or no end."""
    half = (high - low) / 2
    finite = half < float("inf")
    counts = finite & (half > 0)
    return tl.where(finite, (low + high) / 2, 0.0), tl.where(counts, 1 / tl.where(counts, half, 1.0), 0.0)


@triton.jit
def _clip(x, low, high, radius, out, inside, scale, N, D, MASKED: tl.constexpr, BN: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    n, k = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64), tl.arange(0, BD)
    fits, live = k < D, n < N
    at, good = n[:, None] * D + k[None, :], live[:, None] & fits[None, :]
    least, most = tl.load(low + k, mask=fits, other=0.0), tl.load(high + k, mask=fits, other=0.0)
    centre, unit = _ball(least, most)
    value = tl.load(x + at, mask=good, other=0.0)
    result = tl.where(value >= least[None, :], value, least[None, :])  # NaN becomes `low`
    result = tl.where(result > most[None, :], most[None, :], result)
    if MASKED:
        tl.store(inside + at, result == value, mask=good)
    limit = tl.load(radius)
    if limit < float("inf"):
        away = tl.where(good, result - centre[None, :], 0.0)
        size = away * unit[None, :]
        length = tl.sqrt(tl.sum(size * size, axis=1))
        shrunk = length > limit
        factor = tl.where(shrunk, limit / tl.where(shrunk, length, 1.0), 1.0)
        tl.store(scale + n, factor, mask=live)
        result = tl.where(shrunk[:, None], centre[None, :] + factor[:, None] * away, result)
    tl.store(out + at, result, mask=good)


@triton.jit
def _clip_back(gradient, inside, scale, result, low, high, radius, out, N, D, MASKED: tl.constexpr,
          BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    n, k = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64), tl.arange(0, BD)
    fits, live = k < D, n < N
    at, good = n[:, None] * D + k[None, :], live[:, None] & fits[None, :]
    flow = tl.load(gradient + at, mask=good, other=0.0)
    limit = tl.load(radius)
    if limit < float("inf"):
        least, most = tl.load(low + k, mask=fits, other=0.0), tl.load(high + k, mask=fits, other=0.0)
        centre, unit = _ball(least, most)
        away = tl.where(good, tl.load(result + at, mask=good, other=0.0) - centre[None, :], 0.0)
        factor = tl.load(scale + n, mask=live, other=1.0)[:, None]
        along = tl.sum(flow * away, axis=1)[:, None]
        turned = along * away * ((unit / limit) * (unit / limit))[None, :]
        flow = tl.where(factor < 1, factor * (flow - turned), flow)
    if MASKED:
        flow = tl.where(tl.load(inside + at, mask=good, other=0) != 0, flow, 0.0)
    tl.store(out + at, flow, mask=good)


def clip_rows(x: Tensor, bounds: Bounds, out: Tensor, masked: bool) -> Clipped:
    """See `fgai.ops.reference.clip_rows`; mask and factors are returned whether rows were changed or not."""
    rows, width = x.shape[0], bounds[0].numel()
    inside = torch.empty(x.shape if masked else (1,), dtype=torch.bool, device=x.device)
    scale = x.new_empty(rows)
    if rows:
        sizes = _clip_sizes(width)
        _clip[(-(-rows // sizes["BN"]),)](
            x, *bounds, out, inside.view(torch.uint8), scale, rows, width, MASKED=masked, **sizes
        )
    return out, inside if masked else None, scale


def clip_rows_back(
    gradient: Tensor, inside: Tensor | None, scale: Tensor, result: Tensor, bounds: Bounds
) -> Tensor:
    """See `fgai.ops.reference.clip_rows_back`."""
    rows, width, out = result.shape[0], bounds[0].numel(), torch.empty_like(result)
    marks = scale if inside is None else inside.view(torch.uint8)
    if rows:
        sizes = _clip_sizes(width)
        _clip_back[(-(-rows // sizes["BN"]),)](
            gradient.contiguous(), marks, scale, result, *bounds, out, rows, width,
            MASKED=inside is not None, **sizes,
        )  # fmt: skip
    return out


def _clip_sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BN": max(1, TILE // block), "BD": block}
