"""The recipe of plain supervised training, for every task; others build on it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attention import call_model, evaluating
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.metrics import task_scores
from fgai.tasks import PARTS, task_of
from fgai.training.capture import Drawn
from fgai.training.loop import Recipe, epoch_seed
from fgai.typed import typed


@typed
class Vanilla(Recipe):
    """Cross-entropy on the training nodes, links or graphs; validation score: the task's own.

    That is accuracy, for links ROC-AUC, ties broken by a lower loss. Pairs that are no links are drawn anew
    every epoch.

    Args:
        graph: prepared for the model, as the task views it in training, with labels and masks.
    """

    name = "vanilla"
    capturable = True

    def __init__(self, graph: Graph) -> None:
        self.graph, self.task, self.seed = graph, task_of(graph), 0
        self.train_nodes, self.train_y = labelled(graph, "train_mask")
        self.val_nodes, self.val_y = labelled(graph, "val_mask")

    def start(self, model: nn.Module, seed: int) -> None:
        """Remember the seed of what is drawn every epoch."""
        self.seed = seed

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the cross-entropy."""
        yield supervised(model, *self.batch(epoch))

    def draw(self, epoch: int) -> Drawn | None:
        """Nothing, where every epoch sees the same graph."""
        return Drawn("step") if self.task.fixed_graph else None

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """See `parts`: every epoch is the same."""
        return self.parts(model, 0)

    def batch(self, epoch: int) -> tuple[Graph, Tensor, Tensor]:
        """Return the graph of an epoch, the training rows of its logits and their labels."""
        if self.task.fixed_graph:
            return self.graph, self.train_nodes, self.train_y
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch) ^ 0x1B873593)
        graph = self.task.epoch(self.graph, generator)
        return graph, *labelled(graph, "train_mask")

    def measure(self, model: nn.Module) -> Tensor:
        """Return the validation score minus a thousandth of a bounded loss."""
        with evaluating(model), torch.no_grad():
            logits = call_model(model, self.graph)
            loss = cross_entropy(logits[self.val_nodes], self.val_y)
            return self.grade(logits) - 1e-3 * torch.tanh(loss)

    def grade(self, logits: Tensor) -> Tensor:
        """Return the score on the validation rows that chooses the epoch: accuracy, or the task's own."""
        logits = logits[self.val_nodes]
        if self.task.selected_by is not None:
            return logits.new_tensor(task_scores(self.task.name, logits, self.val_y)[self.task.selected_by])
        return (logits.argmax(1) == self.val_y).float().mean()


def supervised(model: nn.Module, graph: Graph, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the cross-entropy of some rows of the logits as a loss of one term."""
    # `index_select` rather than brackets: its backward pass does not sort.
    loss = cross_entropy(call_model(model, graph).index_select(0, rows), labels)
    return {"cross_entropy": loss, "total": loss}


@typed
def labelled(graph: Graph, mask: str) -> tuple[Tensor, Tensor]:
    """Return the rows of the logits (nodes, links or small graphs) in a mask, and their labels.

    Raises:
        InputError: if the graph has no labels, no such mask, an empty one, or unlabelled rows in it.
    """
    task = task_of(graph)
    truth = task.labels(graph)
    if truth is None:
        raise InputError(f"{graph.name!r} has no labels `y` to train on")
    part = one_of(mask.removesuffix("_mask"), "mask", PARTS)
    rows = task.rows(graph, part) if task.has_part(graph, part) else None
    if rows is None or not rows.numel():
        remedy = f"make a split with `{task.split_function}`"
        raise InputError(f"{graph.name!r} has no {task.rows_are} in `{mask}`; {remedy}")
    labels = truth[rows]
    if int(labels.min()) < 0:
        count = int((labels < 0).sum())
        raise InputError(f"`{mask}` holds {count} {task.rows_are} without a label; take them out")
    return rows, labels
