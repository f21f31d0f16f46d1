"""The members of the ensemble: start × space × optimiser × loss × gradient, each a search of its own.

Whose gradient a member climbs is the model's own, one straight through its limits, or a softer model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fgai.attacks.search.climb import SearchSpec
from fgai.attacks.search.scores import ROW_LOSSES
from fgai.attacks.search.starts import STARTS
from fgai.attention import AttentionMap, duplicate, find_layers, limits_of, observe
from fgai.checks import one_of
from fgai.graph import Graph
from fgai.ops.segments import row_max
from fgai.typed import typed

SATURATED = 1e-6  # distance to 1 from which the largest attention of a node counts as all there is
MOST = 0.5  # share of the nodes at which attention must be so for a layer to count as saturated
HOTTEST = 1e8  # the last temperature tried
# Parameters and linear maps a layer's scores are linear in, in fgai's layers and PyG's, and their limits.
SCORE_WEIGHTS = (
    *("source_weight", "destination_weight", "score_weight"),
    *("att_src", "att_dst", "att_edge", "att", "att_l", "att_r"),
)
SCORE_MAPS = ("query", "lin_query")
SCORE_LIMITS = ("source", "destination", "query")


def _saturated_layer(attention: AttentionMap) -> tuple[str, float] | None:
    """Return the first layer whose attention is all or nothing at most nodes, and at which share of them."""
    for layer in attention:
        several = layer.degree > 1
        top = row_max(layer.values.mean(1), layer.rowptr)[several]
        share = float((top > 1 - SATURATED).double().mean()) if top.numel() else 0.0
        if share > MOST:
            return layer.name, share
    return None


def _softened(model: nn.Module, graph: Graph) -> nn.Module | None:
    """Return a copy with all scores divided by a temperature, so that attention is not saturated; else None.

    Softmax that gives one neighbour everything has no gradient; that of the same scores, ten or a thousand
    times smaller, points the way. Points found there are judged on the model itself.
    """
    temperature = 10.0
    while temperature <= HOTTEST:
        other = duplicate(model)
        for layer in find_layers(other).values():
            _cool(layer, 1 / temperature)
        if _saturated_layer(observe(other, graph, heads="mean", ranked=False).attention) is None:
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


GRADIENTS: dict[str, Callable[[nn.Module, AttentionMap], bool]] = {
    "true": lambda model, attention: True,
    "straight": lambda model, attention: bool(limits_of(model)),
    "smooth": lambda model, attention: _saturated_layer(attention) is not None,
}
"""Name → whether it is worth climbing: (model, its clean attention)."""


@typed
@dataclass(frozen=True, kw_only=True)
class Member(SearchSpec):
    """One search of an ensemble.

    Attributes:
        name: for records.
        start: a name from `STARTS`.
        gradient: a name from `GRADIENTS`.
    """

    name: str
    start: str
    gradient: str = "true"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.start, "start", tuple(STARTS))
        one_of(self.loss, "loss", tuple(ROW_LOSSES))
        one_of(self.gradient, "gradient", tuple(GRADIENTS))


_MOMENTUM: dict[str, Any] = {"space": "box", "optimiser": "momentum", "rate": 0.05}
_SIGN: dict[str, Any] = {"space": "box", "optimiser": "sign"}

PREDICTION_MEMBERS: tuple[Member, ...] = (
    Member(name="sign", start="middle", **_SIGN, rate=0.01),
    Member(name="momentum", start="small", **_MOMENTUM),
    Member(name="adam small margin", start="small", rate=0.03),
    Member(name="adam small reach", start="small", loss="reach"),
    Member(name="adam medium reach", start="medium", loss="reach"),
    Member(name="adam corner margin", start="corner"),
    Member(name="adam others margin", start="others"),
    Member(name="adam others reach", start="others", loss="reach"),
    Member(name="straight small margin", start="small", rate=0.03, gradient="straight"),
    Member(name="straight others reach", start="others", loss="reach", gradient="straight"),
    Member(name="straight momentum", start="small", **_MOMENTUM, gradient="straight"),
    Member(name="smooth small margin", start="small", rate=0.03, gradient="smooth"),
    Member(name="polish", start="incumbent", loss="reach", rate=0.03),
    Member(name="polish momentum", start="incumbent", **{**_MOMENTUM, "rate": 0.01}, loss="reach"),
)

EXPLANATION_MEMBERS: tuple[Member, ...] = (
    Member(name="sign", start="middle", **_SIGN, rate=0.02, steps=200),
    Member(name="sign large", start="middle", **_SIGN, steps=100),
    Member(name="momentum", start="small", **_MOMENTUM, steps=200),
    Member(name="adam large", start="large", steps=200),
    Member(name="adam others", start="others", rate=0.3, steps=200),
    Member(name="transfer", start="donated", steps=200),
    Member(name="straight momentum", start="small", **_MOMENTUM, steps=200, gradient="straight"),
    Member(name="straight others", start="others", rate=0.3, steps=200, gradient="straight"),
    Member(name="smooth large", start="large", steps=200, gradient="smooth"),
    Member(name="polish", start="incumbent", rate=0.03, steps=200),
)

_SHORT = ("sign", "momentum", "adam small margin", "adam others reach")
_SHORT_STRAIGHT = ("straight small margin", "straight momentum")
SHORT_MEMBERS = tuple(one for one in PREDICTION_MEMBERS if one.name in (*_SHORT, *_SHORT_STRAIGHT))
"""Members that find most of the damage in few steps: for checks within a training."""

DONOR = Member(name="donor", start="small", rate=0.03)
"""How the vanilla model is attacked for the features it donates."""


def _batches(members: tuple[Member, ...]) -> list[list[Member]]:
    """Members that can climb side by side, in the order of the first of each; those that polish last."""
    batches: dict[tuple[bool, str, int], list[Member]] = {}
    for member in members:
        key = (member.start == "incumbent", member.gradient, member.steps)
        batches.setdefault(key, []).append(member)
    return [batches[key] for key in sorted(batches, key=lambda key: key[0])]
