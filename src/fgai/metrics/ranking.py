"""Whether two attentions point at the same neighbours: top-k overlap and rank correlation.

Both arguments hold one value per edge on the same edges (matched by source and destination): what neighbours
are ranked by, see `LayerAttention.ranking`.
Before and after an attack, that means the original edges: the top-k of a node among its old neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fgai import checks, topk
from fgai.attention import AttentionMap
from fgai.compiled import compiled
from fgai.metrics.given import check_attention, check_attentions
from fgai.metrics.nodes import mean_over
from fgai.metrics.spec import metric
from fgai.ops.segments import check_row_pointers, row_index, row_max, row_order, row_sum
from fgai.typed import typed

CORRELATIONS = ("spearman", "kendall")


@typed
def overlap_per_node(w: Tensor, w_other: Tensor, rowptr: Tensor, k: int = 5) -> Tensor:
    """Top-k overlap `V_k = |T_k ∩ T'_k| / k` of every node with more than k neighbours; NaN for the others.

    Args:
        w: [E].
        w_other: [E], on the same edges.
        rowptr: [N+1].
        k: how many neighbours are shown.

    Returns:
        float64 [N].
    """
    check_attentions(w, w_other, rowptr)
    checks.whole(k, "k", 1)
    shared = topk.overlap(topk.topk_mask(w, rowptr, k), topk.topk_mask(w_other, rowptr, k), rowptr)
    return torch.where(rowptr.diff() > k, shared, float("nan"))


@metric(
    direction="higher",
    low=0,
    high=1,
    parameters=("k",),
    paths=(
        "overlap.prediction",
        "overlap.explanation",
        "overlap_touched.prediction",
        "overlap_touched.explanation",
        "endpoints.*.*.overlap",
        "overlap_mean.prediction",
        "overlap_mean.explanation",
        "overlap_mean_touched.prediction",
        "overlap_mean_touched.explanation",
        "similarity.overlap",
        "similarity.overlap_mean",
        "same_class.*.overlap",
        "explanations.prediction",
        "explanations.explanation",
        "explanations.similarity",
    ),
    headings={
        "overlap.prediction.all": "overlap",
        "overlap_touched.prediction.all": "touched",
        "overlap_touched.explanation.all": "touched, expl.",
        "explanations.prediction.links.all": "links",
        "explanations.prediction.pairs.all": "other pairs",
        "explanations.prediction.graphs.all": "graphs",
        "similarity.overlap.all": "similarity",
    },
)
@typed
def overlap(w: Tensor, w_other: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None) -> float:
    """Mean top-k overlap over nodes with more than k neighbours.

        V_k = |T_k(w) ∩ T_k(w')| / k

    Nodes with at most k neighbours are left out: their overlap is 1 whatever the attention.

    Args:
        w: [E].
        w_other: [E], on the same edges.
        rowptr: [N+1].
        k: how many neighbours are shown.
        nodes: bool [N] or indices; only these nodes count, as those within reach of a perturbation.

    Returns:
        In [0, 1]; NaN if no node counts. `overlap_chance` is what a random ranking scores.

    Example:
        >>> w, v = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.5, 0.2, 0.3])
        >>> overlap(w, v, torch.tensor([0, 3]), k=2)
        0.5
    """
    return mean_over(overlap_per_node(w, w_other, rowptr, k), nodes)


@typed
def kept_by_layer(before: AttentionMap, after: AttentionMap, k: int, nodes: Sequence[Tensor]) -> list[float]:
    """Top-k overlap before and after a perturbation, layer by layer, on the edges that both have.

    Attacks are judged by it and tables report it. A layer where no node counts has no value: NaN.

    Args:
        before: attention on the original graph.
        after: attention on the perturbed graph, whose first nodes are the original ones.
        k: how many neighbours are shown.
        nodes: per layer bool [N], the nodes that count; see `fgai.attention.touched_rows`.
    """
    pairs = zip(*before.heads("mean").align(after.heads("mean")), nodes, strict=True)
    return [overlap(a.ranking(), b.ranking(), a.rowptr, k, nodes=rows) for a, b, rows in pairs]


@typed
def overlap_chance(rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None) -> float:
    """What `overlap` is on average for a random ranking: the mean of k/degree over the nodes that count.

    Example:
        >>> overlap_chance(torch.tensor([0, 4, 6]), k=3)
        0.75
    """
    checks.whole(k, "k", 1)
    check_row_pointers(rowptr)
    degree = rowptr.diff().double()
    return mean_over(torch.where(degree > k, k / degree, float("nan")), nodes)


ROUNDING = 1e-6
"""Attentions that differ by no more, relative to the larger, may be in either order: a few float32 steps."""


@typed
def tied_share(w: Tensor, rowptr: Tensor, k: int = 5) -> float:
    """Share of the nodes with more than k neighbours whose top-k is cut within rounding.

    Their k-th neighbour and the next differ by at most `ROUNDING`, so that rounding, or the order of the
    edges, decides which of them explains the node.

    Args:
        w: [E].
        rowptr: [N+1].
        k: how many neighbours are shown.

    Returns:
        In [0, 1]; NaN if no node has more than k neighbours.

    Example:
        >>> tied_share(torch.tensor([0.4, 0.3, 0.3, 0.5, 0.3, 0.2]), torch.tensor([0, 3, 6]), k=2)
        0.5
    """
    topk.check_k(k)
    check_attention(w, rowptr)
    w = w.detach().double()
    places = topk.leaders(w, rowptr, k + 1)
    ranked = places[places[:, k] >= 0]
    last, following = w[ranked[:, k - 1]], w[ranked[:, k]]
    return float((last - following <= ROUNDING * last).double().mean())


@metric(
    direction="higher",
    low=0,
    high=1,
    parameters=("k",),
    paths=("overlap_graph.prediction", "overlap_graph.explanation", "similarity.overlap_graph"),
)
@typed
def overlap_graph(w: Tensor, w_other: Tensor, rowptr: Tensor, k: int = 100_000) -> float:
    """Overlap of the top-k edges of the whole graph, `|T_k ∩ T'_k| / min(k, |E|)`.

    Mostly decided by degree (a node of low degree has large attention), so it says little about explanations.

    Args:
        w: [E].
        w_other: [E], on the same edges.
        rowptr: [N+1].
        k: size of the sets; at or above |E| the overlap is 1.

    Returns:
        In [0, 1]; a random ranking scores k/|E|. NaN for a graph without edges.

    Example:
        >>> w, v = torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.6, 0.4, 1.0])
        >>> overlap_graph(w, v, torch.tensor([0, 2, 3]), k=2)
        1.0
    """
    check_attentions(w, w_other, rowptr)
    before, after = (topk.topk_mask(x, rowptr, k, "graph") for x in (w, w_other))
    rows = topk.scoped_rows(rowptr, w.shape[0], "graph")
    return topk.overlap(before, after, rows).item() if w.numel() else float("nan")


@typed
def rank_correlation_per_node(w: Tensor, w_other: Tensor, rowptr: Tensor, method: str = "spearman") -> Tensor:
    """Rank correlation of every node with at least two neighbours, float64 [N]; NaN for the others.

    Arguments and treatment of ties as in `rank_correlation`.
    """
    check_attentions(w, w_other, rowptr)
    checks.one_of(method, "method", CORRELATIONS)
    a, b = w.detach().double(), w_other.detach().double()
    rho = (_spearman if method == "spearman" else _kendall)(a, b, rowptr)
    flat_a, flat_b = _constant(a, rowptr), _constant(b, rowptr)
    rho = torch.where(flat_a & flat_b, 1.0, torch.where(flat_a | flat_b, 0.0, rho))
    return torch.where(rowptr.diff() >= 2, rho, float("nan"))


@metric(
    direction="higher",
    low=-1,
    high=1,
    parameters=("method",),
    paths=("rank_correlation.prediction", "rank_correlation.explanation", "similarity.rank_correlation"),
)
@typed
def rank_correlation(
    w: Tensor, w_other: Tensor, rowptr: Tensor, method: str = "spearman", *, nodes: Tensor | None = None
) -> float:
    """Mean rank correlation over nodes with at least two neighbours.

        spearman  the correlation of the ranks; tied values share the mean of their ranks
        kendall   tau-b, (P - Q) / sqrt((P + Q + T)(P + Q + U)): P pairs in the same order, Q in opposite
                  order, T and U tied in one argument only. Takes time quadratic in the degree.

    Where all values of a node are equal there is no ranking and the formulas are 0/0: such a node counts as 0
    if only one argument is constant there, and as 1 if both are.

    Args:
        w: [E], finite.
        w_other: [E], finite, on the same edges.
        rowptr: [N+1].
        method: "spearman" or "kendall".
        nodes: bool [N] or indices; only these nodes count.

    Returns:
        In [-1, 1]; 0 for unrelated rankings, NaN if no node counts.

    Example:
        >>> w = torch.tensor([0.5, 0.3, 0.2])
        >>> rank_correlation(w, w.flip(0), torch.tensor([0, 3]))
        -1.0
    """
    return mean_over(rank_correlation_per_node(w, w_other, rowptr, method), nodes)


def row_midranks(values: Tensor, rowptr: Tensor) -> Tensor:
    """Ascending ranks within each row, from 1 up; tied values share the mean of theirs. float64 [E]."""
    row = row_index(rowptr, values.shape[0])
    order = row_order(-values, rowptr)
    ordered = values[order]
    place = torch.arange(1, values.shape[0] + 1, device=values.device) - rowptr[row]
    # A tie group is a run of equal values in one row.
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = (ordered[1:] != ordered[:-1]) | (row[1:] != row[:-1])
    group = starts.long().cumsum(0) - 1
    count = torch.bincount(group)
    middle = place[starts].double() + (count.double() - 1) / 2
    ranks = middle[group]
    return torch.empty_like(ranks).scatter_(0, order, ranks)


def _spearman(a: Tensor, b: Tensor, rowptr: Tensor) -> Tensor:
    row = row_index(rowptr, a.shape[0])
    # The mean rank of a row of d is (d + 1)/2 with or without ties.
    centre = (rowptr.diff().double() + 1)[row] / 2
    x, y = row_midranks(a, rowptr) - centre, row_midranks(b, rowptr) - centre
    scale = (row_sum(x.square(), rowptr) * row_sum(y.square(), rowptr)).sqrt()
    return (row_sum(x * y, rowptr) / scale).clamp(-1, 1)


def _kendall(a: Tensor, b: Tensor, rowptr: Tensor) -> Tensor:
    tau = np.empty(rowptr.numel() - 1)
    _kendall_rows(a.cpu().numpy(), b.cpu().numpy(), rowptr.cpu().numpy(), tau)
    return torch.from_numpy(tau).to(a.device)


def _constant(values: Tensor, rowptr: Tensor) -> Tensor:
    return row_max(values, rowptr) == -row_max(-values, rowptr)


@compiled
def _kendall_rows(a: np.ndarray, b: np.ndarray, rowptr: np.ndarray, tau: np.ndarray) -> None:
    for i in range(rowptr.shape[0] - 1):
        balance, ordered_a, ordered_b = 0, 0, 0
        for e in range(rowptr[i], rowptr[i + 1]):
            for f in range(rowptr[i], e):
                sign_a = (a[e] > a[f]) - (a[e] < a[f])
                sign_b = (b[e] > b[f]) - (b[e] < b[f])
                balance += sign_a * sign_b
                ordered_a += sign_a != 0
                ordered_b += sign_b != 0
        tau[i] = balance / np.sqrt(float(ordered_a) * float(ordered_b)) if ordered_a and ordered_b else np.nan
