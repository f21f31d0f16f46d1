"""`TrainConfig`, `FaithfulSettings` and `HardenSettings`; every graph has the same defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from fgai.attacks import Budget
from fgai.attacks.budget import LARGEST
from fgai.attention import unwrapped
from fgai.checks import above, at_least, fraction, one_of, whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.tasks import task_of
from fgai.training.stability import StabilityReport
from fgai.typed import typed

LEARNING_RATES = {"GT": 0.001}  # of model classes with another default than the rest
STEP_SIZE = 0.1  # of an ascent step of the adversary, in units of half the box
VALIDATE_EVERY = 20  # epochs between validations of fine-tuning
RETRY_SHRINK = 0.4  # least `shrink` of the second training if predictions were unstable
MAX_EPOCHS = 10_000_000  # largest value of `epochs` that is accepted


def check_setting_names(names: Iterable[str], allowed: Iterable[str], argument: str = "settings") -> None:
    """Raise `InputError` if a name is not among the allowed ones."""
    for name in names:
        one_of(name, argument, tuple(allowed))


def _check_shares(clip_share: float, shrink: float) -> None:
    if not 0.0 <= clip_share < 0.5:
        raise InputError(f"`clip_share` must be at least 0 and below 0.5, got {clip_share}")
    if not 0.0 <= shrink < 1.0:
        raise InputError(f"`shrink` must be at least 0 and below 1, got {shrink}")


@typed
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how fast to train.

    Attributes:
        epochs: largest number; an epoch is one step on the whole graph, or a pass over its mini-batches.
        lr: Adam's learning rate.
        weight_decay: l2 penalty on all parameters.
        patience: epochs without a better validation score after which to stop.
        validate_every: epochs between validations.
        clip: largest gradient norm, 0 for none.
        decay: share of the learning rate that is gone, linearly, by the last epoch: 0 keeps it, 1 ends at 0.
    """

    epochs: int = 200
    lr: float = 0.01
    weight_decay: float = 5e-4
    patience: int = 100
    validate_every: int = 1
    clip: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        whole(self.epochs, "epochs", 1, MAX_EPOCHS)
        above(self.lr, "lr", 0.0)
        at_least(self.weight_decay, "weight_decay", 0.0)
        whole(self.patience, "patience", 1)
        whole(self.validate_every, "validate_every", 1)
        at_least(self.clip, "clip", 0.0)
        fraction(self.decay, "decay")

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with some settings changed; `InputError` for an unknown one."""
        check_setting_names(changes, TRAIN_FIELDS)
        return dataclasses.replace(self, **changes)


TRAIN_FIELDS = tuple(field.name for field in dataclasses.fields(TrainConfig))


@dataclass(frozen=True, kw_only=True)
class _FineTuningSettings:
    """Settings that `make_faithful` and `harden` share; see `FaithfulSettings`."""

    must_match_vanilla: ClassVar[bool] = False  # whether to check likeness to the vanilla model, too

    limits: bool = True
    clip_share: float = 0.02
    shrink: float = 0.4
    nodes: int = 60
    edges: int = 40
    box: tuple[float, float] | None = None
    epochs: int = 200
    lr: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.limits, bool):
            raise InputError(f"`limits` must be True or False, got {self.limits!r}")
        _check_shares(self.clip_share, self.shrink)
        whole(self.nodes, "nodes", 1, LARGEST)
        whole(self.edges, "edges", 1, LARGEST)
        whole(self.epochs, "epochs", 1, MAX_EPOCHS)
        if self.lr is not None:
            above(self.lr, "lr", 0.0)
        if self.box is not None:
            numbers = isinstance(self.box, tuple | list) and all(isinstance(x, int | float) for x in self.box)
            if not numbers or len(self.box) != 2 or not -math.inf < self.box[0] < self.box[1] < math.inf:
                raise InputError(f"`box` must be two numbers (low, high) with low < high, got {self.box}")

    @property
    def shares(self) -> tuple[float, float]:
        """`clip_share` and `shrink`."""
        return self.clip_share, self.shrink

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the settings."""
        return [field.name for field in dataclasses.fields(cls)]

    @property
    def budget(self) -> Budget:
        """Budget of the adversary."""
        return Budget(nodes=self.nodes, edges=self.edges, box=self.box, step_size=STEP_SIZE, targets="fit")

    @property
    def train_config(self) -> TrainConfig:
        """Settings of the training loop."""
        return TrainConfig(
            epochs=self.epochs,
            lr=0.005 if self.lr is None else self.lr,
            weight_decay=0.0,
            patience=self.epochs,
            validate_every=VALIDATE_EVERY,
            decay=1.0,
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed."""
        check_setting_names(changes, self.names())
        return dataclasses.replace(self, **changes)

    def slower(self) -> Self:
        """Return the settings with half the learning rate."""
        return self.replace(lr=self.train_config.lr / 2)


@typed
@dataclass(frozen=True, kw_only=True)
class FaithfulSettings(_FineTuningSettings):
    """How `make_faithful` trains; every graph has the same defaults.

    The first five are weights of loss terms, see `fgai.training.terms`; 0 leaves a term out.

    Attributes:
        closeness: weight of the distance to the vanilla model's predictions.
        similarity: of the distance to its attention and its top-k.
        prediction_stability: of the change of predictions when nodes are injected.
        margin: of the missing gap between the top-k of the explanation and the other neighbours.
        sharpness: of attention that is flatter than the vanilla model's.
        limits: give the faithful model limits (see `fgai.limit`) and train through them.
        clip_share: share of the nodes left out at either end of each range of the limits.
        shrink: share of the nodes, those of largest norm, that limits shrink to the norm of the rest.
        nodes: number of nodes that the adversary injects.
        edges: number of edges of each injected node; fewer if there are fewer nodes to join.
        box: (low, high) of their features; None takes one for each feature from the data, see `Budget`.
        steps: ascent steps of the adversary per attacked epoch; the first uses the last training step's.
        k: size of the explanation, for similarity and margin.
        radius: of the l1 ball in attention space, for the margin.
        epochs: number of epochs, on the clean and the attacked graph in turn.
        lr: Adam's learning rate, which falls to 0; 0.005 by default, for GT 0.001.
    """

    must_match_vanilla: ClassVar[bool] = True

    closeness: float = 20.0
    similarity: float = 120.0
    prediction_stability: float = 120.0
    margin: float = 20.0
    sharpness: float = 10.0
    steps: int = 3
    k: int = 5
    radius: float = 0.01

    def __post_init__(self) -> None:
        for name in ("closeness", "similarity", "prediction_stability", "margin", "sharpness"):
            at_least(getattr(self, name), name, 0.0)
        whole(self.steps, "steps", 1, LARGEST)
        whole(self.k, "k", 1, LARGEST)
        above(self.radius, "radius", 0.0)
        super().__post_init__()

    def tightened(self, report: StabilityReport) -> FaithfulSettings:
        """Return the settings of a second attempt, with more weight on what failed."""
        changes: dict[str, Any] = {}
        if not report.is_close:
            changes |= {"closeness": 5 * self.closeness, "lr": self.train_config.lr / 2}
        if not report.is_stable:
            changes["prediction_stability"] = 2 * self.prediction_stability
            changes["shrink"] = max(self.shrink, RETRY_SHRINK)
        elif not report.is_similar:
            changes["similarity"] = 2 * self.similarity
        return self.replace(**changes)


@typed
@dataclass(frozen=True, kw_only=True)
class HardenSettings(_FineTuningSettings):
    """How `harden` trains, as `FaithfulSettings`; each epoch is a step on the clean and the attacked graph.

    `attack_weight`, between 0 and 1, weighs the cross-entropy under attack; the clean one has the rest.
    `weight_decay` is the l2 penalty on all parameters.
    """

    attack_weight: float = 0.75
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        if not 0.0 < self.attack_weight < 1.0:
            raise InputError(f"`attack_weight` must be above 0 and below 1, got {self.attack_weight}")
        at_least(self.weight_decay, "weight_decay", 0.0)
        super().__post_init__()

    @property
    def train_config(self) -> TrainConfig:
        """Settings of the training loop."""
        return super().train_config.replace(weight_decay=self.weight_decay)

    @property
    def method(self) -> str:
        """`harden`, or `at` without limits."""
        return "harden" if self.limits else "at"

    def tightened(self, report: StabilityReport) -> HardenSettings:
        """Return the settings of a second attempt: half of the clean weight moves to the attack."""
        return self.replace(attack_weight=(1 + self.attack_weight) / 2, shrink=max(self.shrink, RETRY_SHRINK))


CERTIFIED_SETTINGS: Mapping[str, Any] = {
    "closeness": 8.0,
    "similarity": 1.0,
    "prediction_stability": 0.0,
    "margin": 0.0,
    "sharpness": 2.0,
    "clip_share": 0.05,
    "shrink": 0.2,
    "epochs": 1000,
}
"""Settings of the method `fgai-certified`, which trains with the term `certified` instead of an attack."""

S = TypeVar("S", bound=_FineTuningSettings)


def _resolve_settings(
    kind: type[S], settings: S | None, overrides: Mapping[str, Any], model: nn.Module, graph: Graph
) -> S:
    """Return `settings`, by default the task's, with `overrides`; an `lr` of None is the model's default."""
    check_setting_names(overrides, kind.names())
    if settings is None:
        defaults = task_of(graph).training
        settings = kind(**{name: value for name, value in defaults.items() if name in kind.names()})
    settings = settings.replace(**overrides)
    if settings.lr is None:
        name = type(unwrapped(model)).__name__
        settings = settings.replace(lr=LEARNING_RATES.get(name, settings.train_config.lr))
    return settings
