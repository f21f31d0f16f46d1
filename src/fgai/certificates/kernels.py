"""Compiled loops over the rows of a graph, in float64: dual norms, and weighted means over intervals.

A perturbation δ of a node's attention in a ball of radius R moves `Σ_j δ_j z_j` by at most `R ·
‖(z_j)_j‖_dual`: the maximum over neighbours for l1, the Euclidean norm for l2, the sum for linf. `index` [E]
is the row of `values` [M, H, C] that each edge reads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai.bounds.scores import _ScoreBounds
from fgai.compiled import compiled
from fgai.sparse import Adjacency
from fgai.topk import NORMS

_BLOCKS = 8  # of rows per thread: several, so that no thread waits long for a block of hubs


def _channel_norms(rowptr: Tensor, index: Tensor, values: Tensor, norm: str) -> Tensor:
    """Return `out[i, h, c] = ‖(values[index[e], h, c])_{e into i}‖_dual`, float64; 0 without edges."""
    flat = values.flatten(1)
    out = _run_rows(_channel_norms_rows, rowptr, flat.shape[1:], index, flat, NORMS.index(norm))
    return out.view(-1, *values.shape[1:])


def _linear_norms(
    rowptr: Tensor, index: Tensor, values: Tensor, slope: Tensor, weight: Tensor, norm: str
) -> Tensor:
    """Return how far one unit of radius, in every head, can move linear functions of a node's state [N, F].

    out[i, f] = Σ_h ‖(Σ_c values[index[e], h, c] · slope[i, h, c] · weight[h, c, f])_{e into i}‖_dual
    """
    arguments = index, values, slope, weight, NORMS.index(norm)
    return _run_rows(_linear_norms_rows, rowptr, weight.shape[2:], *arguments)


def _class_norms(rowptr: Tensor, index: Tensor, values: Tensor, top: Tensor, norm: str) -> Tensor:
    """Return how far one unit of radius, in every head at once, can move the logits of each node [N, C + 2].

        margin[i, c] = Σ_h ‖(z_ehc - z_eh,top(i))_e‖_dual          how fast class c can gain on the top class
        range[i]     = 2 max_c Σ_h ‖(z_ehc - mid_eh)_e‖_dual       how fast any class can gain on another
        total[i]     = Σ_h max_e ‖z_eh‖_1  (l1)  or  Σ_h Σ_c ‖(z_ehc)_e‖_dual  (l2, linf)

    z are the `values` [M, H, C], `mid_eh` is half way between the largest and the smallest class of z_eh.
    Columns are the margins of all classes, then range and total.
    """
    columns = (values.shape[2] + 2,)
    return _run_rows(_class_norms_rows, rowptr, columns, index, values, top, NORMS.index(norm))


def _value_range(rowptr: Tensor, index: Tensor, values: Tensor, top: Tensor | None = None) -> Tensor:
    """Return the range [N, H, C] of neighbours' values, or of margins `z[h, top(i)] - z[h, c]`; 0 of none."""
    top = torch.full((rowptr.numel() - 1,), -1) if top is None else top
    return _run_rows(_value_range_rows, rowptr, values.shape[1:], index, values, top)


def _margin_gains(
    rowptr: Tensor, index: Tensor, weight: Tensor, radius: Tensor, growth: Tensor, change: Tensor, top: Tensor
) -> Tensor:
    """Return the most that moving values and weights adds to a class's margin over the top one [N, H, C].

        out[i, h, c] = u_c + u_top,
        u_c = min(growth Σ_e w_e r_ec,  Σ_e w_e r_ec + change (max_e r_ec - min_e r_ec))

    r is `radius` [M, H, C], w `weight` [E, H]; `growth`, `change` [N, H]. Nodes of `top` -1 are left out (0).
    """
    arguments = index, weight, radius, growth, change, top
    return _run_rows(_margin_gains_rows, rowptr, radius.shape[1:], *arguments)


def _mean_bounds(
    adjacency: Adjacency,
    scores: _ScoreBounds,
    values: tuple[Tensor, Tensor],
    loops: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    neighbours: int,
) -> tuple[Tensor, Tensor]:
    """Return lower and upper bounds of `Σ e^s v / Σ e^s` [N, H, C] over intervals of scores and values.

    `values` are (low, high) of a node's neighbours, `loops` of the node itself, `new` [H, C] of new ones.
    """
    rowptr, shape = adjacency.rowptr, values[0].shape[1:]
    of_scores = adjacency.source, scores.low, scores.high, scores.new.amax(2)
    lowest = (one[0] for one in (values, loops, new))
    highest = (-one[1] for one in (values, loops, new))
    low = _run_rows(_least_mean_rows, rowptr, shape, *of_scores, *lowest, float(neighbours))
    high = -_run_rows(_least_mean_rows, rowptr, shape, *of_scores, *highest, float(neighbours))
    return low, high


