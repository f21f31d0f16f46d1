"""How the work is divided: blocks of rows with about equal work, and the indices as numpy views."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fgai.ops.adjacency import Adjacency
from fgai.ops.features import SparseRows

Ints = NDArray[np.int32]
Reals = NDArray[Any]

# Work is counted in entries + rows. The division depends on the graph only, never on the number of threads,
# so results are the same on any machine width.
BLOCK_WORK = 2048
MAX_BLOCKS = 256


class Plan(NamedTuple):
    """The structure as the kernels read it: 32-bit indices and the row blocks of both directions."""

    rowptr: Ints
    source: Ints
    colptr: Ints
    csc: Ints
    destination: Ints
    row_blocks: Ints
    column_blocks: Ints


def blocks(pointers: Ints) -> Ints:
    """Return the boundaries [B + 1] of blocks of rows with about equal `entries + rows`."""
    rows = len(pointers) - 1
    work = pointers.astype(np.int64) + np.arange(rows + 1)
    count = int(np.clip(work[-1] // BLOCK_WORK, 1, MAX_BLOCKS))
    targets = np.arange(1, count) * work[-1] // count
    inner = np.searchsorted(work, targets)
    return np.concatenate([[0], inner, [rows]]).astype(np.int32)


def plan(adjacency: Adjacency) -> Plan:
    """Return the plan of `adjacency`, made once and kept with it."""
    made = adjacency.__dict__.get("_cpu_plan")
    if made is None:
        rowptr, source, colptr, csc, destination = (t.numpy() for t in adjacency.index32)
        made = Plan(rowptr, source, colptr, csc, destination, blocks(rowptr), blocks(colptr))
        adjacency.__dict__["_cpu_plan"] = made
    assert isinstance(made, Plan)
    return made


class RowsPlan(NamedTuple):
    """A sparse matrix as the kernels read it, by rows and by columns."""

    indptr: Ints
    indices: Ints
    row_blocks: Ints


class ColumnsPlan(NamedTuple):
    """The same entries ordered by column: pointers, row and position of each entry."""

    colptr: Ints
    rows: Ints
    order: Ints
    column_blocks: Ints


def rows_plan(rows: SparseRows) -> RowsPlan:
    """Return the row view of `rows`, made once for all matrices of its pattern."""
    if "rows" not in rows.kept:
        indptr, indices = (t.numpy() for t in rows.rows32)
        rows.kept["rows"] = RowsPlan(indptr, indices, blocks(indptr))
    made = rows.kept["rows"]
    assert isinstance(made, RowsPlan)
    return made


def columns_plan(rows: SparseRows) -> ColumnsPlan:
    """Return the column view of `rows`, made once for all matrices of its pattern."""
    if "columns" not in rows.kept:
        colptr, row, order = (t.numpy() for t in rows.columns)
        rows.kept["columns"] = ColumnsPlan(colptr, row, order, blocks(colptr))
    made = rows.kept["columns"]
    assert isinstance(made, ColumnsPlan)
    return made


def array(tensor: Tensor) -> Reals:
    """Return a contiguous numpy view of `tensor` (a copy only when it is not contiguous)."""
    view: Reals = tensor.detach().contiguous().numpy()
    return view


def match_threads() -> None:
    """Let numba use as many threads as torch does, no more."""
    wanted = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    if numba.get_num_threads() != wanted:
        numba.set_num_threads(wanted)
