"""`EdgeScores`: what an explainer says of one node, edge by edge, and `EdgeExplainer`, which says it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.explain import ExplainerAlgorithm

from fgai import checks
from fgai.attention import observe, prepared
from fgai.errors import InputError
from fgai.explanations.field import Fields
from fgai.explanations.propagated import along_paths
from fgai.explanations.pyg import on_edges
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.sparse import edge_name
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class EdgeScores:
    """What an explainer says of one node: a score for every edge of its receptive field.

    Self-loops are left out: masks do not reach those that layers add.

    Attributes:
        node: which is explained.
        keys: [K] identities of the edges, sorted; see `fgai.sparse.edge_keys`.
        values: [K], the larger the more the edge matters; only their order within a node compares.

    Example:
        >>> from fgai.sparse import edge_keys
        >>> keys = edge_keys(torch.tensor([0, 3]), torch.tensor([2, 2]))
        >>> EdgeScores(2, keys, torch.tensor([0.5, 0.75])).on(keys[1:]).tolist()
        [0.75]
    """

    node: int
    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        _check_keys(self.keys)
        if self.values.shape != self.keys.shape:
            got = tuple(self.values.shape)
            raise InputError(f"`values` must hold one score for each of {self.keys.numel()} edges, got {got}")
        if bool((self.keys.diff() <= 0).any()):
            raise InputError("`keys` must be sorted, each edge once")

    def on(self, keys: Tensor) -> Tensor:
        """Return the scores of the given edges [E], matched by (source, destination).

        Raises:
            InputError: an edge that is not in the field.
        """
        _check_keys(keys)
        known = torch.isin(keys, self.keys)
        if not bool(known.all()):
            missing = edge_name(int(keys[~known][0]))
            raise InputError(f"edge {missing} is not in the receptive field of node {self.node}")
        return self.values[torch.searchsorted(self.keys, keys)]


@typed
class EdgeExplainer(ABC):
    """One explainer of one model: called with a graph and some nodes. `edge_explainer` makes them by name.

    A subclass writes `explain`.

    Args:
        model: left as it is.
        seed: of whatever is drawn.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model, self.seed = model, checks.seed(seed)

    def __call__(self, data: Any, nodes: Sequence[int] | Tensor) -> list[EdgeScores]:
        """Explain some nodes of a graph.

        Args:
            data: a `Graph` or PyG `Data`: the clean one, or one with nodes or edges added or removed.
            nodes: their numbers.

        Returns:
            Scores in the order of `nodes`.

        Raises:
            InputError: no such node, or a graph the model cannot read.
        """
        graph = prepared(self.model, as_graph(data))
        try:
            given = torch.as_tensor(nodes)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"`nodes` must hold the numbers of nodes, got {nodes!r:.100}") from error
        if given.dim() != 1 or given.dtype == torch.bool:
            raise InputError("`nodes` must hold the numbers of nodes, one after the other")
        chosen = checks.positions(given, graph.num_nodes, "nodes") if given.numel() else given
        return self.explain(graph, chosen.tolist())

    @abstractmethod
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        """Explain nodes of a graph that is prepared for the model.

        Args:
            graph: prepared.
            nodes: numbers that are there.
        """


class RandomScores(EdgeExplainer):
    """Draws anew at every call: what an explanation that knows nothing scores.

    Args:
        model: whose receptive fields count.
        hops: layers that pass messages.
        seed: of the draws.
    """

    def __init__(self, model: nn.Module, hops: int, seed: int = 0) -> None:
        super().__init__(model, seed)
        self.hops, self.generator = hops, torch.Generator().manual_seed(seed)

    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        """Return scores from the explainer's own generator."""
        fields = Fields(graph, self.hops)
        found = []
        for node in nodes:
            keys = fields.keys[fields.edges(node)]
            drawn = torch.rand(keys.numel(), generator=self.generator, dtype=torch.float64)
            found.append(EdgeScores(node, keys, drawn.to(keys.device)))
        return found


class AttentionScores(EdgeExplainer):
    """Reads the model's attention, in one forward pass for all nodes.

    Args:
        model: with attention that can be recorded.
        heads: how they are reduced; layers are averaged, as `FaithfulAttention` does.
        paths: follow attention along paths instead, as `PropagatedAttention` does.
    """

    def __init__(self, model: nn.Module, heads: str = "log", *, paths: bool = False) -> None:
        super().__init__(model)
        self.heads, self.paths = heads, paths

    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        """Return what attention says of each node's field."""
        attention = observe(self.model, graph).attention.detach()
        fields = Fields(graph, hops_of(self.model, len(attention)))
        shown = on_edges(attention, fields.keys, "mean", self.heads)
        found = []
        for node in nodes:
            used = fields.edges(node)
            values = shown[used]
            if self.paths:
                ends = values.new_zeros(graph.num_nodes)
                ends[node] = 1.0
                values = along_paths(attention, ends, fields.keys[used], self.heads)
            found.append(EdgeScores(node, fields.keys[used], values))
        return found


def hops_of(model: nn.Module, attentions: int) -> int:
    """How many layers pass messages, of which so many with attention that is recorded."""
    return max(attentions, int(ExplainerAlgorithm._num_hops(model)))


def _check_keys(keys: Tensor) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise InputError(f"`keys` must hold int64 keys of edges, got {keys.dtype} {tuple(keys.shape)}")
