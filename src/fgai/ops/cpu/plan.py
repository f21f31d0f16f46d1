"""How the work is divided: blocks of rows with about equal work, and the indices as numpy views."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fgai.cache import cached_on
from fgai.sparse import Adjacency, SparseRows

Ints = NDArray[np.int32]
Reals = NDArray[Any]

# Work is counted in entries + rows. The division depends on the graph only, never on the number of threads,
# so results are the same on any machine width.
BLOCK_WORK = 2048
MAX_BLOCKS = 256
# Numbers of working space before those that depend on the number of heads.
SUMS = 16


class Incoming(NamedTuple):
    """Edges by destination, in blocks of rows: the first arguments of every kernel over incoming edges."""

    blocks: Ints
    rowptr: Ints
    source: Ints


class Outgoing(NamedTuple):
    """Edges by source, with position and destination: the first arguments of kernels over outgoing edges."""

    blocks: Ints
    colptr: Ints
    edge: Ints
    target: Ints


def blocks(pointers: Ints, most: int = MAX_BLOCKS) -> Ints:
    """Return the boundaries [B + 1] of at most `most` blocks of rows with about equal `entries + rows`."""
    rows = len(pointers) - 1
    work = pointers.astype(np.int64) + np.arange(rows + 1)
    count = int(np.clip(work[-1] // BLOCK_WORK, 1, most))
    targets = np.arange(1, count) * work[-1] // count
    inner = np.searchsorted(work, targets)
    return np.concatenate([[0], inner, [rows]]).astype(np.int32)


def incoming(adjacency: Adjacency) -> Incoming:
    """Return the incoming edges of `adjacency` as the kernels read them, made once and kept with it."""

    def make() -> Incoming:
        adjacency.check_incoming()
        index = adjacency.index32
        rowptr = index.rowptr.numpy()
        return Incoming(blocks(rowptr), rowptr, index.source.numpy())

    return cached_on(adjacency, "cpu incoming", make)


def outgoing(adjacency: Adjacency) -> Outgoing:
    """Return the outgoing edges of `adjacency` as the kernels read them, made once and kept with it."""

    def make() -> Outgoing:
        adjacency.check_outgoing()
        index = adjacency.index32
        colptr = index.colptr.numpy()
        # The destinations in this order, so that no kernel has to look them up edge by edge.
        target = index.destination[adjacency.csc].numpy()
        return Outgoing(blocks(colptr), colptr, index.csc.numpy(), target)

    return cached_on(adjacency, "cpu outgoing", make)


class RowsPlan(NamedTuple):
    """A sparse matrix as the kernels read it, by rows and by columns."""

    blocks: Ints
    indptr: Ints
    indices: Ints


class ColumnsPlan(NamedTuple):
    """The same entries ordered by column: pointers, row and position of each entry."""

    blocks: Ints
    colptr: Ints
    rows: Ints
    order: Ints


def rows_plan(rows: SparseRows) -> RowsPlan:
    """Return the row view of `rows`, made once for all matrices of its pattern."""

    def make() -> RowsPlan:
        indptr, indices = (t.numpy() for t in rows.rows32)
        return RowsPlan(blocks(indptr), indptr, indices)

    return cached_on(rows.pattern, "cpu rows", make)


def columns_plan(rows: SparseRows) -> ColumnsPlan:
    """Return the column view of `rows`, made once for all matrices of its pattern."""

    def make() -> ColumnsPlan:
        colptr, row, order = (t.numpy() for t in rows.columns)
        return ColumnsPlan(blocks(colptr), colptr, row, order)

    return cached_on(rows.pattern, "cpu columns", make)


def array(tensor: Tensor) -> Reals:
    """Return a contiguous numpy view of `tensor` (a copy only when it is not contiguous)."""
    view: Reals = tensor.detach().contiguous().numpy()
    return view


def workspace(blocks: Ints, scores: Reals, channels: int = 0) -> Reals:
    """Return room for each block: `SUMS` + 3 H numbers, and behind them the sums of one row.

    The heads of the sums are padded to multiples of 8. The blocks lie far enough apart that threads do not
    share a cache line.
    """
    heads = scores.shape[1]
    size = SUMS + 3 * heads + heads * (channels + 7)
    return np.empty((len(blocks) - 1, size + 64 - size % 64), scores.dtype)


def tensors(*arrays: Reals | None) -> tuple[Tensor | None, ...]:
    """Return tensors that share the memory of `arrays`."""
    return tuple(None if a is None else torch.from_numpy(a) for a in arrays)
