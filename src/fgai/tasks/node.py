"""Node classification: a row of logits for every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fgai.graph import Graph
from fgai.tasks.base import Task, node_mask


class NodeTask(Task):
    """Every node is classified; the split is one of nodes, and so is the reach of an attack."""

    name: ClassVar[str] = "node"
    rows_are: ClassVar[str] = "nodes"
    scores: ClassVar[Mapping[str, str]] = {"f1": "f1"}
    row_per_node: ClassVar[bool] = True
    checks_stability: ClassVar[bool] = True

    def fits(self, graph: Graph) -> bool:
        """One graph, without links to predict."""
        return graph.links is None and graph.batch is None

    def count(self, graph: Graph) -> int:
        """N."""
        return graph.num_nodes

    def rows(self, graph: Graph, targets: str) -> Tensor:
        """The nodes of a mask; all nodes without one."""
        mask = node_mask(graph, targets)
        if mask is None:
            return torch.arange(graph.num_nodes, device=graph.device)
        return mask.nonzero().flatten()

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
