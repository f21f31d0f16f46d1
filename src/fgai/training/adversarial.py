"""Adversarial training: the usual defence, with the same inner adversary as faithful training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attacks import Budget
from fgai.attention import call_model, entry_limits, evaluating, limits_of, straight_through
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import Drawn, replayable
from fgai.training.loop import PROBE, epoch_seed
from fgai.training.ranges import Tightness, range_pass, set_ranges
from fgai.training.recipes import Vanilla
from fgai.typed import typed

ATTACK_WEIGHT = 0.5


@typed
@replayable
class Adversarial(Vanilla):
    """Cross-entropy on the clean graph and on one with adversarial nodes, in equal parts by default.

    The injected features climb the cross-entropy by the gradient of the training step itself and are kept
    from epoch to epoch; endpoints are new every epoch.

    Args:
        graph: prepared for the model, with labels and masks.
        budget: of the adversary; endpoints must come from training and validation nodes (`targets="fit"`).
        tightness: of a model's limits, where it has some.
        space: where new nodes climb then, see `FaithfulConfig`.
        weight: of the attacked part, between 0 and 1; the clean part has the rest.
        lean: of their endpoints, see `InjectionAdversary`.
    """

    name = "at"

    def __init__(
        self,
        graph: Graph,
        budget: Budget,
        *,
        tightness: Tightness | None = None,
        space: str = "mixed",
        weight: float = ATTACK_WEIGHT,
        lean: float = 0.0,
    ) -> None:
        super().__init__(graph)
        if not 0.0 < weight < 1.0:
            raise InputError(f"`attack_weight` must be above 0 and below 1, got {weight}")
        self.weight = weight
        self.adversary = InjectionAdversary(graph, budget, lean)
        self.adversary.check_box()
        self.tightness, self.space = tightness or Tightness(), space
        self.seed = 0

    def start(self, model: nn.Module, seed: int) -> None:
        """Draw the first features."""
        self.seed = seed
        if limits_of(model):
            set_ranges(model, self.graph, self.tightness)
        self.adversary.start(self._generator(-1), entry_limits(model), self.space)
        self.probe, self.probe_endpoints = self.adversary.probe(self._generator(-2))

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the clean cross-entropy, then the attacked one, each with its weight."""
        endpoints = self.adversary.draw(self._generator(epoch)).to(self.graph.device)
        return self._parts(model, *self.lesson(epoch), endpoints)

    def draw(self, epoch: int) -> Drawn | None:
        """Return the endpoints of the adversary's nodes."""
        if not self.task.steady:
            return None
        return Drawn("step", {"endpoints": self.adversary.draw(self._generator(epoch))})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """See `parts`."""
        return self._parts(model, *self.lesson(0), drawn.tensors["endpoints"])

    def _parts(
        self, model: nn.Module, graph: Graph, rows: Tensor, labels: Tensor, endpoints: Tensor
    ) -> Iterator[dict[str, Tensor]]:
        with range_pass(model, self.tightness, sampled=True), straight_through(model):
            clean = cross_entropy(call_model(model, graph).index_select(0, rows), labels)
        yield {"clean": clean, "total": (1 - self.weight) * clean}
        del clean
        attacked = self.adversary.joined(endpoints)[0].replace(links=graph.links)
        with self.adversary.speaking(), straight_through(model):
            hit = cross_entropy(call_model(model, attacked).index_select(0, rows), labels)
        yield {"attacked": hit, "total": self.weight * hit}

    def measure(self, model: nn.Module) -> Tensor:
        """Return the mean of clean and attacked validation score."""
        self.probe.restart()
        with torch.no_grad(), range_pass(model, self.tightness):
            clean = super().measure(model)
        with evaluating(model, freeze=True):
            for step in range(PROBE + 1):
                attacked, _ = self.probe.joined(self.probe_endpoints)
                with self.probe.speaking(), straight_through(model):
                    logits = call_model(model, attacked)
                if step < PROBE:
                    loss = cross_entropy(logits.index_select(0, self.val_nodes), self.val_y)
                    loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return (clean + self.grade(logits)) / 2

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the adversary's features back."""
        self.adversary.load_state(state)

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(epoch_seed(self.seed, epoch) ^ 0x2545F4914)
