"""Explanations of links and of whole graphs: what becomes of them, from attention before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fgai import metrics
from fgai.evaluation.measures import Pair, layered
from fgai.graph import Graph
from fgai.tasks import task_of


def item_overlaps(
    pairs: Sequence[Pair], per_node: Tensor, graph: Graph, rows: Tensor, k: int, sharpest: int
) -> dict[str, Any]:
    """Top-k overlap of the explanations of links or graphs; nothing for nodes, whose own stands elsewhere.

        link   both ends' neighbourhoods explain a pair: the mean of the overlaps at its ends (their edges are
               disjoint), over ends with more than k neighbours; `links` and `pairs` that are none apart
        graph  the k edges of a small graph with the largest attention relative to uniform, `w_ij · degree_i`,
               over graphs with more than k edges. Without the degree, edges into leaves would always win

    Args:
        pairs: attention before and after, one per layer.
        per_node: [L, N] overlap at every node, NaN where it does not count.
        graph: the original one.
        rows: [T] the links or graphs that are explained.
        k: size of a neighbourhood's, or of a graph's explanation.
        sharpest: which layer is reported as such.

    Returns:
        By kind, values per layer; NaN where nothing counts.
    """
    task = task_of(graph)
    ranges = [task.ranked_together(graph, pair.rowptr) for pair in pairs]
    if any(starts is not None for starts in ranges):
        found = [range_overlap(pair, starts, k) for pair, starts in zip(pairs, ranges, strict=True)]
        per_node = torch.stack(found)
    return _by_kind(task.explained(per_node, graph, rows), sharpest)


def range_overlap(pair: Pair, starts: Tensor | None, k: int) -> Tensor:
    """[R] overlap of the top-k edges of every range that begins at `starts`; NaN for at most k edges."""
    degree = pair.rowptr.diff()
    weight = torch.repeat_interleave(degree, degree).to(pair.before.dtype)
    rowptr = pair.rowptr if starts is None else starts
    before, after = (shown * weight for shown in pair.shown)
    return metrics.overlap_per_node(before, after, rowptr, k)


def item_chance(pairs: Sequence[Pair], graph: Graph, rows: Tensor, k: int, sharpest: int) -> dict[str, Any]:
    """What a random ranking scores in `item_overlaps`."""
    task = task_of(graph)
    values = []
    for pair in pairs:
        starts = task.ranked_together(graph, pair.rowptr)
        degree = (pair.rowptr if starts is None else starts).diff().double()
        values.append(torch.where(degree > k, k / degree, float("nan")))
    return _by_kind(task.explained(torch.stack(values), graph, rows), sharpest)


def _by_kind(explained: dict[str, Tensor], sharpest: int) -> dict[str, Any]:
    """Means over what counts, per layer, of every kind of explanation."""
    return {
        name: layered([metrics.mean_over(values) for values in by_layer], sharpest)
        for name, by_layer in explained.items()
    }
