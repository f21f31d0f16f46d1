"""Edges removed by rank, and what becomes of the predictions: F-slope curves and fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fgai import metrics
from fgai.attention import AttentionMap, LayerAttention, Observation, observe
from fgai.ops.segments import row_sum
from fgai.progress import current
from fgai.topk import topk_mask

SCOPES = ("graph", "node")


def combined(attention: AttentionMap) -> LayerAttention:
    """Mean of a head-averaged map over its layers, on the edges all of them have."""
    first = attention.layers[0]
    if not all(first.same_edges(layer) for layer in attention.layers[1:]):
        shared = first.keys
        for layer in attention.layers[1:]:
            shared = shared[torch.isin(shared, layer.keys)]
        attention = attention.restrict(shared)
    return attention.over_layers("mean")


def ranking(attention: AttentionMap, scope: str) -> LayerAttention:
    """What edges are ranked by: the last layer in scope `graph`, the mean over layers in scope `node`.

    Heads are reduced by their geometric mean, see `LayerAttention.heads`.
    """
    shown = attention.heads("log")
    return shown.last if scope == "graph" else combined(shown)


def predict_without(model: nn.Module, observed: Observation, removed: Tensor) -> Tensor:
    """Logits after edges were taken out of every attention layer.

    An edge is removed by setting its attention to zero and scaling up the rest of its row,

        w'_ij = w_ij / sum_{kept m} w_im,

    which is what the softmax gives without it. So self-loops a layer adds itself can go too, and no graph is
    built anew. A node that loses every edge receives nothing. Layers without attention keep their edges.

    Args:
        model: to run, in eval mode.
        observed: the graph and the attention recorded on it, which gives each layer's edges.
        removed: [R] int64 keys of the edges to remove.
    """
    ordered = removed.sort().values
    masks: dict[int, Tensor] = {}

    def keep(index: int) -> Tensor:
        layer = observed.attention.layers[index]
        for other in range(index):
            if other in masks and observed.attention.layers[other].same_edges(layer):
                return masks[other]
        if ordered.numel() == 0:
            return torch.ones_like(layer.keys, dtype=torch.bool)
        spot = torch.searchsorted(ordered, layer.keys).clamp(max=ordered.numel() - 1)
        return ordered[spot] != layer.keys

    def without(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        if index not in masks:
            masks[index] = keep(index)
        kept = attention * masks[index][:, None].to(attention.dtype)
        total = row_sum(kept, observed.attention.layers[index].rowptr)
        return kept / torch.where(total > 0, total, 1.0)[destination]

    return observe(model, observed.graph, perturb=without).logits


def removal_curves(
    model: nn.Module,
    observed: Observation,
    scored: LayerAttention,
    scope: str,
    right: Tensor,
    target: Tensor,
    fractions: Sequence[float] = metrics.FRACTIONS,
) -> dict[str, Any]:
    """Remove edges from the top and from the bottom of a ranking, and watch the share still right.

    Scope `graph` ranks all edges together, self-loops among them; scope `node` ranks within each
    neighbourhood and keeps self-loops.

    Args:
        model: to run.
        observed: on the graph to remove edges from, clean or attacked.
        scored: the ranking, on that graph's edges.
        scope: `graph` or `node`.
        right: bool, the nodes, links or graphs counted: test ones right on the clean graph.
        target: true classes of all of them.
        fractions: of the removable edges; begins with 0.

    Returns:
        `plus`, `minus` (slopes), `gap`, and `curve_plus`, `curve_minus`.
    """
    count, values, rowptr = target.numel(), scored.values[:, 0], scored.rowptr
    loops = scored.source == scored.destination if scope == "node" else None
    curves: dict[bool, list[float]] = {True: [], False: []}
    seen: list[tuple[Tensor, float]] = []
    progress = current()
    for fraction in fractions:
        progress.advance()
        for largest in (True, False):
            gone = metrics.edges_to_remove(values, rowptr, fraction, largest=largest, scope=scope, keep=loops)
            known = next((share for other, share in seen if torch.equal(other, gone)), None)
            if known is None:
                logits = (
                    predict_without(model, observed, scored.keys[gone]) if gone.numel() else observed.logits
                )
                known = metrics.still_right(logits[:count], target, right)
            seen = [*seen[-1:], (gone, known)]
            curves[largest].append(known)
    plus = metrics.f_slope_plus(curves[True], fractions)
    minus = metrics.f_slope_minus(curves[False], fractions)
    gap = metrics.f_slope_gap(minus, plus)
    return {
        "plus": plus,
        "minus": minus,
        "gap": gap,
        "curve_plus": curves[True],
        "curve_minus": curves[False],
    }


def fidelity(model: nn.Module, observed: Observation, nodes: Tensor, k: int) -> dict[str, float]:
    """Fidelity of the top-k neighbours of every node, by the mean attention over layers; loops are kept.

    Args:
        model: to run.
        observed: on the graph to explain.
        nodes: [T] the rows of the logits that count.
        k: neighbours per explanation.

    Returns:
        `plus`, `minus` and `characterization`.
    """
    scored = ranking(observed.attention, "node")
    loops = scored.source == scored.destination
    top = topk_mask(scored.values[:, 0].masked_fill(loops, float("-inf")), scored.rowptr, k) & ~loops
    rest = ~top & ~loops
    whole = observed.logits[nodes]
    plus = metrics.fidelity_plus(whole, predict_without(model, observed, scored.keys[top])[nodes])
    minus = metrics.fidelity_minus(whole, predict_without(model, observed, scored.keys[rest])[nodes])
    return {"plus": plus, "minus": minus, "characterization": metrics.characterization(plus, minus)}


def removals(views: int) -> int:
    """How many shares of the edges `all_curves` removes, over so many views."""
    return len(SCOPES) * views * len(metrics.FRACTIONS)


def all_curves(
    model: nn.Module,
    views: dict[str, Observation],
    target: Tensor,
    right: Tensor,
    rankings: dict[str, dict[str, LayerAttention]] | None = None,
) -> dict[str, Any]:
    """Curves in both scopes on every view.

    Args:
        model: to run.
        views: by name, e.g. `clean` and `attacked`.
        target: true classes of the original nodes, links or graphs.
        right: bool, those counted.
        rankings: by view and scope, to rank by something else than the model's own attention.

    Returns:
        By scope, then by view.
    """
    out: dict[str, Any] = {}
    for scope in SCOPES:
        out[scope] = {}
        for name, view in views.items():
            scored = ranking(view.attention, scope) if rankings is None else rankings[name][scope]
            out[scope][name] = removal_curves(model, view, scored, scope, right, target)
    return out
