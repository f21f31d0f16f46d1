"""Attention against the true explanation, on graphs where it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fgai import checks
from fgai.attention import AttentionMap
from fgai.graph import Graph
from fgai.metrics.common import _check_attention, _check_edge_mask, mean_over
from fgai.metrics.prediction import _auc_from_ranks, roc_auc
from fgai.metrics.ranking import _row_midranks
from fgai.metrics.spec import Shown, metric
from fgai.metrics.views import Views
from fgai.ops.segments import check_rows, row_index, row_sum
from fgai.topk import SCOPES, check_k, ranks_in_rows
from fgai.typed import typed


class _LayerTruth(NamedTuple):
    """One layer on the edges whose truth is known: ranking, attention, truth, rows, nodes with true edges."""

    ranking: Tensor
    averaged: Tensor
    truth: Tensor
    rowptr: Tensor
    nodes: Tensor


def _per_view(views: Views, parts: Mapping[str, Callable[[_LayerTruth], float]]) -> dict[str, Any]:
    """Numbers per layer on the clean graph and under each attack; nothing where the truth is unknown."""
    if views.graph.edge_truth is None:
        return {}
    maps = {"truth": views.attention["clean"]}
    maps |= {f"truth_{name}": attacked.worst.output.attention for name, attacked in views.attacks.items()}
    return {
        name: {
            part: views.by_layer([value(layer) for layer in _truth_by_layer(views.graph, attention)])
            for part, value in parts.items()
        }
        for name, attention in maps.items()
    }


def _truth_by_layer(graph: Graph, attention: AttentionMap) -> Iterator[_LayerTruth]:
    """The graph's own edges without loops; edges into nodes without any true edge say nothing."""
    assert graph.edge_truth is not None
    real = (graph.adjacency.source != graph.adjacency.destination).nonzero().flatten()
    keys, truth = graph.keys[real], graph.edge_truth[real]
    there = torch.isin(keys, attention.layers[0].keys)  # all of them, unless the attack removed some
    keys, truth = keys[there], truth[there]
    for layer, averaged in zip(attention.heads("log").restrict(keys), attention.restrict(keys), strict=True):
        nodes = torch.zeros(layer.num_nodes, dtype=torch.bool, device=truth.device)
        nodes[layer.destination[truth]] = True
        yield _LayerTruth(layer.values[:, 0], averaged.values[:, 0], truth, layer.rowptr, nodes)


def _aucs(views: Views) -> dict[str, Any]:
    return _per_view(
        views,
        {
            "auc": lambda e: truth_auc(e.ranking, e.truth, e.rowptr, nodes=e.nodes),
            "auc_mean": lambda e: truth_auc(e.averaged, e.truth, e.rowptr, nodes=e.nodes),
            "auc_node": lambda e: truth_auc(e.ranking, e.truth, e.rowptr, "node"),
        },
    )


def _precision(views: Views) -> dict[str, Any]:
    parts: dict[str, Callable[[_LayerTruth], float]] = {
        "precision": lambda e: truth_precision(e.ranking, e.truth, e.rowptr, views.k)
    }
    if views.null:  # its own edges may be fewer
        parts["chance"] = lambda e: truth_chance(e.truth, e.rowptr)
    return _per_view(views, parts)


def _paths(*parts: str) -> tuple[str, ...]:
    return tuple(f"truth{view}.{part}" for view in ("", "_prediction", "_explanation") for part in parts)


def _chance(views: Views) -> dict[str, Any]:
    chances = _per_view(views, {"chance": lambda e: truth_chance(e.truth, e.rowptr)})
    return {name: parts["chance"] for name, parts in chances.items()}


@metric(
    direction="higher",
    parameters=("scope",),
    title="truth AUC",
    paths=_paths("auc", "auc_mean", "auc_node"),
    section="fidelity",
    shown=(
        Shown(
            "truth.auc.all",
            "truth AUC",
            "Agreement with the true explanation (AUC)",
            "Where it is known which edges inform: 1 finds all of them, 0.5 is chance.",
        ),
        Shown("truth_prediction.auc.all", "attacked truth AUC"),
    ),
    measure=_aucs,
    null=_aucs,
)
@typed
def truth_auc(
    w: Tensor, truth: Tensor, rowptr: Tensor, scope: str = "graph", *, nodes: Tensor | None = None
) -> float:
    """ROC-AUC of attention as a score for being part of the true explanation.

        graph  one AUC over the edges into `nodes`
        node   the mean over nodes of the AUC within their neighbourhood, over nodes with true and other edges

    0.5 for a random ranking, and for uniform attention in node scope. NaN if nothing counts. `truth` is a
    mask [E]; with `nodes` only edges into these count.

    Example:
        >>> truth_auc(torch.tensor([0.7, 0.2, 0.1]), torch.tensor([True, False, False]), torch.tensor([0, 3]))
        1.0
    """
    _check(w, truth, rowptr)
    if checks.one_of(scope, "scope", SCOPES) == "graph":
        if nodes is not None:
            chosen = torch.zeros(rowptr.numel() - 1, dtype=torch.bool, device=rowptr.device)
            chosen[checks.positions(nodes, len(chosen), "nodes")] = True
            counted = chosen[row_index(rowptr, w.shape[0])]
            w, truth = w[counted], truth[counted]
        return roc_auc(w, truth)
    rank = _row_midranks(w.detach().double(), rowptr)
    positives, negatives = row_sum(truth, rowptr), row_sum(~truth, rowptr)
    return mean_over(_auc_from_ranks(row_sum(rank * truth, rowptr), positives, negatives), nodes)


@metric(
    direction="higher",
    parameters=("k",),
    title="truth precision",
    paths=_paths("precision", "chance"),
    section="fidelity",
    shown=(),
    measure=_precision,
    null=_precision,
    chance=_chance,
)
@typed
def truth_precision(
    w: Tensor, truth: Tensor, rowptr: Tensor, k: int | None = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of true edges among the top of every neighbourhood, averaged over nodes that also have others.

        |T_{k_i} ∩ truth_i| / k_i,   k_i = min(k, number of true edges of node i)

    A perfect ranking scores 1 at every node; `truth_chance` is what a random one scores. `truth` is a mask
    [E]; without k as many neighbours are shown as are true.
    """
    _check(w, truth, rowptr)
    check_k(k)
    positives = row_sum(truth, rowptr)
    size = positives if k is None else positives.clamp(max=min(k, len(w)))
    top = ranks_in_rows(w, rowptr) < size[row_index(rowptr, w.shape[0])]
    precision = row_sum(top & truth, rowptr).double() / size
    return mean_over(torch.where(positives < rowptr.diff(), precision, float("nan")), nodes)


@typed
def truth_chance(truth: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """What `truth_precision` is on average for a random ranking: the mean share of true edges."""
    checks.mask(truth, tuple(truth.shape[:1]), "truth")
    check_rows(truth, rowptr, "truth")
    positives, degree = row_sum(truth, rowptr), rowptr.diff()
    counted = (positives > 0) & (positives < degree)
    return mean_over(torch.where(counted, positives.double() / degree, float("nan")), nodes)


def _check(w: Tensor, truth: Tensor, rowptr: Tensor) -> None:
    _check_attention(w, rowptr)
    _check_edge_mask(truth, w, "truth")
