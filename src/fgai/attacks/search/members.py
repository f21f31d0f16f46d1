"""The members of the ensemble: start × space × optimiser × loss × gradient, each a search of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attacks.budget import Box
from fgai.attacks.search.climb import SearchSpec
from fgai.attacks.search.site import ROW_LOSSES
from fgai.attention import AttentionMap, duplicate, find_layers, limits_of, observe
from fgai.checks import one_of
from fgai.graph import Graph
from fgai.ops.segments import row_max
from fgai.typed import typed

SATURATED = 1e-6  # distance to 1 from which the largest attention of a node counts as all there is
SATURATED_SHARE = 0.5  # share of the nodes at which attention must be so for a layer to count as saturated
LARGEST_TEMPERATURE = 1e8  # the last temperature tried
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
        top = row_max(layer.values.mean(1), layer.rowptr)[layer.degree > 1]
        share = float((top > 1 - SATURATED).double().mean()) if top.numel() else 0.0
        if share > SATURATED_SHARE:
            return layer.name, share
    return None


def _with_temperature(model: nn.Module, graph: Graph) -> nn.Module | None:
    """Return a copy with all scores divided by a temperature, so that softmax has a gradient; else None."""
    temperature = 10.0
    while temperature <= LARGEST_TEMPERATURE:
        other = duplicate(model)
        for layer in find_layers(other).values():
            _scale_scores(layer, 1 / temperature)
        if _saturated_layer(observe(other, graph, heads="mean", ranked=False).attention) is None:
            return other
        temperature *= 10
    return None


@torch.no_grad()
def _scale_scores(layer: nn.Module, factor: float) -> None:
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


@dataclass(frozen=True, eq=False)
class _StartContext:
    graph: Graph  # prepared, clean, with features
    endpoints: Tensor  # [M, e]
    labels: Tensor | None  # [N] classes the attacked model predicts on the clean graph
    box: Box
    seed: str = ""  # of the random numbers of `stream`
    donated: Tensor | None = None  # [M, F] the worst features for the vanilla model
    incumbent: Tensor | None = None  # [M, F] the worst features so far for the attacked one

    @property
    def middle(self) -> Tensor:
        return self.box.middle.expand(self.endpoints.shape[0], -1)

    def stream(self, name: str) -> torch.Generator:
        """Random numbers for one member, which depend on no other."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def drawn(self, scale: float, generator: torch.Generator) -> Tensor:
        """Tanh of normal noise of some scale, stretched to the box."""
        noise = torch.randn(self.middle.shape, generator=generator, dtype=torch.float32).to(self.middle)
        return self.box.features(torch.tanh(scale * noise))

    def earlier(self, features: Tensor | None, scale: float, generator: torch.Generator) -> Tensor:
        """Features of an earlier search, or noise of some scale where there are none."""
        return self.drawn(scale, generator) if features is None else features.clamp(*self.box)


def _corner(context: _StartContext, generator: torch.Generator) -> Tensor:
    low, high = context.box
    coins = torch.rand(context.middle.shape, generator=generator, dtype=torch.float32).to(low)
    return torch.where(coins < 0.5, low, high)


def _others(context: _StartContext, generator: torch.Generator) -> Tensor:
    assert context.graph.features is not None
    nodes = _nodes_of_other_classes(context, 4, generator)[:, 0]
    return context.graph.features.select(nodes).clamp(*context.box)


def _nodes_of_other_classes(context: _StartContext, count: int, generator: torch.Generator) -> Tensor:
    """Real nodes [M, count] for every new one, of classes other than most of its endpoints have, if any."""
    graph = context.graph
    shape = (context.endpoints.shape[0], 8 * count)
    drawn = torch.randint(graph.num_nodes, shape, generator=generator).to(graph.device)
    if context.labels is None:
        return drawn[:, :count]
    alike = context.labels[drawn] == context.labels[context.endpoints].mode(1).values[:, None]
    return drawn.gather(1, alike.long().argsort(dim=1, stable=True)[:, :count])


STARTS: dict[str, Callable[[_StartContext, torch.Generator], Tensor]] = {
    "middle": lambda context, generator: context.middle,
    "small": lambda context, generator: context.drawn(0.05, generator),
    "medium": lambda context, generator: context.drawn(0.3, generator),
    "large": lambda context, generator: context.drawn(1.0, generator),
    "corner": _corner,
    "others": _others,
    "donated": lambda context, generator: context.earlier(context.donated, 1.0, generator),
    "incumbent": lambda context, generator: context.earlier(context.incumbent, 0.3, generator),
}


GRADIENTS: dict[str, Callable[[nn.Module, AttentionMap], bool]] = {
    "true": lambda model, attention: True,
    "straight": lambda model, attention: bool(limits_of(model)),
    "smooth": lambda model, attention: _saturated_layer(attention) is not None,
}
# Gradients of the model itself, past the clipping of its limits, and of a copy with a higher temperature;
# the values tell from (model, its clean attention) whether one is worth climbing.


@typed
@dataclass(frozen=True, kw_only=True)
class Member(SearchSpec):
    """One search of an ensemble."""

    name: str  # for records
    start: str  # a name from `STARTS`
    gradient: str = "true"  # a name from `GRADIENTS`

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

DONOR = Member(name="donor", start="small", rate=0.03)  # attacks the vanilla model for `donated`


def _batches(members: Sequence[Member]) -> list[list[Member]]:
    """Members that can climb side by side, in order; those that polish last."""
    batches: dict[tuple[bool, str, int], list[Member]] = {}
    for member in members:
        key = (member.start == "incumbent", member.gradient, member.steps)
        batches.setdefault(key, []).append(member)
    return [batches[key] for key in sorted(batches, key=lambda key: key[0])]
