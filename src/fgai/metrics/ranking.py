"""Whether two attentions point at the same neighbours: top-k overlap, rank correlation, injected neighbours.

Both are on the same edges, the original ones: overlap stays at 1 when a new neighbour takes all the
attention. `intruder_*` count the new ones on the attacked graph, at original nodes that have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fgai import checks, topk
from fgai.attention import AttentionMap
from fgai.metrics.common import (
    _check_attention,
    _check_attentions,
    _check_edge_mask,
    _matched_classes,
    mean_over,
    overlap_per_node,
)
from fgai.metrics.spec import Shown, _under_attacks, metric
from fgai.metrics.views import AttentionPair, View, Views, _LayerPair
from fgai.ops.segments import check_row_pointers, row_index, row_max, row_order, row_sum
from fgai.tasks import task_of
from fgai.typed import typed


@typed
def overlap_layers(pair: AttentionPair) -> dict[str, list[float]]:
    """Top-k overlap of every layer: of all nodes and of touched ones, `mean` with heads averaged first."""
    averaged = [overlap_per_node(p.before, p.after, p.rowptr, pair.k) for p in pair.layers]
    by_node = {"overlap": list(pair.overlap), "overlap_mean": averaged}
    values = {name: [mean_over(row) for row in rows] for name, rows in by_node.items()}
    for name, rows in by_node.items() if pair.touched else ():
        values[f"{name}_touched"] = [mean_over(row, n) for row, n in zip(rows, pair.touched, strict=True)]
    return values


def _overlaps(views: Views) -> dict[str, Any]:

    def layers(pair: AttentionPair) -> dict[str, Any]:
        return {name: views.by_layer(values) for name, values in overlap_layers(pair).items()}

    out: dict[str, Any] = {}
    for attack, by_name in views.by_attack(lambda view: layers(view.pair)).items():
        for name, value in by_name.items():
            out.setdefault(name, {})[attack] = value
    pairs = {name: attacked.worst.pair for name, attacked in views.attacks.items()}
    if views.similarity is not None:
        out["similarity"] = layers(views.similarity)
        pairs["similarity"] = views.similarity
    out |= views.by_endpoints("overlap", lambda view: layers(view.pair)["overlap_touched"])
    if not task_of(views.graph).row_per_node and not views.null:
        out["explanations"] = {name: _item_overlaps(views, pair) for name, pair in pairs.items()}
    return out


def _overlap_chances(views: Views) -> dict[str, Any]:
    first = views.attacks["prediction"].shared.pair
    out = {
        name: views.by_layer(
            [overlap_chance(p.rowptr, first.k, nodes=n) for p, n in zip(first.layers, nodes, strict=True)]
        )
        for name, nodes in (("overlap", [None] * len(first.layers)), ("overlap_touched", first.touched))
    }
    if not task_of(views.graph).row_per_node:
        *_, last = views.attacks.values()
        out["explanations"] = _item_overlaps(views, last.worst.pair, chance=True)
    return out


def _item_overlaps(views: Views, pair: AttentionPair, *, chance: bool = False) -> dict[str, Any]:
    """Top-k overlap of the explanations of links or graphs, by kind and layer; NaN where nothing counts.

    link   the mean of the overlaps at both ends with more than k neighbours (their edges are disjoint);
           of `links`, and of `pairs` that are no links
    graph  the k edges of a small graph with the largest attention relative to uniform, `w_ij · degree_i`,
           over graphs with more than k edges. Without the degree, edges into leaves would always win

    `chance` gives the value of a random ranking.
    """
    task, values = task_of(views.graph), []
    for layer, by_node in zip(pair.layers, pair.overlap, strict=True):
        starts = task.edge_groups(views.graph, layer.rowptr)
        degree = layer.rowptr.diff()
        if chance:
            edges = (degree if starts is None else starts.diff()).double()
            values.append(torch.where(edges > pair.k, pair.k / edges, float("nan")))
        elif starts is None:
            values.append(by_node)
        else:
            weight = torch.repeat_interleave(degree, degree).to(layer.before.dtype)
            before, after = (shown * weight for shown in layer.shown)
            values.append(overlap_per_node(before, after, starts, pair.k))
    return {
        name: views.by_layer([mean_over(row) for row in by_layer])
        for name, by_layer in task.explanation_values(torch.stack(values), views.graph, views.rows).items()
    }


def _same_class(views: Views) -> dict[str, Any]:
    before = views.logits["clean"]

    def shares(view: View) -> dict[str, Any]:
        stayed = before.argmax(1) == view.output.logits[: before.shape[0]].argmax(1)
        scored = torch.zeros_like(stayed)
        scored[views.rows] = True
        rows = list(zip(view.pair.overlap, view.pair.touched, strict=True))
        kept = [mean_over(row, scored & near & stayed & ~row.isnan()) for row, near in rows]
        changed = [same_class_changed(row, stayed, nodes=scored & near) for row, near in rows]
        share = same_class_share(before[views.rows], view.output.logits[views.rows])
        return {"overlap": views.by_layer(kept), "changed": views.by_layer(changed), "kept": share}

    return {"same_class": views.by_attack(shares)} if task_of(views.graph).row_per_node else {}


def _touched(views: Views) -> dict[str, Any]:
    return views.by_layer([touched_share(rows) for rows in views.attacks["prediction"].shared.pair.touched])


@metric(
    direction="higher",
    paths=(
        "overlap.*",
        "overlap_touched.*",
        "overlap_mean.*",
        "overlap_mean_touched.*",
        "similarity.overlap",
        "similarity.overlap_mean",
        "endpoints.*.*.overlap",
        "same_class.*.overlap",
        "explanations.*",
    ),
    section="explanation",
    shown=(
        Shown("overlap.prediction.all", "overlap"),
        *_under_attacks(
            "overlap_touched.{}.all",
            "touched",
            "Top-k kept",
            "Share of a node's strongest neighbours that stay, over the nodes in reach of the attack.",
        ),
        Shown(
            "explanations.prediction.links.all",
            "links",
            "Explanations of links kept",
            "Share of the strongest neighbours of both ends that stay, prediction attacked.",
        ),
        Shown(
            "explanations.prediction.pairs.all",
            "other pairs",
            "… of pairs that are no links",
            "The same for other pairs.",
        ),
        Shown(
            "explanations.prediction.graphs.all",
            "graphs",
            "Explanations of graphs kept",
            "Share of a graph's strongest edges that stay, prediction attacked.",
        ),
        Shown(
            "similarity.overlap.all",
            "similarity",
            "Same top-k as the reference",
            "Share of the strongest neighbours the model has in common with the reference, clean graph.",
        ),
    ),
    measure=_overlaps,
    null=_overlaps,
    chance=_overlap_chances,
)
def overlap(w: Tensor, w_other: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None) -> float:
    """Mean top-k overlap over nodes with more than k neighbours; NaN if there is none.

    V_k = |T_k(w) ∩ T_k(w')| / k; of other nodes it is 1 whatever the attention. `overlap_chance` is what a
    random ranking scores.

    Example:
        >>> w, v = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.5, 0.2, 0.3])
        >>> overlap(w, v, torch.tensor([0, 3]), k=2)
        0.5
    """
    return mean_over(overlap_per_node(w, w_other, rowptr, k), nodes)


def _lost(views: Views) -> dict[str, Any]:
    explained = views.attacks.get("explanation")
    if explained is None or explained is views.attacks["prediction"] or not explained.damage:
        return {}
    return {"lost": {"explanation": dict(explained.damage)}}


@metric(
    direction="lower",
    paths=("lost.*",),
    section="explanation",
    shown=(
        Shown(
            "lost.explanation.random",
            "lost, random ends",
            "Top-k lost, new nodes joined at random",
            "Share of the strongest neighbours that go, explanation attacked.",
        ),
        Shown(
            "lost.explanation.chosen",
            "lost, chosen ends",
            "Top-k lost, new nodes joined where it hurts",
            "The same at endpoints chosen by a rule.",
        ),
    ),
    measure=_lost,
)
def lost(kept: float) -> float:
    """Share of the top-k that touched nodes lose, for each endpoint rule of the attack: 1 - overlap."""
    return 1 - kept


@metric(
    direction="lower",
    title="changed, same class",
    paths=("same_class.*.changed",),
    section="explanation",
    shown=(),
    measure=_same_class,
)
def same_class_changed(kept: Tensor, stayed: Tensor, *, nodes: Tensor | None = None) -> float:
    """Share of the nodes whose top-k lost a member although their class stayed; NaN if no node counts.

    `kept` is the top-k overlap [N], NaN where it is undefined; `stayed`, bool [N], who keeps its class.
    """
    checks.mask(stayed, (kept.numel(),), "stayed")
    return mean_over(torch.where(kept.isnan(), float("nan"), ((kept < 1) & stayed).double()), nodes)


@metric(direction="", title="same class", paths=("same_class.*.kept",), shown=(), measure=_same_class)
def same_class_share(before: Tensor, after: Tensor) -> float:
    """Share of nodes whose predicted class stays: 1 - `changed_share`, with the same arguments."""
    one, two = _matched_classes(before, after)
    return float((one == two).double().mean())


@metric(
    direction="", title="touched nodes", paths=("touched",), section="explanation", shown=(), measure=_touched
)
def touched_share(touched: Tensor) -> float:
    """Share of nodes within reach of the attack; see `fgai.attention.touched_rows`."""
    return float(checks.mask(touched, (touched.numel(),), "touched").double().mean())


@typed
def kept_by_layer(before: AttentionMap, after: AttentionMap, k: int, nodes: Sequence[Tensor]) -> list[float]:
    """Top-k overlap of every layer, by which attacks are judged, on common edges and `nodes`, bool [N]."""
    pairs = zip(*before.heads("mean").align(after.heads("mean")), nodes, strict=True)
    return [overlap(a.ranking(), b.ranking(), a.rowptr, k, nodes=rows) for a, b, rows in pairs]


@typed
def overlap_chance(rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None) -> float:
    """What `overlap` is on average for a random ranking: the mean of k/degree over the nodes that count."""
    checks.whole(k, "k", 1)
    check_row_pointers(rowptr)
    degree = rowptr.diff().double()
    return mean_over(torch.where(degree > k, k / degree, float("nan")), nodes)


ROUNDING = 1e-6
"""Attentions that differ by no more, relative to the larger, may be in either order: a few float32 steps."""


@typed
def tied_share(w: Tensor, rowptr: Tensor, k: int = 5) -> float:
    """Share of nodes with more than k neighbours whose k-th and next value tie (`ROUNDING`); NaN of none."""
    topk.check_k(k)
    _check_attention(w, rowptr)
    w = w.detach().double()
    best = topk.leaders(w, rowptr, k + 1)
    ranked = best[best[:, k] >= 0]
    last, following = w[ranked[:, k - 1]], w[ranked[:, k]]
    return float((last - following <= ROUNDING * last).double().mean())


def _half(pair: _LayerPair) -> int:
    """The graph-wide K of the paper's experiments: half of the edges."""
    return max(1, pair.before.numel() // 2)


def _graph_chance(views: Views) -> dict[str, Any]:
    layers = views.attacks["prediction"].shared.pair.layers
    return {"overlap_graph": views.by_layer([_half(p) / max(1, p.before.numel()) for p in layers])}


def _graph_overlap(views: Views) -> dict[str, Any]:
    return views.compare_layers(
        "overlap_graph", lambda p: overlap_graph(p.before, p.after, p.rowptr, _half(p))
    )


@metric(
    direction="higher",
    paths=("overlap_graph.*", "similarity.overlap_graph"),
    section="explanation",
    shown=(),
    measure=_graph_overlap,
    null=_graph_overlap,
    chance=_graph_chance,
)
def overlap_graph(w: Tensor, w_other: Tensor, rowptr: Tensor, k: int = 100_000) -> float:
    """Overlap of the top-k edges of the whole graph, `|T_k ∩ T'_k| / min(k, |E|)`; NaN without edges.

    Mostly decided by degree (a node of low degree has large attention), so it says little about explanations.
    A random ranking scores k/|E|.
    """
    _check_attentions(w, w_other, rowptr)
    before, after = (topk.topk_mask(x, rowptr, k, "graph") for x in (w, w_other))
    rows = topk.scoped_rows(rowptr, w.shape[0], "graph")
    return topk.overlap(before, after, rows).item() if w.numel() else float("nan")


def _correlation(views: Views) -> dict[str, Any]:
    return views.compare_layers("rank_correlation", lambda p: rank_correlation(*p.ranks, p.rowptr))


@metric(
    direction="higher",
    low=-1,
    high=1,
    paths=("rank_correlation.*", "similarity.rank_correlation"),
    section="explanation",
    shown=(),
    measure=_correlation,
    null=_correlation,
)
def rank_correlation(w: Tensor, w_other: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Mean correlation of the ranks over nodes with at least two neighbours; tied values share a mean rank.

    A node whose values are all equal (0/0) counts as 0 if in one argument alone, as 1 if in both.
    """
    _check_attentions(w, w_other, rowptr)
    a, b = w.detach().double(), w_other.detach().double()
    # The mean rank of a row of d is (d + 1)/2 with or without ties.
    centre = (rowptr.diff().double() + 1)[row_index(rowptr, a.shape[0])] / 2
    x, y = _row_midranks(a, rowptr) - centre, _row_midranks(b, rowptr) - centre
    scale = (row_sum(x.square(), rowptr) * row_sum(y.square(), rowptr)).sqrt()
    rho = (row_sum(x * y, rowptr) / scale).clamp(-1, 1)
    flat_a, flat_b = (row_max(x, rowptr) == -row_max(-x, rowptr) for x in (a, b))
    rho = torch.where(flat_a & flat_b, 1.0, torch.where(flat_a | flat_b, 0.0, rho))
    return mean_over(torch.where(rowptr.diff() >= 2, rho, float("nan")), nodes)


def _row_midranks(values: Tensor, rowptr: Tensor) -> Tensor:
    """Ascending ranks within each row, from 1 up; tied values share the mean of theirs. float64 [E]."""
    row = row_index(rowptr, values.shape[0])
    order = row_order(-values, rowptr)
    ordered = values[order]
    rank = torch.arange(1, values.shape[0] + 1, device=values.device) - rowptr[row]
    # A tie group is a run of equal values in one row.
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = (ordered[1:] != ordered[:-1]) | (row[1:] != row[:-1])
    group = starts.long().cumsum(0) - 1
    count = torch.bincount(group)
    middle = rank[starts].double() + (count.double() - 1) / 2
    ranks = middle[group]
    return torch.empty_like(ranks).scatter_(0, order, ranks)


def _intruders(views: Views) -> dict[str, Any]:
    originals = views.attention["clean"].layers[0].num_nodes

    def numbers(view: View) -> dict[str, Any]:
        values: dict[str, list[float]] = {"nodes": [], "places": [], "mass": []}
        for layer in view.output.attention:
            new, old = layer.source >= originals, torch.arange(originals, device=layer.source.device)
            ranks = layer.ranking()
            values["nodes"].append(intruder_nodes(ranks, new, layer.rowptr, views.k, nodes=old))
            values["places"].append(intruder_places(ranks, new, layer.rowptr, views.k, nodes=old))
            values["mass"].append(intruder_mass(layer.values[:, 0], new, layer.rowptr, nodes=old))
        if views.null == "random":
            del values["mass"]  # random scores are no distribution
        return {name: views.by_layer(layers) for name, layers in values.items()}

    return {"intruders": views.by_attack(numbers), **views.by_endpoints("intruders", numbers)}


_intruded = partial(metric, direction="lower", section="explanation", measure=_intruders, null=_intruders)


@_intruded(
    title="intruded nodes",
    paths=("intruders.*.nodes", "endpoints.*.*.intruders.nodes"),
    shown=_under_attacks(
        "intruders.{}.nodes.all",
        "intruded",
        "Nodes that show an intruder",
        "Of the nodes a new node was joined to, the share with a new one among their top k.",
    ),
)
def intruder_nodes(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the nodes with a new neighbour that show one in their top-k.

        mean over joined i of 1(T_k(i) ∩ new ≠ ∅)

    Of a node with at most k neighbours, the new ones included, all are shown. NaN if no node has a new one.
    `w` [E] is what neighbours are ranked by on the attacked graph, ties broken by edge order; `injected`,
    bool [E], marks the edges from new nodes.

    Example:
        >>> w, new = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.9]), torch.tensor([False, False, True, True, False])
        >>> intruder_nodes(w, new, torch.tensor([0, 3, 5]), k=2)
        0.5
    """
    shares = _shares(w, injected, rowptr, k)
    return mean_over(torch.where(shares.isnan(), shares, (shares > 0).double()), nodes)


@_intruded(
    title="intruders' places", paths=("intruders.*.places", "endpoints.*.*.intruders.places"), shown=()
)
def intruder_places(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the places in the top-k that new neighbours take, mean over the nodes that have any.

    `|T_k(i) ∩ new| / min(k, degree_i)`. Arguments as in `intruder_nodes`.
    """
    return mean_over(_shares(w, injected, rowptr, k), nodes)


@_intruded(
    title="intruders' mass",
    paths=("intruders.*.mass", "endpoints.*.*.intruders.mass"),
    shown=_under_attacks(
        "intruders.{}.mass.all",
        "their mass",
        "Attention on intruders",
        "Attention that new nodes take at the nodes they were joined to.",
    ),
)
def intruder_mass(w: Tensor, injected: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Attention that new neighbours take, mean over the nodes that have any.

    `Σ_{j new} w_ij`. Arguments as in `intruder_nodes`, `w` with heads averaged.
    """
    _check_attention(w, rowptr)
    _check_edge_mask(injected, w, "injected")
    return mean_over(_where_joined(row_sum(w.detach().double() * injected, rowptr), injected, rowptr), nodes)


def _shares(w: Tensor, injected: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """Share of the places in the top-k that new neighbours take, float64 [N]; NaN at nodes without any."""
    _check_attention(w, rowptr)
    _check_edge_mask(injected, w, "injected")
    checks.whole(k, "k", 1)
    taken = row_sum(topk.topk_mask(w, rowptr, k) & injected, rowptr).double()
    return _where_joined(taken / rowptr.diff().clamp(min=1, max=max(1, min(k, len(w)))), injected, rowptr)


def _where_joined(values: Tensor, injected: Tensor, rowptr: Tensor) -> Tensor:
    return torch.where(row_sum(injected, rowptr) > 0, values, float("nan"))
