"""Pro-GNN: the weights of the edges are learned together with the model, kept sparse, smooth and low-rank."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fgai.checks import at_least, memory, whole
from fgai.graph import Graph
from fgai.models.base import Capabilities, as_features
from fgai.models.defences.base import Defended, register_defence
from fgai.ops import edge_cosine
from fgai.ops.lowrank import reconstruct
from fgai.sparse import match_edges
from fgai.typed import typed


@typed
@register_defence("pro-gnn")
class ProGNN(Defended):
    """A model that learns how much of each edge to believe.

    With `a` the given edges, `w` the learned ones, x̂ the features scaled to length 1 and L the best rank-r
    approximation of the adjacency, all on existing edges without self-loops, the structure should make

        Σ (w − a)²  +  sparsity Σ |w|  +  smoothness ½ Σ w ‖x̂_i − x̂_j‖²  +  low_rank Σ (w − L)²

    small, together with the cross-entropy of the model that reads it. Without the cross-entropy the best is

        w* = (a + low_rank · L − (sparsity + smoothness · (1 − cos(x_i, x_j))) / 2) / (1 + low_rank)

    cut to [0, 1]. The model uses `w = w* + c` with a correction c for each edge it was trained on, learned by
    gradient; an edge it has not seen, such as an attacker's, gets w* alone. So the structure is learned anew
    on every graph, in one step. In evaluation mode gradients pass straight through the cut and through the
    decomposition (which depends on the edges only); in the features they are exact otherwise.

    Args:
        in_channels: features per node.
        out_channels: classes.
        sparsity: weight of the l1 norm.
        smoothness: weight of the feature smoothness.
        low_rank: weight of the distance to the low-rank approximation.
        rank: r.
        num_edges: corrections to keep, set by `for_data`.
        base: the model behind.
        **arguments: of that model.

    Reference: Jin et al., Graph Structure Learning for Robust Graph Neural Networks, KDD 2020. We differ: the
    original learns a dense N × N matrix and shrinks all its singular values every epoch (`dense_bytes` says
    what that needs); here the structure lives on existing edges, the nuclear norm is replaced by the distance
    to rank r, features are compared by angle, and the terms are divided by the number of nodes, like the
    cross-entropy.
    """

    can_capture = False  # the decomposition is computed on the host
    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ("sparsity", "smoothness", "low_rank", "rank")
    keys: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        sparsity: float = 0.1,
        smoothness: float = 1.0,
        low_rank: float = 1.0,
        rank: int = 50,
        num_edges: int = 0,
        base: str = "GAT",
        **arguments: Any,
    ) -> None:
        for name, value in (("sparsity", sparsity), ("smoothness", smoothness), ("low_rank", low_rank)):
            at_least(value, name, 0.0)
        at_least(rank, "rank", 1)
        memory(whole(num_edges, "num_edges", 0), 12, "num_edges")
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.sparsity, self.smoothness, self.low_rank, self.rank = sparsity, smoothness, low_rank, rank
        self.config |= {
            "sparsity": sparsity,
            "smoothness": smoothness,
            "low_rank": low_rank,
            "rank": rank,
            "num_edges": num_edges,
        }
        self.register_buffer("keys", torch.zeros(num_edges, dtype=torch.long))
        self.correction = nn.Parameter(torch.zeros(num_edges))

    def see(self, graph: Graph) -> None:
        """Keep a correction for each edge of this graph, all 0."""
        self.config["num_edges"] = graph.num_edges
        self.keys = graph.keys.clone()
        self.correction = nn.Parameter(torch.zeros(graph.num_edges, device=graph.device))

    def weights(self, graph: Graph) -> Tensor:
        """Return the learned weights [E]."""
        wanted, given = self.settled(graph), graph.edge_weight
        loops = graph.adjacency.source == graph.adjacency.destination
        learned = wanted + self._corrections(graph)
        cut = learned.clamp(0.0, 1.0)
        learned = cut if self.training else learned + (cut - learned).detach()
        return torch.where(loops, torch.ones_like(learned) if given is None else given, learned)

    def settled(self, graph: Graph) -> Tensor:
        """Return w* [E] before the cut: the structure that fits graph and features best without labels."""
        cost = self.sparsity + self.smoothness * (1 - edge_cosine(as_features(graph), graph.adjacency))
        given = 1.0 if graph.edge_weight is None else graph.edge_weight
        return (given + self.low_rank * self._approximation(graph) - cost / 2) / (1 + self.low_rank)

    def terms(self, graph: Graph) -> dict[str, Tensor]:
        """Return the four terms of the structure at the learned weights, divided by the number of nodes."""
        keep = graph.adjacency.source != graph.adjacency.destination
        w = self.weights(graph)[keep]
        given = torch.ones_like(w) if graph.edge_weight is None else graph.edge_weight[keep]
        apart = 1 - edge_cosine(as_features(graph), graph.adjacency)[keep]
        nodes = graph.num_nodes
        return {
            "fidelity": (w - given).square().sum() / nodes,
            "sparsity": self.sparsity * w.abs().sum() / nodes,
            "smoothness": self.smoothness * (w * apart).sum() / nodes,
            "low_rank": self.low_rank * (w - self._approximation(graph)[keep]).square().sum() / nodes,
        }

    def _approximation(self, graph: Graph) -> Tensor:
        found, given = reconstruct(graph.adjacency, self.rank, graph.edge_weight), graph.edge_weight
        return found if given is None else found + (given - given.detach())

    def _corrections(self, graph: Graph) -> Tensor:
        """The correction of each edge, 0 for those not seen in training."""
        keys = graph.keys
        if keys.shape == self.keys.shape and torch.equal(keys, self.keys):
            return self.correction
        here, there = match_edges(keys, self.keys)
        out = self.correction.new_zeros(keys.numel())
        return out.index_copy(0, here, self.correction[there])


def dense_bytes(num_nodes: int) -> int:
    """Bytes the original needs at least: the matrix, its gradient, its momentum and its decomposition."""
    return 6 * 4 * num_nodes**2
