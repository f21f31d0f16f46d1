"""Edges sorted by destination, with pointers both ways: what every kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fgai import checks
from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.sparse.keys import edge_keys, key_ends
from fgai.sparse.valid import (
    INTEGERS,
    _check_count,
    _mark_pointers,
    _unreadable,
    check_index,
    check_pointers,
    owners,
)
from fgai.typed import typed

_INCOMING, _OUTGOING = "_incoming_fits", "_outgoing_fits"


class Index32(NamedTuple):
    """The structure in 32-bit integers, half the bytes for the kernels to read."""

    rowptr: Tensor
    source: Tensor
    colptr: Tensor
    csc: Tensor
    destination: Tensor


def pointers(sorted_index: Tensor, num_nodes: int) -> Tensor:
    """Return `[num_nodes + 1]` offsets such that the entries equal to i are `ptr[i]:ptr[i + 1]`."""
    steps = torch.arange(num_nodes + 1, device=sorted_index.device)
    return torch.searchsorted(sorted_index, steps)


def _interleave(spots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions after a merge: of `count` old items, and of new items that go before old item `spots`."""
    arrived = torch.zeros(count + 1, dtype=torch.long, device=spots.device)
    arrived.index_add_(0, spots, torch.ones_like(spots))
    ours = torch.arange(count, device=spots.device) + arrived.cumsum(0)[:count]
    return ours, spots + torch.arange(spots.numel(), device=spots.device)


