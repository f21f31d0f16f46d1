"""How the rows are divided among GPU programs: long rows in pieces, the longest work first."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fgai.cache import cached_on
from fgai.ops.gpu.tiles import _add_pieces, _power
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

# No program gets more edges than this: a node with ten thousand neighbours would keep one busy long after all
# others have ended. The results of a row's pieces are joined afterwards.
PIECE = 256


class _Layout(NamedTuple):
    """The pieces of rows wherever their edges are; `within` [P] is a piece's number in its row."""

    row: Tensor
    within: Tensor
    slot: Tensor
    split_row: Tensor
    split_slot: Tensor
    slots: int


class Work(NamedTuple):
    """Pieces of rows of the incoming or outgoing view, by falling size; all int32."""

    row: Tensor  # [P] node of each piece
    first: Tensor  # [P] its first position in the view
    last: Tensor  # [P] one after its last position; a piece may be empty
    slot: Tensor  # [P] where it leaves its part of the result, -1 when it is the whole row
    split_row: Tensor  # [R] nodes in more than one piece
    split_slot: Tensor  # [R + 1] their slots
    slots: int  # number of slots
    pointer: Tensor  # [N + 1] of the view
    edge: Tensor  # [E] position of each edge in the incoming view
    node: Tensor  # [E] the node at the other end

    @property
    def pieces(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first arguments of every kernel over pieces."""
        return self.row, self.first, self.last, self.slot


def _lay_out(degree: Tensor) -> _Layout:
    """The pieces of rows that have up to `degree` [N] edges; waits for the device once."""
    count = torch.clamp((degree + PIECE - 1) // PIECE, min=1)
    row = torch.repeat_interleave(torch.arange(len(count), device=degree.device), count.long())
    within = torch.arange(len(row), device=degree.device) - (torch.cumsum(count, 0) - count)[row]
    split = count[row] > 1
    slot = torch.where(split, torch.cumsum(split, 0) - 1, -1)
    size = torch.clamp(degree[row] - within * PIECE, max=PIECE)
    order = torch.argsort(size, descending=True, stable=True)
    split_row = torch.nonzero(count > 1).flatten()
    split_slot = torch.nn.functional.pad(torch.cumsum(count[split_row], 0), (1, 0))
    row, within, slot = (t[order].to(torch.int32) for t in (row, within, slot))
    ends = split_row.to(torch.int32), split_slot.to(torch.int32)
    return _Layout(row, within, slot, *ends, int(split.sum()))


@triton.jit
def _bounds(row, within, pointer, first, last, count, SIZE: tl.constexpr, B: tl.constexpr):
    p = tl.program_id(0) * B + tl.arange(0, B)
    live = p < count
    i = tl.load(row + p, mask=live, other=0)
    end = tl.load(pointer + i + 1, mask=live, other=0)
    low = tl.load(pointer + i, mask=live, other=0) + tl.load(within + p, mask=live, other=0) * SIZE
    tl.store(first + p, tl.minimum(low, end), mask=live)
    tl.store(last + p, tl.minimum(low + SIZE, end), mask=live)


def _place(layout: _Layout, pointer: Tensor, edge: Tensor, node: Tensor) -> Work:
    """The work of a layout over rows that begin at `pointer` [N + 1]; waits for nothing."""
    first, last = torch.empty_like(layout.row), torch.empty_like(layout.row)
    if count := len(layout.row):
        _bounds[(-(-count // 256),)](
            layout.row, layout.within, pointer, first, last, count, SIZE=PIECE, B=256
        )  # fmt: skip
    return Work(layout.row, first, last, *layout[2:], pointer, edge, node)


def incoming(adjacency: Adjacency, rows: int | None = None) -> Work:
    """The work over incoming edges of the nodes before `rows`, all by default; made once."""

    def make() -> Work:
        adjacency.check_incoming()
        index = adjacency.index32
        return _place(_lay_out(index.rowptr.diff()[:rows]), index.rowptr, index.source, index.source)

    return cached_on(adjacency, ("gpu incoming", _some(adjacency, rows)), make)


def outgoing(adjacency: Adjacency, rows: int | None = None) -> Work:
    """The work over outgoing edges, made once; `rows` as in `incoming`."""

    def make() -> Work:
        adjacency.check_outgoing()
        index = adjacency.index32
        target = index.destination[adjacency.csc]
        return _place(_lay_out(index.colptr.diff()[:rows]), index.colptr, index.csc, target)

    return cached_on(adjacency, ("gpu outgoing", _some(adjacency, rows)), make)


def _keep_work(adjacency: Adjacency, into: Work, out_of: Work) -> None:
    """Let `incoming` and `outgoing` return these for all nodes."""
    cached_on(adjacency, ("gpu incoming", None), lambda: into)
    cached_on(adjacency, ("gpu outgoing", None), lambda: out_of)


def _add_parts(work: Work, parts: Tensor, out: Tensor) -> None:
    """Sum the parts of split rows into their rows of `out`."""
    if work.slots:
        width = parts.numel() // work.slots
        block = min(256, _power(width))
        grid = (len(work.split_row), -(-width // block))
        _add_pieces[grid](work.split_row, work.split_slot, parts, out, width, BD=block, num_warps=1)


def _seed_on(like: Tensor, seed: int | Tensor) -> Tensor:
    """The seed on the device of `like`, without a copy from the host: it could not be captured."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, device=like.device)


def _some(adjacency: Adjacency, rows: int | None) -> int | None:
    return None if rows is None or rows >= adjacency.num_nodes else rows


def _room(like: Tensor, rows: int) -> Tensor:
    """A tensor of this shape to be filled up to `rows`; zeros from there on."""
    out = torch.empty_like(like)
    out[rows:] = 0.0
    return out


def _grown_layouts(adjacency: Adjacency, nodes: int, width: int) -> tuple[_Layout, _Layout, int]:
    """Both views' layouts with room for `nodes` new nodes of `width` edges each, and the longest row.

    An old node may become the neighbour of every new one, so each row has room for that many edges more.
    """

    def make() -> tuple[_Layout, _Layout, int]:
        adjacency.check_outgoing()
        index = adjacency.index32
        fresh = index.rowptr.new_full((nodes,), width)
        degrees = [pointer.diff() for pointer in (index.rowptr, index.colptr)]
        by_row, by_column = (_lay_out(torch.cat([degree + nodes, fresh])) for degree in degrees)
        return by_row, by_column, int(torch.cat(degrees).max())

    return cached_on(adjacency, ("gpu grown", nodes, width), make)
