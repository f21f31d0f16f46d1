"""Cosine similarity of the two ends of every edge, for dense and for sparse rows."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from fgai.cache import cached_on
from fgai.compiled import compiled
from fgai.errors import InputError
from fgai.ops import score_dot
from fgai.sparse import Adjacency, Features, SparseRows, key_ends
from fgai.sparse.valid import row_entries
from fgai.typed import typed

SMALLEST = 1e-6  # smallest length to divide by: a row of zeros has cosine 0 with everything
_CHUNK = 1 << 24  # stored entries looked up at once on a GPU


@dataclass
class _Table:
    """Similarities of stored rows by sorted edge key, and those of the last adjacency."""

    keys: Tensor
    values: Tensor
    last: tuple[ref[Adjacency], Tensor] | None = None


# mypy: disable-error-code="no-untyped-def"


@typed
def edge_cosine(x: Tensor | Features, adjacency: Adjacency) -> Tensor:
    """Cosine `⟨x_i, x_j⟩ / (‖x_i‖ ‖x_j‖)` of the ends of every edge → [E].

    No array of edges × columns is made. Similarities of sparse rows are computed once and kept, so that a
    graph with a few more edges costs those edges only. Gradients reach dense rows: all of a tensor, or the
    appended rows and the deltas of `Features`.

    Args:
        x: [N, D], or the features of the N nodes.
        adjacency: the edges.

    Example:
        >>> adjacency, _ = Adjacency.build(torch.tensor([[0, 1], [2, 2]]), 3)
        >>> edge_cosine(torch.tensor([[2.0, 0.0], [0.0, 0.0], [3.0, 3.0]]), adjacency).tolist()
        [0.7071067690849304, 0.0]
    """
    if isinstance(x, Features):
        x.check()
    if len(x.shape) != 2 or x.shape[0] != adjacency.num_nodes or not x.dtype.is_floating_point:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise InputError(f"`x` must be floating-point of shape [{adjacency.num_nodes}, D], got {got}")
    if x.device != adjacency.device:
        raise InputError(f"`x` must be on {adjacency.device}, as the edges are, got {x.device}")
    adjacency.check_incoming()
    if isinstance(x, Tensor):
        return _dense(x, adjacency)
    if not isinstance(x.base, SparseRows):
        return _dense(x.to_dense(), adjacency)
    unchanged = x.appended is None and x.rows is None
    table = _table(x.base)
    if unchanged and table.last is not None and table.last[0]() is adjacency:
        return table.last[1]
    changed = torch.zeros(x.num_rows, dtype=torch.bool, device=x.device)  # not stored sparsely alone
    changed[x.num_base_rows :] = True
    if x.rows is not None:
        changed[x.rows] = True
    touched = changed[adjacency.source] | changed[adjacency.destination]
    still = (~touched).nonzero().flatten()
    out = torch.zeros(adjacency.num_edges, dtype=x.dtype, device=x.device)
    out = out.index_copy(0, still, _stored(x.base, adjacency.keys[still]).to(x.dtype))
    if unchanged:
        table.last = (ref(adjacency), out)
        return out
    fresh = touched.nonzero().flatten()
    ends = torch.stack([adjacency.source[fresh], adjacency.destination[fresh]])
    nodes, ends = torch.unique(ends, return_inverse=True)
    part = Adjacency.from_sorted(ends[0], ends[1], nodes.numel())
    return out.index_copy(0, fresh, _dense(_rows(x, nodes), part))


def _dense(x: Tensor, adjacency: Adjacency) -> Tensor:
    unit = torch.nn.functional.normalize(x, dim=1, eps=SMALLEST)[:, None, :].contiguous()
    scale: float = x.shape[1] ** 0.5
    return score_dot(unit, unit, adjacency).squeeze(1) * scale


def _rows(x: Features, nodes: Tensor) -> Tensor:
    """Dense rows [R, D] of some sorted nodes, deltas and appended rows included."""
    count = int((nodes < x.num_base_rows).sum())
    rows = x.select(nodes[:count])
    if x.rows is not None and x.delta is not None:
        spot = torch.full((x.num_base_rows,), -1, device=x.device)
        spot[nodes[:count]] = torch.arange(count, device=x.device)
        there = spot[x.rows] >= 0
        rows = rows.index_add(0, spot[x.rows][there], x.delta[there])
    if x.appended is None:
        return rows
    return torch.cat([rows, x.appended[nodes[count:] - x.num_base_rows]])


def _table(rows: SparseRows) -> _Table:
    def make() -> _Table:
        keys = torch.empty(0, dtype=torch.long, device=rows.indices.device)
        return _Table(keys, keys.double())

    return cached_on(rows, "similarity", make)


def _stored(rows: SparseRows, keys: Tensor) -> Tensor:
    """Similarities of stored rows by sorted edge key; those that are not there yet are computed and kept."""
    table = _table(rows)
    spot = torch.searchsorted(table.keys, keys).clamp(max=max(0, table.keys.numel() - 1))
    fresh = keys if not table.keys.numel() else keys[table.keys[spot] != keys]
    if fresh.numel():
        table.keys, order = torch.sort(torch.cat([table.keys, fresh]))
        table.values = torch.cat([table.values, _between(rows, fresh)])[order]
    return table.values[torch.searchsorted(table.keys, keys)]


def _between(rows: SparseRows, keys: Tensor) -> Tensor:
    """Cosine of the stored rows at both ends of the edges with these sorted keys."""
    source, destination = key_ends(keys)
    squares = rows.values.double() ** 2
    length = torch.zeros(rows.num_rows, dtype=torch.float64, device=squares.device)
    length = length.index_add(0, rows.rows, squares).sqrt().clamp(min=SMALLEST)
    if keys.device.type == "cpu":
        out = np.empty(keys.numel(), dtype=np.float64)
        arrays = (rows.indptr, rows.indices, rows.values.detach().double(), source, destination)
        _products(*(array.numpy() for array in arrays), np.zeros(rows.num_columns), out)
        products = torch.from_numpy(out)
    else:
        products = _looked_up(rows, source, destination)
    return products / (length[source] * length[destination])


@compiled
def _products(indptr, indices, values, source, destination, row, out):
    """`out[e] = ⟨x_source, x_destination⟩`; the destination's row is laid out once for all its edges."""
    loaded = -1
    for e in range(out.shape[0]):
        if destination[e] != loaded:
            if loaded >= 0:
                for k in range(indptr[loaded], indptr[loaded + 1]):
                    row[indices[k]] = 0.0
            loaded = destination[e]
            for k in range(indptr[loaded], indptr[loaded + 1]):
                row[indices[k]] += values[k]
        total = 0.0
        for k in range(indptr[source[e]], indptr[source[e] + 1]):
            total += values[k] * row[indices[k]]
        out[e] = total


def _looked_up(rows: SparseRows, source: Tensor, destination: Tensor) -> Tensor:
    """The same by searching each entry of the source's row among the destination's."""
    width = rows.num_columns
    entries, order = torch.sort(rows.rows * width + rows.indices)
    values = rows.values.double()[order]
    ends = rows.indptr.diff()[source].cumsum(0)
    out = torch.zeros(source.numel(), dtype=torch.float64, device=source.device)
    first = 0
    while first < source.numel() and entries.numel():
        limit = (int(ends[first - 1]) if first else 0) + _CHUNK
        last = max(first + 1, int(torch.searchsorted(ends, limit, right=True)))
        entry, edges = row_entries(rows.indptr, source[first:last])
        edges = edges + first
        keys = destination[edges] * width + rows.indices[entry]
        spot = torch.searchsorted(entries, keys).clamp(max=entries.numel() - 1)
        matches = torch.where(entries[spot] == keys, values[spot], 0.0)
        out.index_add_(0, edges, rows.values.double()[entry] * matches)
        first = last
    return out
