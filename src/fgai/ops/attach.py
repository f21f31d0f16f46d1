"""New nodes joined to a sorted graph, on the fastest kernel at hand.

New nodes have the largest numbers, so their edges come last in every row and column: old edges only move up
by the number of new edges in the rows before theirs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.ops.backend import _has_numba, has_triton
from fgai.ops.cpu.parallel import _by_block, _Columns, _incoming, _launch, _outgoing, _Rows, blocks
from fgai.ops.cpu.rows import _kernel
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import Index32, of_narrow
from fgai.sparse.valid import check_index
from fgai.typed import typed


@typed
def attach(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """Add new nodes, each joined to some old ones by edges in both directions.

    On a GPU nothing waits for the device and every shape follows from those of the arguments, so that a CUDA
    graph can capture it.

    Args:
        adjacency: the old edges.
        targets: [M, e] on the same device, old nodes that differ within a row.
        loops: also give every new node an edge to itself.

    Returns:
        The new adjacency, and [E] the new positions of the old edges.

    Raises:
        InputError: `targets` is no matrix of nodes of `adjacency` on its device, or names one twice in a row.
    """
    check_targets(targets, adjacency)
    return attach_known(adjacency, targets, loops)


def check_targets(targets: Tensor, adjacency: Adjacency) -> None:
    """Raise unless `targets` names old nodes that differ within a row."""
    if targets.dim() != 2 or targets.dtype != torch.int64:
        got = f"{targets.dtype} {tuple(targets.shape)}"
        raise InputError(
            f"`targets` must be integers (torch.long) of shape [new nodes, edges each], got {got}"
        )
    if targets.device != adjacency.device:
        raise InputError(f"`targets` must be on {adjacency.device}, as the edges are, got {targets.device}")
    check_index(targets, adjacency.num_nodes, "targets")
    ordered = targets.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InputError("`targets` must name distinct nodes in each row")


def attach_known(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """`attach` for targets that are known to fit: nothing is read or waited for."""
    adjacency.check_outgoing()
    if targets.is_cuda and has_triton():
        from fgai.ops.gpu.attach import attach as attach_on_gpu

        return attach_on_gpu(adjacency, targets, loops)
    if adjacency.device.type == "cpu" and _has_numba():
        return _attach_on_cpu(adjacency, targets, loops)
    m, e = targets.shape
    new = torch.arange(adjacency.num_nodes, adjacency.num_nodes + m, device=adjacency.device)
    spread, ends = new[:, None].expand(m, e).flatten(), targets.flatten()
    edges = torch.stack([torch.cat([spread, ends]), torch.cat([ends, spread])])
    if loops:
        edges = torch.cat([edges, new.expand(2, m)], dim=1)
    return adjacency.merge(edges, adjacency.num_nodes + m)


# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@_by_block
def _old_edges(
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


@_kernel
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


def _attach_on_cpu(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    (nodes, width), first = targets.shape, adjacency.num_nodes
    rows, columns = _incoming(adjacency), _outgoing(adjacency)
    old, each = adjacency.num_edges, width + int(loops)
    size = old + nodes * (width + each)
    ends = np.sort(targets.numpy().astype(np.int32), axis=1)
    more = np.bincount(ends.reshape(-1), minlength=first)
    shift = np.zeros(first + 1, np.int32)
    np.cumsum(more, out=shift[1:])
    tail = old + shift[-1] + each * np.arange(1, nodes + 1)
    rowptr, colptr = (
        np.concatenate([p + shift, tail]).astype(np.int32) for p in (rows.pointer, columns.pointer)
    )
    out = tuple(np.empty(size, np.int32) for _ in range(4))
    ours = np.empty(old, np.int64)
    _launch(_old_edges, len(rows.blocks) - 1, *rows, *columns[1:], shift, *out, ours)
    filled = np.zeros(first, np.int32)
    _new_edges(ends, loops, rows.pointer, columns.pointer, shift, filled, rowptr, colptr, out)
    source, destination, csc, target = out
    index = Index32(*(torch.from_numpy(a) for a in (rowptr, source, colptr, csc, destination)))
    grown = of_narrow(first + nodes, index)
    cached_on(grown, "cpu incoming", lambda: _Rows(blocks(rowptr), rowptr, source))
    cached_on(grown, "cpu outgoing", lambda: _Columns(blocks(colptr), colptr, csc, target))
    return grown, torch.from_numpy(ours)
