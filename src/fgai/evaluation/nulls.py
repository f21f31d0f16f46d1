"""Null rows: what the explanation metrics say of attention that explains nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from fgai import metrics
from fgai.attention import AttentionMap, LayerAttention, Observation, touched_rows
from fgai.evaluation.curves import SCOPES, all_curves, ranking
from fgai.evaluation.measures import against_truth, agreement, intruders, layered, paired
from fgai.graph import Graph

NULLS = ("uniform", "random")


def null_map(attention: AttentionMap, kind: str, seed: int) -> AttentionMap:
    """The map with every layer's values replaced: 1/degree (`uniform`) or scores drawn at random (`random`).

    Random scores are drawn once for all layers, so that their mean is as random as each of them.
    """

    def replaced(layer: LayerAttention) -> LayerAttention:
        like = layer.values
        if kind == "uniform":
            values = metrics.uniform_attention(layer.rowptr, layer.num_edges, like.dtype)
        else:
            values = metrics.random_ranking(layer.num_edges, seed, like.device, like.dtype)
        return layer.with_values(values[:, None])

    return AttentionMap(tuple(replaced(layer) for layer in attention))


def null_rows(
    model: nn.Module,
    views: dict[str, Observation],
    graph: Graph,
    *,
    k: int,
    seed: int,
    sharpest: int,
    vanilla: AttentionMap | None = None,
    changed: Any = None,
    target: Any = None,
    right: Any = None,
) -> dict[str, Any]:
    """Explanation metrics of uniform attention and of a random ranking, on the same graphs and predictions.

    The random ranking is drawn anew on the attacked graph: an explainer that rolls dice rolls them again.

    Args:
        model: whose predictions the curves watch.
        views: `clean` and `attacked`.
        graph: the original one.
        k: size of a node's explanation.
        seed: of the random ranking.
        sharpest: which layer is reported as such.
        vanilla: attention to be similar to, or None.
        changed: nodes whose features the attack changed, or None.
        target: true classes, for the curves.
        right: bool, what counts in the curves, or None to leave them out.
    """
    clean, attacked = views["clean"].attention, views["attacked"].attention
    touched = touched_rows(clean, attacked, changed)
    out: dict[str, Any] = {}
    for kind in NULLS:
        maps = {"clean": null_map(clean, kind, seed), "attacked": null_map(attacked, kind, seed + 1)}
        row: dict[str, Any] = agreement(paired(maps["clean"], maps["attacked"]), k, sharpest, touched).metrics
        row["intruders"] = intruders(maps["attacked"], clean.layers[0].num_nodes, k, sharpest)
        if kind == "random":
            del row["g_jsd"], row["intruders"]["mass"]  # its scores are no distribution
        else:
            row["sharpness"] = layered([0.0] * len(clean), sharpest)
            row["top_share"] = layered([metrics.uniform_share(layer.rowptr) for layer in clean], sharpest)
        if vanilla is not None and len(vanilla) == len(clean):
            row["similarity"] = agreement(paired(vanilla, maps["clean"]), k, sharpest).metrics
            row["similarity"].pop("g_jsd")
        if graph.edge_truth is not None:
            row["truth"] = against_truth(maps["clean"], graph, k, sharpest)
            row["truth_prediction"] = against_truth(maps["attacked"], graph, k, sharpest)
        if right is not None:
            scored = {name: {scope: ranking(m, scope) for scope in SCOPES} for name, m in maps.items()}
            row["f_slope"] = all_curves(model, views, target, right, scored)
        out[kind] = row
    return out
