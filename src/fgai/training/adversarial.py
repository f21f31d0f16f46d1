"""Adversarial training: the usual defence, with the same inner adversary as faithful training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.adversaries import InjectionAdversary
from fgai.attacks import Budget
from fgai.attention import call_model, evaluating
from fgai.graph import Graph
from fgai.training.loop import PROBE, epoch_seed
from fgai.training.recipes import Vanilla


class Adversarial(Vanilla):
    """Cross-entropy on the clean graph and on one with adversarial nodes, in equal parts.

    The injected features climb the cross-entropy by the gradient of the training step itself and are kept
    from epoch to epoch; endpoints are new every epoch.

    Args:
        graph: prepared for the model, with labels and masks.
        budget: of the adversary; endpoints must come from training and validation nodes (`targets="fit"`).
    """

    name = "adversarial"

    def __init__(self, graph: Graph, budget: Budget) -> None:
        super().__init__(graph)
        self.adversary = InjectionAdversary(graph, budget)
        self.seed = 0

    def start(self, model: nn.Module, seed: int) -> None:
        """Draw the first features."""
        self.seed = seed
        self.adversary.start(self._generator(-1))

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield half the clean cross-entropy, then half the attacked one."""
        graph, rows, labels = self.lesson(epoch)
        clean = cross_entropy(call_model(model, graph)[rows], labels)
        yield {"clean": clean, "total": clean / 2}
        del clean
        attacked, _ = self.adversary.attacked(self._generator(epoch))
        hit = cross_entropy(call_model(model, attacked.replace(links=graph.links))[rows], labels)
        yield {"attacked": hit, "total": hit / 2}

    def score(self, model: nn.Module) -> float:
        """Return the mean of clean and attacked validation score."""
        adversary = self.adversary.restarted()
        nodes = self.task.nodes(self.graph, "val")
        with evaluating(model, freeze=True):
            for step in range(PROBE + 1):
                attacked, _ = adversary.attacked(self._generator(-2), nodes)
                logits = call_model(model, attacked)
                if step < PROBE:
                    cross_entropy(logits[self.val_nodes], self.val_y).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return (super().score(model) + float(self.grade(logits))) / 2

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the adversary's features back."""
        self.adversary.load_state(state)

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(epoch_seed(self.seed, epoch) ^ 0x2545F4914)
