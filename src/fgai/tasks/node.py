"""Node classification: a row of logits for every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fgai.cache import cached_on
from fgai.graph import Graph
from fgai.tasks.base import Task, _nodes_of

IMBALANCED = 0.7  # share of the labelled nodes in one class above which accuracy says little


class NodeTask(Task):
    """Every node is classified; the split is one of nodes, and so is the reach of an attack."""

    name: ClassVar[str] = "node"
    rows_are: ClassVar[str] = "nodes"
    scores: ClassVar[Mapping[str, str]] = {name: name for name in ("f1", "balanced_accuracy", "macro_f1")}
    row_per_node: ClassVar[bool] = True
    checks_stability: ClassVar[bool] = True

    def headline_for(self, graph: Graph) -> str:
        """Balanced accuracy if one class has more than 70 % of all labelled nodes, else micro-F1."""
        balanced = "balanced_accuracy"
        return balanced if balanced in self.scores and _largest_share(graph) > IMBALANCED else self.headline

    def fits(self, graph: Graph) -> bool:
        """One graph, without links to predict."""
        return graph.links is None and graph.batch is None

    def count(self, graph: Graph) -> int:
        """N."""
        return graph.num_nodes

    def rows(self, graph: Graph, targets: str) -> Tensor:
        """The nodes of a mask; all nodes without one."""
        return _nodes_of(graph, targets)

    def labels(self, graph: Graph) -> Tensor | None:
        """The nodes' classes."""
        return graph.y

    def nodes(self, graph: Graph, targets: str) -> Tensor:
        """The nodes of the mask."""
        return self.rows(graph, targets)

    def reached(self, graph: Graph, nodes: Tensor) -> Tensor:
        """The nodes themselves."""
        return nodes

    def row_of(self, graph: Graph) -> Tensor:
        """The node's own."""
        return torch.arange(graph.num_nodes, device=graph.device)

    def measured(self, graph: Graph, targets: str) -> Tensor:
        """All nodes: an attack on some moves others too."""
        return torch.arange(graph.num_nodes, device=graph.device)


def _largest_share(graph: Graph) -> float:
    """Share of the most frequent class among all nodes whose class is known; 0 if none is."""

    def share() -> float:
        labels = graph.y[graph.y >= 0] if graph.y is not None else torch.zeros(0, dtype=torch.long)
        return float(torch.bincount(labels).max()) / labels.numel() if labels.numel() else 0.0

    return cached_on(graph, "fgai.tasks.node", share)
