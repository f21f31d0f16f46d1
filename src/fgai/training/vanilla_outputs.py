"""`VanillaOutputs`, which the loss terms of faithful training compare the model with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import LayerAttention, observe
from fgai.graph import Graph
from fgai.tasks import task_of
from fgai.topk import topk_mask

MIN_CONTRAST = 0.01
"""Least relative contrast: layers below it are uniform up to rounding and get no more weight."""


class Reach(NamedTuple):
    """Shares of a graph that injected nodes can change."""

    layers: list[float]  # of the nodes, per layer
    predictions: float  # of the nodes, links or small graphs


@dataclass(frozen=True, eq=False)
class VanillaOutputs:
    """Outputs of the vanilla model on the clean graph.

    N counts the nodes and E the edges; in a mini-batch the seeds and the edges into them.

    Attributes:
        logits: [N, C].
        classes: predicted; of all nodes of a mini-batch.
        layers: the attention, per layer; on all edges of a mini-batch.
        attention: per layer [E], averaged over heads.
        ranking: per layer [E], larger for neighbours that explain more.
        rowptrs: per layer [N + 1].
        contrasts: per layer, the unit of `similarity`, see `relative_contrasts`.
        sharpness: per layer.
        logit_spread: unit of changes of logits, see `spread`.
        depths: per layer, see `AttentionMap.depths`.
    """

    logits: Tensor
    classes: Tensor
    layers: tuple[LayerAttention, ...]
    attention: list[Tensor]
    ranking: list[Tensor]
    rowptrs: list[Tensor]
    contrasts: list[float]
    sharpness: list[float]
    logit_spread: float
    depths: list[int]
    _top_k: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, vanilla: nn.Module, graph: Graph) -> VanillaOutputs:
        """Run a trained model in eval mode on a graph that was prepared for it."""
        observation = observe(vanilla, graph, heads="mean")
        logits, layers = observation.logits, observation.attention.layers
        values = [layer.heads() for layer in layers]
        pairs = list(zip(values, layers, strict=True))
        sharpness = [float(layer_sharpness(w, layer.rowptr, layer.destination)) for w, layer in pairs]
        contrasts = [contrast(w, layer.rowptr) for w, layer in pairs]
        return cls(
            logits=logits,
            classes=logits.argmax(1),
            layers=tuple(layers),
            attention=values,
            ranking=[layer.ranking() for layer in layers],
            rowptrs=[layer.rowptr for layer in layers],
            contrasts=relative_contrasts(contrasts),
            sharpness=sharpness,
            logit_spread=float(spread(logits)),
            depths=observation.attention.depths,
        )

    def top_k(self, k: int) -> list[Tensor]:
        """The top-k neighbours of every node, per layer bool [E]; computed once."""
        if k not in self._top_k:
            layers = zip(self.ranking, self.rowptrs, strict=True)
            self._top_k[k] = [topk_mask(ranking, rowptr, k) for ranking, rowptr in layers]
        return self._top_k[k]

    def reach(self, graph: Graph, attacked: Graph) -> Reach:
        """Return the shares of nodes and predictions that the injected nodes can change.

        Layer 1 reads the new nodes at their neighbours; every further layer carries the change one edge on.
        Averages over all nodes are divided by these shares to become averages over the nodes in reach, so
        that the weight of a term does not depend on how much larger the graph is than the attack.
        """
        count = self.rowptrs[0].numel() - 1
        source, destination = attacked.adjacency.source, attacked.adjacency.destination
        reached = torch.arange(attacked.num_nodes, device=attacked.device) >= graph.num_nodes
        shares = []
        for _ in range(max(self.depths) + 1):
            further = reached.clone()
            further[destination[reached[source]]] = True
            reached = further
            shares.append(max(float(reached[:count].float().mean()), 1.0 / count))
        rows = task_of(graph).rows_predicted_from(graph, reached[: graph.num_nodes])
        rows = rows[:count] if count < graph.num_nodes else rows
        predictions = max(float(rows.float().mean()), 1.0 / rows.numel())
        return Reach([shares[depth] for depth in self.depths], predictions)


def spread(logits: Tensor) -> Tensor:
    """Mean over nodes of `½ Σ_c |y_c − mean_c y|`: the unit of changes of logits."""
    return (logits - logits.mean(1, keepdim=True)).abs().sum(1).mean().clamp(min=1e-12) / 2


def contrast(w: Tensor, rowptr: Tensor) -> float:
    """Mean over nodes of the total variation of an attention [E] to a uniform one."""
    degree = rowptr.diff()
    uniform = (1.0 / degree.clamp(min=1).to(w.dtype)).repeat_interleave(degree)
    return max(float((w - uniform).abs().sum() / 2 / max(1, degree.numel())), 1e-7)


def relative_contrasts(contrasts: list[float]) -> list[float]:
    """Contrasts per layer, divided by the largest."""
    return [max(value / max(contrasts), MIN_CONTRAST) for value in contrasts]


def layer_sharpness(w: Tensor, rowptr: Tensor, destination: Tensor) -> Tensor:
    """`fgai.metrics.sharpness` of an attention [E] that sums to 1 at every node; differentiable."""
    degree = rowptr.diff().to(w.dtype)
    counted = degree >= 2
    size = degree.clamp(min=2)
    divergence = w * (w.clamp(min=torch.finfo(w.dtype).tiny) * size[destination]).log()
    per_node = torch.zeros_like(degree).index_add(0, destination, divergence) / size.log()
    return torch.where(counted, per_node, 0.0).sum() / counted.sum().clamp(min=1)
