"""Edges sorted by destination, with pointers both ways, and one integer per edge that survives every edit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fgai import checks
from fgai.cache import cached_on
from fgai.errors import AttentionError, InputError
from fgai.sparse.valid import (
    INTEGERS,
    _capturing,
    _check_count,
    _mark_as_valid,
    check_index,
    check_pointers,
    row_index,
)
from fgai.typed import typed

_LOW = 0xFFFFFFFF
_CHECKED = {"_incoming_checked": True, "_outgoing_checked": True}


@typed
def edge_keys(source: Tensor, destination: Tensor) -> Tensor:
    """Return one integer per edge, `destination · 2³² + source`, for any number of nodes."""
    if source.shape != destination.shape or source.is_floating_point() or destination.is_floating_point():
        got = " and ".join(f"{ends.dtype} {tuple(ends.shape)}" for ends in (source, destination))
        raise InputError(f"`source` and `destination` must be integers of one shape, got {got}")
    return (destination.long() << 32) | source.long()


@typed
def key_ends(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return source and destination of every key: the inverse of `edge_keys`."""
    if keys.dtype != torch.int64:
        raise InputError(f"`keys` must be int64, as `edge_keys` gives them, got {keys.dtype}")
    return keys & _LOW, keys >> 32


@typed
def edge_name(key: int) -> str:
    """Return "source → destination" for one edge key, for messages."""
    checks.whole(key, "key")
    return f"{key & _LOW} → {key >> 32}"


@typed
@dataclass(frozen=True)
class EdgeMap:
    """Positions [K] int64 of the K edges that an edit kept: `before` in the old graph, `after` in the new."""

    before: Tensor
    after: Tensor
    num_before: int
    num_after: int


