"""GNN-SVD: edges weighted by what a low-rank approximation of the graph says of them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fgai.checks import at_least
from fgai.graph import Graph
from fgai.models.base import Capabilities
from fgai.models.defences.base import Defended, register_defence
from fgai.ops.lowrank import reconstruct
from fgai.typed import typed


@typed
@register_defence("gnn-svd")
class GNNSVD(Defended):
    """A model that reads the graph through its best approximation of low rank.

    The weight of an edge is its entry in the rank-r truncated singular value decomposition of the adjacency
    (without self-loops), cut to [0, 1]; self-loops keep weight 1. The decomposition is kept in factors and
    evaluated on existing edges only, and made anew on every graph, an attacked one included.

    Features do not enter the weights, so the gradient an attack sees in them is exact. In edge weights, which
    edge-flipping attacks move, the decomposition is passed straight through: d weight / d edge = 1.

    Args:
        in_channels: features per node.
        out_channels: classes.
        rank: r.
        base: the model behind.
        **arguments: of that model.

    Reference: Entezari et al., All You Need Is Low (Rank), WSDM 2020. We differ: the original reads the whole
    dense approximation, pairs without an edge included, which needs N² numbers.
    """

    can_capture = False  # the decomposition is computed on the host
    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ("rank",)

    def __init__(
        self, in_channels: int, out_channels: int, *, rank: int = 50, base: str = "GAT", **arguments: Any
    ) -> None:
        at_least(rank, "rank", 1)
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.config |= {"rank": rank}
        self.rank = rank

    def weights(self, graph: Graph) -> Tensor:
        """Return the weights [E] of the edges."""
        given, adjacency = graph.edge_weight, graph.adjacency
        found = reconstruct(adjacency, self.rank, given).clamp(0.0, 1.0)
        loops = adjacency.source == adjacency.destination
        if given is None:
            return found.masked_fill(loops, 1.0)
        through = found + (given - given.detach())
        return torch.where(loops, given, through)
