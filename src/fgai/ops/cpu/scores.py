"""The three attention scores on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu import score_kernels as kernels
from fgai.ops.cpu.parallel import threads_for
from fgai.ops.cpu.plan import Incoming, Outgoing, Reals, array, incoming, outgoing, tensors
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-call"


def _empty_scores(adjacency: Adjacency, given: Reals) -> Reals:
    return np.empty((adjacency.num_edges, given.shape[1]), given.dtype)


def _threads(index: Incoming | Outgoing) -> int:
    return threads_for(len(index.blocks) - 1)


class _Additive(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
        index, given = incoming(adjacency), array(left)
        out = _empty_scores(adjacency, given)
        flat = (given.reshape(-1), array(right).reshape(-1), given.dtype.type(slope), out.reshape(-1))
        kernels.additive(_threads(index), *index, given.shape[1], *flat)
        ctx.save_for_backward(left, right)
        ctx.adjacency, ctx.slope = adjacency, slope
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right = (array(t) for t in ctx.saved_tensors)
        slope, heads = left.dtype.type(ctx.slope), left.shape[1]
        flat = (left.reshape(-1), right.reshape(-1), slope, array(gradients[0]).reshape(-1))
        d_left = d_right = None
        if ctx.needs_input_grad[0]:
            d_left, columns = np.empty_like(left), outgoing(ctx.adjacency)
            kernels.additive_left(_threads(columns), *columns, heads, *flat, d_left.reshape(-1))
        if ctx.needs_input_grad[1]:
            d_right, rows = np.empty_like(right), incoming(ctx.adjacency)
            kernels.additive_right(_threads(rows), *rows, heads, *flat, d_right.reshape(-1))
        return (*tensors(d_left, d_right), None, None)


class _Dynamic(Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float
    ) -> Tensor:
        index, given = incoming(adjacency), array(left)
        out = _empty_scores(adjacency, given)
        flat = (given.reshape(-1), array(right).reshape(-1), array(weight).reshape(-1))
        kernels.dynamic(
            _threads(index), *index, *given.shape[1:], *flat, given.dtype.type(slope), out.reshape(-1)
        )
        ctx.save_for_backward(left, right, weight)
        ctx.adjacency, ctx.slope = adjacency, slope
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right, weight = (array(t) for t in ctx.saved_tensors)
        slope, gradient = left.dtype.type(ctx.slope), array(gradients[0]).reshape(-1)
        flat = (*left.shape[1:], left.reshape(-1), right.reshape(-1), weight.reshape(-1), slope, gradient)
        d_left = d_right = d_weight = None
        if ctx.needs_input_grad[0]:
            d_left, columns = np.empty_like(left), outgoing(ctx.adjacency)
            kernels.dynamic_left(_threads(columns), *columns, *flat, d_left.reshape(-1))
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_right, d_weight = dynamic_right(ctx.adjacency, flat, right, weight)
        return (*tensors(d_left, d_right, d_weight), None, None)


def dynamic_right(
    adjacency: Adjacency, flat: tuple[Any, ...], right: Reals, weight: Reals
) -> tuple[Reals, Reals]:
    """Return the gradients at the destinations and of the weight."""
    rows = incoming(adjacency)
    d_right = np.empty_like(right)
    # One partial sum per block, added in block order: the same result for any number of threads.
    partial = np.zeros((len(rows.blocks) - 1, weight.size), weight.dtype)
    kernels.dynamic_right(_threads(rows), *rows, *flat, d_right.reshape(-1), partial)
    return d_right, partial.sum(0).reshape(weight.shape)


class _Dot(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
        index, given = incoming(adjacency), array(query)
        out = _empty_scores(adjacency, given)
        scale = given.dtype.type(given.shape[2] ** -0.5)
        flat = (given.reshape(-1), array(key).reshape(-1), scale, out.reshape(-1))
        kernels.dot_product(_threads(index), *index, *given.shape[1:], *flat)
        ctx.save_for_backward(query, key)
        ctx.adjacency = adjacency
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key = (array(t) for t in ctx.saved_tensors)
        scale, gradient = query.dtype.type(query.shape[2] ** -0.5), array(gradients[0]).reshape(-1)
        d_query = d_key = None
        if ctx.needs_input_grad[0]:
            d_query, rows = np.empty_like(query), incoming(ctx.adjacency)
            flat = (*key.shape[1:], key.reshape(-1), scale, gradient, d_query.reshape(-1))
            kernels.dot_product_query(_threads(rows), *rows, *flat)
        if ctx.needs_input_grad[1]:
            d_key, columns = np.empty_like(key), outgoing(ctx.adjacency)
            flat = (*query.shape[1:], query.reshape(-1), scale, gradient, d_key.reshape(-1))
            kernels.dot_product_key(_threads(columns), *columns, *flat)
        return (*tensors(d_query, d_key), None)


def score_additive(left: Tensor, right: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
    """`leaky_relu(left[source] + right[destination])` for `left`, `right` [N, H] → [E, H]."""
    result: Tensor = _Additive.apply(left, right, adjacency, slope)
    return result


def score_dynamic(left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
    """`Σ_c weight · leaky_relu(left[source] + right[destination])`, [N, H, C] and [H, C] → [E, H]."""
    result: Tensor = _Dynamic.apply(left, right, weight, adjacency, slope)
    return result


def score_dot(query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
    """`⟨query[destination], key[source]⟩ / √C` for [N, H, C] → [E, H]."""
    result: Tensor = _Dot.apply(query, key, adjacency)
    return result
