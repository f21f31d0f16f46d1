"""Shared by the GPU kernels: tiles, dropout by position, and pieces of rows, the longest first."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fgai.cache import cached_on
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

PIECE = 256  # most edges in a piece: a whole row of ten thousand would keep one program busy after all others


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _row_tile(heads: int, channels: int, least: int, most: int, tile: int) -> dict[str, int]:
    """Compile-time sizes of tiles [BE, BH, BC] of about `tile` numbers, with `least` to `most` edges."""
    high, wide = _power_of_two(heads), _power_of_two(channels)
    block = max(least, min(most, tile // (high * wide)))
    return {"H": heads, "C": channels, "BH": high, "BC": wide, "BE": block}


def _head_tile(heads: int, tile: int) -> dict[str, int]:
    """Compile-time sizes of tiles [BE, BH] of about `tile` numbers."""
    high = _power_of_two(heads)
    return {"H": heads, "BH": high, "BE": max(16, tile // high)}


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _factor(position, seed, LIMIT: tl.constexpr, SCALE: tl.constexpr, kind: tl.constexpr):
    """0 or SCALE for every position (int64), see `fgai.ops.reference`."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    x = _mix((position & 0xFFFFFFFF).to(tl.uint32) + low)
    spread = ((position >> 32).to(tl.uint32) + low) * 0x9E3779B9
    return (_mix(x ^ high ^ spread) >= LIMIT).to(kind) * SCALE


@triton.jit
def _heads(BH: tl.constexpr):
    """The heads of this program: those of a kernel's second grid axis, BH at a time."""
    return tl.program_id(1) * BH + tl.arange(0, BH)


@triton.jit
def _inside(h, c, H: tl.constexpr, C: tl.constexpr):
    """Mask of the [BH, BC] entries that are not padding."""
    return (h[:, None] < H) & (c[None, :] < C)


@triton.jit
def _wide(x):
    """Numbers of 16 bits as float32, in which all sums are computed."""
    return x.to(tl.float32) if x.dtype.primitive_bitwidth < 32 else x


@triton.jit
def _load_rows(pointer, node, h, c, live, H: tl.constexpr, C: tl.constexpr):
    """Rows [BE, BH, BC] of a [N, H, C] array; without padding there is less to check."""
    where = pointer + (node * (H * C))[:, None, None] + (h[:, None] * C + c[None, :])[None, :, :]
    if (h.shape[0] == H or h.shape[0] == 1) and c.shape[0] == C:
        x = tl.load(where, mask=live[:, None, None], other=0.0)
    else:
        x = tl.load(where, mask=live[:, None, None] & _inside(h, c, H, C)[None, :, :], other=0.0)
    return _wide(x)


@triton.jit
def _load_row(pointer, node, h, c, H: tl.constexpr, C: tl.constexpr):
    """One row [BH, BC] of a [N, H, C] array."""
    where = pointer + node * (H * C) + h[:, None] * C + c[None, :]
    return _wide(tl.load(where, mask=_inside(h, c, H, C), other=0.0))


@triton.jit
def _load_heads(pointer, node, h, live, H: tl.constexpr):
    """Rows [BE, BH] of a [N, H] array."""
    where = pointer + node[:, None] * H + h[None, :]
    return _wide(tl.load(where, mask=live[:, None] & (h[None, :] < H), other=0.0))


@triton.jit
def _leaky(z, SLOPE: tl.constexpr):
    return tl.where(z > 0, z, z * SLOPE)


@triton.jit
def _row_scores(other, mine, weight, SLOPE: tl.constexpr, RATE: tl.constexpr, SCORE: tl.constexpr):
    """The dynamic (1) or dot-product (2) score of tiles [BE, BH, BC] with one row [BH, BC]."""
    if SCORE == 1:
        s = tl.sum(weight[None, :, :] * _leaky(other + mine[None, :, :], SLOPE), axis=2)
    else:
        s = tl.sum(other * mine[None, :, :], axis=2) * RATE
    return s