def _place(old: Tensor, new: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    out = old.new_empty(old.numel() + new.numel())
    out[ours], out[theirs] = old, new
    return out


def _grow(ptr: Tensor, sorted_index: Tensor, num_nodes: int) -> Tensor:
    """Pointers after adding items with the sorted owners `sorted_index`, some perhaps new."""
    longer = torch.cat([ptr, ptr[-1:].expand(num_nodes + 1 - ptr.numel())])
    return longer + pointers(sorted_index, num_nodes)


@typed
@dataclass(frozen=True, eq=False)
class Adjacency:
    """Edges sorted by (destination, source), with the incoming and the outgoing view.

    The incoming edges of node i are positions `rowptr[i]:rowptr[i + 1]`; the outgoing edges of node j are
    positions `csc[colptr[j]:colptr[j + 1]]`. Parallel edges are allowed here (`Graph` merges them). The
    indices are checked once, when a kernel first asks for them; none may be changed in place.

    Attributes:
        num_nodes: N.
        source: [E] int64, where each edge starts.
        destination: [E] int64, where each edge ends; not decreasing.
        rowptr: [N + 1] int64.
        colptr: [N + 1] int64.
        csc: [E] int64, edge positions sorted by (source, destination).
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
    def from_sorted(cls, source: Tensor, destination: Tensor, num_nodes: int) -> Adjacency:
        """Build from edges that are already sorted by (destination, source)."""
        checks.memory(num_nodes, 32, "num_nodes")  # two vectors of pointers, and what they are summed from
        csc = torch.argsort(source, stable=True)
        rowptr, colptr = pointers(destination, num_nodes), pointers(source[csc], num_nodes)
        return cls(num_nodes, source, destination, rowptr, colptr, csc)

    def merge(self, edges: Tensor, num_nodes: int) -> tuple[Adjacency, Tensor]:
        """Add new edges to the sorted ones in linear time.

        Args:
            edges: [2, M], none of which is there already.
            num_nodes: at least the present number.

        Returns:
            The new adjacency, and [E] the new positions of the old edges.

        Raises:
            InputError: an edge names no node, or the present edges do not fit each other.
        """
        self.check_outgoing()
        check_index(edges, num_nodes, "edges")
        keys = torch.sort(edge_keys(edges[0], edges[1])).values
        spots = torch.searchsorted(self.keys, keys)
        ours, theirs = _interleave(spots, self.num_edges)
        merged = _place(self.keys, keys, ours, theirs)
        new_source, new_destination = key_ends(keys)
        turned, order = torch.sort(edge_keys(new_destination, new_source), stable=True)
        ours_t, theirs_t = _interleave(torch.searchsorted(self.turned_keys, turned), self.num_edges)
        rowptr = _grow(self.rowptr, new_destination, num_nodes)
        colptr = _grow(self.colptr, key_ends(turned)[1], num_nodes)
        csc = _place(ours[self.csc], theirs[order], ours_t, theirs_t)
        adjacency = Adjacency(num_nodes, *key_ends(merged), rowptr, colptr, csc)
        adjacency.__dict__["keys"] = merged
        _mark(adjacency)
        return adjacency, ours

    @cached_property
    def turned_keys(self) -> Tensor:
        """[E] int64, sorted: `source · 2³² + destination` of each edge in `csc` order."""
        return edge_keys(self.destination, self.source)[self.csc]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """Widen the 32-bit indices when they are first asked for."""
            if name not in Index32._fields or "index32" not in self.__dict__:
                raise AttributeError(f"'Adjacency' object has no attribute {name!r}")
            wide = self.__dict__[name] = getattr(self.__dict__["index32"], name).long()
            if name in ("rowptr", "colptr"):
                _mark_pointers(wide, self.num_edges)
            return wide

    def check_incoming(self) -> None:
        """Raise `InputError` unless nodes, edges and row pointers fit each other; read once."""
        if _INCOMING not in self.__dict__ and not _unreadable(self.device):
            self.__dict__[_INCOMING] = self._look_at_incoming()

    def check_outgoing(self) -> None:
        """Raise `InputError` unless the order by source and the column pointers fit, too; read once."""
        if _OUTGOING not in self.__dict__ and not _unreadable(self.device):
            self.__dict__[_OUTGOING] = self._look_at_outgoing()

    def _look_at_incoming(self) -> bool:
        source, destination, rowptr = self._parts("source", "destination", "rowptr")
        check_pointers(rowptr, len(source), "rowptr")
        check_index(source, self.num_nodes, "source")
        if not torch.equal(owners(rowptr, len(source)), destination.long()):
            raise InputError("`destination` must be sorted and hold node i at `rowptr[i]:rowptr[i + 1]`")
        return True

    def _look_at_outgoing(self) -> bool:
        self.check_incoming()
        source, csc, colptr = self._parts("source", "csc", "colptr")
        check_pointers(colptr, len(source), "colptr")
        check_index(csc, len(source), "csc")
        order = csc.long()
        covered = torch.zeros(len(csc), dtype=torch.bool, device=csc.device).index_fill(0, order, True)
        if not bool(covered.all()) or not torch.equal(owners(colptr, len(csc)), source[order].long()):
            raise InputError("`csc` must hold every edge once, that of node j at `colptr[j]:colptr[j + 1]`")
        return True

    def _parts(self, *names: str) -> tuple[Tensor, Tensor, Tensor]:
        """Two vectors over edges and one of pointers, in 32 bits where only those exist."""
        parts = self.__dict__ if "source" in self.__dict__ else self.index32._asdict()
        one, two, pointer = (parts[name] for name in names)
        _check_count(self.num_nodes, "nodes")
        if any(part.dim() != 1 or part.dtype not in INTEGERS for part in (one, two, pointer)):
            raise InputError("the parts of an adjacency must be vectors of integers")
        _check_count(len(one), "edges")
        if len(two) != len(one) or len(pointer) != self.num_nodes + 1:
            raise InputError(
                f"an adjacency of {self.num_nodes} nodes needs {' and '.join(names[:2])} of equal length and"
                f" {self.num_nodes + 1} entries of {names[2]}, got {len(one)}, {len(two)} and {len(pointer)};"
                " let `Adjacency.build` make them"
            )
        if not one.device == two.device == pointer.device:
            raise InputError("the parts of an adjacency must be on one device")
        return one, two, pointer

    @property
    def _known(self) -> Tensor:
        source: Tensor | None = self.__dict__.get("source")
        return self.index32.source if source is None else source

    @property
    def num_edges(self) -> int:
        """E."""
        return int(self._known.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the indices live."""
        return self._known.device

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
        """Return the structure on `device` (itself when it is there)."""
        device = checks.device(device)
        if device == self.device:
            return self
        moved = (t.to(device) for t in (self.source, self.destination, self.rowptr, self.colptr, self.csc))
        return Adjacency(self.num_nodes, *moved)


def of_narrow(num_nodes: int, index: Index32) -> Adjacency:
    """An adjacency of indices a kernel made from checked ones; 64-bit indices are made on demand."""
    adjacency = object.__new__(Adjacency)
    adjacency.__dict__.update(num_nodes=num_nodes, index32=index)
    _mark(adjacency)
    return adjacency


def _mark(adjacency: Adjacency) -> None:
    adjacency.__dict__.update({_INCOMING: True, _OUTGOING: True})


class _Reach(NamedTuple):
    """Which nodes of an adjacency matter."""

    moving: int  # gradients are needed of the nodes before this one only; those of others may be zeros
    filled: int  # nodes from this one on have no incoming edges


def set_reach(adjacency: Adjacency, moving: int, filled: int) -> None:
    """Set once which nodes of an adjacency matter, see `_Reach`; copies of it do not know."""
    cached_on(adjacency, "ops reach", lambda: _Reach(moving, filled))


def reach_of(adjacency: Adjacency) -> _Reach:
    """Which nodes of an adjacency matter: all unless `set_reach` was called."""
    return cached_on(adjacency, "ops reach", lambda: _Reach(adjacency.num_nodes, adjacency.num_nodes))