def _lost_members(rowptr: Tensor, top: Tensor, k: int, ahead: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Count, float64 [N], the members of each top-k, bool [E], that are not `ahead` of all other edges."""
    degree = rowptr.diff()
    row, sizes = torch.repeat_interleave(torch.arange(len(degree)), degree), degree.clamp(max=k)
    members, first = top.nonzero().flatten(), sizes.cumsum(0) - sizes  # index of a node's first member
    others = (~top).nonzero().flatten()
    rows, lost = row[others], torch.zeros(len(degree), dtype=torch.float64)
    for number in range(k if len(others) else 0):
        overtaken = ~ahead(members[first[rows] + number], others)
        lost += torch.zeros_like(lost).index_fill(0, rows[overtaken], 1.0)
    return lost


def _array(value: Any) -> Any:
    """Return a tensor as an array, floats in float64."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu().contiguous()
    return (value.double() if value.is_floating_point() else value).numpy()


def _run_rows(kernel: Callable[..., None], rowptr: Tensor, shape: tuple[int, ...], *arguments: Any) -> Tensor:
    """Return `out` [N, *shape], filled by `kernel(start, stop, rowptr, *arguments, out)` in blocks of rows.

    Blocks have about as many edges each.
    """
    threads, pointers, arrays = torch.get_num_threads(), _array(rowptr), [_array(one) for one in arguments]
    out = torch.zeros(rowptr.numel() - 1, *shape, dtype=torch.float64)
    marks = np.linspace(0, pointers[-1], threads * _BLOCKS + 1)[1:-1]
    bounds = np.unique([0, *np.searchsorted(pointers, marks), len(pointers) - 1])
    with ThreadPoolExecutor(threads) as pool:
        blocks = [pool.submit(kernel, a, b, pointers, *arrays, out.numpy()) for a, b in pairwise(bounds)]
    for block in blocks:
        block.result()
    return out


# The kernels release the interpreter, so plain threads run them side by side.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@compiled
def _accumulate(row, centre, norm, into):
    """Add one edge to the running dual norms of `row - centre`; l2 collects squares."""
    if norm == 0:
        for c in range(row.shape[0]):
            size = abs(row[c] - centre)
            into[c] = size if size > into[c] else into[c]
    elif norm == 1:
        for c in range(row.shape[0]):
            into[c] += (row[c] - centre) * (row[c] - centre)
    else:
        for c in range(row.shape[0]):
            into[c] += abs(row[c] - centre)


@compiled
def _channel_norms_rows(start, stop, rowptr, index, values, norm, out):
    for i in range(start, stop):
        for e in range(rowptr[i], rowptr[i + 1]):
            _accumulate(values[index[e]], 0.0, norm, out[i])
        if norm == 1:
            out[i] = np.sqrt(out[i])


@compiled
def _linear_norms_rows(start, stop, rowptr, index, values, slope, weight, norm, out):
    heads, channels, columns = weight.shape
    scaled, product, into = np.empty((channels, columns)), np.empty(columns), np.empty(columns)
    for i in range(start, stop):
        for h in range(heads):
            into[:] = 0.0
            for c in range(channels):
                for f in range(columns):
                    scaled[c, f] = slope[i, h, c] * weight[h, c, f]
            for e in range(rowptr[i], rowptr[i + 1]):
                row = values[index[e], h]
                product[:] = 0.0
                for c in range(channels):
                    for f in range(columns):
                        product[f] += row[c] * scaled[c, f]
                _accumulate(product, 0.0, norm, into)
            out[i] += np.sqrt(into) if norm == 1 else into


@compiled
def _class_norms_rows(start, stop, rowptr, index, values, top, norm, out):
    heads, classes = values.shape[1], values.shape[2]
    for i in range(start, stop):
        to_middle = np.zeros(classes)
        for h in range(heads):
            to_top, to_mid, to_zero = np.zeros(classes), np.zeros(classes), np.zeros(classes)
            largest = 0.0
            for e in range(rowptr[i], rowptr[i + 1]):
                row = values[index[e], h]
                _accumulate(row, row[top[i]], norm, to_top)
                _accumulate(row, (row.max() + row.min()) / 2, norm, to_mid)
                if norm == 0:
                    largest = max(largest, np.abs(row).sum())
                else:
                    _accumulate(row, 0.0, norm, to_zero)
            if norm == 1:
                to_top, to_mid, to_zero = np.sqrt(to_top), np.sqrt(to_mid), np.sqrt(to_zero)
            out[i, :classes] += to_top
            to_middle += to_mid
            out[i, classes + 1] += largest + to_zero.sum()
        out[i, classes] = 2 * to_middle.max()


@compiled
def _extend_range(row, shift, sign, lowest, highest):
    for c in range(row.shape[0]):
        value = shift + sign * row[c]
        lowest[c] = value if value < lowest[c] else lowest[c]
        highest[c] = value if value > highest[c] else highest[c]


@compiled
def _value_range_rows(start, stop, rowptr, index, values, top, out):
    heads, channels = values.shape[1], values.shape[2]
    for i in range(start, stop):
        if rowptr[i] == rowptr[i + 1]:
            continue
        for h in range(heads):
            lowest, highest = np.full(channels, np.inf), np.full(channels, -np.inf)
            for e in range(rowptr[i], rowptr[i + 1]):
                row = values[index[e], h]
                if top[i] < 0:
                    _extend_range(row, 0.0, 1.0, lowest, highest)
                else:
                    _extend_range(row, row[top[i]], -1.0, lowest, highest)
            out[i, h] = highest - lowest


@compiled
def _margin_gains_rows(start, stop, rowptr, index, weight, radius, growth, change, top, out):
    heads, classes = radius.shape[1], radius.shape[2]
    for i in range(start, stop):
        if rowptr[i] == rowptr[i + 1] or top[i] < 0:
            continue
        for h in range(heads):
            mixed, lowest, highest = np.zeros(classes), np.full(classes, np.inf), np.zeros(classes)
            for e in range(rowptr[i], rowptr[i + 1]):
                row, share = radius[index[e], h], weight[e, h]
                for c in range(classes):
                    mixed[c] += share * row[c]
                _extend_range(row, 0.0, 1.0, lowest, highest)
            for c in range(classes):
                mixed[c] = min(growth[i, h] * mixed[c], mixed[c] + change[i, h] * (highest[c] - lowest[c]))
            out[i, h] = mixed + mixed[top[i]]


_HALVINGS = 30


@compiled
def _least_mean_rows(start, stop, rowptr, source, low, high, new, values, loops, of_new, neighbours, out):
    heads, channels = values.shape[1], values.shape[2]
    longest = 0
    for i in range(start, stop):
        longest = max(longest, rowptr[i + 1] - rowptr[i])
    weak, strong, numbers = np.empty(longest + 1), np.empty(longest + 1), np.empty(longest + 1)
    for i in range(start, stop):
        first, count = rowptr[i], rowptr[i + 1] - rowptr[i]
        last = count + 1 if neighbours > 0 else count  # a new neighbour comes after the others
        for h in range(heads):
            peak = new[i, h] if neighbours > 0 else -np.inf
            for j in range(count):
                peak = max(peak, high[first + j, h])
            for j in range(count):  # one exponential of each for all channels and halvings
                weak[j], strong[j] = np.exp(low[first + j, h] - peak), np.exp(high[first + j, h] - peak)
            weak[count], strong[count] = 0.0, neighbours * np.exp(new[i, h] - peak)
            for c in range(channels):
                for j in range(count):
                    at = source[first + j]
                    numbers[j] = loops[at, h, c] if at == i else values[at, h, c]
                numbers[count] = of_new[h, c]
                out[i, h, c] = _least_mean(numbers[:last], weak, strong)


@compiled
def _least_mean(numbers, weak, strong):
    """Return the least weighted mean of numbers whose weights lie between `weak` and `strong`; 0 of none."""
    if len(numbers) == 0:
        return 0.0
    floor, ceiling = numbers.min(), numbers.max()
    if not floor < ceiling:
        return floor
    # The floor is a lower bound, as no term is negative there; it stays one.
    for _ in range(_HALVINGS):
        middle = (floor + ceiling) / 2
        total = 0.0
        for j in range(len(numbers)):
            away = numbers[j] - middle
            total += (strong[j] if away < 0 else weak[j]) * away
        if total >= 0:
            floor = middle
        else:
            ceiling = middle
    return floor
