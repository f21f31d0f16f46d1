"""The operations on the GPU one by one, with hand-written backward passes.

One program per node or per block of edges, no atomics: every sum over the edges of a node is made by one
program in edge order, so results are the same run to run. Heads and channels are padded to powers of two in
the kernels; nothing of size edges × heads × channels is written. THROUGH: positions go through `edge` (the
outgoing view), else they are the edges themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.gpu.plan import _room
from fgai.ops.gpu.tiles import _leaky, _narrow_sizes, _wide_sizes, inside, narrow, one, wide
from fgai.ops.reference import ADDITIVE, DYNAMIC, Score
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import reach_of

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


def _sizes(heads: int, channels: int) -> dict[str, int]:
    return _wide_sizes(heads, channels, 1, 64, 4096)


def _view(adjacency: Adjacency, *, outgoing: bool) -> tuple[Tensor, Tensor, Tensor]:
    index = adjacency.index32
    if outgoing:
        return index.colptr, index.csc, index.destination
    return index.rowptr, index.source, index.source


def _weighted(adjacency: Adjacency, weight: Tensor, values: Tensor, rows: int, *, outgoing: bool) -> Tensor:
    """Σ over the edges of a node before `rows` of weight [E, H] times the values at the other end."""
    view, values, weight = _view(adjacency, outgoing=outgoing), values.contiguous(), weight.contiguous()
    out, sizes = _room(values, rows), _sizes(*values.shape[1:])
    if rows:
        _weighted_sum[(rows,)](*view, weight, values, out, **sizes, THROUGH=outgoing, num_warps=4)
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
        out, sizes = torch.empty_like(scores), _narrow_sizes(scores.shape[1], 1024)
        if rows := reach_of(adjacency).filled:
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
        if rows := reach_of(adjacency).filled:
            _softmax_backward[(rows,)](pointer, attention, gradient, out, **_narrow_sizes(out.shape[1], 1024))
        return out, None


class _Aggregate(Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
        ctx.save_for_backward(attention, values)
        ctx.adjacency = adjacency
        return _weighted(adjacency, attention, values, reach_of(adjacency).filled, outgoing=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        attention, values = ctx.saved_tensors
        d_out, adjacency = gradients[0].contiguous(), ctx.adjacency
        d_attention = d_values = None
        if ctx.needs_input_grad[0]:
            d_attention = _edge_dot(adjacency, d_out, values, 1.0)
        if ctx.needs_input_grad[1]:
            d_values = _weighted(adjacency, attention, d_out, reach_of(adjacency).moving, outgoing=True)
        return d_attention, d_values, None


class _Additive(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
        left, right = left.contiguous(), right.contiguous()
        index, heads = adjacency.index32, left.shape[1]
        out = left.new_empty(adjacency.num_edges, heads)
        total = out.numel()
        if total:
            _additive_forward[(-(-total // 512),)](
                index.source, index.destination, left, right, out, total, slope, H=heads, B=512
            )
        ctx.save_for_backward(left, right)
        ctx.adjacency, ctx.slope = adjacency, slope
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        gradient, adjacency, results = gradients[0].contiguous(), ctx.adjacency, []
        rows, sizes = reach_of(adjacency).moving, _narrow_sizes(left.shape[1], 1024)
        for needed, outgoing in zip(ctx.needs_input_grad, (True, False), strict=False):
            own, other = (left, right) if outgoing else (right, left)
            out = _room(own, rows) if needed else None
            if out is not None and rows:
                arguments = *_view(adjacency, outgoing=outgoing), own, other, gradient, out, ctx.slope
                _additive_backward[(rows,)](*arguments, **sizes, THROUGH=outgoing)
            results.append(out)
        return *results, None, None


class _Dynamic(Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float
    ) -> Tensor:
        left, right, weight = left.contiguous(), right.contiguous(), weight.contiguous()
        index, sizes = adjacency.index32, _sizes(*left.shape[1:])
        out = left.new_empty(adjacency.num_edges, left.shape[1])
        if adjacency.num_edges:
            grid = (-(-adjacency.num_edges // sizes["BE"]),)
            _dynamic_forward[grid](
                index.source, index.destination, left, right, weight, out, adjacency.num_edges, slope, **sizes
            )
        ctx.save_for_backward(left, right, weight)
        ctx.adjacency, ctx.slope = adjacency, slope
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right, weight = ctx.saved_tensors
        gradient, adjacency, sizes = gradients[0].contiguous(), ctx.adjacency, _sizes(*left.shape[1:])
        (moving, filled), learned = reach_of(adjacency), ctx.needs_input_grad[2]
        filled = filled if learned else moving
        d_left, d_right = _room(left, moving), _room(right, filled)
        part = _room(right, filled) if learned else right[:0]
        ends = (True, moving, left, right, d_left), (False, filled, right, left, d_right)
        for outgoing, rows, own, other, out in ends:
            if rows:
                arguments = own, other, weight, gradient, out, part, ctx.slope
                view, share = _view(adjacency, outgoing=outgoing), learned and not outgoing
                _dynamic_backward[(rows,)](*view, *arguments, **sizes, THROUGH=outgoing, WEIGHT=share)
        return d_left, d_right, part.sum(0) if learned else None, None, None


class _Dot(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
        ctx.save_for_backward(query, key)
        ctx.adjacency, ctx.scale = adjacency, query.shape[-1] ** -0.5
        return _edge_dot(adjacency, query, key, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        arguments, rows = (ctx.adjacency, gradients[0] * ctx.scale), reach_of(ctx.adjacency).moving
        d_query = _weighted(*arguments, key, rows, outgoing=False) if ctx.needs_input_grad[0] else None
        d_key = _weighted(*arguments, query, rows, outgoing=True) if ctx.needs_input_grad[1] else None
        return d_query, d_key, None


edge_softmax, aggregate = _EdgeSoftmax.apply, _Aggregate.apply


def score(terms: Score, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.score`."""
    kind, near, far, weight, slope = terms
    if kind == ADDITIVE:
        return _Additive.apply(far, near, adjacency, slope)  # type: ignore[no-any-return]
    if kind == DYNAMIC:
        return _Dynamic.apply(far, near, weight, adjacency, slope)  # type: ignore[no-any-return]
    return _Dot.apply(near, far, adjacency)  # type: ignore[no-any-return]


