"""The recipe of plain supervised training, for nodes; others build on it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attention import call_model, evaluating
from fgai.errors import InputError
from fgai.graph import Graph


class Vanilla:
    """Cross-entropy on the training nodes; validation score: accuracy, ties broken by a lower loss.

    Args:
        graph: prepared for the model, with labels and masks.
    """

    name = "vanilla"

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.train_nodes, self.train_y = labelled(graph, "train_mask")
        self.val_nodes, self.val_y = labelled(graph, "val_mask")

    def start(self, model: nn.Module, seed: int) -> None:
        """Nothing to prepare."""

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the cross-entropy."""
        logits = call_model(model, self.graph)
        loss = cross_entropy(logits[self.train_nodes], self.train_y)
        yield {"cross_entropy": loss, "total": loss}

    def score(self, model: nn.Module) -> float:
        """Return validation accuracy minus a thousandth of a bounded loss."""
        with evaluating(model), torch.no_grad():
            logits = call_model(model, self.graph)[self.val_nodes]
            accuracy = (logits.argmax(1) == self.val_y).float().mean()
            loss = cross_entropy(logits, self.val_y)
            return float(accuracy - 1e-3 * torch.tanh(loss))

    def state(self) -> dict[str, Tensor]:
        """Nothing to keep."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Nothing to take back."""


def labelled(graph: Graph, mask: str) -> tuple[Tensor, Tensor]:
    """Return the nodes of a mask and their labels.

    Raises:
        InputError: if the graph has no labels, no such mask, an empty one, or unlabelled nodes in it.
    """
    chosen: Tensor | None = getattr(graph, mask)
    if graph.y is None:
        raise InputError(f"{graph.name!r} has no labels `y` to train on")
    if chosen is None or not bool(chosen.any()):
        remedy = "make a split with `fgai.datasets.random_split`"
        raise InputError(f"{graph.name!r} has no nodes in `{mask}`; {remedy}")
    nodes = chosen.nonzero().flatten()
    labels = graph.y[nodes]
    if int(labels.min()) < 0:
        raise InputError(f"`{mask}` holds {int((labels < 0).sum())} nodes without a label; take them out")
    return nodes, labels
