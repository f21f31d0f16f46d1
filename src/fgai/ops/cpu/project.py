"""Sparse node features times a weight matrix, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.plan import array, columns_plan, match_threads, rows_plan
from fgai.ops.cpu.vector import FAST, axpy, dot
from fgai.ops.features import SparseRows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@njit(parallel=True, fastmath=FAST, cache=True)
def _forward(indptr, indices, blocks, values, weight, out):
    width = weight.shape[1]
    flat, result = weight.reshape(-1), out.reshape(-1)
    for b in prange(len(blocks) - 1):
        for n in range(blocks[b], blocks[b + 1]):
            here = np.int64(n) * width
            result[here : here + width] = 0
            for z in range(indptr[n], indptr[n + 1]):
                axpy(width, values[z], flat, np.int64(indices[z]) * width, result, here)


@njit(parallel=True, fastmath=FAST, cache=True)
def _backward_weight(colptr, rows, order, blocks, values, gradient, out):
    width = gradient.shape[1]
    given, result = gradient.reshape(-1), out.reshape(-1)
    for b in prange(len(blocks) - 1):
        for f in range(blocks[b], blocks[b + 1]):
            here = np.int64(f) * width
            result[here : here + width] = 0
            for p in range(colptr[f], colptr[f + 1]):
                axpy(width, values[order[p]], given, np.int64(rows[p]) * width, result, here)


@njit(parallel=True, fastmath=FAST, cache=True)
def _backward_values(indptr, indices, blocks, weight, gradient, out):
    width = weight.shape[1]
    flat, given = weight.reshape(-1), gradient.reshape(-1)
    for b in prange(len(blocks) - 1):
        for n in range(blocks[b], blocks[b + 1]):
            here = np.int64(n) * width
            for z in range(indptr[n], indptr[n + 1]):
                out[z] = dot(width, flat, np.int64(indices[z]) * width, given, here)


class _ProjectSparse(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, rows: SparseRows) -> Tensor:
        match_threads()
        index, matrix = rows_plan(rows), array(weight)
        out = np.empty((rows.num_rows, matrix.shape[1]), matrix.dtype)
        _forward(index.indptr, index.indices, index.row_blocks, array(values), matrix, out)
        ctx.save_for_backward(values, weight)
        ctx.rows = rows
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        match_threads()
        values, weight = ctx.saved_tensors
        stored, gradient = array(values), array(gradients[0])
        d_values = d_weight = None
        if ctx.needs_input_grad[0]:
            index = rows_plan(ctx.rows)
            d_values = np.empty_like(stored)
            _backward_values(index.indptr, index.indices, index.row_blocks, array(weight), gradient, d_values)
        if ctx.needs_input_grad[1]:
            columns = columns_plan(ctx.rows)
            d_weight = np.empty((ctx.rows.num_columns, gradient.shape[1]), gradient.dtype)
            _backward_weight(*columns, stored, gradient, d_weight)
        made = (None if d is None else from_numpy(d) for d in (d_values, d_weight))
        return (*made, None)


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """Sparse `rows` times `weight` [F, D] → [N, D]; the weight is read in its own type.

    The gradient of `weight` is gathered column by column, that of the stored values only if they ask for it.
    """
    result: Tensor = _ProjectSparse.apply(rows.values.to(weight.dtype), weight, rows)
    return result
