"""Retry: train, attack the validation nodes, train again with other settings if the model is not stable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from fgai.attacks import EnsembleInjection, make_attack
from fgai.attacks.search.members import SHORT_MEMBERS
from fgai.attention import call_model, evaluating, observe
from fgai.checks import whole
from fgai.divergence import tvd
from fgai.errors import BudgetError, DivergenceError, ReliabilityWarning, collected, warn
from fgai.graph import Graph
from fgai.metrics import NOTHING, overlap, sharpness
from fgai.progress import stage
from fgai.tasks import task_of
from fgai.training.train import history_of

M = TypeVar("M", bound=nn.Module)
C = TypeVar("C")
APART = 7_001
"""Between the seeds of two attempts."""
ATTEMPTS = 3
"""Trainings of one model at most, unless told otherwise."""
MAX_RATIO = 0.5
"""Shift of a faithful model's predictions over that of the vanilla model's, at most."""
MIN_SHIFT = 0.02
"""A vanilla model whose predictions shift less than this needs no model that is more stable."""
MIN_AGREEMENT = 0.9
"""Share of the validation rows that a faithful model puts in the vanilla model's class, at least."""
MIN_OVERLAP = 0.9
"""Share of the vanilla model's top neighbours that a faithful model keeps in the sharpest layer, at least."""
TOP = 5
"""How many neighbours these are."""
MIN_EPOCHS = 100
"""Trainings of fewer epochs are trials and are not judged."""
STEPS = 50
"""Of each member of the short ensemble."""


@dataclass(frozen=True)
class _Standing:
    """What a short attack on the validation nodes says of a model; None where nothing can be said.

    Attributes:
        shift: of its predictions.
        vanilla: shift of the vanilla model's.
        agreement: share of the validation rows in the vanilla model's class, without an attack.
        overlap: of its explanations with the vanilla model's, see `_explanation_overlap`.
    """

    shift: float | None = None
    vanilla: float | None = None
    agreement: float | None = None
    overlap: float | None = None

    @property
    def is_stable(self) -> bool:
        """Whether predictions shift clearly less than the vanilla model's, or nothing can be said."""
        if self.shift is None or self.vanilla is None:
            return True
        return self.vanilla < MIN_SHIFT or self.shift <= MAX_RATIO * self.vanilla

    @property
    def is_close(self) -> bool:
        """Whether it still predicts what the vanilla model does, or nothing can be said."""
        return self.agreement is None or self.agreement >= MIN_AGREEMENT

    @property
    def is_alike(self) -> bool:
        """Whether its explanations still are the vanilla model's, or nothing can be said."""
        return self.overlap is None or self.overlap >= MIN_OVERLAP

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return self.is_stable and self.is_close and self.is_alike

    def beats(self, other: _Standing) -> bool:
        """Whether it is the better of two attempts.

        Predictions that are lost count before those that move, and, where both stay, explanations that are
        lost before what is left of the movement.
        """
        if self.is_close != other.is_close:
            return self.is_close
        if self.is_stable and other.is_stable and self.is_alike != other.is_alike:
            return self.is_alike
        return self.shift is not None and other.shift is not None and self.shift < other.shift

    def warn(self) -> None:
        """Say what is wrong with a faithful model, if something is."""
        self.warn_unstable("faithful", "`prediction_stability`, `soften` or `epochs`")
        if not self.is_close:
            text = (
                f"the faithful model agrees with the vanilla one on {self.agreement:.0%} of the validation"
                " nodes only; raise `closeness`, or lower `lr`, `cut` or `soften`"
            )
            warn(ReliabilityWarning("not-close", text))
        if not self.is_alike:
            text = (
                f"the faithful model keeps {self.overlap:.0%} of the vanilla one's top {TOP} neighbours in"
                " the sharpest layer; raise `similarity`, or lower `cut` or `soften`"
            )
            warn(ReliabilityWarning("not-alike", text))

    def warn_unstable(self, kind: str, remedy: str) -> None:
        """Say so if predictions still move.

        Args:
            kind: of the model, in a word or two.
            remedy: settings that may be raised.
        """
        if not self.is_stable:
            text = (
                f"under attack on validation nodes the {kind} model's predictions shift by {self.shift:.3f}"
                f" (total variation), the vanilla model's by {self.vanilla:.3f}: it is hardly more stable;"
                f" raise {remedy}"
            )
            warn(ReliabilityWarning("not-steadier", text))


