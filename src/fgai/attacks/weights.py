"""Forward passes on graphs with weights on their edges, for any model whose attention can be recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, LayerAttention, adapter_of, observe
from fgai.graph import Graph
from fgai.sparse import edge_keys

TINY = 1e-12
"""Smallest weight and row sum that is divided by."""


def weighted_forward(model: nn.Module, graph: Graph, weight: Tensor) -> tuple[Tensor, AttentionMap]:
    """Return the logits where edges are there in part, and the attention with the parts divided out.

    Weights enter attention as log-weights on the score: w_e exp(s_e) / Σ w exp(s) over a node's edges. fgai's
    models read them from the graph. In any other model, attention a_e = exp(s_e) / Σ exp(s) is turned into
    the same thing after the softmax:

        w_e a_e · (Σ a) / (Σ w a)

    The attention returned is that divided by w_e. Within a node it ranks edges by score alone, as where an
    edge is there or not: half an edge is not half as good an explanation. Weights the graph has itself are
    the model's affair and stay.

    Args:
        model: fgai's or the user's, see `fgai.attention.record`.
        graph: prepared for it.
        weight: [E], how much of each edge is there; gradients flow to it.

    Returns:
        Logits and attention, not detached.
    """
    if adapter_of(model).reads_weights:
        whole = weight if graph.edge_weight is None else weight * graph.edge_weight
        seen = observe(model, graph.replace(edge_weight=whole), grad=True)
    else:
        seen = observe(model, graph, grad=True, perturb=Weigh(graph.keys, weight))
    divided = (_divided(layer, graph.keys, weight) for layer in seen.attention)
    return seen.logits, AttentionMap(tuple(divided))


class Weigh:
    """Puts weights on the edges of any layer's attention; see `weighted_forward` for the formula.

    A node all of whose edges have weight 0 gets zeros, like one without edges. Edges without a weight, such
    as self-loops a layer adds, have weight 1.

    Args:
        keys: [K] sorted identities of the weighted edges.
        weight: [K], at least 0.
    """

    def __init__(self, keys: Tensor, weight: Tensor) -> None:
        self.keys, self.weight = keys, weight

    def __call__(self, layer: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        """Return the weighted attention [E, H] of one layer."""
        weight = _look_up(edge_keys(source, destination), self.keys, self.weight).to(attention.dtype)
        weighted = attention * weight[:, None]
        count = int(destination.max()) + 1 if destination.numel() else 0
        empty = attention.new_zeros(count, attention.shape[1])
        before = empty.index_add(0, destination, attention)
        after = empty.index_add(0, destination, weighted).clamp(min=TINY)
        return weighted * (before / after)[destination]


def _divided(layer: LayerAttention, keys: Tensor, weight: Tensor) -> LayerAttention:
    own = _look_up(layer.keys, keys, weight).to(layer.values.dtype).clamp(min=TINY)
    return layer.with_values(layer.values / own[:, None])


def _look_up(wanted: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """The weight of each wanted edge, 1 where it has none."""
    if keys.numel() == 0:
        return torch.ones_like(wanted, dtype=weight.dtype)
    spot = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
    return torch.where(keys[spot] == wanted, weight[spot], 1.0)
