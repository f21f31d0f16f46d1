"""Sparse node features times a weight matrix, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import load, prefetch, splat, store
from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import Reals, array, blocks, columns_plan, rows_plan, tensors
from fgai.ops.cpu.rows import AHEAD, axpy, dot, fetch, kernel, piece
from fgai.sparse import SparseRows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


# A row of the weights is taken 64 numbers at a time: eight vectors, which stay in registers.
WIDE = 64
# Parts the rows are divided into for the gradient of the weights, each with a sum of its own.
SLABS = 8
# Entries per column from which those sums are worth their memory.
DENSE = 16


@piece
def _sum_wide(low, high, indices, values, weight, width, column, out, here):
    """out[here : here + 64] = Σ_z values[z] · weight[indices[z]], columns `column` to `column + 63`."""
    end, zero = len(indices) - 1, splat(weight.dtype.type(0))
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    for z in range(low, high):
        later = np.int64(indices[min(z + AHEAD, end)]) * width + column
        for c in range(0, WIDE, 64 // weight.itemsize):
            prefetch(weight, later + c)
        at, scale = np.int64(indices[z]) * width + column, splat(values[z])
        s0 = s0 + scale * load(weight, at)
        s1 = s1 + scale * load(weight, at + 8)
        s2 = s2 + scale * load(weight, at + 16)
        s3 = s3 + scale * load(weight, at + 24)
        s4 = s4 + scale * load(weight, at + 32)
        s5 = s5 + scale * load(weight, at + 40)
        s6 = s6 + scale * load(weight, at + 48)
        s7 = s7 + scale * load(weight, at + 56)
    store(out, here, s0)
    store(out, here + 8, s1)
    store(out, here + 16, s2)
    store(out, here + 24, s3)
    store(out, here + 32, s4)
    store(out, here + 40, s5)
    store(out, here + 48, s6)
    store(out, here + 56, s7)


@kernel
def _forward_block(b, blocks, indptr, indices, width, values, weight, out):
    end, whole = len(indices) - 1, width // WIDE * WIDE
    for n in range(blocks[b], blocks[b + 1]):
        here = np.int64(n) * width
        for column in range(0, whole, WIDE):
            _sum_wide(indptr[n], indptr[n + 1], indices, values, weight, width, column, out, here + column)
        if whole < width:
            out[here + whole : here + width] = 0
            for z in range(indptr[n], indptr[n + 1]):
                fetch(weight, np.int64(indices[min(z + AHEAD, end)]) * width + whole, width - whole)
                at = np.int64(indices[z]) * width + whole
                axpy(width - whole, values[z], weight, at, out, here + whole)


@kernel
def _forward(threads, blocks, indptr, indices, width, values, weight, out):
    arguments = (blocks, indptr, indices, width, values, weight, out)
    run_blocks(_forward_block, threads, len(blocks) - 1, arguments)


@piece
def _spread_wide(low, high, indices, values, gradient, here, width, column, out):
    """out[indices[z]] += values[z] · gradient[here : here + 64], columns `column` to `column + 63`."""
    g0, g1, g2, g3 = (
        load(gradient, here),
        load(gradient, here + 8),
        load(gradient, here + 16),
        load(gradient, here + 24),
    )
    g4, g5, g6, g7 = (
        load(gradient, here + 32),
        load(gradient, here + 40),
        load(gradient, here + 48),
        load(gradient, here + 56),
    )
    for z in range(low, high):
        at, scale = np.int64(indices[z]) * width + column, splat(values[z])
        store(out, at, load(out, at) + scale * g0)
        store(out, at + 8, load(out, at + 8) + scale * g1)
        store(out, at + 16, load(out, at + 16) + scale * g2)
        store(out, at + 24, load(out, at + 24) + scale * g3)
        store(out, at + 32, load(out, at + 32) + scale * g4)
        store(out, at + 40, load(out, at + 40) + scale * g5)
        store(out, at + 48, load(out, at + 48) + scale * g6)
        store(out, at + 56, load(out, at + 56) + scale * g7)


@kernel
def _slab_block(b, slabs, indptr, indices, width, values, gradient, partial):
    out, whole = partial[b], width // WIDE * WIDE
    out[:] = 0
    for n in range(slabs[b], slabs[b + 1]):
        here = np.int64(n) * width
        for column in range(0, whole, WIDE):
            _spread_wide(
                indptr[n], indptr[n + 1], indices, values, gradient, here + column, width, column, out
            )
        if whole < width:
            for z in range(indptr[n], indptr[n + 1]):
                at = np.int64(indices[z]) * width + whole
                axpy(width - whole, values[z], gradient, here + whole, out, at)


@kernel
def _backward_slabs(threads, slabs, indptr, indices, width, values, gradient, partial):
    """The gradient of the weights from each part of the rows, in partial[part]."""
    arguments = (slabs, indptr, indices, width, values, gradient, partial)
    run_blocks(_slab_block, threads, len(slabs) - 1, arguments)


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
            d_weight = _weight_gradient(ctx.rows, stored, gradient, matrix)
        return (*tensors(d_values, d_weight), None)


def _weight_gradient(rows: SparseRows, stored: Reals, gradient: Reals, matrix: Reals) -> Reals:
    """Return the gradient [F, D]; summed in an order that does not depend on the number of threads."""
    made, width = np.empty_like(matrix), matrix.shape[1]
    if len(stored) < DENSE * rows.num_columns:
        columns = columns_plan(rows)
        threads = threads_for(len(columns.blocks) - 1)
        _backward_weight(threads, *columns, width, stored, gradient, made.reshape(-1))
        return made
    index = rows_plan(rows)
    slabs = blocks(index.indptr, SLABS)
    # The order of the columns within a row is kept, so each part reads its rows once and in order.
    partial = np.empty((len(slabs) - 1, made.size), made.dtype)
    _backward_slabs(
        threads_for(len(slabs) - 1), slabs, index.indptr, index.indices, width, stored, gradient, partial
    )
    np.sum(partial, axis=0, out=made.reshape(-1))
    return made


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """Sparse `rows` times `weight` [F, D] → [N, D].

    The gradient of `weight` is summed over parts of the rows (gathered column by column where there are few
    entries), that of the stored values only if they ask for it.
    """
    result: Tensor = _ProjectSparse.apply(rows.values.to(weight.dtype), weight, rows)
    return result
