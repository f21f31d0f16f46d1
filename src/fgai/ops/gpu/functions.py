"""The operations on the GPU, with hand-written backward passes over the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.gpu import kernels
from fgai.ops.gpu.plan import room
from fgai.ops.reach import reach_of
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-call"

TILE = 4096
"""Elements of a block of edges × heads × channels that one program holds at a time."""


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _sizes(heads: int, channels: int) -> dict[str, int]:
    """Return the compile-time sizes for tensors [*, heads, channels]."""
    high, wide = _power(heads), _power(channels)
    block = max(1, min(64, TILE // (high * wide)))
    return {"H": heads, "C": channels, "BH": high, "BC": wide, "BE": block}


def _narrow(heads: int) -> dict[str, int]:
    """Return the compile-time sizes for tensors [E, heads]."""
    high = _power(heads)
    return {"H": heads, "BH": high, "BE": max(16, 1024 // high)}


def _incoming(adjacency: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    index = adjacency.index32
    return index.rowptr, index.source, index.source


def _outgoing(adjacency: Adjacency) -> tuple[Tensor, Tensor, Tensor]:
    index = adjacency.index32
    return index.colptr, index.csc, index.destination


def _weighted(adjacency: Adjacency, weight: Tensor, values: Tensor, rows: int, *, outgoing: bool) -> Tensor:
    """Σ over the incoming (or outgoing) edges of a node of weight [E, H] times the far end's values.

    For the nodes before `rows`; zeros for others.
    """
    ptr, edge, node = _outgoing(adjacency) if outgoing else _incoming(adjacency)
    values, weight = values.contiguous(), weight.contiguous()
    out = room(values, rows)
    sizes = _sizes(*values.shape[1:])
    if rows:
        kernels.weighted_sum[(rows,)](
            ptr, edge, node, weight, values, out, **sizes, THROUGH=outgoing, num_warps=4
        )
    return out


def _edge_dot(adjacency: Adjacency, at_destination: Tensor, at_source: Tensor, scale: float) -> Tensor:
    index, (heads, channels) = adjacency.index32, at_source.shape[1:]
    out = at_source.new_empty(adjacency.num_edges, heads)
    if adjacency.num_edges:
        sizes = _sizes(heads, channels)
        grid = (-(-adjacency.num_edges // sizes["BE"]),)
        kernels.edge_dot[grid](
            index.source,
            index.destination,
            at_destination.contiguous(),
            at_source.contiguous(),
            out,
            adjacency.num_edges,
            scale,
            **sizes,
        )
    return out


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, adjacency: Adjacency) -> Tensor:
        scores = scores.contiguous()
        out = torch.empty_like(scores)
        sizes = _narrow(scores.shape[1])
        if rows := reach_of(adjacency).filled:
            kernels.softmax_forward[(rows,)](adjacency.index32.rowptr, scores, out, **sizes)
        ctx.save_for_backward(out)
        ctx.adjacency = adjacency
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (attention,) = ctx.saved_tensors
        out, adjacency = torch.empty_like(attention), ctx.adjacency
        pointer, gradient, sizes = adjacency.index32.rowptr, gradients[0].contiguous(), _narrow(out.shape[1])
        if rows := reach_of(adjacency).filled:
            kernels.softmax_backward[(rows,)](pointer, attention, gradient, out, **sizes)
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
            kernels.additive_forward[(-(-total // 512),)](
                index.source, index.destination, left, right, out, total, slope, H=heads, B=512
            )
        ctx.save_for_backward(left, right)
        ctx.adjacency, ctx.slope = adjacency, slope
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        gradient, adjacency, found = gradients[0].contiguous(), ctx.adjacency, []
        rows = reach_of(adjacency).moving
        for want, view, outgoing, own, other in (
            (ctx.needs_input_grad[0], _outgoing(adjacency), True, left, right),
            (ctx.needs_input_grad[1], _incoming(adjacency), False, right, left),
        ):
            out = room(own, rows) if want else None
            if out is not None and rows:
                kernels.additive_backward[(rows,)](
                    *view, own, other, gradient, out, ctx.slope, **_narrow(own.shape[1]), THROUGH=outgoing
                )
            found.append(out)
        return found[0], found[1], None, None


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
            kernels.dynamic_forward[grid](
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
        reach, learned = reach_of(adjacency), ctx.needs_input_grad[2]
        moving = reach.moving
        filled = reach.filled if learned else moving
        d_left, d_right, part = room(left, moving), room(right, filled), right[:0]
        if learned:
            part = room(right, filled)
        if moving:
            kernels.dynamic_backward[(moving,)](
                *_outgoing(adjacency), left, right, weight, gradient, d_left, part, ctx.slope, **sizes,
                THROUGH=True, WEIGHT=False,
            )  # fmt: skip
        if filled:
            kernels.dynamic_backward[(filled,)](
                *_incoming(adjacency), right, left, weight, gradient, d_right, part, ctx.slope, **sizes,
                THROUGH=False, WEIGHT=learned,
            )  # fmt: skip
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
        given, rows = (ctx.adjacency, gradients[0] * ctx.scale), reach_of(ctx.adjacency).moving
        d_query = _weighted(*given, key, rows, outgoing=False) if ctx.needs_input_grad[0] else None
        d_key = _weighted(*given, query, rows, outgoing=True) if ctx.needs_input_grad[1] else None
        return d_query, d_key, None


def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.edge_softmax`."""
    return _EdgeSoftmax.apply(scores, adjacency)  # type: ignore[no-any-return]


def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.aggregate`."""
    return _Aggregate.apply(attention, values, adjacency)  # type: ignore[no-any-return]


def score_additive(left: Tensor, right: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
    """See `fgai.ops.reference.score_additive`."""
    return _Additive.apply(left, right, adjacency, slope)  # type: ignore[no-any-return]


def score_dynamic(left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
    """See `fgai.ops.reference.score_dynamic`."""
    return _Dynamic.apply(left, right, weight, adjacency, slope)  # type: ignore[no-any-return]


def score_dot(query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.score_dot`."""
    return _Dot.apply(query, key, adjacency)  # type: ignore[no-any-return]
