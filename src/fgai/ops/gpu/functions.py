"""The operations on the GPU one by one, with hand-written backward passes; clipping of rows.

One program per node or per block of edges, no atomics: every sum over the edges of a node is made by one
program in edge order, so results are the same run to run. Heads and channels are padded to powers of two in
the kernels; no array of edges × heads × channels is written. With INDIRECT, rows are sources and position k
stands for edge `edge[k]`; without, rows are destinations and position k is edge k.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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

# Numbers in a tile of nodes × heads × channels, and number of programs of a sum over all nodes.
TILE = 2048
PROGRAMS = 1024


def _sizes(heads: int, channels: int) -> dict[str, int]:
    return _row_tile(heads, channels, 1, 64, 4096)


def _view(adjacency: Adjacency, *, outgoing: bool) -> tuple[Tensor, Tensor, Tensor]:
    index = adjacency.index32
    if outgoing:
        return index.colptr, index.csc, index.destination
    return index.rowptr, index.source, index.source


def _weighted(adjacency: Adjacency, weight: Tensor, values: Tensor, rows: int, *, outgoing: bool) -> Tensor:
    """Σ over the edges of a node before `rows` of weight [E, H] times the values at the other end."""
    view, values, weight = _view(adjacency, outgoing=outgoing), values.contiguous(), weight.contiguous()
    out, sizes = _zeros_after(values, rows), _sizes(*values.shape[1:])
    if rows:
        _weighted_sum[(rows,)](*view, weight, values, out, **sizes, INDIRECT=outgoing, num_warps=4)
    return out


def _edge_dot(adjacency: Adjacency, at_destination: Tensor, at_source: Tensor, scale: float) -> Tensor:
    index, (heads, channels) = adjacency.index32, at_source.shape[1:]
    out = at_source.new_empty(adjacency.num_edges, heads)
    if adjacency.num_edges:
        sizes = _sizes(heads, channels)
        grid = (-(-adjacency.num_edges // sizes["BE"]),)
        ends = index.source, index.destination, at_destination.contiguous(), at_source.contiguous()
        _edge_dot_kernel[grid](*ends, out, adjacency.num_edges, scale, **sizes)
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
        return _weighted(adjacency, attention, values, active_rows(adjacency).with_edges, outgoing=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        attention, values = ctx.saved_tensors
        d_out, adjacency = gradients[0].contiguous(), ctx.adjacency
        d_attention = d_values = None
        if ctx.needs_input_grad[0]:
            d_attention = _edge_dot(adjacency, d_out, values, 1.0)
        if ctx.needs_input_grad[1]:
            d_values = _weighted(adjacency, attention, d_out, active_rows(adjacency).with_grad, outgoing=True)
        return d_attention, d_values, None


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
        adjacency, kind, slope = ctx.options = options
        near, far = near.contiguous(), far.contiguous()
        weight = None if weight is None else weight.contiguous()
        ctx.save_for_backward(near, far, weight)
        if kind == DOT:
            return _edge_dot(adjacency, near, far, near.shape[-1] ** -0.5)
        index, edges = adjacency.index32, adjacency.num_edges
        out = far.new_empty(edges, far.shape[1])
        ends = index.source, index.destination, far, near
        if edges and kind == ADDITIVE:
            total = out.numel()
            _additive_forward[(-(-total // 512),)](*ends, out, total, slope, H=far.shape[1], B=512)
        elif edges:
            sizes = _sizes(*far.shape[1:])
            _dynamic_forward[(-(-edges // sizes["BE"]),)](*ends, weight, out, edges, slope, **sizes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (near, far, weight), (adjacency, kind, slope) = ctx.saved_tensors, ctx.options
        gradient, (needs_near, needs_far, learned) = gradients[0].contiguous(), ctx.needs_input_grad[:3]
        with_grad, with_edges = active_rows(adjacency)
        d_near = d_far = d_weight = None
        if kind == DOT:
            scaled = gradient * near.shape[-1] ** -0.5
            d_near = _weighted(adjacency, scaled, far, with_grad, outgoing=False) if needs_near else None
            d_far = _weighted(adjacency, scaled, near, with_grad, outgoing=True) if needs_far else None
        elif kind == ADDITIVE:
            d_near = _additive_gradient(adjacency, near, far, gradient, slope, False) if needs_near else None
            d_far = _additive_gradient(adjacency, far, near, gradient, slope, True) if needs_far else None
        else:
            with_edges, sizes = with_edges if learned else with_grad, _sizes(*far.shape[1:])
            d_far, d_near = _zeros_after(far, with_grad), _zeros_after(near, with_edges)
            part = _zeros_after(near, with_edges) if learned else near[:0]
            ends = (True, with_grad, far, near, d_far), (False, with_edges, near, far, d_near)
            for outgoing, rows, own, other, out in ends:
                if rows:
                    arguments = own, other, weight, gradient, out, part, slope
                    view, share = _view(adjacency, outgoing=outgoing), learned and not outgoing
                    _dynamic_backward[(rows,)](*view, *arguments, **sizes, INDIRECT=outgoing, WEIGHT=share)
            d_weight = part.sum(0) if learned else None
        return d_near, d_far, d_weight, None, None, None


def _additive_gradient(
    adjacency: Adjacency, own: Tensor, other: Tensor, gradient: Tensor, slope: float, outgoing: bool
) -> Tensor:
    """The gradient of the additive score in one end, `own` [N, H]."""
    rows = active_rows(adjacency).with_grad
    out, view = _zeros_after(own, rows), _view(adjacency, outgoing=outgoing)
    if rows:
        sizes = _head_tile(own.shape[1], 1024)
        _additive_backward[(rows,)](*view, own, other, gradient, out, slope, **sizes, INDIRECT=outgoing)
    return out


edge_softmax, aggregate = _EdgeSoftmax.apply, _Aggregate.apply


def score(terms: Score, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.score`."""
    kind, near, far, weight, slope = terms
    return _Score.apply(near, far, weight, adjacency, kind, slope)  # type: ignore[no-any-return]


