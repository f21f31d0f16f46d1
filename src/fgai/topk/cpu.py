"""The distance and the margin of top-k sets on the CPU, with their gradients, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.compiled import compiled

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

# Edges from which a second thread pays.
MANY = 50_000
# Edges of a row up to which branches cost more than they save.
SHORT = 64


@compiled(inline="always")
def _sink(value, above, level):
    """The level after `value` came: the value itself if it fits between the level and the one above."""
    lower = value if value < above else above
    return lower if lower > level else level


@compiled
def _five(values, first, last, levels):
    """The five largest values of a row, in registers."""
    a = b = c = d = f = values.dtype.type(-np.inf)
    for e in range(first, last):
        value = values[e]
        f, d, c, b = _sink(value, d, f), _sink(value, c, d), _sink(value, b, c), _sink(value, a, b)
        a = value if value > a else a
    levels[0], levels[1], levels[2], levels[3], levels[4] = a, b, c, d, f


@compiled
def _levels(values, first, last, count, levels):
    """The `count` largest values of a row with at least so many edges, in falling order.

    In short rows a branch predictor is often wrong, so every value is compared with every level; in long rows
    most values are smaller than all levels, and one branch skips them.
    """
    if count == 5 and last - first <= SHORT:
        _five(values, first, last, levels)
        return
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


@compiled
def _spare(levels, count):
    """How many edges with just the last level belong to the `count` largest."""
    count_equal = 0
    for slot in range(count):
        count_equal += levels[slot] == levels[count - 1]
    return count_equal


@compiled
def _distance(low, high, rowptr, grown, w, v, mask, k, slope, sums):
    """Σ |w − v| on the top-k of w plus on that of v (all if k is 0) of every row, and its slope in v.

    `mask`, unless it is empty, is the top-k of w; the rows of v begin at `grown`.
    """
    masked = len(mask) > 0
    levels = np.empty(max(k, 1), w.dtype)
    for i in range(low, high):
        first, last = rowptr[i], rowptr[i + 1]
        more = grown[i] - first
        total = 0.0
        if k == 0 or last - first <= k:
            for e in range(first, last):
                apart = v[e + more] - w[e]
                total += 2 * abs(apart)
                slope[e + more] = 2 * (apart > 0) - 2 * (apart < 0)
            sums[i] = total
            continue
        level, spare = w[first], 0
        if not masked:
            _levels(w, first, last, k, levels)
            level, spare = levels[k - 1], _spare(levels, k)
        _levels(v, first + more, last + more, k, levels)
        other, room = levels[k - 1], _spare(levels, k)
        for e in range(first, last):
            after = v[e + more]
            here = int(after > other or (after == other and room > 0))
            room -= after == other
            if masked:
                here += mask[e]
            else:
                here += int(w[e] > level or (w[e] == level and spare > 0))
                spare -= w[e] == level
            apart = after - w[e]
            total += here * abs(apart)
            slope[e + more] = here * (int(apart > 0) - int(apart < 0))
        sums[i] = total


@compiled
def _margin(low, high, rowptr, values, k, radius, slope, sums):
    """Σ_m relu(R − c(m) / m) / R of every row, and its slope at the edges that matter."""
    levels = np.empty(2 * k, values.dtype)
    flows, counts = np.empty(2 * k, values.dtype), np.empty(2 * k, np.int64)
    share = np.empty(k, np.float64)
    for i in range(low, high):
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


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fgai-rows")


def _over_rows(work: Callable[..., None], rowptr: Any, *arguments: Any) -> None:
    """Run `work(low, high, rowptr, *given)` over all rows, on as many threads as torch uses."""
    rows, edges = len(rowptr) - 1, int(rowptr[-1])
    threads = min(torch.get_num_threads(), max(1, edges // MANY))
    if threads == 1:
        work(0, rows, rowptr, *arguments)
        return
    bounds = np.searchsorted(rowptr, np.arange(1, threads) * edges // threads)
    bounds = np.concatenate([[0], bounds, [rows]])
    parts = [_pool(threads).submit(work, a, b, rowptr, *arguments) for a, b in pairwise(bounds.tolist())]
    for part in parts:
        part.result()


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


class _Sloped(Function):
    """A scalar whose kernel gives its slope in `w_tilde`, which is minus that in `w` (None: no such tensor).

    The slope is still to be multiplied with the scale, unless that is None.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Any, w: Tensor | None, w_tilde: Tensor, *options: Any) -> Tensor:
        value, slope, ctx.scale = kernel(w, w_tilde, *options)
        ctx.save_for_backward(slope)
        return value  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flow = ctx.saved_tensors[0] * (gradients[0] if ctx.scale is None else gradients[0] * ctx.scale)
        needed = ctx.needs_input_grad
        rest = (None,) * (len(needed) - 3)
        return None, -flow if needed[1] else None, flow if needed[2] else None, *rest


def _distances(w: Tensor, w_tilde: Tensor, *options: Any) -> tuple[Tensor, Tensor, float]:
    rowptr, k, mask, factor, grown = options
    before, after, ptr = _array(w), _array(w_tilde), _array(rowptr)
    starts = ptr if grown is None else _array(grown)
    make = np.empty if grown is None else np.zeros  # nothing is written at the edges that came
    slope, sums = make(len(after), np.int8), np.empty(len(ptr) - 1, np.float64)
    _over_rows(_distance, ptr, starts, before, after, _array(mask), k, slope, sums)
    scale = 0.25 * factor / max(1, int(np.count_nonzero(ptr[1:] > ptr[:-1])))
    return w_tilde.new_tensor(sums.sum() * scale), torch.from_numpy(slope), scale


def _margins(_: None, values: Tensor, rowptr: Tensor, k: int, radius: float) -> tuple[Tensor, Tensor, float]:
    array, ptr = _array(values), _array(rowptr)
    slope, sums = np.empty_like(array), np.empty(len(ptr) - 1, np.float64)
    _over_rows(_margin, ptr, array, k, radius, slope, sums)
    scale = 1 / max(1, int(np.clip(ptr[1:] - ptr[:-1] - k, 0, k).sum()))
    return values.new_tensor(sums.sum() * scale), torch.from_numpy(slope), scale


def distance(
    w: Tensor,
    w_tilde: Tensor,
    rowptr: Tensor,
    k: int | None,
    mask: Tensor | None = None,
    factor: float = 1.0,
    grown: Tensor | None = None,
) -> Tensor:
    """See `topk_l1`, form "tv", scope "node"; k None takes all edges. Grown rows: no gradient in w."""
    members = torch.empty(0, dtype=torch.bool) if mask is None else mask
    options = rowptr, k or 0, members, factor, grown
    return _Sloped.apply(_distances, w, w_tilde, *options)  # type: ignore[no-any-return]


def margin(values: Tensor, rowptr: Tensor, k: int, radius: float) -> Tensor:
    """See `swap_margin`."""
    return _Sloped.apply(_margins, None, values, rowptr, k, radius)  # type: ignore[no-any-return]
