"""New nodes joined to a sorted graph on the GPU, in fixed shapes and without waiting for the device.

The new edges come in pairs u → v and v → u, so their keys sorted by destination are also their keys sorted by
source. The new position of an old edge is its position plus the number of new keys below its own, by
bisection, and the other way round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fgai.ops.gpu.plan import _grown_layouts, _keep_work, _place
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import Index32

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

BLOCK = 256
FEW = 16_384  # new edges up to which counting the smaller ones beats sorting


@triton.jit
def _halve(keys, low, high, target, live):
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
        low, high = _halve(keys, low, high, target, live)
    return low


@triton.jit
def _row(pointer, node, first, old, live):
    """Where the row of an old node begins and ends; rows of new nodes are empty and at the end."""
    old_node = live & (node < first)
    low = tl.load(pointer + node, mask=old_node, other=0).to(tl.int32)
    high = tl.load(pointer + node + 1, mask=old_node, other=0).to(tl.int32)
    return tl.where(old_node, low, old), tl.where(old_node, high, old)


@triton.jit
def _sort(keys, out, count, B: tl.constexpr, T: tl.constexpr):
    """Sort different keys: each goes where as many as are smaller leave off."""
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
def _turned(key):
    return (key << 32) | (key >> 32)


@triton.jit
def _new_keys(targets, keys, nodes, width, first, loops, count, B: tl.constexpr):
    """Keys of u → v, then v → u, then the loops; `first` is the number of old nodes."""
    k = tl.program_id(0) * B + tl.arange(0, B)
    pairs = nodes * width
    way = k // tl.maximum(pairs, 1)
    spot = k - way * pairs
    pair = (k < count) & (way < 2)
    v = tl.load(targets + spot, mask=pair, other=0).to(tl.int64)
    u = (first + tl.where(way < 2, spot // tl.maximum(width, 1), k - 2 * pairs)).to(tl.int64)
    v = tl.where(way < 2, v, u)
    tl.store(keys + k, tl.where(way == 0, (v << 32) | u, (u << 32) | v), mask=k < count)


@triton.jit
def _old_edges(
    keys, turned, csc, fresh, source32, destination32, csc32, target32, ours,
    old, new, STEPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * B + tl.arange(0, B)
    live = e < old
    key = tl.load(keys + e, mask=live, other=0)
    back = tl.load(turned + e, mask=live, other=0)
    edge = tl.load(csc + e, mask=live, other=0).to(tl.int32)
    low_a, low_b, low_c = e * 0, e * 0, e * 0
    high_a, high_b, high_c = low_a + new, low_b + new, low_c + new
    for _ in range(STEPS):  # three searches side by side, so that their loads wait together
        low_a, high_a = _halve(fresh, low_a, high_a, key, live)
        low_b, high_b = _halve(fresh, low_b, high_b, back, live)
        low_c, high_c = _halve(fresh, low_c, high_c, _turned(back), live)
    at, spot, edge = e + low_a, e + low_b, edge + low_c
    tl.store(ours + e, at.to(tl.int64), mask=live)
    tl.store(source32 + at, (key & 0xFFFFFFFF).to(tl.int32), mask=live)
    tl.store(destination32 + at, (key >> 32).to(tl.int32), mask=live)
    tl.store(csc32 + spot, edge, mask=live)
    tl.store(target32 + spot, (back & 0xFFFFFFFF).to(tl.int32), mask=live)


@triton.jit
def _new_edges(
    keys, turned, rowptr, colptr, fresh, source32, destination32, csc32, target32,
    first, old, new, STEPS: tl.constexpr, LONG: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0) * B + tl.arange(0, B)
    live = e < new
    key = tl.load(fresh + e, mask=live, other=0)
    back = _turned(key)
    low_a, high_a = _row(rowptr, key >> 32, first, old, live)
    low_b, high_b = _row(colptr, key >> 32, first, old, live)
    low_c, high_c = _row(rowptr, back >> 32, first, old, live)
    for _ in range(LONG):
        low_a, high_a = _halve(keys, low_a, high_a, key, live)
        low_b, high_b = _halve(turned, low_b, high_b, key, live)
        low_c, high_c = _halve(keys, low_c, high_c, back, live)
    at, spot, edge = e + low_a, e + low_b, low_c + _below(fresh, new, back, live, STEPS)
    tl.store(source32 + at, (key & 0xFFFFFFFF).to(tl.int32), mask=live)
    tl.store(destination32 + at, (key >> 32).to(tl.int32), mask=live)
    tl.store(csc32 + spot, edge, mask=live)
    tl.store(target32 + spot, (key & 0xFFFFFFFF).to(tl.int32), mask=live)


@triton.jit
def _pointers(
    fresh, rowptr, colptr, rowptr32, colptr32, first, count, new, STEPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """`first` is the number of old nodes, `count` that of all plus one."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < count
    more = _below(fresh, new, i.to(tl.int64) << 32, live, STEPS).to(tl.int64)
    at = tl.minimum(i, first)
    row = tl.load(rowptr + at, mask=live, other=0) + more
    column = tl.load(colptr + at, mask=live, other=0) + more
    tl.store(rowptr32 + i, row.to(tl.int32), mask=live)
    tl.store(colptr32 + i, column.to(tl.int32), mask=live)


def _grid(count: int) -> tuple[int]:
    return (max(1, -(-count // BLOCK)),)


def attach(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """See `fgai.ops.attach`; the pieces for the kernels are laid out too."""
    (nodes, width), first = targets.shape, adjacency.num_nodes
    old, new = adjacency.num_edges, nodes * (2 * width + int(loops))
    keys, turned, count = adjacency.keys, adjacency.keys_by_source, first + nodes + 1
    edges, fresh = targets.new_empty(new), targets.new_empty(new)
    _new_keys[_grid(new)](targets.contiguous(), edges, nodes, width, first, loops, new, B=BLOCK)
    if new <= FEW:
        _sort[(max(1, -(-new // 16)),)](edges, fresh, new, B=16, T=256)
    else:
        fresh = torch.sort(edges).values
    source, destination, csc, target = (keys.new_empty(old + new, dtype=torch.int32) for _ in range(4))
    rowptr, colptr = (keys.new_empty(count, dtype=torch.int32) for _ in range(2))
    ours = keys.new_empty(old)
    out = source, destination, csc, target
    incoming, outgoing, longest = _grown_layouts(adjacency, nodes, width + int(loops))
    short, long = new.bit_length(), longest.bit_length()
    _old_edges[_grid(old)](keys, turned, adjacency.csc, fresh, *out, ours, old, new, STEPS=short, B=BLOCK)
    _new_edges[(max(1, -(-new // 64)),)](
        keys, turned, adjacency.rowptr, adjacency.colptr, fresh, *out, first, old, new,
        STEPS=short, LONG=long, B=64, num_warps=2,
    )  # fmt: skip
    _pointers[_grid(count)](
        fresh, adjacency.rowptr, adjacency.colptr, rowptr, colptr, first, count, new, STEPS=short, B=BLOCK
    )
    grown = Adjacency.from_index32(first + nodes, Index32(rowptr, source, colptr, csc, destination))
    _keep_work(grown, _place(incoming, rowptr, source, source), _place(outgoing, colptr, csc, target))
    return grown, ours
