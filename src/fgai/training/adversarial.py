"""Adversarial training, with the adversary, the limits and the further attempts of faithful training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attacks import Budget
from fgai.attention import (
    add_limits,
    call_model,
    entry_limits,
    evaluating,
    limits_of,
    prepared,
    straight_through,
)
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.progress import shown
from fgai.tasks import check_logits, task_of
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import Drawn
from fgai.training.loop import PROBE, TRAIN_FIELDS, TrainConfig, epoch_seed, fit
from fgai.training.recipes import Vanilla
from fgai.training.resume import run_label, set_history
from fgai.training.retry import MIN_EPOCHS, StabilityCheck, StabilityReport, attempt_options, retry
from fgai.training.settings import (
    ADVERSARY_FIELDS,
    FIRMER,
    LIMIT_FIELDS,
    FaithfulConfig,
    Tightness,
    _range_pass,
    set_ranges,
)
from fgai.training.train import copied
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)
ATTACK_WEIGHT = 0.5


@typed
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
    capturable = True

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
        with _range_pass(model, self.tightness, sampled=True), straight_through(model):
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
        with torch.no_grad(), _range_pass(model, self.tightness):
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


@dataclass(frozen=True, kw_only=True)
class _HardenedConfig:
    """How adversarial training goes: the adversary of faithful training, and a weight of its own.

    Attributes:
        budget: of the adversary.
        lean: of its endpoints, see `InjectionAdversary`.
        weight: of the attacked part.
        limits: whether the model gets limits.
        tightness: of these.
        space: where new nodes climb then.
        train: epochs, learning rate and so on.
    """

    budget: Budget
    lean: float
    weight: float
    limits: bool
    tightness: Tightness
    space: str
    train: TrainConfig

    @classmethod
    def of(cls, chosen: dict[str, Any], *, limits: bool) -> _HardenedConfig:
        """Read settings by name; what is not there is faithful training's default."""
        default = FaithfulConfig()
        own = {name: getattr(default, name) for name in (*ADVERSARY_FIELDS, *LIMIT_FIELDS, "lean")}
        own |= {name: value for name, value in chosen.items() if name not in TRAIN_FIELDS}
        return cls(
            budget=Budget(**{name: own[name] for name in ADVERSARY_FIELDS}, targets="fit"),
            lean=own["lean"],
            weight=own.get("attack_weight", ATTACK_WEIGHT),
            limits=limits,
            tightness=Tightness(own["cut"], own["soften"]),
            space=own["space"],
            train=TrainConfig(**{name: chosen[name] for name in TRAIN_FIELDS if name in chosen}),
        )

    def slower(self) -> _HardenedConfig:
        """Return the settings with half the learning rate."""
        return replace(self, train=self.train.replace(lr=self.train.lr / 2))

    def tightened(self, report: StabilityReport) -> _HardenedConfig:
        """Return the settings of a second attempt: half of the clean part's weight goes to the attacked part.

        With limits at least as many nodes are softened as in the second attempt of faithful training.
        """
        del report
        tighter = replace(self.tightness, soften=max(self.tightness.soften, FIRMER))
        return replace(
            self, weight=(1 + self.weight) / 2, tightness=tighter if self.limits else self.tightness
        )


def _harden(
    vanilla: M,
    graph: Graph,
    config: _HardenedConfig,
    *,
    check: bool,
    seed: int,
    checkpoint: Path | str | None,
    **options: Any,
) -> M:
    """Fine-tune a copy of a vanilla model under the adversary, once more if its predictions are not stable.

    The check is that of `make_faithful` without explanations and agreement: labels may correct predictions.
    """
    ready = prepared(vanilla, task_of(graph).view(graph, "fit"))
    with evaluating(vanilla), torch.no_grad():
        check_logits(call_model(vanilla, ready), ready)

    def train(config: _HardenedConfig, count: int) -> M:
        hardened = copied(vanilla)
        if config.limits:
            add_limits(hardened)
        recipe = Adversarial(
            ready,
            config.budget,
            tightness=config.tightness,
            space=config.space,
            weight=config.weight,
            lean=config.lean,
        )
        own = attempt_options(recipe.name, count, seed, checkpoint, options)
        label = run_label(vanilla, ready, recipe.name, config, own["seed"], weights=True)
        set_history(hardened, fit(hardened, recipe, config.train, fingerprint=label, **own))
        if config.limits:
            set_ranges(hardened, ready, config.tightness)
        return hardened

    tester = StabilityCheck(vanilla, ready, seed, config.budget.box, faithful=False)
    with shown(options.get("progress")):
        return retry(train, tester if check and config.train.epochs >= MIN_EPOCHS else None, config)