@triton.jit
def _weighted_sum(
    ptr, edge, node, weight, values, out, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr, BE: tl.constexpr, THROUGH: tl.constexpr,
):  # fmt: skip
    """out[i] = Σ_e weight[e, h] · values[node(e), h, c] over the edges of row i."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    total = tl.zeros([BH, BC], dtype=values.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        a = narrow(weight, e.to(tl.int64), h, live, H)
        total += tl.sum(a[:, :, None] * wide(values, j, h, c, live, H, C), axis=0)
    where = out + i.to(tl.int64) * (H * C) + h[:, None] * C + c[None, :]
    tl.store(where, total, mask=inside(h, c, H, C))


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
    products = wide(at_destination, i, h, c, live, H, C) * wide(at_source, j, h, c, live, H, C)
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
        a = narrow(attention, k.to(tl.int64), h, k < last, H)
        mean += tl.sum(a * narrow(gradient, k.to(tl.int64), h, k < last, H), axis=0)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        a = narrow(attention, k.to(tl.int64), h, k < last, H)
        g = narrow(gradient, k.to(tl.int64), h, k < last, H)
        where, good = k[:, None].to(tl.int64) * H + h[None, :], (k < last)[:, None] & (h[None, :] < H)
        tl.store(out + where, a * (g - mean[None, :]), mask=good)


@triton.jit
def _additive_forward(
    source, destination, left, right, out, T, slope: tl.constexpr, H: tl.constexpr, B: tl.constexpr
):
    """out[e, h] = leaky_relu(left[src, h] + right[dst, h]); T = E · H entries."""
    t = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    live = t < T
    e, h = t // H, t % H
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    s = tl.load(left + j * H + h, mask=live, other=0.0) + tl.load(right + i * H + h, mask=live, other=0.0)
    tl.store(out + t, tl.where(s > 0, s, s * slope), mask=live)


@triton.jit
def _additive_backward(
    ptr, edge, node, own, other, gradient, out, slope: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    BE: tl.constexpr, THROUGH: tl.constexpr,
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
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        s = mine[None, :] + narrow(other, j, h, live, H)
        g = narrow(gradient, e.to(tl.int64), h, live, H)
        total += tl.sum(tl.where(s > 0, g, g * slope), axis=0)
    tl.store(out + i * H + h, total, mask=h < H)


@triton.jit
def _dynamic_forward(
    source, destination, left, right, weight, out, E, slope: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[e, h] = Σ_c weight[h, c] · leaky_relu(left[src, h, c] + right[dst, h, c])."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    live = e < E
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    s = wide(left, j, h, c, live, H, C) + wide(right, i, h, c, live, H, C)
    total = tl.sum(one(weight, 0, h, c, H, C)[None, :, :] * _leaky(s, slope), axis=2)
    tl.store(out + e[:, None].to(tl.int64) * H + h[None, :], total, mask=live[:, None] & (h[None, :] < H))


@triton.jit
def _dynamic_backward(
    ptr, edge, node, own, other, weight, gradient, out, weight_part, slope: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, THROUGH: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradient of the dynamic score in one end's projection, and this row's part of the weight's."""
    i = tl.program_id(0).to(tl.int64)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    w, mine = one(weight, 0, h, c, H, C), one(own, i, h, c, H, C)
    total = tl.zeros([BH, BC], dtype=own.dtype.element_ty)
    part = tl.zeros([BH, BC], dtype=own.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        s = mine[None, :, :] + wide(other, j, h, c, live, H, C)
        g = narrow(gradient, e.to(tl.int64), h, live, H)
        flow = g[:, :, None] * w[None, :, :]
        total += tl.sum(tl.where(s > 0, flow, flow * slope), axis=0)
        if WEIGHT:
            part += tl.sum(g[:, :, None] * _leaky(s, slope), axis=0)
    where, fits = i * (H * C) + h[:, None] * C + c[None, :], inside(h, c, H, C)
    tl.store(out + where, total, mask=fits)
    if WEIGHT:
        tl.store(weight_part + where, part, mask=fits)
