"""Softmax over the incoming edges of each node, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.adjacency import Adjacency
from fgai.ops.cpu.plan import array, match_threads, plan
from fgai.ops.cpu.vector import FAST, exp_nonpositive

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@njit(inline="always", fastmath=FAST, cache=True)
def normalise_row(weight, low, high, heads, top, total):
    """Turn the flat scores of edges low..high-1 (low < high) into their softmax, in place."""
    for h in range(heads):
        top[h] = weight[low * heads + h]
        total[h] = 0
    for e in range(low + 1, high):
        for h in range(heads):
            top[h] = max(top[h], weight[e * heads + h])
    row = weight[low * heads : high * heads]
    for e in range(high - low):
        for h in range(heads):
            row[e * heads + h] -= top[h]
    for k in range(len(row)):
        row[k] = exp_nonpositive(row[k])
    for e in range(high - low):
        for h in range(heads):
            total[h] += row[e * heads + h]
    for h in range(heads):
        total[h] = 1 / total[h]
    for e in range(high - low):
        for h in range(heads):
            row[e * heads + h] *= total[h]


@njit(parallel=True, fastmath=FAST, cache=True)
def _forward(rowptr, blocks, scores, out):
    heads = scores.shape[1]
    given, weight = scores.ravel(), out.ravel()
    for b in prange(len(blocks) - 1):
        top, total = np.empty(heads, scores.dtype), np.empty(heads, scores.dtype)
        first, last = rowptr[blocks[b]] * heads, rowptr[blocks[b + 1]] * heads
        weight[first:last] = given[first:last]
        for i in range(blocks[b], blocks[b + 1]):
            if rowptr[i] < rowptr[i + 1]:
                normalise_row(weight, rowptr[i], rowptr[i + 1], heads, top, total)


@njit(parallel=True, fastmath=FAST, cache=True)
def _backward(rowptr, blocks, weight, gradient, out):
    heads = weight.shape[1]
    for b in prange(len(blocks) - 1):
        mean = np.empty(heads, weight.dtype)
        for i in range(blocks[b], blocks[b + 1]):
            mean[:] = 0
            for e in range(rowptr[i], rowptr[i + 1]):
                for h in range(heads):
                    mean[h] += weight[e, h] * gradient[e, h]
            for e in range(rowptr[i], rowptr[i + 1]):
                for h in range(heads):
                    out[e, h] = weight[e, h] * (gradient[e, h] - mean[h])


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, adjacency: Adjacency) -> Tensor:
        match_threads()
        given, index = array(scores), plan(adjacency)
        out = np.empty_like(given)
        _forward(index.rowptr, index.row_blocks, given, out)
        attention = from_numpy(out)
        ctx.save_for_backward(attention)
        ctx.index = index
        return attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        match_threads()
        (attention,) = ctx.saved_tensors
        weight = array(attention)
        out = np.empty_like(weight)
        _backward(ctx.index.rowptr, ctx.index.row_blocks, weight, array(gradients[0]), out)
        return from_numpy(out), None


def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax of `scores` [E, H] over the incoming edges of each node → [E, H]."""
    result: Tensor = _EdgeSoftmax.apply(scores, adjacency)
    return result
