"""The three attention scores on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.adjacency import Adjacency
from fgai.ops.cpu import score_kernels as kernels
from fgai.ops.cpu.plan import array, match_threads, plan

# mypy: disable-error-code="no-untyped-call"


def _tensors(*arrays: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if a is None else from_numpy(a) for a in arrays)


class _Additive(Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
        match_threads()
        index, given = plan(adjacency), array(left)
        out = np.empty((adjacency.num_edges, given.shape[1]), given.dtype)
        kernels.additive(
            index.rowptr, index.source, index.row_blocks, given, array(right), given.dtype.type(slope), out
        )
        ctx.save_for_backward(left, right)
        ctx.index, ctx.slope = index, slope
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        match_threads()
        index = ctx.index
        left, right = (array(t) for t in ctx.saved_tensors)
        gradient, slope = array(gradients[0]), left.dtype.type(ctx.slope)
        d_left = d_right = None
        if ctx.needs_input_grad[0]:
            d_left = np.empty_like(left)
            outgoing = (index.colptr, index.csc, index.destination, index.column_blocks)
            kernels.additive_left(*outgoing, left, right, slope, gradient, d_left)
        if ctx.needs_input_grad[1]:
            d_right = np.empty_like(right)
            incoming = (index.rowptr, index.source, index.row_blocks)
            kernels.additive_right(*incoming, left, right, slope, gradient, d_right)
        return (*_tensors(d_left, d_right), None, None)


class _Dynamic(Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float
    ) -> Tensor:
        match_threads()
        index, given = plan(adjacency), array(left)
        out = np.empty((adjacency.num_edges, given.shape[1]), given.dtype)
        incoming = (index.rowptr, index.source, index.row_blocks)
        kernels.dynamic(*incoming, given, array(right), array(weight), given.dtype.type(slope), out)
        ctx.save_for_backward(left, right, weight)
        ctx.index, ctx.slope = index, slope
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        match_threads()
        index = ctx.index
        left, right, weight = (array(t) for t in ctx.saved_tensors)
        gradient, slope = array(gradients[0]), left.dtype.type(ctx.slope)
        d_left = d_right = d_weight = None
        if ctx.needs_input_grad[0]:
            d_left = np.empty_like(left)
            outgoing = (index.colptr, index.csc, index.destination, index.column_blocks)
            kernels.dynamic_left(*outgoing, left, right, weight, slope, gradient, d_left)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_right = np.empty_like(right)
            # One partial sum per block, added in block order: the same result for any number of threads.
            partial = np.zeros((len(index.row_blocks) - 1, *weight.shape), weight.dtype)
            incoming = (index.rowptr, index.source, index.row_blocks)
            kernels.dynamic_right(*incoming, left, right, weight, slope, gradient, d_right, partial)
            d_weight = partial.sum(0)
        return (*_tensors(d_left, d_right, d_weight), None, None)


class _Dot(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
        match_threads()
        index, given = plan(adjacency), array(query)
        out = np.empty((adjacency.num_edges, given.shape[1]), given.dtype)
        kernels.dot_product(index.rowptr, index.source, index.row_blocks, given, array(key), out)
        ctx.save_for_backward(query, key)
        ctx.index = index
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        match_threads()
        index, gradient = ctx.index, array(gradients[0])
        query, key = (array(t) for t in ctx.saved_tensors)
        d_query = d_key = None
        if ctx.needs_input_grad[0]:
            d_query = np.empty_like(query)
            incoming = (index.rowptr, index.source, index.row_blocks)
            kernels.dot_product_query(*incoming, key, gradient, d_query)
        if ctx.needs_input_grad[1]:
            d_key = np.empty_like(key)
            outgoing = (index.colptr, index.csc, index.destination, index.column_blocks)
            kernels.dot_product_key(*outgoing, query, gradient, d_key)
        return (*_tensors(d_query, d_key), None)


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
