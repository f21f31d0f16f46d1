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

SHORT = 64  # up to this many edges of a row, comparing without branches is faster
_by_block = partial(_fast_by_block, fastmath=False)  # sums are added in edge order


@compiled(inline="always")
def _insert_level(value, above, level):
    """The new level after inserting `value` into falling levels: `value` if it is between the two."""
    lower = value if value < above else above
    return lower if lower > level else level


@compiled
def _levels(values, first, last, count, levels):
    """The `count` largest values of a row with at least so many edges, in falling order.

    In short rows every value is compared with every level, as branches are often mispredicted; in long rows
    one branch skips most values.
    """
    for slot in range(count):
        levels[slot] = -np.inf
    if last - first <= SHORT and count <= 16:
        for e in range(first, last):
            value = values[e]
            for slot in range(count - 1, 0, -1):
                levels[slot] = _insert_level(value, levels[slot - 1], levels[slot])
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
def _margin(b, bounds, rowptr, values, k, radius, gradient, sums, floats, integers, doubles):
    """Σ_m relu(R − c(m) / m) / R of every row, and its gradient.

    Working space of block b: `floats` [2, 2 k] for the 2 k largest values (levels) and the gradients by rank,
    `integers` [2 k] for how often each level occurred so far, `doubles` [k] for −∂/∂c(m).
    """
    levels, by_rank = floats[b, 0], floats[b, 1]
    ties, d_cost = integers[b], doubles[b]
    for i in range(bounds[b], bounds[b + 1]):
        first, last = rowptr[i], rowptr[i + 1]
        sums[i] = 0
        count = min(k, last - first - k)
        if count <= 0:
            gradient[first:last] = 0
            continue
        _levels(values, first, last, k + count, levels)
        cost = 0.0
        for m in range(1, count + 1):
            cost += levels[k - m] - levels[k + m - 1]
            short = radius - cost / m
            d_cost[m - 1] = 1 / (m * radius) if short > 0 else 0
            sums[i] += max(short, 0.0) / radius
        by_rank[: k - count] = 0
        total = 0.0
        for m in range(count, 0, -1):  # the m-th pair is part of the costs of m and more swaps
            total += d_cost[m - 1]
            by_rank[k - m], by_rank[k + m - 1] = -total, total
        ties[: k + count] = 0
        for e in range(first, last):
            rank = 0
            for slot in range(k + count):
                rank += levels[slot] > values[e]
            gradient[e] = 0
            if rank < k + count:
                equal = ties[rank]  # equal values rank in edge order
                ties[rank] += 1
                if rank + equal < k + count:
                    gradient[e] = by_rank[rank + equal]


def margins(values: Tensor, rowptr: Tensor, k: int, radius: float) -> tuple[Tensor, Tensor, float]:
    """`swap_margin`: value, gradient, and a factor the gradient is still to be multiplied with."""
    array, pointers = _array(values), _array(rowptr)
    gradient, sums = np.empty_like(array), np.empty(len(pointers) - 1, np.float64)
    bounds = blocks(pointers)
    count = len(bounds) - 1
    sizes = ((count, 2, 2 * k), array.dtype), ((count, 2 * k), np.int64), ((count, k), np.float64)
    space = (np.empty(*size) for size in sizes)
    _launch(_margin, count, bounds, pointers, array, k, radius, gradient, sums, *space)
    factor = 1 / max(1, int(np.clip(np.diff(pointers) - k, 0, k).sum()))
    return values.new_tensor(sums.sum() * factor), torch.from_numpy(gradient), factor


@compiled(inline="always")
def _insert(value, e, filled, best, leading):
    """Insert an edge into the list of the largest of its row, `filled` so far; returns the new `filled`."""
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
def _pair_rows(values, exists, members, rowptr, rows, strong, weak):
    """See `pick_pairs`; edges that do not count have value −∞, so they end up last and are no pair."""
    k = strong.shape[1]
    high, low = np.empty(k, values.dtype), np.empty(k, values.dtype)
    for r in range(len(rows)):
        filled, filled_weak = 0, 0
        for e in range(rowptr[rows[r]], rowptr[rows[r] + 1]):
            outside, inside = exists[e] and not members[e], exists[e] and members[e]
            filled = _insert(values[e] if outside else -np.inf, e, filled, high, strong[r])
            filled_weak = _insert(-values[e] if inside else -np.inf, e, filled_weak, low, weak[r])
        for s in range(k):
            out, own = strong[r, s], weak[r, s]
            if s >= filled or not (exists[out] and not members[out] and exists[own] and members[own]):
                strong[r, s] = weak[r, s] = -1


def pick_leaders(values: Tensor, rowptr: Tensor, count: int) -> Tensor:
    """Positions [N, count] of the largest of every row, -1 where a row has fewer; see `leaders`."""
    positions = np.full((rowptr.numel() - 1, count), -1, dtype=np.int64)
    _lead_rows(values.numpy(), rowptr.numpy(), positions)
    return torch.from_numpy(positions)


def pick_pairs(
    values: Tensor, exists: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Positions [R, k] of strong outsiders and weak members, -1 where there is no pair; see `swap_gaps`."""
    strong, weak = (np.full((len(rows), k), -1, np.int64) for _ in range(2))
    _pair_rows(*(_array(t) for t in (values, exists, members, rowptr, rows)), strong, weak)
    return torch.from_numpy(strong), torch.from_numpy(weak)
