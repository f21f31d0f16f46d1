"""What is measured between two views of a graph: per layer, for the last one, over all, and the sharpest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fgai import metrics
from fgai.attention import AttentionMap, call_model, evaluating
from fgai.graph import Graph

NAN = float("nan")


class Pair(NamedTuple):
    """One layer before and after, [E] each, on the same edges.

    Attributes:
        before: attention, mean over the heads.
        after: the same, after.
        rowptr: [N + 1].
        ranks: what neighbours are ranked by, before and after; see `LayerAttention.ranking`.
        shown: the heads' geometric mean, before and after, which compares between nodes.
    """

    before: Tensor
    after: Tensor
    rowptr: Tensor
    ranks: tuple[Tensor, Tensor]
    shown: tuple[Tensor, Tensor]


def logits_again(model: nn.Module, graph: Graph) -> Tensor:
    """Run the model once more, without recording."""
    with evaluating(model), torch.no_grad():
        return call_model(model, graph).detach()


def paired(before: AttentionMap, after: AttentionMap) -> list[Pair]:
    """Match two head-averaged maps layer by layer, by (source, destination)."""
    ours, theirs = before.align(after)
    return [
        Pair(
            a.values[:, 0],
            b.values[:, 0],
            a.rowptr,
            (a.ranking(), b.ranking()),
            (a.heads("log"), b.heads("log")),
        )
        for a, b in zip(ours.layers, theirs.layers, strict=True)
    ]


def layered(values: Sequence[float], sharpest: int) -> dict[str, Any]:
    """Values per layer with their summaries: `last`, `all` (mean of those defined) and `sharpest`.

    Example:
        >>> layered([0.5, 1.0], sharpest=0)
        {'layers': [0.5, 1.0], 'last': 1.0, 'all': 0.75, 'sharpest': 0.5}
    """
    mean = metrics.mean_of_defined(values)
    return {"layers": list(values), "last": values[-1], "all": mean, "sharpest": values[sharpest]}


def sharpness_by_layer(attention: AttentionMap) -> list[float]:
    """Sharpness of every layer of a head-averaged map."""
    return [metrics.sharpness(layer.values[:, 0], layer.rowptr) for layer in attention]


def top_shares(pairs: Sequence[Pair], sharpest: int) -> dict[str, Any]:
    """What a node's strongest neighbour gets: `clean`, `attacked`, and of attention that is `uniform`."""
    return {
        "clean": layered([metrics.top_share(p.before, p.rowptr) for p in pairs], sharpest),
        "attacked": layered([metrics.top_share(p.after, p.rowptr) for p in pairs], sharpest),
        "uniform": layered([metrics.uniform_share(p.rowptr) for p in pairs], sharpest),
    }


def sharpest_layer(sharpness: Sequence[float]) -> int:
    """Index of the layer with the largest sharpness, undefined ones last."""
    return max(range(len(sharpness)), key=lambda i: sharpness[i] if sharpness[i] == sharpness[i] else -1.0)


def prediction_change(before: Tensor, after: Tensor) -> dict[str, float]:
    """g-TVD on logits, on probabilities, and relative to the spread of the logits."""
    return {
        "logits": metrics.g_tvd(before, after),
        "probs": metrics.g_tvd_prob(before, after),
        "rel": metrics.g_tvd_rel(before, after),
    }


