"""Sparse node features times a weight matrix, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import array, columns_plan, rows_plan, tensors
from fgai.ops.cpu.rows import AHEAD, axpy, dot, fetch, kernel
from fgai.ops.features import SparseRows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@kernel
def _forward_block(b, blocks, indptr, indices, width, values, weight, out):
    end = len(indices) - 1
    for n in range(blocks[b], blocks[b + 1]):
        here = np.int64(n) * width
        out[here : here + width] = 0
        for z in range(indptr[n], indptr[n + 1]):
            fetch(weight, np.int64(indices[min(z + AHEAD, end)]) * width, width)
            axpy(width, values[z], weight, np.int64(indices[z]) * width, out, here)


@kernel
def _forward(threads, blocks, indptr, indices, width, values, weight, out):
    arguments = (blocks, indptr, indices, width, values, weight, out)
    run_blocks(_forward_block, threads, len(blocks) - 1, arguments)


@kernel
def _weight_block(b, blocks, colptr, rows, order, width, values, gradient, out):
    end = len(rows) - 1
    for f in range(blocks[b], blocks[b + 1]):
        here = np.int64(f) * width
        out[here : here + width] = 0
        for p in range(colptr[f], colptr[f + 1]):
            fetch(gradient, np.int64(rows[min(p + AHEAD, end)]) * width, width)
            axpy(width, values[order[p]], gradient, np.int64(rows[p]) * width, out, here)


@kernel
def _backward_weight(threads, blocks, colptr, rows, order, width, values, gradient, out):
    arguments = (blocks, colptr, rows, order, width, values, gradient, out)
    run_blocks(_weight_block, threads, len(blocks) - 1, arguments)


@kernel
def _values_block(b, blocks, indptr, indices, width, weight, gradient, out):
    for n in range(blocks[b], blocks[b + 1]):
        here = np.int64(n) * width
        for z in range(indptr[n], indptr[n + 1]):
            out[z] = dot(width, weight, np.int64(indices[z]) * width, gradient, here)


@kernel
def _backward_values(threads, blocks, indptr, indices, width, weight, gradient, out):
    arguments = (blocks, indptr, indices, width, weight, gradient, out)
    run_blocks(_values_block, threads, len(blocks) - 1, arguments)


class _ProjectSparse(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, rows: SparseRows) -> Tensor:
        index, matrix = rows_plan(rows), array(weight)
        out = np.empty((rows.num_rows, matrix.shape[1]), matrix.dtype)
        flat = (array(values), matrix.reshape(-1), out.reshape(-1))
        _forward(threads_for(len(index.blocks) - 1), *index, matrix.shape[1], *flat)
        ctx.save_for_backward(values, weight)
        ctx.rows = rows
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, matrix = (array(t) for t in ctx.saved_tensors)
        gradient, width = array(gradients[0]).reshape(-1), matrix.shape[1]
        d_values = d_weight = None
        if ctx.needs_input_grad[0]:
            index = rows_plan(ctx.rows)
            d_values = np.empty_like(stored)
            threads = threads_for(len(index.blocks) - 1)
            _backward_values(threads, *index, width, matrix.reshape(-1), gradient, d_values)
        if ctx.needs_input_grad[1]:
            columns = columns_plan(ctx.rows)
            d_weight = np.empty_like(matrix)
            threads = threads_for(len(columns.blocks) - 1)
            _backward_weight(threads, *columns, width, stored, gradient, d_weight.reshape(-1))
        return (*tensors(d_values, d_weight), None)


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """Sparse `rows` times `weight` [F, D] → [N, D].

    The gradient of `weight` is gathered column by column, that of the stored values only if they ask for it.
    """
    result: Tensor = _ProjectSparse.apply(rows.values.to(weight.dtype), weight, rows)
    return result
