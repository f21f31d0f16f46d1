"""Adversarial training with what faithful training has: adversary, limits and further attempts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fgai.attacks import Budget
from fgai.attention import add_limits, call_model, evaluating, prepared
from fgai.graph import Graph
from fgai.progress import shown
from fgai.tasks import check_logits, task_of
from fgai.training.adversarial import ATTACK_WEIGHT, Adversarial
from fgai.training.assurance import MIN_EPOCHS, Standing
from fgai.training.judged import Judged
from fgai.training.loop import TRAIN_FIELDS, TrainConfig, fit
from fgai.training.ranges import Tightness, set_ranges
from fgai.training.resume import run_label
from fgai.training.settings import ADVERSARY_FIELDS, FIRMER, LIMIT_FIELDS, FaithfulConfig
from fgai.training.train import copied, set_history

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class HardenedConfig:
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
    def of(cls, chosen: dict[str, Any], *, limits: bool) -> HardenedConfig:
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

    def fallback(self) -> HardenedConfig:
        """Return the settings of the next attempt: half of the clean part's weight goes to the attacked one.

        With limits they soften at least what that of faithful training softens.
        """
        tighter = replace(self.tightness, soften=max(self.tightness.soften, FIRMER))
        return replace(
            self, weight=(1 + self.weight) / 2, tightness=tighter if self.limits else self.tightness
        )


def harden(
    vanilla: M,
    graph: Graph,
    config: HardenedConfig,
    *,
    most: int,
    seed: int,
    progress: bool | None,
    checkpoint: Path | str | None,
    **saving: Any,
) -> M:
    """Go on with a vanilla model under the adversary; once more where its predictions hardly stay.

    It is judged as a faithful model is, see `make_faithful`, but for explanations, which it does not promise.

    Args:
        vanilla: trained; untouched.
        graph: with labels and masks.
        config: see `HardenedConfig`.
        most: trainings at most.
        seed: of the adversary's draws.
        progress: show a bar.
        checkpoint: folder to save the training in and to resume from.
        **saving: further settings of `fit`.
    """
    seen = prepared(vanilla, task_of(graph).view(graph, "fit"))
    with evaluating(vanilla), torch.no_grad():
        check_logits(call_model(vanilla, seen), seen)
    attempts = _Hardened(
        model=vanilla,
        graph=seen,
        seed=seed,
        checkpoint=checkpoint,
        saving={"progress": progress, **saving},
        most=most,
    )
    with shown(progress):
        return attempts.best(config)


class _Hardened(Judged[M, HardenedConfig]):
    """Attempts at an adversarially trained model."""

    name, explains = Adversarial.name, False

    def trained(
        self, config: HardenedConfig, seed: int, checkpoint: Path | str | None, saving: dict[str, Any]
    ) -> M:
        """Train a copy of the vanilla model, and take the ranges of its limits once more."""
        made = copied(self.model)
        if config.limits:
            add_limits(made)
        recipe = Adversarial(
            self.graph,
            config.budget,
            tightness=config.tightness,
            space=config.space,
            weight=config.weight,
            lean=config.lean,
        )
        label = run_label(self.model, self.graph, self.name, config, seed, weights=True) if checkpoint else ""
        history = fit(
            made, recipe, config.train, seed=seed, checkpoint=checkpoint, fingerprint=label, **saving
        )
        set_history(made, history)
        if config.limits:
            set_ranges(made, self.graph, config.tightness)
        return made

    def is_judged(self, config: HardenedConfig) -> bool:
        """Whether it was long enough."""
        return config.train.epochs >= MIN_EPOCHS

    def box(self, config: HardenedConfig) -> tuple[float, float] | None:
        """Return the adversary's."""
        return config.budget.box

    def slower(self, config: HardenedConfig) -> HardenedConfig:
        """Return the settings with half the learning rate."""
        return replace(config, train=config.train.replace(lr=config.train.lr / 2))

    def holds(self, standing: Standing) -> bool:
        """Whether predictions stay. They need not be the vanilla model's: labels may have mended them."""
        return standing.is_stable

    def fallback(self, config: HardenedConfig, standing: Standing) -> HardenedConfig:
        """See `HardenedConfig.fallback`."""
        del standing
        return config.fallback()

    def warn(self, config: HardenedConfig, standing: Standing) -> None:
        """Say so where predictions still move."""
        tighter = ", `soften`" if config.limits else ""
        standing.warn_unstable("adversarially trained", f"`attack_weight`{tighter} or `epochs`")
