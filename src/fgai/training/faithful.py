"""The recipe of faithful training: predictions and attention of the vanilla model that stay put."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fgai.attacks import Budget
from fgai.attention import entry_limits, evaluating
from fgai.bounds.scores import check_followed
from fgai.graph import Graph
from fgai.tasks import task_of
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import Drawn
from fgai.training.lesson import Injection, Lesson, Targets
from fgai.training.loop import PROBE, Recipe, epoch_seed
from fgai.training.settings import FaithfulConfig, set_ranges
from fgai.typed import typed


class FaithfulRecipe(Recipe):
    """What faithful training is on the whole graph and in mini-batches: its adversary and its schedule.

    Args:
        vanilla: trained; only read.
        graph: whose nodes the adversary joins.
        config: see `FaithfulConfig`.
        feature_range: smallest and largest value of each feature, [F] each, where the graph at hand does not
            hold them.
    """

    name = "fgai"

    def __init__(
        self,
        vanilla: nn.Module,
        graph: Graph,
        config: FaithfulConfig,
        feature_range: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.vanilla, self.graph, self.config = vanilla, graph, config
        if config.weights.certified:
            check_followed(vanilla)
        self.injects = config.injects
        budget = Budget(
            nodes=config.nodes, edges=config.edges, box=config.box, step_size=config.step_size, targets="fit"
        )
        self.adversary = InjectionAdversary(graph, budget, config.lean, feature_range)
        if self.injects:
            self.adversary.check_box()
        self.seed = 0

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state() if self.injects else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the adversary's features back."""
        if state:
            self.adversary.load_state(state)

    def _due(self, step: int, steps_per_epoch: int = 1) -> tuple[str, float]:
        """Which terms are due in a step, and how far stability has risen."""
        config = self.config
        alone = config.turns and self.injects and step > 0
        rising = config.ramp * config.train.epochs * steps_per_epoch
        rise = min(1.0, (step + 1) / max(1.0, rising))
        if not self.injects or (alone and step % 2 == 0):
            return "clean", rise
        return "attacked" if alone else "both", rise

    def stream(self, step: int) -> int:
        """Return the seed of what a step draws."""
        # A stream of its own: no draw here moves dropout or the evaluation's endpoints.
        return epoch_seed(self.seed, step) ^ 0x5DEECE66D

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.stream(step))


@typed
class Faithful(FaithfulRecipe):
    """The recipe: closeness, similarity and stability against frozen vanilla targets.

    Terms mean the same on every graph: predictions are compared in units of the vanilla logits' spread,
    attentions by total variation, and both stabilities are averages over the nodes the adversary can reach.

    Args:
        vanilla: trained; only read.
        graph: prepared for it.
        config: see `FaithfulConfig`.
    """

    capturable = True

    def __init__(self, vanilla: nn.Module, graph: Graph, config: FaithfulConfig) -> None:
        super().__init__(vanilla, graph, config)

    def start(self, model: nn.Module, seed: int) -> None:
        """Freeze the vanilla targets, and let the adversary climb a little before the first epoch."""
        self.seed = seed
        self.probe: Injection | None = None
        with evaluating(self.vanilla, freeze=True):
            targets = Targets.of(self.vanilla, self.graph, self.config)
        self.lesson = Lesson(self.graph, targets, self.config)
        if self.injects:
            with evaluating(model, freeze=True):
                self._start_adversary(model, self._generator(-1))

    def _start_adversary(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the first features, set up the probe, and climb against the model, which is still vanilla."""
        targets, graph, config = self.lesson.targets, self.graph, self.config
        if config.limits:
            set_ranges(model, graph, config.tightness)
        self.adversary.start(generator, entry_limits(model), config.space)
        self.shares = shares = targets.shares(graph, self.adversary.attacked(generator)[0])
        adversary, endpoints = self.adversary.probe(self._generator(-2))
        if graph.batch is not None:  # the probe joins the validation graphs alone, a few of all
            shares = targets.shares(graph, adversary.joined(endpoints)[0])
        self.probe = Injection(adversary, endpoints, shares)
        for _ in range(PROBE):
            endpoints = self.adversary.draw(generator).to(graph.device)
            self.lesson.climb(model, self._attack(endpoints))

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield what `replayed` does, from the epoch's own draws."""
        return self.replayed(model, self.drawn(epoch).to(self.graph.device))

    def draw(self, epoch: int) -> Drawn | None:
        """Return which terms are due, the endpoints of every step and how far stability has risen."""
        return self.drawn(epoch) if task_of(self.graph).steady else None

    def drawn(self, epoch: int) -> Drawn:
        """Return the draws of an epoch, on the CPU; a recipe built on this one may add its own."""
        due, risen = self._due(epoch)
        rise = torch.tensor(risen, dtype=self.lesson.targets.logits.dtype)
        if due == "clean":
            return Drawn(due, {"rise": rise})
        generator = self._generator(epoch)
        endpoints = torch.stack([self.adversary.draw(generator) for _ in range(self.config.steps)])
        return Drawn(due, {"endpoints": endpoints, "rise": rise})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the terms that are due, see `Lesson.parts`."""
        steps = drawn.tensors.get("endpoints")
        attacks = [] if steps is None else [self._attack(endpoints) for endpoints in steps.unbind()]
        return self.lesson.parts(model, drawn.kind, attacks, drawn.tensors["rise"])

    def score(self, model: nn.Module) -> float:
        """Return minus the same total under a fresh attack on validation nodes; needs no labels."""
        return float(self.measure(model))

    def measure(self, model: nn.Module) -> Tensor:
        """See `score`; nothing waits for the device."""
        return self.lesson.score(model, self.probe)

    def _attack(self, endpoints: Tensor) -> Injection:
        """Return the training's own adversary at the given endpoints."""
        return Injection(self.adversary, endpoints, self.shares)
