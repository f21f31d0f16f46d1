"""What faithful training compares with: the vanilla model's answers, and what an injection reaches."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fgai.attention import LayerAttention, observe
from fgai.graph import Graph
from fgai.sparse import EdgeMap
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

    Of a mini-batch, N are the seeds and E the edges into them; classes and layers are of all its nodes.

    Attributes:
        logits: [N, C].
        classes: that it predicts, of all nodes of the graph.
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
    classes: Tensor
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
            classes=logits.argmax(1),
            layers=chosen.layers,
            attention=values,
            rowptrs=rowptrs,
            leaders=[frozen_topk(w, ptr, config.k2, config.scope) for w, ptr in pairs],
            contrasts=relative(contrasts, config.contrast),
            sharpness=[
                float(sharp(w, one.rowptr, one.destination)) for w, one in zip(values, chosen, strict=True)
            ],
            scale=float(spread(logits)),
            depths=seen.attention.depths,
        )

    def shares(self, graph: Graph, attacked: Graph) -> Shares:
        """Return the shares of nodes in reach at the layers that count, and that of predictions."""
        count = self.rowptrs[0].numel() - 1
        some = count if count < graph.num_nodes else None
        layers, predictions = reach_shares(graph, attacked, self.depths, some)
        return Shares(layers[-len(self.attention) :], predictions)


def relative(contrasts: list[float], power: float) -> list[float]:
    """What similarity is divided by, per layer; see `FaithfulConfig.contrast`."""
    return [max(value / max(contrasts), FLATTEST) ** power for value in contrasts]


@dataclass(frozen=True, eq=False)
class Injection:
    """An adversary's new nodes at their endpoints.

    Attributes:
        adversary: holds the features.
        endpoints: [M, e], on the graph's device.
        shares: what they reach.
        some: [M] which of the adversary's nodes join a mini-batch; None for all, and the adversary's graph.
    """

    adversary: InjectionAdversary
    endpoints: Tensor
    shares: Shares
    some: Tensor | None = None

    def join(self, graph: Graph) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes, which take the step they have pending first."""
        if self.some is None:
            return self.adversary.joined(self.endpoints)
        return self.adversary.joined_to(graph, self.endpoints, self.some)

    def speaking(self) -> AbstractContextManager[None]:
        """A block in which the new nodes of value space speak."""
        return self.adversary.speaking(self.some)
