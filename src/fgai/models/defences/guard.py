"""GNNGuard: edges between unlike nodes are pruned, the others weighted by likeness, layer by layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models.base import Capabilities, as_features
from fgai.models.defences.base import Defended, attention_layers, register_defence
from fgai.ops import edge_cosine
from fgai.ops.segments import row_sum
from fgai.sparse import Adjacency, Features
from fgai.typed import typed


@typed
@register_defence("gnnguard")
class GNNGuard(Defended):
    """A model whose every layer trusts an edge as far as its two ends resemble each other there.

    With `s_ij` the cosine of the inputs of the layer at i and j, set to 0 below the threshold, and `n_i` the
    neighbours of i that are left, the weights into node i are

        α_ij = s_ij / Σ_j s_ij · n_i / (n_i + 1)   for neighbours,   α_ii = 1 / (n_i + 1)

    and the layer uses `ω = β ω_before + (1 − β) α`, the memory of the layer before, with a learned β (the
    first layer has none before it). A node that is left alone keeps its self-loop.

    Gradients reach the weights in evaluation mode, so attacks see the defence: exactly where an edge is kept;
    where it is pruned the threshold is passed straight through, or nothing would show how to get past it.
    While training the weights are constants of each step, and β alone is learned, as in the original.

    Args:
        in_channels: features per node.
        out_channels: classes.
        threshold: cosine below which an edge is pruned, at least 0.
        base: the model behind.
        **arguments: of that model.

    Reference: Zhang, Zitnik, GNNGuard, NeurIPS 2020. We differ: similarities on edges instead of dense
    matrices, sparse features as they are; pruning by the threshold of its code instead of the learned one of
    its text; weights as they are instead of their exponentials; any of fgai's models behind.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ("threshold",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        threshold: float = 0.1,
        base: str = "GAT",
        **arguments: Any,
    ) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise InputError(f"`threshold` must be a cosine between 0 and 1, got {threshold}")
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.config |= {"threshold": threshold}
        self.threshold = threshold
        self.gates = nn.Parameter(torch.zeros(attention_layers(self.model) - 1))

    def weights(self, graph: Graph) -> Tensor:
        """Return the weights of the first layer."""
        return self.trust(as_features(graph), graph.adjacency)

    def trust(self, x: Tensor | Features, adjacency: Adjacency) -> Tensor:
        """Return α [E] for the input of a layer."""
        if self.training and isinstance(x, Tensor):
            x = x.detach()
        similar = edge_cosine(x, adjacency)
        loops = adjacency.source == adjacency.destination
        kept = torch.where((similar >= self.threshold) & (similar > 0) & ~loops, similar, 0.0)
        if not self.training:
            kept = similar + (kept - similar).detach()
        kept = kept.masked_fill(loops, 0.0)
        left = row_sum((kept.detach() > 0).to(kept.dtype), adjacency.rowptr)
        # A node that is left alone gives its pruned edges the gradient of a first neighbour.
        total = torch.where(left > 0, row_sum(kept, adjacency.rowptr), 1.0)
        crowd = left.clamp(min=1)
        share = kept / total[adjacency.destination] * (crowd / (crowd + 1))[adjacency.destination]
        return torch.where(loops, (1 / (left + 1))[adjacency.destination], share)

    def embed(self, graph: Graph) -> Tensor:
        """Return the embeddings [N, out], the weights of each layer made on the way."""
        held: list[Tensor] = []

        def guard(x: Tensor | Features, given: Graph) -> Tensor:
            now = self.trust(x, given.adjacency)
            if held:
                memory = torch.sigmoid(self.gates[len(held) - 1])
                now = memory * held[-1] + (1 - memory) * now
            held.append(now)
            return now if given.edge_weight is None else now * given.edge_weight

        self.model.guard = guard
        try:
            return self.model.embed(graph)
        finally:
            self.model.guard = None
