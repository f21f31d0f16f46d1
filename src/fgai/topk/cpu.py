"""Top-k of every row on the CPU, and the margin of the sets with its gradient in one pass over the rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from fgai.compiled import compiled
from fgai.ops.cpu.parallel import _array, _launch, blocks
from fgai.ops.cpu.parallel import _by_block as _fast_by_block

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

# Edges of a row up to which branches cost more than they save.
SHORT = 64
_by_block = partial(_fast_by_block, fastmath=False)  # sums are added in edge order


@compiled(inline="always")
def _sink(value, above, level):
    """The level after `value` came: the value itself if it fits between the level and the one above."""
    lower = value if value < above else above
    return lower if lower > level else level


@compiled
def _levels(values, first, last, count, levels):
    """The `count` largest values of a row with at least so many edges, in falling order.

    In short rows a branch predictor is often wrong, so every value is compared with every level; in long rows
    most values are smaller than all levels, and one branch skips them.
    """
    for slot in range(count):
        levels[slot] = -np.inf
    if last - first <= SHORT and count <= 16:
        for e in range(first, last):
            value = values[e]
            for slot in range(count - 1, 0, -1):
                levels[slot] = _sink(value, levels[slot - 1], levels[slot])
            levels[0] = value if value > levels[0] else levels[0]
        return
    for e in range(first, last):
        value = values[e]
        if value > levels[count - 1]:
            slot = count - 1
            while slot > 0 and value > levels[slot - 1]:
                levels[slot] = levels[slot - 1]
                slot -= 1
            levels[slot] = value


@_by_block
def _margin(b, bounds, rowptr, values, k, radius, slope, sums, levels_and_flows, counters, shares):
    """Σ_m relu(R − c(m) / m) / R of every row, and its slope at the edges that matter."""
    levels, flows = levels_and_flows[b, 0], levels_and_flows[b, 1]
    counts, share = counters[b], shares[b]
    for i in range(bounds[b], bounds[b + 1]):
        first, last = rowptr[i], rowptr[i + 1]
        sums[i] = 0
        count = min(k, last - first - k)
        if count <= 0:
            slope[first:last] = 0
            continue
        _levels(values, first, last, k + count, levels)
        cost = 0.0
        for m in range(1, count + 1):
            cost += levels[k - m] - levels[k + m - 1]
            short = radius - cost / m
            share[m - 1] = 1 / (m * radius) if short > 0 else 0
            sums[i] += max(short, 0.0) / radius
        flows[: k - count] = 0
        flow = 0.0
        for m in range(count, 0, -1):  # the m-th pair takes part in the costs of m and more swaps
            flow += share[m - 1]
            flows[k - m], flows[k + m - 1] = -flow, flow
        counts[: k + count] = 0
        for e in range(first, last):
            rank = 0
            for slot in range(k + count):
                rank += levels[slot] > values[e]
            slope[e] = 0
            if rank < k + count:
                equal = counts[rank]  # equal values rank in edge order
                counts[rank] += 1
                if rank + equal < k + count:
                    slope[e] = flows[rank + equal]


def margins(_: None, values: Tensor, rowptr: Tensor, k: int, radius: float) -> tuple[Tensor, Tensor, float]:
    """`swap_margin`: value, slope and what scales the slope."""
    array, pointers = _array(values), _array(rowptr)
    slope, sums = np.empty_like(array), np.empty(len(pointers) - 1, np.float64)
    bounds = blocks(pointers)
    count = len(bounds) - 1
    room = (
        np.empty((count, 2, 2 * k), array.dtype),
        np.empty((count, 2 * k), np.int64),
        np.empty((count, k), np.float64),
    )
    _launch(_margin, count, bounds, pointers, array, k, radius, slope, sums, *room)
    scale = 1 / max(1, int(np.clip(pointers[1:] - pointers[:-1] - k, 0, k).sum()))
    return values.new_tensor(sums.sum() * scale), torch.from_numpy(slope), scale


@compiled(inline="always")
def _insert(value, e, filled, best, leading):
    """Put an edge into the list of the largest of its row, of which `filled` are known; returns how many."""
    if filled < len(best):
        filled += 1
    elif not value > best[filled - 1]:
        return filled
    slot = filled - 1
    # Strictly larger only: an equal value that came earlier stays ahead.
    while slot > 0 and value > best[slot - 1]:
        best[slot] = best[slot - 1]
        leading[slot] = leading[slot - 1]
        slot -= 1
    best[slot] = value
    leading[slot] = e
    return filled


@compiled
def _lead_rows(values, rowptr, positions):
    rows, count = positions.shape
    best = np.empty(count, values.dtype)
    for i in range(rows):
        filled = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            filled = _insert(values[e], e, filled, best, positions[i])


@compiled
def _pair_rows(values, there, members, rowptr, rows, strong, weak):
    """See `pick_rivals`; lists too short go on with edges that do not count, which are no pair."""
    k = strong.shape[1]
    high, low = np.empty(k, values.dtype), np.empty(k, values.dtype)
    for r in range(len(rows)):
        filled, also = 0, 0
        for e in range(rowptr[rows[r]], rowptr[rows[r] + 1]):
            outside, inside = there[e] and not members[e], there[e] and members[e]
            filled = _insert(values[e] if outside else -np.inf, e, filled, high, strong[r])
            also = _insert(-values[e] if inside else -np.inf, e, also, low, weak[r])
        for s in range(k):
            far, near = strong[r, s], weak[r, s]
            if s >= filled or not (there[far] and not members[far] and there[near] and members[near]):
                strong[r, s] = weak[r, s] = -1


def pick_leaders(values: Tensor, rowptr: Tensor, count: int) -> Tensor:
    """Positions [N, count] of the largest of every row, -1 where a row has fewer; see `leaders`."""
    positions = np.full((rowptr.numel() - 1, count), -1, dtype=np.int64)
    _lead_rows(values.numpy(), rowptr.numpy(), positions)
    return torch.from_numpy(positions)


def pick_rivals(
    values: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Positions [R, k] of strong outsiders and weak members, -1 where there is no pair; see `rivals`."""
    strong, weak = (np.full((len(rows), k), -1, np.int64) for _ in range(2))
    sides = (_array(each) for each in (values, there, members, rowptr, rows))
    _pair_rows(*sides, strong, weak)
    return torch.from_numpy(strong), torch.from_numpy(weak)


def pick_mask(values: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """The top-k of every row as a mask [E]; see `topk_mask`."""
    leading = pick_leaders(values, rowptr, k)
    mask = torch.zeros(values.shape[0], dtype=torch.bool)
    return mask.index_fill_(0, leading[leading >= 0], True)