@typed
def match_edges(keys_a: Tensor, keys_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions in each vector of the keys in both; `AttentionError` if one is unsorted."""
    for name, keys in (("keys_a", keys_a), ("keys_b", keys_b)):
        if keys.dim() != 1 or keys.dtype != torch.long:
            raise InputError(f"`{name}` must be int64 [E], got {keys.dtype} {list(keys.shape)}")
        if keys.numel() > 1 and not bool((keys[1:] > keys[:-1]).all()):
            raise AttentionError(f"`{name}` must be sorted, without duplicates; use the `keys` of a `Graph`")
    if keys_b.numel() == 0 or keys_a.numel() == 0:
        return keys_a[:0], keys_a[:0]
    spot = torch.searchsorted(keys_b, keys_a).clamp(max=keys_b.numel() - 1)
    ia = (keys_b[spot] == keys_a).nonzero().flatten()
    return ia, spot[ia]


class Index32(NamedTuple):
    """The indices of an `Adjacency` as 32-bit integers: kernels read half the bytes."""

    rowptr: Tensor
    source: Tensor
    colptr: Tensor
    csc: Tensor
    destination: Tensor


def pointers(sorted_index: Tensor, num_nodes: int) -> Tensor:
    """Return `[num_nodes + 1]` offsets such that the entries equal to i are `ptr[i]:ptr[i + 1]`."""
    return torch.searchsorted(sorted_index, torch.arange(num_nodes + 1, device=sorted_index.device))


def _merged_positions(before: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return positions after a merge: of `count` old items, and of new ones before the old ones `before`."""
    inserted = torch.zeros(count + 1, dtype=torch.long, device=before.device)
    inserted.index_add_(0, before, torch.ones_like(before))
    old = torch.arange(count, device=before.device) + inserted.cumsum(0)[:count]
    return old, before + torch.arange(before.numel(), device=before.device)


def _merge(old: Tensor, new: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    """Return one vector with the old and the new items at these positions."""
    out = old.new_empty(old.numel() + new.numel())
    out[positions[0]], out[positions[1]] = old, new
    return out


def _extend_pointers(ptr: Tensor, sorted_index: Tensor, num_nodes: int) -> Tensor:
    """Return the pointers of `num_nodes` rows after items were added to the rows `sorted_index`."""
    longer = torch.cat([ptr, ptr[-1:].expand(num_nodes + 1 - ptr.numel())])
    return longer + pointers(sorted_index, num_nodes)


@typed
@dataclass(frozen=True, eq=False)
class Adjacency:
    """Edges sorted by (destination, source), and their order by (source, destination).

    The incoming edges of node i are positions `rowptr[i]:rowptr[i + 1]`; the outgoing edges of node j are
    positions `csc[colptr[j]:colptr[j + 1]]`. Parallel edges are allowed here (`Graph` merges them). The
    indices are checked once, when a kernel first reads them; do not change them in place.

    `source`, `destination` (not decreasing) and `csc` are int64 [E], the pointers int64 [N + 1].
    """

    num_nodes: int
    source: Tensor
    destination: Tensor
    rowptr: Tensor
    colptr: Tensor
    csc: Tensor

    @classmethod
    def build(cls, edge_index: Tensor, num_nodes: int) -> tuple[Adjacency, Tensor]:
        """Sort `edge_index` [2, E]; also return `order` [E]: sorted position → position in `edge_index`."""
        order = torch.argsort(edge_keys(edge_index[0], edge_index[1]), stable=True)
        source, destination = edge_index[0][order].long(), edge_index[1][order].long()
        return cls.from_sorted(source, destination, num_nodes), order

    @classmethod
    def from_index32(cls, num_nodes: int, index: Index32) -> Adjacency:
        """Build from the indices a kernel made from checked ones; 64-bit indices are made on first use."""
        adjacency = object.__new__(cls)
        adjacency.__dict__.update(_CHECKED, num_nodes=num_nodes, index32=index)
        return adjacency

    @classmethod
    def from_sorted(cls, source: Tensor, destination: Tensor, num_nodes: int) -> Adjacency:
        """Build from edges that are already sorted by (destination, source)."""
        checks.memory(num_nodes, 32, "num_nodes")  # two vectors of pointers, and those they are computed from
        csc = torch.argsort(source, stable=True)
        rowptr, colptr = pointers(destination, num_nodes), pointers(source[csc], num_nodes)
        return cls(num_nodes, source, destination, rowptr, colptr, csc)

    def merge(self, edges: Tensor, num_nodes: int) -> tuple[Adjacency, Tensor]:
        """Add new `edges` [2, M] to the sorted ones in linear time; none may exist already.

        Returns the new adjacency of `num_nodes`, at least as many as before, and [E] the new positions of the
        old edges. `InputError` if an edge names no node.
        """
        self.check_outgoing()
        check_index(edges, num_nodes, "edges")
        keys = torch.sort(edge_keys(edges[0], edges[1])).values
        by_row = _merged_positions(torch.searchsorted(self.keys, keys), self.num_edges)
        merged = _merge(self.keys, keys, by_row)
        source, destination = key_ends(keys)
        reversed_keys, order = torch.sort(edge_keys(destination, source), stable=True)
        before = torch.searchsorted(self.keys_by_source, reversed_keys)
        by_column = _merged_positions(before, self.num_edges)
        rowptr = _extend_pointers(self.rowptr, destination, num_nodes)
        colptr = _extend_pointers(self.colptr, key_ends(reversed_keys)[1], num_nodes)
        csc = _merge(by_row[0][self.csc], by_row[1][order], by_column)
        adjacency = Adjacency(num_nodes, *key_ends(merged), rowptr, colptr, csc)
        adjacency.__dict__.update(_CHECKED, keys=merged)
        return adjacency, by_row[0]

    @cached_property
    def keys_by_source(self) -> Tensor:
        """[E] int64, sorted: `source · 2³² + destination` of each edge in `csc` order."""
        return edge_keys(self.destination, self.source)[self.csc]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """Make 64-bit indices from `index32` on first use; see `from_index32`."""
            if name not in Index32._fields or "index32" not in self.__dict__:
                raise AttributeError(f"'Adjacency' object has no attribute {name!r}")
            wide = self.__dict__[name] = getattr(self.__dict__["index32"], name).long()
            if name in ("rowptr", "colptr"):
                _mark_as_valid(wide, self.num_edges)
            return wide

    def check_incoming(self) -> None:
        """Raise `InputError` unless nodes, edges and row pointers fit each other; checked once."""
        if "_incoming_checked" in self.__dict__ or _capturing(self.device):
            return
        source, destination, rowptr = self._parts("source", "destination", "rowptr")
        check_pointers(rowptr, len(source), "rowptr")
        check_index(source, self.num_nodes, "source")
        if not torch.equal(row_index(rowptr, len(source)), destination.long()):
            raise InputError("`destination` must be sorted and hold node i at `rowptr[i]:rowptr[i + 1]`")
        self.__dict__["_incoming_checked"] = True

    def check_outgoing(self) -> None:
        """Raise `InputError` unless the order by source and the column pointers fit, too; checked once."""
        if "_outgoing_checked" in self.__dict__ or _capturing(self.device):
            return
        self.check_incoming()
        source, csc, colptr = self._parts("source", "csc", "colptr")
        check_pointers(colptr, len(source), "colptr")
        check_index(csc, len(source), "csc")
        order = csc.long()
        covered = torch.zeros(len(csc), dtype=torch.bool, device=csc.device).index_fill(0, order, True)
        if not bool(covered.all()) or not torch.equal(row_index(colptr, len(csc)), source[order].long()):
            raise InputError("`csc` must hold every edge once, those of node j at `colptr[j]:colptr[j + 1]`")
        self.__dict__["_outgoing_checked"] = True

    def _parts(self, *names: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return two vectors over edges and one of pointers, 32-bit ones if there are no others."""
        parts = self.__dict__ if "source" in self.__dict__ else self.index32._asdict()
        one, two, pointer = (parts[name] for name in names)
        _check_count(self.num_nodes, "nodes")
        if any(part.dim() != 1 or part.dtype not in INTEGERS for part in (one, two, pointer)):
            raise InputError(f"{', '.join(names)} of an adjacency must be vectors of integers")
        _check_count(len(one), "edges")
        if len(two) != len(one) or len(pointer) != self.num_nodes + 1:
            raise InputError(
                f"an adjacency of {self.num_nodes} nodes needs {' and '.join(names[:2])} of equal length and"
                f" {self.num_nodes + 1} entries of {names[2]}, got {len(one)}, {len(two)} and {len(pointer)}"
            )
        if not one.device == two.device == pointer.device:
            raise InputError(f"{', '.join(names)} of an adjacency must be on one device")
        return one, two, pointer

    @property
    def _any_index(self) -> Tensor:
        source: Tensor | None = self.__dict__.get("source")
        return self.index32.source if source is None else source

    @property
    def num_edges(self) -> int:
        """Number of edges, E."""
        return int(self._any_index.shape[0])

    @property
    def device(self) -> torch.device:
        """Device of the indices."""
        return self._any_index.device

    @cached_property
    def keys(self) -> Tensor:
        """[E] int64, sorted: the identity of each edge."""
        return edge_keys(self.source, self.destination)

    @cached_property
    def degree(self) -> Tensor:
        """[N] int64, incoming edges per node."""
        return self.rowptr[1:] - self.rowptr[:-1]

    @cached_property
    def index32(self) -> Index32:
        """The same indices as 32-bit integers, for the kernels."""
        self.check_incoming()
        return Index32(*(getattr(self, name).to(torch.int32) for name in Index32._fields))

    def to(self, device: torch.device | str) -> Adjacency:
        """Return the adjacency on `device`; the same object if it is there."""
        device = checks.device(device)
        if device == self.device:
            return self
        moved = (t.to(device) for t in (self.source, self.destination, self.rowptr, self.colptr, self.csc))
        return Adjacency(self.num_nodes, *moved)


class _ActiveRows(NamedTuple):
    with_grad: int  # nodes that need gradients; those of the others may be zeros
    with_edges: int  # nodes that may have incoming edges; the others have none


def set_active_rows(adjacency: Adjacency, with_grad: int, with_edges: int) -> None:
    """Set how many of the first nodes need gradients and have edges, once; copies do not keep this."""
    cached_on(adjacency, "active rows", lambda: _ActiveRows(with_grad, with_edges))


def active_rows(adjacency: Adjacency) -> _ActiveRows:
    """Return the numbers set by `set_active_rows`; all nodes by default."""
    return cached_on(adjacency, "active rows", lambda: _ActiveRows(adjacency.num_nodes, adjacency.num_nodes))
