"""`Task`: the few questions whose answers differ between nodes, links and graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fgai.graph import Graph

PARTS = ("train", "val", "test", "fit")
"""Parts of a split; `fit` is training and validation together."""


class Task(ABC):
    """What is predicted on a graph.

    A model gives one row of logits for everything there is to classify: for each node, each pair of nodes in
    `graph.links`, or each small graph of a batch. Training, attacks, metrics and certificates speak of those
    rows; only the answers below depend on the task.

    Attributes:
        name: `node`, `link` or `graph`.
        rows_are: what a row of the logits stands for, in words.
        steady: every epoch sees the same graph, so its training steps can be captured.
    """

    name: ClassVar[str]
    rows_are: ClassVar[str]
    steady: ClassVar[bool] = True

    def view(self, graph: Graph, targets: str) -> Graph:
        """Return the graph a model reads when `targets` are predicted; itself where it already is that."""
        return graph

    def epoch(self, graph: Graph, generator: torch.Generator) -> Graph:
        """Return the graph of one training epoch, with whatever is drawn anew."""
        return graph

    @abstractmethod
    def count(self, graph: Graph) -> int:
        """Rows of the logits."""

    @abstractmethod
    def rows(self, graph: Graph, targets: str) -> Tensor:
        """[T] the rows of a part of the split; all where there is no split."""

    @abstractmethod
    def labels(self, graph: Graph) -> Tensor | None:
        """[rows] classes, -1 where unknown, or None."""

    @abstractmethod
    def nodes(self, graph: Graph, targets: str) -> Tensor:
        """The nodes that an attack on `targets` may join or change."""

    @abstractmethod
    def reached(self, graph: Graph, nodes: Tensor) -> Tensor:
        """Bool [rows]: what is predicted from at least one of `nodes` (bool [N])."""

    @abstractmethod
    def row_of(self, graph: Graph) -> Tensor:
        """[N] the row that tells most about each node, -1 where there is none."""

    def measured(self, graph: Graph, targets: str) -> Tensor:
        """The rows whose change under attack is measured: those of `targets`."""
        return self.rows(graph, targets)


def node_mask(graph: Graph, targets: str) -> Tensor | None:
    """Bool [N] of a part of the split, or None where the graph has none."""
    if targets == "fit":
        masks = [mask for mask in (graph.train_mask, graph.val_mask) if mask is not None]
        return torch.stack(masks).any(0) if masks else None
    mask: Tensor | None = getattr(graph, f"{targets}_mask")
    return mask