def half_of(pair: Pair) -> int:
    """The graph-wide K of the paper's experiments: half of the edges."""
    return max(1, pair.before.numel() // 2)


@dataclass(frozen=True, eq=False)
class Agreement:
    """How far two attentions agree.

    Attributes:
        metrics: `g_jsd`, `overlap`, `overlap_touched`, `overlap_graph`, `rank_correlation`, each per layer;
            and `overlap_mean`, `overlap_mean_touched`, where heads are averaged before neighbours are ranked.
        per_node: [L, N] top-k overlap, NaN at nodes that do not count.
    """

    metrics: dict[str, Any]
    per_node: Tensor


def agreement(
    pairs: Sequence[Pair], k: int, sharpest: int, touched: Sequence[Tensor] | None = None
) -> Agreement:
    """Compare two attentions layer by layer.

    Args:
        pairs: one per layer.
        k: size of a node's explanation.
        sharpest: which layer is reported as such.
        touched: per layer bool [N], for overlap on these nodes only; None leaves it out.
    """
    nodes = [metrics.overlap_per_node(*p.ranks, p.rowptr, k) for p in pairs]
    averaged = [metrics.overlap_per_node(p.before, p.after, p.rowptr, k) for p in pairs]
    values = {
        "g_jsd": [metrics.g_jsd(p.before, p.after) for p in pairs],
        "overlap": [metrics.mean_over(v) for v in nodes],
        "overlap_mean": [metrics.mean_over(v) for v in averaged],
        "overlap_graph": [metrics.overlap_graph(p.before, p.after, p.rowptr, half_of(p)) for p in pairs],
        "rank_correlation": [metrics.rank_correlation(*p.ranks, p.rowptr) for p in pairs],
    }
    if touched is not None:
        for name, found in (("overlap_touched", nodes), ("overlap_mean_touched", averaged)):
            values[name] = [metrics.mean_over(v, t) for v, t in zip(found, touched, strict=True)]
    return Agreement({name: layered(v, sharpest) for name, v in values.items()}, torch.stack(nodes))


def chance(
    pairs: Sequence[Pair], k: int, sharpest: int, touched: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """What a random ranking scores: overlap on all nodes, on touched ones, and over the graph."""
    values = {
        "overlap": [metrics.overlap_chance(p.rowptr, k) for p in pairs],
        "overlap_graph": [half_of(p) / max(1, p.before.numel()) for p in pairs],
    }
    if touched is not None:
        values["overlap_touched"] = [
            metrics.overlap_chance(p.rowptr, k, nodes=t) for p, t in zip(pairs, touched, strict=True)
        ]
    return {name: layered(v, sharpest) for name, v in values.items()}


def intruders(attention: AttentionMap, originals: int, k: int, sharpest: int) -> dict[str, Any]:
    """What injected nodes take at the original nodes they are joined to, per layer; NaN where there are none.

    Args:
        attention: head-averaged, on the attacked graph.
        originals: nodes of the original graph, which come first.
        k: size of a node's explanation.
        sharpest: which layer is reported as such.
    """
    values: dict[str, list[float]] = {"nodes": [], "places": [], "mass": []}
    for layer in attention:
        w, ranks, new = layer.values[:, 0], layer.ranking(), layer.source >= originals
        old = torch.arange(layer.num_nodes, device=w.device) < originals
        values["nodes"].append(metrics.intruder_nodes(ranks, new, layer.rowptr, k, nodes=old))
        values["places"].append(metrics.intruder_places(ranks, new, layer.rowptr, k, nodes=old))
        values["mass"].append(metrics.intruder_mass(w, new, layer.rowptr, nodes=old))
    return {name: layered(v, sharpest) for name, v in values.items()}


def against_truth(attention: AttentionMap, graph: Graph, k: int, sharpest: int) -> dict[str, Any]:
    """ROC-AUC and precision of attention against the true explanation, on the graph's own edges, no loops.

    Edges into nodes without any true edge say nothing and are left out.

    Args:
        attention: head-averaged, on `graph` or on more edges.
        graph: with `edge_truth`.
        k: size of a node's explanation.
        sharpest: which layer is reported as such.
    """
    assert graph.edge_truth is not None
    real = (graph.adjacency.source != graph.adjacency.destination).nonzero().flatten()
    keys, truth = graph.keys[real], graph.edge_truth[real]
    values: dict[str, list[float]] = {
        name: [] for name in ("auc", "auc_mean", "auc_node", "precision", "chance")
    }
    there = torch.isin(keys, attention.layers[0].keys)  # all of them, unless the attack removed some
    keys, truth = keys[there], truth[there]
    for layer, averaged in zip(attention.heads("log").restrict(keys), attention.restrict(keys), strict=True):
        w, rowptr = layer.values[:, 0], layer.rowptr
        meant = torch.zeros(layer.num_nodes, dtype=torch.bool, device=w.device)
        meant[layer.destination[truth]] = True
        values["auc"].append(metrics.truth_auc(w, truth, rowptr, nodes=meant))
        values["auc_mean"].append(metrics.truth_auc(averaged.values[:, 0], truth, rowptr, nodes=meant))
        values["auc_node"].append(metrics.truth_auc(w, truth, rowptr, "node"))
        values["precision"].append(metrics.truth_precision(w, truth, rowptr, k))
        values["chance"].append(metrics.truth_chance(truth, rowptr))
    return {name: layered(v, sharpest) for name, v in values.items()}
