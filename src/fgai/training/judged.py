"""Trainings that are judged: an attack tells whether they did what they are for; if not, they go again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from fgai.checks import whole
from fgai.errors import DivergenceError
from fgai.graph import Graph
from fgai.training.assurance import Standing, prediction_shift, standing_of
from fgai.training.train import history_of

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")
APART = 7_001
"""Between the seeds of two attempts."""
ATTEMPTS = 3
"""Trainings of one model at most, unless told otherwise."""


def check_attempts(most: int) -> int:
    """Return a number of attempts that can be made.

    Raises:
        InputError: it is none.
    """
    return whole(most, "max_attempts", 1, 1000)


@dataclass(frozen=True, kw_only=True)
class Judged(ABC, Generic[M, C]):
    """What all attempts at a more stable version of one model share.

    A kind of training says how it is made, what counts as done, and what is changed where that failed; here
    is the order of events, the same for all kinds.

    Attributes:
        model: vanilla.
        graph: prepared for it.
        seed: of the first attempt.
        checkpoint: folder of the first, and of the folders of the others.
        saving: further settings of `fit`.
        most: attempts at most.
    """

    name: ClassVar[str]
    """What a tracker knows the training as."""
    explains: ClassVar[bool]
    """Whether explanations are to stay the vanilla model's."""

    model: M
    graph: Graph
    seed: int
    checkpoint: Path | str | None
    saving: dict[str, Any]
    most: int

    @abstractmethod
    def trained(self, config: C, seed: int, checkpoint: Path | str | None, saving: dict[str, Any]) -> M:
        """Make one attempt."""

    @abstractmethod
    def is_judged(self, config: C) -> bool:
        """Whether the training meant to keep predictions in place, and was long enough to do it."""

    @abstractmethod
    def box(self, config: C) -> tuple[float, float] | None:
        """Return the box of the adversary's features, which the attack that judges has, too."""

    @abstractmethod
    def slower(self, config: C) -> C:
        """Return the settings after a training that diverged: smaller steps."""

    @abstractmethod
    def holds(self, standing: Standing) -> bool:
        """Whether an attempt is good enough."""

    @abstractmethod
    def fallback(self, config: C, standing: Standing) -> C:
        """Return the settings of the next attempt: the same budget, and more weight on what failed."""

    @abstractmethod
    def warn(self, config: C, standing: Standing) -> None:
        """Say what is wrong with the best attempt, if something is."""

    def best(self, config: C) -> M:
        """Train, judge, and train again where that did not go well; the best attempt."""
        made, config, done = self._finished(config)
        if not self.is_judged(config):
            return made
        box = self.box(config)
        shift = prediction_shift(self.model, self.graph, self.seed, box)
        best = self._standing(made, shift, box)
        for count in range(done + 1, self.most + 1):
            if self.holds(best):
                break
            config = self.fallback(config, best)
            try:
                other = self._made(count, config)
            except DivergenceError:  # what there is, stays
                continue
            found = self._standing(other, shift, box)
            history_of(other).attempts = history_of(made).attempts = count
            if found.beats(best):
                made, best = other, found
        self.warn(config, best)
        return made

    def _finished(self, config: C) -> tuple[M, C, int]:
        """The first attempt that comes to its end, its settings and its number; each takes smaller steps.

        Raises:
            DivergenceError: none does.
        """
        for count in range(1, self.most + 1):
            try:
                made = self._made(count, config)
            except DivergenceError:
                if count == self.most:
                    raise
                config = self.slower(config)
            else:
                history_of(made).attempts = count
                return made, config, count
        raise AssertionError("at least one attempt is made")

    def _made(self, count: int, config: C) -> M:
        """Train with the draws, in the folder and under the name of attempt `count`."""
        folder, saving = self.checkpoint, self.saving
        if count > 1:
            folder = None if folder is None else Path(folder) / f"attempt-{count}"
            saving = {**saving, "run": f"{self.name}-{count}"}
        return self.trained(config, self.seed + APART * (count - 1), folder, saving)

    def _standing(self, made: M, shift: float | None, box: tuple[float, float] | None) -> Standing:
        return standing_of(made, self.model, self.graph, self.seed, shift, box=box, explains=self.explains)
