"""Weighted sums over incoming edges, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.adjacency import Adjacency
from fgai.ops.cpu.plan import array, match_threads, plan
from fgai.ops.cpu.vector import FAST, axpy, dot

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@njit(parallel=True, fastmath=FAST, cache=True)
def _forward(rowptr, source, blocks, weight, values, out):
    heads, channels = values.shape[1], values.shape[2]
    flat, result = values.reshape(-1), out.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            here = np.int64(i) * width
            result[here : here + width] = 0
            for e in range(rowptr[i], rowptr[i + 1]):
                there = np.int64(source[e]) * width
                for h in range(heads):
                    axpy(channels, weight[e, h], flat, there + h * channels, result, here + h * channels)


@njit(parallel=True, fastmath=FAST, cache=True)
def _backward(colptr, csc, destination, blocks, weight, values, gradient, d_weight, d_values):
    """One pass over outgoing edges: each gradient row is fetched once for both results."""
    heads, channels = values.shape[1], values.shape[2]
    flat, given, result = values.reshape(-1), gradient.reshape(-1), d_values.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for j in range(blocks[b], blocks[b + 1]):
            here = np.int64(j) * width
            result[here : here + width] = 0
            for p in range(colptr[j], colptr[j + 1]):
                e = csc[p]
                there = np.int64(destination[e]) * width
                for h in range(heads):
                    c = h * channels
                    d_weight[e, h] = dot(channels, given, there + c, flat, here + c)
                    axpy(channels, weight[e, h], given, there + c, result, here + c)


@njit(parallel=True, fastmath=FAST, cache=True)
def _backward_weight(rowptr, source, blocks, values, gradient, d_weight):
    heads, channels = values.shape[1], values.shape[2]
    flat, given = values.reshape(-1), gradient.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            here = np.int64(i) * width
            for e in range(rowptr[i], rowptr[i + 1]):
                there = np.int64(source[e]) * width
                for h in range(heads):
                    c = h * channels
                    d_weight[e, h] = dot(channels, given, here + c, flat, there + c)


@njit(parallel=True, fastmath=FAST, cache=True)
def _backward_values(colptr, csc, destination, blocks, weight, gradient, d_values):
    heads, channels = gradient.shape[1], gradient.shape[2]
    given, result = gradient.reshape(-1), d_values.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for j in range(blocks[b], blocks[b + 1]):
            here = np.int64(j) * width
            result[here : here + width] = 0
            for p in range(colptr[j], colptr[j + 1]):
                e = csc[p]
                there = np.int64(destination[e]) * width
                for h in range(heads):
                    c = h * channels
                    axpy(channels, weight[e, h], given, there + c, result, here + c)


class _Aggregate(Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
        match_threads()
        given, index = array(values), plan(adjacency)
        out = np.empty((adjacency.num_nodes, *given.shape[1:]), given.dtype)
        _forward(index.rowptr, index.source, index.row_blocks, array(attention), given, out)
        ctx.save_for_backward(attention, values)
        ctx.index = index
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        match_threads()
        attention, values = ctx.saved_tensors
        weight, given, gradient, index = array(attention), array(values), array(gradients[0]), ctx.index
        wants_weight, wants_values = ctx.needs_input_grad[:2]
        d_weight = np.empty_like(weight) if wants_weight else None
        d_values = np.empty_like(given) if wants_values else None
        outgoing = (index.colptr, index.csc, index.destination, index.column_blocks)
        if wants_weight and wants_values:
            _backward(*outgoing, weight, given, gradient, d_weight, d_values)
        elif wants_weight:
            _backward_weight(index.rowptr, index.source, index.row_blocks, given, gradient, d_weight)
        elif wants_values:
            _backward_values(*outgoing, weight, gradient, d_values)
        made = (None if d is None else from_numpy(d) for d in (d_weight, d_values))
        return (*made, None)


def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """`out[i] = Σ_{j→i} attention[j→i] · values[j]`: [E, H] and [N, H, C] → [N, H, C]."""
    result: Tensor = _Aggregate.apply(attention, values, adjacency)
    return result