def _standing_of(
    model: nn.Module,
    vanilla: nn.Module,
    graph: Graph,
    seed: int,
    shift: float | None,
    *,
    box: tuple[float, float] | None = None,
    explains: bool = True,
) -> _Standing:
    """Attack a model on the validation nodes, and compare it with what it was made from.

    Args:
        model: more stable, it is hoped; on the graph's device.
        vanilla: what it was made from.
        graph: prepared for both.
        seed: of the attack.
        shift: `_prediction_shift` of the vanilla model.
        box: of the attack's features; None takes it from the data.
        explains: compare explanations, too.
    """
    rows = _rows(graph)
    if rows is None:
        return _Standing()
    with torch.no_grad(), evaluating(model), evaluating(vanilla):
        one, two = (call_model(which, graph)[rows].argmax(1) for which in (model, vanilla))
    agreement = float((one == two).double().mean())
    kept = _explanation_overlap(model, vanilla, graph) if explains else None
    return _Standing(_prediction_shift(model, graph, seed, box), shift, agreement, kept)


def _explanation_overlap(model: nn.Module, vanilla: nn.Module, graph: Graph) -> float | None:
    """Share of the vanilla model's top five neighbours kept, in the layer where its attention says most.

    Args:
        model: faithful.
        vanilla: what it was made from.
        graph: prepared for both.

    Returns:
        The mean over nodes with more than five neighbours, or None where there are none or no layer says
        anything.
    """
    ours, theirs = (observe(which, graph, heads="mean").attention for which in (model, vanilla))
    if [layer.keys.shape for layer in ours] != [layer.keys.shape for layer in theirs]:
        return None
    said = [sharpness(layer.heads(), layer.rowptr) for layer in theirs]
    most = max((value for value in said if value == value), default=0.0)
    if most <= NOTHING:
        return None
    one, two = (attention.layers[said.index(most)] for attention in (ours, theirs))
    kept = overlap(two.ranking(), one.ranking(), one.rowptr, TOP)
    return kept if kept == kept else None


def _prediction_shift(
    model: nn.Module, graph: Graph, seed: int, box: tuple[float, float] | None = None
) -> float | None:
    """How far a short ensemble of attacks on the validation nodes shifts their predictions.

        mean over validation nodes of ½ Σ_c |p_c − p̃_c|

    Args:
        model: fgai's or the user's, on the graph's device.
        graph: prepared for it, with a validation mask.
        seed: of the attack.
        box: of its features; None takes it from the data.

    Returns:
        The mean total variation of the class probabilities, or None where nothing can be attacked: another
        task than node classification, no validation nodes or too few of them.
    """
    rows = _rows(graph)
    if rows is None or graph.features is None:
        return None
    budget = make_attack("ensemble", targets="val").budget
    attack = EnsembleInjection(
        replace(budget, steps=STEPS, box=box), members=SHORT_MEMBERS, rules=("random",), baselines=()
    )
    unlabelled = graph.replace(y=None)
    try:
        with collected(), stage("checking"):  # what a search warns of is not about the training
            attacked = attack.run(model, unlabelled, seed=seed).graph
    except BudgetError:
        return None
    with evaluating(model), torch.no_grad():
        before, after = (call_model(model, where)[rows] for where in (graph, attacked))
    return float(tvd(before, after, "probabilities").mean())


def _rows(graph: Graph) -> torch.Tensor | None:
    """The validation rows, where a stable prediction of theirs can be checked."""
    task = task_of(graph)
    if not task.checks_stability or graph.val_mask is None:
        return None
    return task.rows(graph, "val")


def _check_attempts(most: int) -> int:
    """Return a number of attempts that can be made.

    Raises:
        InputError: it is none.
    """
    return whole(most, "max_attempts", 1, 1000)


@dataclass(frozen=True, kw_only=True)
class _Judged(ABC, Generic[M, C]):
    """What all attempts at a more stable version of one model share.

    A subclass trains one model, decides whether it is good enough, and chooses the next attempt's settings.

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
    def holds(self, standing: _Standing) -> bool:
        """Whether an attempt is good enough."""

    @abstractmethod
    def fallback(self, config: C, standing: _Standing) -> C:
        """Return the settings of the next attempt: the same budget, and more weight on what failed."""

    @abstractmethod
    def warn(self, config: C, standing: _Standing) -> None:
        """Say what is wrong with the best attempt, if something is."""

    def best(self, config: C) -> M:
        """Train, judge, and train again where that did not go well; the best attempt."""
        made, config, done = self._finished(config)
        if not self.is_judged(config):
            return made
        box = self.box(config)
        shift = _prediction_shift(self.model, self.graph, self.seed, box)
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

    def _standing(self, made: M, shift: float | None, box: tuple[float, float] | None) -> _Standing:
        return _standing_of(made, self.model, self.graph, self.seed, shift, box=box, explains=self.explains)
