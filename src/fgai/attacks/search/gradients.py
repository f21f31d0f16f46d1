"""Whose gradient a search climbs: the model's own, one straight through its limits, or a softer model's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fgai.attention import AttentionMap, duplicate, find_layers, limits_of, observe
from fgai.graph import Graph
from fgai.ops.segments import row_max

SATURATED = 1e-6
"""Distance to 1 from which the largest attention of a node counts as all there is."""
MOST = 0.5
"""Share of the nodes at which attention must be so for a layer to count as saturated."""
HOTTEST = 1e8
"""The last temperature tried."""
SCORE_WEIGHTS = (
    *("source_weight", "destination_weight", "score_weight"),
    *("att_src", "att_dst", "att_edge", "att", "att_l", "att_r"),
)
"""Parameters a layer's scores are linear in, in fgai's layers and PyG's."""
SCORE_MAPS = ("query", "lin_query")
"""Linear maps of which the same holds."""
SCORE_LIMITS = ("source", "destination", "query")
"""Limits that grow and shrink with them."""


def saturated_layer(attention: AttentionMap) -> tuple[str, float] | None:
    """Return the first layer whose attention is all or nothing at most nodes, and at which share of them."""
    for layer in attention:
        several = layer.degree > 1
        top = row_max(layer.values.mean(1), layer.rowptr)[several]
        share = float((top > 1 - SATURATED).double().mean()) if top.numel() else 0.0
        if share > MOST:
            return layer.name, share
    return None


def softened(model: nn.Module, graph: Graph) -> nn.Module | None:
    """Return a copy whose attention is not saturated: all its scores divided by one temperature.

    Softmax that gives one neighbour everything has no gradient; that of the same scores, ten or a thousand
    times smaller, points the way. What is found there is judged on the model itself.

    Args:
        model: in eval mode.
        graph: prepared for it.

    Returns:
        None where no temperature helps: a layer whose scores fgai does not know.
    """
    temperature = 10.0
    while temperature <= HOTTEST:
        other = duplicate(model)
        for layer in find_layers(other).values():
            _cool(layer, 1 / temperature)
        if saturated_layer(observe(other, graph, heads="mean", ranked=False).attention) is None:
            return other
        temperature *= 10
    return None


@torch.no_grad()
def _cool(layer: nn.Module, factor: float) -> None:
    for name, parameter in layer.named_parameters(recurse=False):
        if name in SCORE_WEIGHTS:
            parameter.mul_(factor)
    for name in SCORE_MAPS:
        for parameter in getattr(layer, name, nn.Identity()).parameters():
            parameter.mul_(factor)
    own = getattr(layer, "limits", None) or {}
    for name in SCORE_LIMITS:
        if name in own:
            own[name].low.mul_(factor)
            own[name].high.mul_(factor)


def has_limits(model: nn.Module, attention: AttentionMap) -> bool:
    """Whether straight-through gradients differ from the true ones."""
    return bool(limits_of(model))


def is_saturated(model: nn.Module, attention: AttentionMap) -> bool:
    """Whether a softer softmax is worth a try."""
    return saturated_layer(attention) is not None


def always(model: nn.Module, attention: AttentionMap) -> bool:
    """The true gradient serves everywhere."""
    return True


GRADIENTS: dict[str, Callable[[nn.Module, AttentionMap], bool]] = {
    "true": always,
    "straight": has_limits,
    "smooth": is_saturated,
}
"""Name → whether it is worth climbing: (model, its clean attention)."""
