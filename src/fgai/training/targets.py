"""What faithful training compares with: the vanilla model's answers, and what an injection reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fgai.attention import LayerAttention, observe
from fgai.graph import Graph
from fgai.topk import Cut, frozen_topk
from fgai.training.adversary import InjectionAdversary, reach_shares
from fgai.training.settings import FaithfulConfig
from fgai.training.terms import contrast, sharp, spread

FLATTEST = 0.01
"""Layers with less contrast, relative to the sharpest, are uniform up to rounding and get no more weight."""


class Shares(NamedTuple):
    """Which part of the graph an adversary reaches.

    Attributes:
        layers: of the nodes, at each layer that counts.
        predictions: of the nodes, links or small graphs.
    """

    layers: list[float]
    predictions: float


@dataclass(frozen=True, eq=False)
class Targets:
    """The vanilla model's answers on the clean graph, frozen; per layer means per layer that counts.

    Attributes:
        logits: [N, C].
        layers: the attention, per layer.
        attention: per layer [E], heads averaged.
        rowptrs: per layer [N + 1].
        leaders: per layer, the top-k kept under perturbation.
        contrasts: per layer, what similarity is divided by.
        sharpness: per layer.
        scale: spread of the logits.
        depths: of every layer, counting or not, see `AttentionMap.depths`.
    """

    logits: Tensor
    layers: tuple[LayerAttention, ...]
    attention: list[Tensor]
    rowptrs: list[Tensor]
    leaders: list[Tensor | Cut]
    contrasts: list[float]
    sharpness: list[float]
    scale: float
    depths: list[int]

    @classmethod
    def of(cls, vanilla: nn.Module, graph: Graph, config: FaithfulConfig) -> Targets:
        """Read them off a model in eval mode.

        Args:
            vanilla: trained.
            graph: prepared for it.
            config: which layers count, and what of them.
        """
        seen = observe(vanilla, graph, heads="mean", ranked=False)
        logits, chosen = seen.logits, seen.attention.select(config.layers)
        values, rowptrs = [layer.heads() for layer in chosen], [layer.rowptr for layer in chosen]
        pairs = list(zip(values, rowptrs, strict=True))
        contrasts = [contrast(w, ptr) for w, ptr in pairs]
        return cls(
            logits=logits,
            layers=chosen.layers,
            attention=values,
            rowptrs=rowptrs,
            leaders=[frozen_topk(w, ptr, config.k2, config.scope) for w, ptr in pairs],
            contrasts=[max(value / max(contrasts), FLATTEST) ** config.contrast for value in contrasts],
            sharpness=[
                float(sharp(w, one.rowptr, one.destination)) for w, one in zip(values, chosen, strict=True)
            ],
            scale=float(spread(logits)),
            depths=seen.attention.depths,
        )

    def shares(self, graph: Graph, attacked: Graph) -> Shares:
        """Return the shares of nodes in reach at the layers that count, and that of predictions."""
        layers, predictions = reach_shares(graph, attacked, self.depths)
        return Shares(layers[-len(self.attention) :], predictions)


@dataclass(frozen=True, eq=False)
class Injection:
    """An adversary's new nodes at their endpoints.

    Attributes:
        adversary: holds the features.
        endpoints: [M, e], on the graph's device.
        shares: what they reach.
    """

    adversary: InjectionAdversary
    endpoints: Tensor
    shares: Shares
