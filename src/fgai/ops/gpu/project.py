"""The product of sparse features and a matrix on the GPU: row by row in pieces, or as a dense matrix."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.cache import cached_on
from fgai.ops.gpu.plan import Work, _add_parts, _make_layout, _place
from fgai.sparse import SparseRows

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

DENSE, LARGEST = 0.08, 2**30  # least share of non-zeros for the dense product, most bytes of its matrix


@triton.jit
def _gather(
    row, first, last, slot, column, entry, values, dense, out, parts, D: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """out[n] = Σ_z values[z] · dense[column(z)] over a piece of row n, for a block of BD columns of dense."""
    p = tl.program_id(0)
    n, low, high = tl.load(row + p).to(tl.int64), tl.load(first + p), tl.load(last + p)
    where = tl.load(slot + p).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BE, BD], dtype=dense.dtype.element_ty)
    for start in range(low, high, BE):
        k = start + tl.arange(0, BE)
        live = k < high
        z = tl.load(entry + k, mask=live, other=0) if INDIRECT else k
        f = tl.load(column + k, mask=live, other=0).to(tl.int64)
        v = tl.load(values + z, mask=live, other=0.0)
        good = live[:, None] & (d[None, :] < D)
        total += v[:, None] * tl.load(dense + f[:, None] * D + d[None, :], mask=good, other=0.0)
    result = tl.sum(total, axis=0)
    if where < 0:
        tl.store(out + n * D + d, result, mask=d < D)
    else:
        tl.store(parts + where * D + d, result, mask=d < D)


@triton.jit
def _spread(pointer, column, values, out, F, BE: tl.constexpr):
    """Write the entries of one row to their places in a dense matrix."""
    n = tl.program_id(0).to(tl.int64)
    low, high = tl.load(pointer + n), tl.load(pointer + n + 1)
    for start in range(low, high, BE):
        k = start + tl.arange(0, BE)
        at = n * F + tl.load(column + k, mask=k < high, other=0)
        tl.store(out + at, tl.load(values + k, mask=k < high, other=0.0), mask=k < high)


def _works(rows: SparseRows) -> tuple[Work, Work]:
    """The pieces of the rows and of the columns; made once for a pattern."""

    def make() -> tuple[Work, Work]:
        (rowptr, column), (colptr, owner, entry) = rows.rows32, rows.columns
        by_row = _place(_make_layout(rowptr.diff()), rowptr, column, column)
        return by_row, _place(_make_layout(colptr.diff()), colptr, entry, owner)

    return cached_on(rows.pattern, "gpu rows and columns", make)


def _is_full(rows: SparseRows) -> bool:
    """Whether the dense product is less work; never where an entry occurs twice."""

    def make() -> bool:
        size = rows.num_rows * rows.num_columns
        if not 0 < DENSE * size < rows.indices.numel() or size > LARGEST // 4:
            return False
        keys = torch.sort(rows.rows * rows.num_columns + rows.indices).values
        return not bool((keys[1:] == keys[:-1]).any())

    return cached_on(rows.pattern, "gpu full", make)


def _dense(rows: SparseRows) -> Tensor:
    """The features as a matrix; made once for features that stay, every time for those after dropout."""

    def make() -> Tensor:
        out = rows.values.new_zeros(rows.num_rows, rows.num_columns)
        pointer, column = rows.rows32
        _spread[(rows.num_rows,)](pointer, column, rows.values, out, rows.num_columns, BE=128, num_warps=4)
        return out

    return cached_on(rows, "gpu dense", make)


def _sum(work: Work, values: Tensor, dense: Tensor, count: int, *, indirect: bool) -> Tensor:
    dense, values = dense.contiguous(), values.contiguous()
    width = dense.shape[1]
    out, parts = dense.new_empty(count, width), dense.new_empty(work.slots, width)
    block = min(64, triton.next_power_of_2(width))
    if len(work.row):
        _gather[(len(work.row), -(-width // block))](
            *work.pieces, work.node, work.edge, values, dense, out, parts,
            D=width, BD=block, BE=max(8, 1024 // block), INDIRECT=indirect, num_warps=2,
        )  # fmt: skip
    _add_parts(work, parts, out)
    return out


class _ProjectSparse(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, rows: SparseRows) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.rows, ctx.dense = rows, None
        if _is_full(rows):
            dense = ctx.dense = _dense(rows)
            return dense @ weight
        return _sum(_works(rows)[0], values, weight, rows.num_rows, indirect=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        rows, gradient = ctx.rows, gradients[0]
        d_values = d_weight = None
        if ctx.needs_input_grad[0]:
            d_values = (gradient[rows.rows] * weight[rows.indices]).sum(1)
        if ctx.needs_input_grad[1] and ctx.dense is not None:
            d_weight = ctx.dense.t() @ gradient
        elif ctx.needs_input_grad[1]:
            d_weight = _sum(_works(rows)[1], values, gradient, rows.num_columns, indirect=True)
        return d_values, d_weight, None


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """See `fgai.ops.reference.project_sparse`."""
    return _ProjectSparse.apply(rows.values, weight, rows)  # type: ignore[no-any-return]
