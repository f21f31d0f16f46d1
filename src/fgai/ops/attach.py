"""Add nodes to a sorted graph; their edges come last in every row and column, and old edges move up."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.ops.backend import _has_numba, has_triton
from fgai.ops.cpu.parallel import _by_block, _Columns, _incoming, _launch, _outgoing, blocks
from fgai.ops.cpu.rows import _kernel
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import Index32
from fgai.sparse.valid import check_index


def check_targets(targets: Tensor, adjacency: Adjacency) -> None:
    """Raise unless `targets` is a matrix of nodes of `adjacency` on its device, distinct within each row."""
    if targets.dim() != 2 or targets.dtype != torch.int64:
        got = f"{targets.dtype} {tuple(targets.shape)}"
        raise InputError(f"`targets` must be integers (torch.long) of shape [new nodes, edges], got {got}")
    if targets.device != adjacency.device:
        raise InputError(f"`targets` must be on {adjacency.device}, as the edges are, got {targets.device}")
    check_index(targets, adjacency.num_nodes, "targets")
    ordered = targets.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InputError("`targets` must name distinct nodes in each row")


def attach(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """Add new nodes, each joined to the old ones in its row of `targets` [M, e], by edges in both directions.

    `loops`: also give every new node an edge to itself. Returns the new adjacency, and [E] the new positions
    of the old edges. `check_targets` is not called here; on a GPU a CUDA graph can capture all of it.
    """
    adjacency.check_outgoing()
    if targets.is_cuda and has_triton():
        from fgai.ops.gpu.attach import attach as attach_on_gpu

        return attach_on_gpu(adjacency, targets, loops)
    if adjacency.device.type == "cpu" and _has_numba():
        return _attach_on_cpu(adjacency, targets, loops)
    m, e = targets.shape
    new = torch.arange(adjacency.num_nodes, adjacency.num_nodes + m, device=adjacency.device)
    pairs = torch.stack([new[:, None].expand(m, e).flatten(), targets.flatten()])
    edges = torch.cat([pairs, pairs.flip(0), new[: m * loops].expand(2, -1)], dim=1)
    return adjacency.merge(edges, adjacency.num_nodes + m)


# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@_by_block
def _move_old_edges(
    b, blocks, rowptr, source, colptr, csc, target, shift, new_source, new_destination, new_csc, new_target,
    positions,
):  # fmt: skip
    """Copy the old edges to their places; `shift[i]` new edges are in the rows, or columns, before i."""
    for i in range(blocks[b], blocks[b + 1]):
        more = shift[i]
        for e in range(rowptr[i], rowptr[i + 1]):
            new_source[e + more] = source[e]
            new_destination[e + more] = i
            positions[e] = e + more
        for p in range(colptr[i], colptr[i + 1]):
            new_csc[p + more] = csc[p] + shift[target[p]]
            new_target[p + more] = target[p]


@_kernel
def _add_new_edges(targets, loops, rowptr, colptr, shift, count, new_rowptr, new_colptr, out):
    """Write the new edges. `targets` is sorted in each row, `count` [N] holds zeros at first."""
    source, destination, csc, target = out
    old = len(rowptr) - 1
    for m in range(targets.shape[0]):
        u, row, column = old + m, new_rowptr[old + m], new_colptr[old + m]
        for r in range(targets.shape[1]):
            v = targets[m, r]
            in_row = rowptr[v + 1] + shift[v] + count[v]  # of the edge u → v, after the old edges of v
            in_column = colptr[v + 1] + shift[v] + count[v]  # of v → u
            count[v] += 1
            source[in_row], destination[in_row] = u, v
            source[row + r], destination[row + r] = v, u
            csc[in_column], target[in_column] = row + r, u
            csc[column + r], target[column + r] = in_row, v
        if loops:
            r = targets.shape[1]
            source[row + r], destination[row + r] = u, u
            csc[column + r], target[column + r] = row + r, u


def _attach_on_cpu(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    (nodes, width), first = targets.shape, adjacency.num_nodes
    rows, columns = _incoming(adjacency), _outgoing(adjacency)
    old, degree = adjacency.num_edges, width + int(loops)  # of a new node
    ends = np.sort(targets.numpy().astype(np.int32), axis=1)
    shift = np.zeros(first + 1, np.int32)
    np.cumsum(np.bincount(ends.reshape(-1), minlength=first), out=shift[1:])
    tail = old + shift[-1] + degree * np.arange(1, nodes + 1)
    rowptr, colptr = (
        np.concatenate([p + shift, tail]).astype(np.int32) for p in (rows.pointer, columns.pointer)
    )
    out = tuple(np.empty(old + nodes * (width + degree), np.int32) for _ in range(4))
    positions = np.empty(old, np.int64)
    _launch(_move_old_edges, len(rows.blocks) - 1, *rows, *columns[1:], shift, *out, positions)
    count = np.zeros(first, np.int32)
    _add_new_edges(ends, loops, rows.pointer, columns.pointer, shift, count, rowptr, colptr, out)
    source, destination, csc, target = out
    index = Index32(*(torch.from_numpy(a) for a in (rowptr, source, colptr, csc, destination)))
    grown = Adjacency.from_index32(first + nodes, index)
    cached_on(grown, "cpu outgoing", lambda: _Columns(blocks(colptr), colptr, csc, target))
    return grown, torch.from_numpy(positions)
