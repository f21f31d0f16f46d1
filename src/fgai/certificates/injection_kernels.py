"""Row loops of the certificates against injection: the worst weighted mean over intervals, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai.certificates.kernels import _array, _over_rows
from fgai.compiled import compiled
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_HALVINGS = 30


def class_kept(
    adjacency: Adjacency,
    low: Tensor,
    high: Tensor,
    new: Tensor,
    lead: Tensor,
    own: Tensor,
    words: Tensor,
    classes: Tensor,
    first: int,
    neighbours: int,
    rounding: float,
) -> Tensor:
    """Whether a node's class stays ahead of every other, whatever the scores and values in their intervals.

    Nodes of other classes than the A from `first` on are not asked about, and count as kept.

    Args:
        adjacency: the layer's edges.
        low: lower ends of the scores [E, 1].
        high: upper ends.
        new: ceilings of a new neighbour's score [N, 1, S].
        lead: least lead of class a over b that a neighbour says [N, A, C].
        own: the same for a node itself.
        words: with each ceiling, the same for a new neighbour [S, C, C].
        classes: [N].
        first: of the classes a.
        neighbours: new ones.
        rounding: relative to what is summed.
    """
    out = np.ones(classes.numel(), dtype=np.bool_)
    arrays = [
        _array(t) for t in (adjacency.source, low[:, 0], high[:, 0], new[:, 0], lead, own, words, classes)
    ]
    _over_rows(_class_kept, adjacency.rowptr, *arrays, first, float(neighbours), rounding, out)
    return torch.from_numpy(out)


def mean_bounds(
    adjacency: Adjacency,
    low: Tensor,
    high: Tensor,
    new: Tensor,
    least: Tensor,
    most: Tensor,
    box: tuple[Tensor, Tensor],
    neighbours: int,
) -> tuple[Tensor, Tensor]:
    """Ends of `Σ e^s v / Σ e^s` over intervals of scores and values, new neighbours included.

    Args:
        adjacency: the layer's edges.
        low: lower ends of the scores [E, H].
        high: upper ends.
        new: ceiling of a new neighbour's score [N, H].
        least: lower ends of the values [N, H, C].
        most: upper ends.
        box: ends of a new neighbour's values, [H, C] each.
        neighbours: new ones.
    """
    ends = []
    for sign, values, edge in ((1.0, least, box[0]), (-1.0, -most, -box[1])):
        out = np.zeros(values.shape)
        arrays = [_array(t) for t in (adjacency.source, low, high, new, values, edge)]
        _over_rows(_least_mean, adjacency.rowptr, *arrays, float(neighbours), out)
        ends.append(sign * torch.from_numpy(out))
    return ends[0], ends[1]


def order_kept(
    adjacency: Adjacency, low: Tensor, high: Tensor, members: Tensor, slope: float, rounding: float
) -> Tensor:
    """Whether every member of a node's top-k scores above every other neighbour, in the mean over the heads.

    Args:
        adjacency: the layer's edges.
        low: lower ends of what differs between neighbours [E, H].
        high: upper ends.
        members: bool [E], the top-k.
        slope: least slope of the score in it, at most 1.
        rounding: relative to the ends.
    """
    out = np.zeros(adjacency.num_nodes, dtype=np.bool_)
    arrays = [_array(t) for t in (low, high, members)]
    _over_rows(_order_kept, adjacency.rowptr, *arrays, float(slope), rounding, out)
    return torch.from_numpy(out)


@compiled
def _order_kept(start, stop, rowptr, low, high, members, slope, rounding, out):
    heads = low.shape[1]
    for i in range(start, stop):
        kept = True
        for e in range(rowptr[i], rowptr[i + 1]):
            if not members[e]:
                continue
            for f in range(rowptr[i], rowptr[i + 1]):
                if members[f]:
                    continue
                ahead, size = 0.0, 0.0
                for h in range(heads):
                    gap = low[e, h] - high[f, h]
                    ahead += slope * gap if gap > 0 else gap
                    size += abs(low[e, h]) + abs(high[f, h])
                if not ahead > rounding * size:
                    kept = False
                    break
            if not kept:
                break
        out[i] = kept


@compiled
def _class_kept(
    start, stop, rowptr, source, low, high, new, lead, own, words, classes, first, neighbours, rounding, out
):
    sectors, width = words.shape[0], words.shape[1]
    for i in range(start, stop):
        top, at = classes[i], classes[i] - first
        if not 0 <= at < lead.shape[1]:
            continue
        peak = -np.inf
        if neighbours > 0:
            for s in range(sectors):
                peak = max(peak, new[i, s])
        for e in range(rowptr[i], rowptr[i + 1]):
            peak = max(peak, high[e])
        kept = rowptr[i + 1] > rowptr[i]
        for c in range(width):
            if c == top or not kept:
                continue
            total, size = 0.0, 0.0
            for e in range(rowptr[i], rowptr[i + 1]):
                j = source[e]
                least = own[j, at, c] if j == i else lead[j, at, c]
                term = np.exp((high[e] if least < 0 else low[e]) - peak) * least
                total += term
                size += abs(term)
            if neighbours > 0:
                worst = 0.0
                for s in range(sectors):
                    if words[s, top, c] < 0:
                        worst = min(worst, np.exp(new[i, s] - peak) * words[s, top, c])
                total += neighbours * worst
                size -= neighbours * worst
            kept = total > rounding * size
        out[i] = kept


@compiled
def _least_mean(start, stop, rowptr, source, low, high, new, values, edge, neighbours, out):
    heads, channels = values.shape[1], values.shape[2]
    longest = 0
    for i in range(start, stop):
        longest = max(longest, rowptr[i + 1] - rowptr[i])
    weak, strong, said = np.empty(longest + 1), np.empty(longest + 1), np.empty(longest + 1)
    for i in range(start, stop):
        first, count = rowptr[i], rowptr[i + 1] - rowptr[i]
        last = count + 1 if neighbours > 0 else count  # a new neighbour stands behind the others
        for h in range(heads):
            peak = new[i, h] if neighbours > 0 else -np.inf
            for j in range(count):
                peak = max(peak, high[first + j, h])
            for j in range(count):  # exponentials are dear: one of each for all channels and halvings
                weak[j], strong[j] = np.exp(low[first + j, h] - peak), np.exp(high[first + j, h] - peak)
            weak[count], strong[count] = 0.0, neighbours * np.exp(new[i, h] - peak)
            for c in range(channels):
                for j in range(count):
                    said[j] = values[source[first + j], h, c]
                said[count] = edge[h, c]
                out[i, h, c] = _least_of(said[:last], weak, strong)


@compiled
def _least_of(said, weak, strong):
    """The least weighted mean of numbers whose weights lie between two ends; 0 of none."""
    if len(said) == 0:
        return 0.0
    floor, ceiling = said.min(), said.max()
    if not floor < ceiling:
        return floor
    # At the floor no term is negative, so it is a bound; keep it one.
    for _ in range(_HALVINGS):
        middle = (floor + ceiling) / 2
        total = 0.0
        for j in range(len(said)):
            away = said[j] - middle
            total += (strong[j] if away < 0 else weak[j]) * away
        if total >= 0:
            floor = middle
        else:
            ceiling = middle
    return floor
