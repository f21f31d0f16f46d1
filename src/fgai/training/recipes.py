"""`Recipe`, the loss and score of a training, and the recipe of supervised training, `VanillaRecipe`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attention import call_model, evaluating
from fgai.checks import one_of
from fgai.checks import seed as check_seed
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.metrics import task_scores
from fgai.tasks import PARTS, task_of
from fgai.training.adversary import InjectionAdversary
from fgai.typed import typed


@dataclass(frozen=True)
class Draws:
    """The random draws of an epoch. `kind` names the captured step they belong to; its shapes are fixed."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Draws:
        """Return the same on a device."""
        return Draws(self.kind, {name: tensor.to(device) for name, tensor in self.tensors.items()})


class Step(NamedTuple):
    """One step of the optimizer."""

    weight: int  # for means over steps: number of seeds of the mini-batch; 0 if the process has none
    losses: Iterator[dict[str, Tensor]]  # see `Recipe.losses`


class Recipe:
    """A loss and the score that decides which epoch's weights are kept.

    A recipe defines `losses` and `score`, or `steps` and `score` if it reads mini-batches. One whose steps
    can be captured in a CUDA graph sets `capturable = True` in its own class body (subclasses do not inherit
    it) and defines `draw`, `losses_from` and `score_tensor`, which must not wait for the device.
    """

    name: str
    mini_batches: ClassVar[bool] = False
    """Whether it reads mini-batches, which several processes can share."""
    capturable: ClassVar[bool] = False
    injects = False
    """Whether it trains on injected nodes, those of its `adversary`."""
    adversary: InjectionAdversary
    seed: int = 0
    stream: ClassVar[int] = 0  # of its random draws, see `epoch_generator`

    def start(self, model: nn.Module, seed: int) -> None:
        """Prepare the first epoch, e.g. compute the vanilla model's outputs; by default keep the seed."""
        self.seed = seed

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield one or more dictionaries of loss terms, each with their weighted sum as `total`.

        Every `total` is back-propagated and freed before the next is asked for: a loss on two graphs needs
        the memory of one. Their gradients add up to one step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `losses` or `steps`")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        return 1

    def steps(self, model: nn.Module, epoch: int) -> Iterator[Step]:
        """Yield the steps of an epoch, each taken before the next is asked for; by default one."""
        yield Step(1, self.losses(model, epoch))

    def score(self, model: nn.Module) -> float:
        """Return the validation score, higher is better; by default the value of `score_tensor`."""
        return float(self.score_tensor(model))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save besides weights and optimizer; by default the adversary's, if any."""
        return self.adversary.state() if self.injects else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors that `state` returned."""
        if self.injects:
            self.adversary.load_state(state)

    def _generator(self, epoch: int) -> torch.Generator:
        return epoch_generator(self.seed, epoch, self.stream)

    def draw(self, epoch: int) -> Draws | None:
        """Return the random draws of an epoch, on the CPU; None (the default) runs it without capture."""
        return None

    def losses_from(self, model: nn.Module, draws: Draws) -> Iterator[dict[str, Tensor]]:
        """Yield what `losses` yields for an epoch with these draws, which are on the device."""
        raise NotImplementedError(f"{type(self).__name__} is capturable and must define `losses_from`")

    def score_tensor(self, model: nn.Module) -> Tensor:
        """Return the score as a tensor on the device."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `score`, or `score_tensor` if it is capturable"
        )


@typed
def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch; it depends on its arguments alone, so a training can resume anywhere."""
    check_seed(seed)
    return (seed * 1_000_003 + epoch * 7_919 + 12_345) % (2**63 - 1)


def epoch_generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    """Return the generator of an epoch (negative: of other draws); streams are independent."""
    return torch.Generator().manual_seed(epoch_seed(seed, epoch) ^ stream)


@typed
class VanillaRecipe(Recipe):
    """Cross-entropy on the training rows of a prepared graph, and the task's score on the validation rows.

    The score is accuracy, for links ROC-AUC; a lower loss breaks ties. Non-links are drawn every epoch.
    """

    name = "vanilla"
    capturable = True

    def __init__(self, graph: Graph) -> None:
        self.graph, self.task = graph, task_of(graph)
        self.train_rows, self.train_labels = labelled_rows(graph, "train_mask")
        self.val_rows, self.val_labels = labelled_rows(graph, "val_mask")

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the cross-entropy."""
        yield supervised_loss(model, *self.batch(epoch))

    def draw(self, epoch: int) -> Draws | None:
        """Return draws without tensors if every epoch has the same graph, else None."""
        return Draws("step") if self.task.fixed_graph else None

    def losses_from(self, model: nn.Module, draws: Draws) -> Iterator[dict[str, Tensor]]:
        """See `losses`: every epoch is the same."""
        return self.losses(model, 0)

    def batch(self, epoch: int) -> tuple[Graph, Tensor, Tensor]:
        """Return the graph of an epoch, the training rows of its logits and their labels."""
        if self.task.fixed_graph:
            return self.graph, self.train_rows, self.train_labels
        graph = self.task.epoch(self.graph, epoch_generator(self.seed, epoch, 0x1B873593))
        return graph, *labelled_rows(graph, "train_mask")

    def score_tensor(self, model: nn.Module) -> Tensor:
        """Return the validation score minus a thousandth of a bounded loss."""
        with evaluating(model), torch.no_grad():
            logits = call_model(model, self.graph)
            loss = cross_entropy(logits[self.val_rows], self.val_labels)
            return self.validation_score(logits) - 1e-3 * torch.tanh(loss)

    def validation_score(self, logits: Tensor) -> Tensor:
        """Return the accuracy on the validation rows, or the score by which the task chooses the epoch."""
        logits, name = logits[self.val_rows], self.task.selected_by
        if name is not None:
            return logits.new_tensor(task_scores(self.task.name, logits, self.val_labels)[name])
        return (logits.argmax(1) == self.val_labels).float().mean()


def supervised_loss(model: nn.Module, graph: Graph, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the cross-entropy of some rows of the logits, as `cross_entropy` and `total`."""
    # The backward pass of `index_select`, unlike that of brackets, does not sort.
    loss = cross_entropy(call_model(model, graph).index_select(0, rows), labels)
    return {"cross_entropy": loss, "total": loss}


@typed
def labelled_rows(graph: Graph, mask: str) -> tuple[Tensor, Tensor]:
    """Return the rows of the logits (nodes, links or small graphs) in a mask, and their labels.

    `InputError` if the graph has no labels, no such mask, an empty one, or unlabelled rows in it.
    """
    task = task_of(graph)
    truth = task.labels(graph)
    if truth is None:
        raise InputError(f"{graph.name!r} has no labels `y` to train on")
    part = one_of(mask.removesuffix("_mask"), "mask", PARTS)
    rows = task.rows(graph, part) if task.has_part(graph, part) else None
    if rows is None or not rows.numel():
        raise InputError(
            f"{graph.name!r} has no {task.rows_are} in `{mask}`; make a split with `{task.split_function}`"
        )
    labels = truth[rows]
    if int(labels.min()) < 0:
        count = int((labels < 0).sum())
        raise InputError(f"`{mask}` holds {count} {task.rows_are} without a label; take them out")
    return rows, labels
