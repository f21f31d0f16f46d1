"""Attention against the true explanation, on graphs where it is known."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.metrics.common import _check_attention, _check_edge_mask, mean_over
from fgai.metrics.prediction import _auc_from_ranks, roc_auc
from fgai.metrics.ranking import _row_midranks
from fgai.metrics.spec import Shown, metric
from fgai.metrics.views import Views
from fgai.ops.segments import check_rows, row_index, row_sum
from fgai.topk import SCOPES, check_k, ranks_in_rows
from fgai.typed import typed


def _truth(views: Views) -> dict[str, Any]:
    """All numbers, clean and under each attack, on the graph's own edges without loops; or nothing."""
    graph = views.graph
    if graph.edge_truth is None:
        return {}
    real = (graph.adjacency.source != graph.adjacency.destination).nonzero().flatten()
    maps = {"truth": views.attention["clean"]}
    maps |= {f"truth_{name}": attacked.worst.output.attention for name, attacked in views.attacks.items()}
    out: dict[str, Any] = {}
    for name, attention in maps.items():
        there = real[torch.isin(graph.keys[real], attention.layers[0].keys)]  # attacks may remove edges
        keys, truth = graph.keys[there], graph.edge_truth[there]
        by_layer = []
        for layer, averaged in zip(
            attention.heads("log").restrict(keys), attention.restrict(keys), strict=True
        ):
            w, rowptr = layer.values[:, 0], layer.rowptr
            nodes = torch.zeros(layer.num_nodes, dtype=torch.bool, device=truth.device)
            nodes[layer.destination[truth]] = True
            by_layer.append(
                {
                    "auc": truth_auc(w, truth, rowptr, nodes=nodes),
                    "auc_mean": truth_auc(averaged.values[:, 0], truth, rowptr, nodes=nodes),
                    "auc_node": truth_auc(w, truth, rowptr, "node"),
                    "precision": truth_precision(w, truth, rowptr, views.k),
                    "chance": truth_chance(truth, rowptr),
                }
            )
        out[name] = {part: views.by_layer([layer[part] for layer in by_layer]) for part in by_layer[0]}
    return out


_metric = partial(metric, direction="higher", section="fidelity", measure=_truth, null=_truth)


def _paths(*parts: str) -> tuple[str, ...]:
    return tuple(f"truth{view}.{part}" for view in ("", "_prediction", "_explanation") for part in parts)


@_metric(
    title="truth AUC",
    paths=_paths("auc", "auc_mean", "auc_node"),
    shown=(
        Shown(
            "truth.auc.all",
            "truth AUC",
            "Agreement with the true explanation (AUC)",
            "Where it is known which edges inform: 1 finds all of them, 0.5 is chance.",
        ),
        Shown("truth_prediction.auc.all", "attacked truth AUC"),
    ),
)
def truth_auc(
    w: Tensor, truth: Tensor, rowptr: Tensor, scope: str = "graph", *, nodes: Tensor | None = None
) -> float:
    """ROC-AUC of attention as a score for being part of the true explanation, a mask [E].

        graph  one AUC over the edges into `nodes`
        node   the mean over nodes of the AUC within their neighbourhood, over nodes with true and other edges

    0.5 for a random ranking, and for uniform attention in node scope. NaN if nothing counts.
    """
    _check_attention(w, rowptr)
    _check_edge_mask(truth, w, "truth")
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


@_metric(
    title="truth precision",
    paths=_paths("precision", "chance"),
    shown=(),
    chance=lambda views: {},  # `_truth` measures it
)
def truth_precision(
    w: Tensor, truth: Tensor, rowptr: Tensor, k: int | None = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of true edges among the top of every neighbourhood, averaged over nodes that also have others.

        |T_{k_i} ∩ truth_i| / k_i,   k_i = min(k, number of true edges of node i)

    `truth` is a mask [E]; without k as many neighbours are shown as are true.
    """
    _check_attention(w, rowptr)
    _check_edge_mask(truth, w, "truth")
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