@triton.jit
def _weighted_sum(
    ptr, edge, node, weight, values, out, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, BE: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """out[i] = Σ_e weight[e, h] · values[node(e), h, c] over the edges of row i."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    total = tl.zeros([BH, BC], dtype=values.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if INDIRECT else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        a = _load_heads(weight, e.to(tl.int64), h, live, H)
        total += tl.sum(a[:, :, None] * _load_rows(values, j, h, c, live, H, C), axis=0)
    where = out + i.to(tl.int64) * (H * C) + h[:, None] * C + c[None, :]
    tl.store(where, total, mask=_inside(h, c, H, C))


@triton.jit
def _edge_dot_kernel(
    source, destination, at_destination, at_source, out, E, scale: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[e, h] = scale · Σ_c at_destination[dst, h, c] · at_source[src, h, c]."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    live = e < E
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    products = _load_rows(at_destination, i, h, c, live, H, C) * _load_rows(at_source, j, h, c, live, H, C)
    total = tl.sum(products, axis=2) * scale
    tl.store(out + e[:, None].to(tl.int64) * H + h[None, :], total, mask=live[:, None] & (h[None, :] < H))


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
def _additive_forward(
    source, destination, far, near, out, T, slope: tl.constexpr, H: tl.constexpr, B: tl.constexpr
):
    """out[e, h] = leaky_relu(far[src, h] + near[dst, h]); T = E · H entries."""
    t = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    live = t < T
    e, h = t // H, t % H
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    s = tl.load(far + j * H + h, mask=live, other=0.0) + tl.load(near + i * H + h, mask=live, other=0.0)
    tl.store(out + t, tl.where(s > 0, s, s * slope), mask=live)


@triton.jit
def _additive_backward(
    ptr, edge, node, own, other, gradient, out, slope: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    BE: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """out[i, h] = Σ_e gradient[e, h] · leaky_relu'(own[i, h] + other[node(e), h]) over the edges of row i."""
    i = tl.program_id(0).to(tl.int64)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    mine = tl.load(own + i * H + h, mask=h < H, other=0.0)
    total = tl.zeros([BH], dtype=own.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if INDIRECT else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        s = mine[None, :] + _load_heads(other, j, h, live, H)
        g = _load_heads(gradient, e.to(tl.int64), h, live, H)
        total += tl.sum(tl.where(s > 0, g, g * slope), axis=0)
    tl.store(out + i * H + h, total, mask=h < H)


@triton.jit
def _dynamic_forward(
    source, destination, far, near, weight, out, E, slope: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[e, h] = Σ_c weight[h, c] · leaky_relu(far[src, h, c] + near[dst, h, c])."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    live = e < E
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    s = _load_rows(far, j, h, c, live, H, C) + _load_rows(near, i, h, c, live, H, C)
    total = tl.sum(_load_row(weight, 0, h, c, H, C)[None, :, :] * _leaky(s, slope), axis=2)
    tl.store(out + e[:, None].to(tl.int64) * H + h[None, :], total, mask=live[:, None] & (h[None, :] < H))


@triton.jit
def _dynamic_backward(
    ptr, edge, node, own, other, weight, gradient, out, weight_part, slope: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, INDIRECT: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradient of the dynamic score in one end's projection, and this row's part of the weight's."""
    i = tl.program_id(0).to(tl.int64)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    w, mine = _load_row(weight, 0, h, c, H, C), _load_row(own, i, h, c, H, C)
    total = tl.zeros([BH, BC], dtype=own.dtype.element_ty)
    part = tl.zeros([BH, BC], dtype=own.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if INDIRECT else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        s = mine[None, :, :] + _load_rows(other, j, h, c, live, H, C)
        g = _load_heads(gradient, e.to(tl.int64), h, live, H)
        flow = g[:, :, None] * w[None, :, :]
        total += tl.sum(tl.where(s > 0, flow, flow * slope), axis=0)
        if WEIGHT:
            part += tl.sum(g[:, :, None] * _leaky(s, slope), axis=0)
    where, fits = i * (H * C) + h[:, None] * C + c[None, :], _inside(h, c, H, C)
    tl.store(out + where, total, mask=fits)
    if WEIGHT:
        tl.store(weight_part + where, part, mask=fits)


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
