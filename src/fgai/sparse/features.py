"""Node features that stay sparse, with dense rows appended or deltas on some rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.sparse.adjacency import pointers
from fgai.sparse.valid import (
    INTEGERS,
    _capturing,
    _check_count,
    check_index,
    check_pointers,
    row_entries,
    row_index,
)
from fgai.typed import typed

SPARSE_SHARE, MIN_COLUMNS = 0.1, 64  # dense features become sparse: largest share of non-zeros, least width


class _Pattern:
    """Key of cached results that depend on the positions of a sparse matrix's entries, not on values."""


@typed
@dataclass(frozen=True, eq=False)
class SparseRows:
    """A matrix in compressed rows (CSR), and its columns (CSC), which the backward pass reads.

    Row n holds the entries `indptr[n]:indptr[n + 1]` of `indices`, their columns, and `values` [Z]; `indptr`
    [N + 1] and `indices` [Z] are int64. They are checked once, on first use (see `fgai.sparse.valid`).
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor
    num_columns: int

    @property
    def num_rows(self) -> int:
        """Number of rows, N."""
        return int(self.indptr.shape[0]) - 1

    @cached_property
    def rows(self) -> Tensor:
        """[Z] int64: row of each entry."""
        self.check()
        return row_index(self.indptr, len(self.indices))

    @cached_property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """(column pointers [F + 1], row of each entry [Z], entry position [Z]), ordered by column; int32."""
        self.check()
        order = torch.argsort(self.indices, stable=True)
        ptr = pointers(self.indices[order], self.num_columns)
        return ptr.to(torch.int32), self.rows[order].to(torch.int32), order.to(torch.int32)

    @cached_property
    def rows32(self) -> tuple[Tensor, Tensor]:
        """(row pointers, column of each entry) as 32-bit integers."""
        self.check()
        return self.indptr.to(torch.int32), self.indices.to(torch.int32)

    @cached_property
    def pattern(self) -> _Pattern:
        """Object that `with_values` hands on; results that do not depend on values are cached on it."""
        return _Pattern()

    def check(self) -> None:
        """Raise `InputError` unless pointers, columns and values fit each other; checked once per pattern."""
        if not _capturing(self.indices.device):
            cached_on(self.pattern, "valid entries", self._check)

    def _check(self) -> bool:
        for name, part in (("indptr", self.indptr), ("indices", self.indices)):
            if part.dim() != 1 or part.dtype not in INTEGERS or part.device != self.values.device:
                got = f"{part.dtype} {tuple(part.shape)} on {part.device}"
                raise InputError(f"`{name}` must be a vector of integers on {self.values.device}, got {got}")
        if not len(self.indptr) or self.values.dim() != 1 or not self.values.is_floating_point():
            raise InputError("sparse rows must have `indptr` [N + 1] and floating-point `values` [Z]")
        if len(self.indices) != len(self.values):
            got = f"{len(self.indices)} and {len(self.values)}"
            raise InputError(f"`indices` and `values` must be as long as each other, got {got}")
        _check_count(len(self.indices), "entries")
        _check_count(self.num_columns, "columns")
        check_pointers(self.indptr, len(self.indices), "indptr")
        check_index(self.indices, self.num_columns, "indices")
        return True

    def with_values(self, values: Tensor) -> SparseRows:
        """Return a matrix with the same entries and other values; whatever depends on positions is shared."""
        if values.shape != self.values.shape:
            raise InputError(f"`values` must be {tuple(self.values.shape)}, got {tuple(values.shape)}")
        other = replace(self, values=values)
        for name in ("rows", "columns", "rows32", "pattern"):
            other.__dict__[name] = getattr(self, name)
        return other

    def to_dense(self) -> Tensor:
        """Return a dense matrix [N, F]."""
        checks.memory(self.num_rows * self.num_columns, self.values.element_size(), "features")
        out = self.values.new_zeros((self.num_rows, self.num_columns))
        return out.index_put((self.rows, self.indices), self.values, accumulate=True)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> SparseRows:
        """Return the rows on `device`, the values in `dtype`."""
        device = checks.device(device)
        values = self.values.to(device, dtype)
        if self.indptr.device == device:
            return self if values is self.values else self.with_values(values)
        return SparseRows(self.indptr.to(device), self.indices.to(device), values, self.num_columns)


@typed
@dataclass(frozen=True, eq=False)
class Features:
    """Node features: a dense or sparse base, dense rows appended below, dense deltas added to some rows.

    Injected nodes have dense adversarial features; the rest of the graph keeps its sparse ones. `base` is [N,
    F], `appended` [M, F] are the rows N..N+M-1, and `delta` [R, F] is added to the base's `rows` [R], int64.
    """

    base: Tensor | SparseRows
    appended: Tensor | None = None
    rows: Tensor | None = None
    delta: Tensor | None = None

    @classmethod
    def dense(cls, x: Tensor) -> Features:
        """Wrap a dense matrix [N, F]; a vector [N] becomes one column."""
        if x.dim() == 1:
            x = x[:, None]
        if x.dim() != 2:
            raise InputError(f"`features` must have shape [num_nodes, num_features], got {tuple(x.shape)}")
        return cls(x)

    @classmethod
    def sparse(cls, indptr: Tensor, indices: Tensor, values: Tensor, num_columns: int) -> Features:
        """Wrap compressed sparse rows."""
        return cls(SparseRows(indptr.long(), indices.long(), values, num_columns))

    @property
    def is_sparse(self) -> bool:
        """Whether the base is stored in compressed rows."""
        return isinstance(self.base, SparseRows)

    @property
    def num_base_rows(self) -> int:
        """Number of rows of `base`, N."""
        return self.base.num_rows if isinstance(self.base, SparseRows) else int(self.base.shape[0])

    @property
    def num_rows(self) -> int:
        """Number of all rows, N + M."""
        return self.num_base_rows + (0 if self.appended is None else int(self.appended.shape[0]))

    @property
    def num_columns(self) -> int:
        """Number of features, F."""
        return self.base.num_columns if isinstance(self.base, SparseRows) else int(self.base.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(N + M, F)."""
        return self.num_rows, self.num_columns

    @property
    def stored(self) -> Tensor:
        """The stored values of the base (all entries when dense)."""
        return self.base.values if isinstance(self.base, SparseRows) else self.base

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the values."""
        return self.stored.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.stored.device

    def check(self) -> None:
        """Raise `InputError` unless all parts fit each other."""
        if isinstance(self.base, SparseRows):
            self.base.check()
        elif self.base.dim() != 2 or not self.base.is_floating_point():
            got = f"{self.base.dtype} {tuple(self.base.shape)}"
            raise InputError(f"features must be a floating-point matrix [num_nodes, num_features], got {got}")
        if self.appended is not None:
            self._check_part(self.appended, "appended", len(self.appended))
        if self.rows is not None and self.delta is not None:
            if self.rows.dim() != 1 or self.rows.dtype != torch.int64:
                got = f"{self.rows.dtype} {tuple(self.rows.shape)}"
                raise InputError(f"`rows` must be a vector of integers (torch.long), got {got}")
            check_index(self.rows, self.num_base_rows, "rows")
            self._check_part(self.delta, "delta", len(self.rows))
        elif self.rows is not None or self.delta is not None:
            raise InputError("`rows` and `delta` must both be tensors or both be None")

    def _check_part(self, part: Tensor, name: str, rows: int) -> None:
        expected = f"{self.dtype} {(rows, self.num_columns)} on {self.device}"
        got = f"{part.dtype} {tuple(part.shape)} on {part.device}"
        if got != expected:
            raise InputError(f"`{name}` must be {expected}, as the features are, got {got}")

    def range(self, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value of each column of the base, [F] each, zeros included.

        With `rows` = (first, stop) of the rows first..stop-1 alone. Cached until the values change.
        """
        if self.stored.is_inference():
            return self._range(rows)
        return cached_on(self, ("range", rows, self.stored._version), lambda: self._range(rows))

    def _range(self, rows: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        first, stop = rows or (0, self.num_base_rows)
        zeros = self.stored.detach().new_zeros(self.num_columns)
        if first == stop:
            return zeros, zeros.clone()
        if not isinstance(self.base, SparseRows):
            part = self.base.detach()[first:stop]
            return part.amin(0), part.amax(0)
        self.base.check()
        entries = slice(int(self.base.indptr[first]), int(self.base.indptr[stop]))
        columns, values = self.base.indices[entries], self.base.values.detach()[entries]
        low, high = (
            zeros.scatter_reduce(0, columns, values, how, include_self=False) for how in ("amin", "amax")
        )
        implicit = torch.bincount(columns, minlength=self.num_columns) < stop - first
        return torch.where(implicit, low.clamp(max=0), low), torch.where(implicit, high.clamp(min=0), high)

    def append(self, rows: Tensor) -> Features:
        """Return features with dense `rows` [M, F] below; gradients flow to `rows`."""
        if rows.dim() != 2 or rows.shape[1] != self.num_columns:
            got = tuple(rows.shape)
            raise InputError(f"appended features must have shape [M, {self.num_columns}], got {got}")
        return replace(self, appended=rows if self.appended is None else torch.cat([self.appended, rows]))

    def perturb(self, rows: Tensor, delta: Tensor) -> Features:
        """Return features with `delta` [R, F] added to base `rows` [R] (distinct); `delta` gets gradients."""
        if self.rows is not None:
            raise InputError("these features already have a `delta`; perturb the original ones")
        return replace(self, rows=rows, delta=delta)

    def to_dense(self) -> Tensor:
        """Return a dense matrix [N + M, F], differentiable in `appended` and `delta`."""
        out = self.base.to_dense() if isinstance(self.base, SparseRows) else self.base
        if self.rows is not None and self.delta is not None:
            out = out.index_add(0, self.rows, self.delta)
        return out if self.appended is None else torch.cat([out, self.appended])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each row, [N + M] each; differentiable in the dense parts."""
        width = self.num_columns
        if isinstance(self.base, SparseRows):
            zeros = self.stored.new_zeros(self.num_base_rows)
            mean = zeros.index_add(0, self.base.rows, self.stored) / width
            square = zeros.index_add(0, self.base.rows, self.stored**2) / width
            variance = (square - mean**2).clamp(min=0)  # rounding may leave it just below
        else:
            mean, variance = self.base.mean(1), self.base.var(1, correction=0)
        if self.rows is not None and self.delta is not None:
            changed = self.select(self.rows) + self.delta
            mean = mean.index_copy(0, self.rows, changed.mean(1))
            variance = variance.index_copy(0, self.rows, changed.var(1, correction=0))
        if self.appended is not None:
            mean = torch.cat([mean, self.appended.mean(1)])
            variance = torch.cat([variance, self.appended.var(1, correction=0)])
        return mean, variance

    def select(self, rows: Tensor) -> Tensor:
        """Return the base rows `rows` [R] as a dense matrix [R, F], without deltas; see also `take`."""
        if not isinstance(self.base, SparseRows):
            return self.base[rows]
        entry, row = row_entries(self.base.indptr, rows)
        out = self.stored.new_zeros((rows.numel(), self.num_columns))
        return out.index_put((row, self.base.indices[entry]), self.stored[entry], accumulate=True)

    def take(self, rows: Tensor) -> Features:
        """Return `Features` of `rows` [R], which increase, without deltas; a sparse base stays sparse."""
        base, old = self.base, rows[rows < self.num_base_rows]
        appended = None if self.appended is None else self.appended[rows[len(old) :] - self.num_base_rows]
        if not isinstance(base, SparseRows):
            return Features(base[old], appended)
        entry, row = row_entries(base.indptr, old)
        parts = pointers(row, len(old)), base.indices[entry], base.values[entry]
        return Features(SparseRows(*parts, self.num_columns), appended)

    def map(self, function: Callable[[Tensor], Tensor]) -> Features:
        """Apply `function` to the values of all parts, the delta included; not to zeros of a sparse base."""
        base = self.base
        mapped = base.with_values(function(base.values)) if isinstance(base, SparseRows) else function(base)
        appended, delta = (None if t is None else function(t) for t in (self.appended, self.delta))
        return Features(mapped, appended, self.rows, delta)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Features:
        """Return the features on `device`, in `dtype` when given."""
        device = checks.device(device)
        base = self.base.to(device, dtype)
        appended, delta = (None if t is None else t.to(device, dtype) for t in (self.appended, self.delta))
        return Features(base, appended, None if self.rows is None else self.rows.to(device), delta)


def as_features(value: Any) -> Features | None:
    """Return `Features` of a tensor, dense or sparse, a NumPy array or a scipy matrix; None stays None."""
    if value is None or isinstance(value, Features):
        return value
    if isinstance(value, Tensor):
        value = value if value.is_floating_point() else value.float()
        if value.layout == torch.strided:
            wide = value.dim() == 2 and value.shape[1] >= MIN_COLUMNS and not value.requires_grad
            if not wide or int(torch.count_nonzero(value)) > SPARSE_SHARE * value.numel():
                return Features.dense(value)
        return _from_sparse(value)
    if hasattr(value, "tocsr"):
        return _from_scipy(value)
    if isinstance(value, np.ndarray):
        return Features.dense(torch.from_numpy(np.asarray(value, dtype=np.float32)))
    got = type(value).__name__
    raise InputError(f"`features` must be a tensor, a scipy sparse matrix or `Features`, got {got}")


def _from_sparse(x: Tensor) -> Features:
    entries = x.to_sparse(layout=torch.sparse_coo).coalesce()
    if entries.sparse_dim() != 2 or entries.dense_dim():
        return Features.dense(entries.to_dense())
    rows, columns = entries.indices()
    return Features.sparse(pointers(rows, x.shape[0]), columns, entries.values(), x.shape[1])


def _from_scipy(matrix: Any) -> Features:
    """Wrap a scipy sparse matrix; its indices are copied, and checked before scipy reads them."""
    if hasattr(matrix, "indptr"):
        _check_compressed(matrix)
    elif hasattr(matrix, "row"):
        for part, count, name in ((matrix.row, matrix.shape[0], "row"), (matrix.col, matrix.shape[1], "col")):
            check_index(torch.as_tensor(part), count, name)
    rows = matrix.tocsr()
    if not rows.has_canonical_format:
        rows = rows.copy() if rows is matrix else rows
        rows.sum_duplicates()
    indptr, indices = (torch.from_numpy(np.array(a, dtype=np.int64)) for a in (rows.indptr, rows.indices))
    values = torch.from_numpy(np.asarray(rows.data, dtype=np.float32))
    return Features.sparse(indptr, indices[: rows.nnz], values[: rows.nnz], int(rows.shape[1]))


def _check_compressed(matrix: Any) -> None:
    """Raise unless the pointers and indices of a scipy matrix stay inside it."""
    (major, minor), (height, width) = matrix.shape, getattr(matrix, "blocksize", (1, 1))
    lines, columns = (minor, major) if matrix.format == "csc" else (major // height, minor // width)
    pointers, indices = (torch.as_tensor(part) for part in (matrix.indptr, matrix.indices))
    if len(pointers) != lines + 1:
        raise InputError(f"`indptr` of the features must have {lines + 1} entries, got {len(pointers)}")
    used = min(int(pointers[-1]), len(indices), len(matrix.data))
    check_pointers(pointers, used, "indptr")
    check_index(indices[:used], columns, "indices")