@triton.jit
def _add_pieces(split_row, split_slot, parts, out, D, BD: tl.constexpr):
    """out[row] = Σ of the `parts` [slots, D] of each row that was split."""
    r = tl.program_id(0)
    row = tl.load(split_row + r).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], dtype=parts.dtype.element_ty)
    begin, end = tl.load(split_slot + r).to(tl.int64), tl.load(split_slot + r + 1).to(tl.int64)
    for slot in range(begin, end):
        total += tl.load(parts + slot * D + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, total, mask=d < D)


class _Layout(NamedTuple):
    """The pieces of rows by degree alone; `within` [P] is a piece's number in its row. See `Work`."""

    row: Tensor
    within: Tensor
    slot: Tensor
    split_row: Tensor
    split_slot: Tensor
    slots: int


class Work(NamedTuple):
    """Pieces of rows (edges by destination or by source), longest first; all int32."""

    row: Tensor  # [P] node of each piece
    first: Tensor  # [P] its first position
    last: Tensor  # [P] one after its last position; a piece may be empty
    slot: Tensor  # [P] where it writes its part of the result, -1 if it is the whole row
    split_row: Tensor  # [R] nodes with more than one piece
    split_slot: Tensor  # [R + 1] their slots
    slots: int  # number of slots
    pointer: Tensor  # [N + 1] row pointers of the positions
    edge: Tensor  # [E] edge at each position (by source), not used by destination
    node: Tensor  # [E] node at the other end of the edge at each position

    @property
    def pieces(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first arguments of every kernel over pieces."""
        return self.row, self.first, self.last, self.slot


def _make_layout(degree: Tensor) -> _Layout:
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
    """The work of a layout for rows that begin at `pointer` [N + 1]; does not wait for the device."""
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
        return _place(_make_layout(index.rowptr.diff()[:rows]), index.rowptr, index.source, index.source)

    return cached_on(adjacency, ("gpu incoming", _limit_rows(adjacency, rows)), make)


def outgoing(adjacency: Adjacency, rows: int | None = None) -> Work:
    """The work over outgoing edges, made once; `rows` as in `incoming`."""

    def make() -> Work:
        adjacency.check_outgoing()
        index = adjacency.index32
        target = index.destination[adjacency.csc]
        return _place(_make_layout(index.colptr.diff()[:rows]), index.colptr, index.csc, target)

    return cached_on(adjacency, ("gpu outgoing", _limit_rows(adjacency, rows)), make)


def _set_work(adjacency: Adjacency, into: Work, out_of: Work) -> None:
    cached_on(adjacency, ("gpu incoming", None), lambda: into)
    cached_on(adjacency, ("gpu outgoing", None), lambda: out_of)


def _add_parts(work: Work, parts: Tensor, out: Tensor) -> None:
    if work.slots:
        width = parts.numel() // work.slots
        block = min(256, _power_of_two(width))
        grid = (len(work.split_row), -(-width // block))
        _add_pieces[grid](work.split_row, work.split_slot, parts, out, width, BD=block, num_warps=1)


def _seed_tensor(like: Tensor, seed: int | Tensor) -> Tensor:
    """The seed on the device of `like`, without a copy from the host, which could not be captured."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, device=like.device)


def _limit_rows(adjacency: Adjacency, rows: int | None) -> int | None:
    return None if rows is None or rows >= adjacency.num_nodes else rows


def _zeros_after(like: Tensor, rows: int) -> Tensor:
    """An empty tensor of this shape, with zeros from row `rows` on."""
    out = torch.empty_like(like)
    out[rows:] = 0.0
    return out


def _layouts_after_attach(adjacency: Adjacency, nodes: int, width: int) -> tuple[_Layout, _Layout, int]:
    """Layouts by row and by column for `nodes` more nodes of `width` edges each, and the longest row."""

    # An old node may become the neighbour of every new one.
    def make() -> tuple[_Layout, _Layout, int]:
        adjacency.check_outgoing()
        index = adjacency.index32
        fresh = index.rowptr.new_full((nodes,), width)
        degrees = [pointer.diff() for pointer in (index.rowptr, index.colptr)]
        by_row, by_column = (_make_layout(torch.cat([degree + nodes, fresh])) for degree in degrees)
        return by_row, by_column, int(torch.cat(degrees).max())

    return cached_on(adjacency, ("gpu grown", nodes, width), make)
