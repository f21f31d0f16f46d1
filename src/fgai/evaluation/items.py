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
    if task.name == "link":
        assert graph.links is not None
        ends, truth = graph.links.pairs[:, rows], graph.links.y[rows]
        found = per_node[:, ends].nanmean(1)
        return {
            name: layered([metrics.mean_over(values[truth == kind]) for values in found], sharpest)
            for name, kind in (("links", 1), ("pairs", 0))
        }
    if task.name == "graph":
        by_layer = [graph_overlap(pair, graph, k)[rows] for pair in pairs]
        return {"graphs": layered([metrics.mean_over(values) for values in by_layer], sharpest)}
    return {}


def graph_overlap(pair: Pair, graph: Graph, k: int) -> Tensor:
    """[G] overlap of the top-k edges of every small graph; NaN for those with at most k edges."""
    assert graph.batch is not None
    degree = pair.rowptr.diff()
    weight = torch.repeat_interleave(degree, degree).to(pair.before.dtype)
    return metrics.overlap_per_node(pair.before * weight, pair.after * weight, graph_rows(pair, graph), k)


def graph_rows(pair: Pair, graph: Graph) -> Tensor:
    """[G+1] where the edges of each small graph begin, the nodes of a batch standing graph by graph."""
    assert graph.batch is not None
    first = torch.searchsorted(graph.batch, torch.arange(graph.num_graphs + 1, device=graph.batch.device))
    return pair.rowptr[first]


def item_chance(pairs: Sequence[Pair], graph: Graph, rows: Tensor, k: int, sharpest: int) -> dict[str, Any]:
    """What a random ranking scores in `item_overlaps`."""
    task = task_of(graph)
    if task.name == "node":
        return {}
    values = []
    for pair in pairs:
        rowptr = pair.rowptr if task.name == "link" else graph_rows(pair, graph)
        degree = rowptr.diff().double()
        values.append(torch.where(degree > k, k / degree, float("nan")))
    if task.name == "graph":
        return {"graphs": layered([metrics.mean_over(v[rows]) for v in values], sharpest)}
    return item_overlaps(pairs, torch.stack(values), graph, rows, k, sharpest)
