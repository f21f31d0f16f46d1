"""Sparse node features times a weight matrix, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import TILE, _load_tile, _splat_tile, _store
from fgai.ops.cpu.parallel import (
    Reals,
    _array,
    _by_block,
    _columns_plan,
    _flat,
    _over,
    _rows_plan,
    _tensors,
    blocks,
)
from fgai.ops.cpu.rows import AHEAD, _axpy, _dot, _fetch, piece
from fgai.sparse import SparseRows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


# Parts the rows are divided into for the gradient of the weights, each with a sum of its own.
_SLABS = 8
# Entries per column from which those sums are worth their memory.
_DENSE = 16


@piece
def _sum_tile(low, high, indices, values, weight, width, column, out, here):
    """out[here : here + 64] = Σ_z values[z] · weight[indices[z]], columns `column` to `column + 63`."""
    end, sums = len(indices) - 1, _splat_tile(weight.dtype.type(0))
    for z in range(low, high):
        _fetch(weight, np.int64(indices[min(z + AHEAD, end)]) * width + column, TILE)
        at = np.int64(indices[z]) * width + column
        sums = sums + _splat_tile(values[z]) * _load_tile(weight, at)
    _store(out, here, sums)


@_by_block
def _forward(b, blocks, indptr, indices, width, values, weight, out):
    end, full = len(indices) - 1, width // TILE * TILE
    for n in range(blocks[b], blocks[b + 1]):
        here = np.int64(n) * width
        for column in range(0, full, TILE):
            _sum_tile(indptr[n], indptr[n + 1], indices, values, weight, width, column, out, here + column)
        if full < width:
            out[here + full : here + width] = 0
            for z in range(indptr[n], indptr[n + 1]):
                _fetch(weight, np.int64(indices[min(z + AHEAD, end)]) * width + full, width - full)
                at = np.int64(indices[z]) * width + full
                _axpy(width - full, values[z], weight, at, out, here + full)


@piece
def _spread_tile(low, high, indices, values, gradient, here, width, column, out):
    """out[indices[z]] += values[z] · gradient[here : here + 64], columns `column` to `column + 63`."""
    tile = _load_tile(gradient, here)
    for z in range(low, high):
        at = np.int64(indices[z]) * width + column
        _store(out, at, _load_tile(out, at) + _splat_tile(values[z]) * tile)


@_by_block
def _backward_slabs(b, slabs, indptr, indices, width, values, gradient, partial):
    out, full = partial[b], width // TILE * TILE
    out[:] = 0
    for n in range(slabs[b], slabs[b + 1]):
        here = np.int64(n) * width
        for column in range(0, full, TILE):
            _spread_tile(
                indptr[n], indptr[n + 1], indices, values, gradient, here + column, width, column, out
            )
        if full < width:
            for z in range(indptr[n], indptr[n + 1]):
                at = np.int64(indices[z]) * width + full
                _axpy(width - full, values[z], gradient, here + full, out, at)


@_by_block
def _backward_weight(b, blocks, colptr, order, rows, width, values, gradient, out):
    end = len(rows) - 1
    for f in range(blocks[b], blocks[b + 1]):
        here = np.int64(f) * width
        out[here : here + width] = 0
        for p in range(colptr[f], colptr[f + 1]):
            _fetch(gradient, np.int64(rows[min(p + AHEAD, end)]) * width, width)
            _axpy(width, values[order[p]], gradient, np.int64(rows[p]) * width, out, here)


@_by_block
def _backward_values(b, blocks, indptr, indices, width, weight, gradient, out):
    for n in range(blocks[b], blocks[b + 1]):
        here = np.int64(n) * width
        for z in range(indptr[n], indptr[n + 1]):
            out[z] = _dot(width, weight, np.int64(indices[z]) * width, gradient, here)


class _ProjectSparse(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, rows: SparseRows) -> Tensor:
        index, matrix = _rows_plan(rows), _array(weight)
        out = np.empty((rows.num_rows, matrix.shape[1]), matrix.dtype)
        _over(_forward, index, matrix.shape[1], _array(values), _flat(matrix), _flat(out))
        ctx.save_for_backward(values, weight)
        ctx.rows = rows
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, matrix = (_array(t) for t in ctx.saved_tensors)
        gradient, width = _flat(gradients[0]), matrix.shape[1]
        d_values = d_weight = None
        if ctx.needs_input_grad[0]:
            d_values = np.empty_like(stored)
            _over(_backward_values, _rows_plan(ctx.rows), width, _flat(matrix), gradient, d_values)
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(ctx.rows, stored, gradient, matrix)
        return (*_tensors(d_values, d_weight), None)


def _weight_gradient(rows: SparseRows, stored: Reals, gradient: Reals, matrix: Reals) -> Reals:
    """The gradient [F, D], summed in an order that does not depend on the number of threads."""
    out, width = np.empty_like(matrix), matrix.shape[1]
    if len(stored) < _DENSE * rows.num_columns:
        _over(_backward_weight, _columns_plan(rows), width, stored, gradient, _flat(out))
        return out
    index = _rows_plan(rows)
    # The order of the columns within a row is kept, so each part reads its rows once and in order.
    slabs = index._replace(blocks=blocks(index.pointer, _SLABS))
    partial = np.empty((len(slabs.blocks) - 1, out.size), out.dtype)
    _over(_backward_slabs, slabs, width, stored, gradient, partial)
    np.sum(partial, axis=0, out=_flat(out))
    return out


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """See `fgai.ops.reference.project_sparse`; the stored values get a gradient only if they ask for it."""
    return _ProjectSparse.apply(rows.values.to(weight.dtype), weight, rows)  # type: ignore[no-any-return]
