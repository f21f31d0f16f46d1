"""New nodes joined to a sorted graph on the CPU, in one pass over its edges.

New nodes have the largest numbers, so their edges come last in every row and column: old edges only move up
by the number of new edges in the rows before theirs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai.cache import cached_on
from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import Incoming, Outgoing, blocks, incoming, outgoing
from fgai.ops.cpu.rows import kernel
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import Index32, of_narrow

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@kernel
def _old_block(
    b, parts, rowptr, source, colptr, csc, target, shift, new_source, new_destination, new_csc, new_target,
    ours,
):  # fmt: skip
    for i in range(parts[b], parts[b + 1]):
        more = shift[i]
        for e in range(rowptr[i], rowptr[i + 1]):
            new_source[e + more] = source[e]
            new_destination[e + more] = i
            ours[e] = e + more
        for p in range(colptr[i], colptr[i + 1]):
            new_csc[p + more] = csc[p] + shift[target[p]]
            new_target[p + more] = target[p]


@kernel
def _old_edges(
    threads, parts, rowptr, source, colptr, csc, target, shift, new_source, new_destination, new_csc,
    new_target, ours,
):  # fmt: skip
    arguments = (
        parts, rowptr, source, colptr, csc, target, shift, new_source, new_destination, new_csc, new_target,
        ours,
    )  # fmt: skip
    run_blocks(_old_block, threads, len(parts) - 1, arguments)


@kernel
def _new_edges(targets, loops, rowptr, colptr, shift, filled, new_rowptr, new_colptr, out):
    """`targets` is sorted within its rows; `filled` counts the new edges of each old node, from 0."""
    source, destination, csc, target = out
    old = len(rowptr) - 1
    for m in range(targets.shape[0]):
        u, row, column = old + m, new_rowptr[old + m], new_colptr[old + m]
        for r in range(targets.shape[1]):
            v = targets[m, r]
            at = rowptr[v + 1] + shift[v] + filled[v]
            there = colptr[v + 1] + shift[v] + filled[v]
            filled[v] += 1
            source[at], destination[at] = u, v
            source[row + r], destination[row + r] = v, u
            csc[there], target[there] = row + r, u
            csc[column + r], target[column + r] = at, v
        if loops:
            r = targets.shape[1]
            source[row + r], destination[row + r] = u, u
            csc[column + r], target[column + r] = row + r, u


def attach(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """See `fgai.ops.attach`; the views of the kernels are made too."""
    (nodes, width), first = targets.shape, adjacency.num_nodes
    rows, columns = incoming(adjacency), outgoing(adjacency)
    old, each = adjacency.num_edges, width + int(loops)
    size = old + nodes * (width + each)
    ends = np.sort(targets.numpy().astype(np.int32), axis=1)
    more = np.bincount(ends.reshape(-1), minlength=first)
    shift = np.zeros(first + 1, np.int32)
    np.cumsum(more, out=shift[1:])
    tail = old + shift[-1] + each * np.arange(1, nodes + 1)
    rowptr, colptr = (
        np.concatenate([p + shift, tail]).astype(np.int32) for p in (rows.rowptr, columns.colptr)
    )
    out = tuple(np.empty(size, np.int32) for _ in range(4))
    ours = np.empty(old, np.int64)
    given = (rows.rowptr, rows.source, columns.colptr, columns.edge, columns.target)
    _old_edges(threads_for(len(rows.blocks) - 1), rows.blocks, *given, shift, *out, ours)
    filled = np.zeros(first, np.int32)
    _new_edges(ends, loops, rows.rowptr, columns.colptr, shift, filled, rowptr, colptr, out)
    source, destination, csc, target = out
    index = Index32(*(torch.from_numpy(a) for a in (rowptr, source, colptr, csc, destination)))
    grown = of_narrow(first + nodes, index)
    cached_on(grown, "cpu incoming", lambda: Incoming(blocks(rowptr), rowptr, source))
    cached_on(grown, "cpu outgoing", lambda: Outgoing(blocks(colptr), colptr, csc, target))
    return grown, torch.from_numpy(ours)
