"""Add nodes to a sorted graph on the GPU, in fixed shapes and without waiting for the device.

The new edges come in pairs u → v and v → u, so their keys sorted by destination are also their keys sorted by
source. The new position of an edge is its position among the old (new) ones plus the number of smaller new
(old) keys, by bisection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fgai.ops.gpu.plan import _layouts_after_attach, _place, _set_work
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import Index32

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

BLOCK = 256
FEW = 16_384  # up to this many new edges, counting the smaller keys of each is faster than sorting


@triton.jit
def _bisect(keys, low, high, target, live):
    """One step of the bisection of sorted `keys` between `low` and `high` for each of `target`."""
    going = live & (low < high)
    middle = (low + high) // 2
    less = tl.load(keys + middle, mask=going, other=0) < target
    return tl.where(going & less, middle + 1, low), tl.where(going & ~less, middle, high)


@triton.jit
def _below(keys, length, target, live, STEPS: tl.constexpr):
    """How many of the sorted `keys` [length] are below each of `target`; int32."""
    low = tl.zeros_like(target).to(tl.int32)
    high = low + length
    for _ in range(STEPS):
        low, high = _bisect(keys, low, high, target, live)
    return low


@triton.jit
def _row_bounds(pointer, node, first, old, live):
    """First and last position of the row of an old node; rows of new nodes are empty and at the end."""
    old_node = live & (node < first)
    low = tl.load(pointer + node, mask=old_node, other=0).to(tl.int32)
    high = tl.load(pointer + node + 1, mask=old_node, other=0).to(tl.int32)
    return tl.where(old_node, low, old), tl.where(old_node, high, old)


@triton.jit
def _sort(keys, out, count, B: tl.constexpr, T: tl.constexpr):
    """Sort distinct keys: the position of each is the number of smaller ones."""
    largest: tl.constexpr = 9223372036854775807
    k = tl.program_id(0) * B + tl.arange(0, B)
    mine = tl.load(keys + k, mask=k < count, other=largest)
    smaller = tl.zeros([B, T], dtype=tl.int32)
    for start in range(0, count, T):
        t = start + tl.arange(0, T)
        other = tl.load(keys + t, mask=t < count, other=largest)
        smaller += (other[None, :] < mine[:, None]).to(tl.int32)
    tl.store(out + tl.sum(smaller, axis=1), mine, mask=k < count)


@triton.jit
def _swap_ends(key):
    return (key << 32) | (key >> 32)


@triton.jit
def _new_keys(targets, keys, nodes, width, first, loops, count, B: tl.constexpr):
    """Keys of u → v, then v → u, then the loops; `first` is the number of old nodes."""
    k = tl.program_id(0) * B + tl.arange(0, B)
    pairs = nodes * width
    part = k // tl.maximum(pairs, 1)
    in_column = k - part * pairs
    pair = (k < count) & (part < 2)
    v = tl.load(targets + in_column, mask=pair, other=0).to(tl.int64)
    u = (first + tl.where(part < 2, in_column // tl.maximum(width, 1), k - 2 * pairs)).to(tl.int64)
    v = tl.where(part < 2, v, u)
    tl.store(keys + k, tl.where(part == 0, (v << 32) | u, (u << 32) | v), mask=k < count)


@triton.jit
def _old_edges(
    keys, by_source, csc, new_keys, source32, destination32, csc32, target32, positions,
    old, new, STEPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * B + tl.arange(0, B)
    live = e < old
    key = tl.load(keys + e, mask=live, other=0)
    swapped = tl.load(by_source + e, mask=live, other=0)
    edge = tl.load(csc + e, mask=live, other=0).to(tl.int32)
    low_a, low_b, low_c = e * 0, e * 0, e * 0
    high_a, high_b, high_c = low_a + new, low_b + new, low_c + new
    for _ in range(STEPS):  # three searches at once, so that the latencies of their loads overlap
        low_a, high_a = _bisect(new_keys, low_a, high_a, key, live)
        low_b, high_b = _bisect(new_keys, low_b, high_b, swapped, live)
        low_c, high_c = _bisect(new_keys, low_c, high_c, _swap_ends(swapped), live)
    in_row, in_column, edge = e + low_a, e + low_b, edge + low_c
    tl.store(positions + e, in_row.to(tl.int64), mask=live)
    tl.store(source32 + in_row, (key & 0xFFFFFFFF).to(tl.int32), mask=live)
    tl.store(destination32 + in_row, (key >> 32).to(tl.int32), mask=live)
    tl.store(csc32 + in_column, edge, mask=live)
    tl.store(target32 + in_column, (swapped & 0xFFFFFFFF).to(tl.int32), mask=live)


@triton.jit
def _new_edges(
    keys, by_source, rowptr, colptr, new_keys, source32, destination32, csc32, target32,
    first, old, new, STEPS: tl.constexpr, LONG: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * B + tl.arange(0, B)
    live = e < new
    key = tl.load(new_keys + e, mask=live, other=0)
    swapped = _swap_ends(key)
    low_a, high_a = _row_bounds(rowptr, key >> 32, first, old, live)
    low_b, high_b = _row_bounds(colptr, key >> 32, first, old, live)
    low_c, high_c = _row_bounds(rowptr, swapped >> 32, first, old, live)
    for _ in range(LONG):
        low_a, high_a = _bisect(keys, low_a, high_a, key, live)
        low_b, high_b = _bisect(by_source, low_b, high_b, key, live)
        low_c, high_c = _bisect(keys, low_c, high_c, swapped, live)
    in_row, in_column, edge = e + low_a, e + low_b, low_c + _below(new_keys, new, swapped, live, STEPS)
    tl.store(source32 + in_row, (key & 0xFFFFFFFF).to(tl.int32), mask=live)
    tl.store(destination32 + in_row, (key >> 32).to(tl.int32), mask=live)
    tl.store(csc32 + in_column, edge, mask=live)
    tl.store(target32 + in_column, (key & 0xFFFFFFFF).to(tl.int32), mask=live)


@triton.jit
def _pointers(
    new_keys, rowptr, colptr, rowptr32, colptr32, first, count, new, STEPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Row and column pointers; `first` is the number of old nodes, `count` that of all nodes plus one."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < count
    more = _below(new_keys, new, i.to(tl.int64) << 32, live, STEPS).to(tl.int64)
    node = tl.minimum(i, first)
    row = tl.load(rowptr + node, mask=live, other=0) + more
    column = tl.load(colptr + node, mask=live, other=0) + more
    tl.store(rowptr32 + i, row.to(tl.int32), mask=live)
    tl.store(colptr32 + i, column.to(tl.int32), mask=live)


def _grid(count: int) -> tuple[int]:
    return (max(1, -(-count // BLOCK)),)


def attach(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """See `fgai.ops.attach`; also prepares the pieces of rows for the other kernels."""
    (nodes, width), first = targets.shape, adjacency.num_nodes
    old, new = adjacency.num_edges, nodes * (2 * width + int(loops))
    keys, by_source, count = adjacency.keys, adjacency.keys_by_source, first + nodes + 1
    edges, new_keys = targets.new_empty(new), targets.new_empty(new)
    _new_keys[_grid(new)](targets.contiguous(), edges, nodes, width, first, loops, new, B=BLOCK)
    if new <= FEW:
        _sort[(max(1, -(-new // 16)),)](edges, new_keys, new, B=16, T=256)
    else:
        new_keys = torch.sort(edges).values
    source, destination, csc, target = (keys.new_empty(old + new, dtype=torch.int32) for _ in range(4))
    rowptr, colptr = (keys.new_empty(count, dtype=torch.int32) for _ in range(2))
    positions = keys.new_empty(old)
    out = source, destination, csc, target
    incoming, outgoing, longest = _layouts_after_attach(adjacency, nodes, width + int(loops))
    short, long = new.bit_length(), longest.bit_length()
    _old_edges[_grid(old)](
        keys, by_source, adjacency.csc, new_keys, *out, positions, old, new, STEPS=short, B=BLOCK
    )
    _new_edges[(max(1, -(-new // 64)),)](
        keys, by_source, adjacency.rowptr, adjacency.colptr, new_keys, *out, first, old, new,
        STEPS=short, LONG=long, B=64, num_warps=2,
    )  # fmt: skip
    _pointers[_grid(count)](
        new_keys, adjacency.rowptr, adjacency.colptr, rowptr, colptr, first, count, new, STEPS=short, B=BLOCK
    )
    grown = Adjacency.from_index32(first + nodes, Index32(rowptr, source, colptr, csc, destination))
    _set_work(grown, _place(incoming, rowptr, source, source), _place(outgoing, colptr, csc, target))
    return grown, positions
