"""Climbs side by side: points that move uphill, and the worst features each passed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fgai.attacks.budget import Box
from fgai.attacks.search.aims import Aim
from fgai.attacks.search.optimisers import OPTIMISERS, Beside, Optimiser
from fgai.attacks.search.site import Site
from fgai.attacks.search.spaces import SPACES, Space, beside
from fgai.ops.capture import Replay
from fgai.progress import current

MIN_STEPS = 20
"""Steps from which a capture, which costs about as much as five steps, pays."""
WARM_UP = 3


@dataclass(frozen=True, eq=False)
class Found:
    """The worst point of a climb.

    Attributes:
        features: [M, F].
        damage: what was reported there.
        loss: what was climbed, there.
        gradient: largest entry of any gradient, in size.
        steps: taken.
    """

    features: Tensor
    damage: float
    loss: float
    gradient: float
    steps: int


class Way(NamedTuple):
    """How one point climbs.

    Attributes:
        space: a name from `SPACES`.
        optimiser: a name from `OPTIMISERS`.
        rate: its step size or learning rate, in units of half the box.
        loss: a name from `ROW_LOSSES`.
    """

    space: str
    optimiser: str
    rate: float
    loss: str


class Climb:
    """Maximises an aim at a site from several starts at once; of each the worst point seen counts.

    Worst is by damage, then by loss. More steps never find less: every point of a shorter climb is one of the
    longer. Climbs do not know of each other.

    Args:
        site: where the new nodes are.
        aim: what is climbed and judged.
        start: [B, M, F] features to begin with, or whatever the space begins at; they count as seen.
        space: what moves.
        optimiser: how.
        box: of the features.
    """

    def __init__(
        self, site: Site, aim: Aim, start: Tensor, space: Space, optimiser: Optimiser, box: Box
    ) -> None:
        self.site, self.aim, self.space, self.optimiser, self.box = site, aim, space, optimiser, box
        self.point, count = space.start(start, box).clone(), start.shape[0]
        self.best = space.features(self.point, box).clone()
        self.damage, self.loss = (start.new_full((count,), float("-inf")) for _ in range(2))
        self.steepest = start.new_zeros(count)

    def run(self, steps: int) -> list[Found]:
        """Take the steps; on a GPU they are captured once and replayed."""
        left = steps
        if self.point.is_cuda and steps >= MIN_STEPS:
            left = steps - self._replay(steps)
        progress, climbs = current(), self.point.shape[0]
        progress.advance((steps - left) * climbs)
        for _ in range(left):
            self._step()
            progress.advance(climbs)
        with torch.no_grad():
            features = self.space.features(self.point, self.box)
            self._note(features, *self.aim(self.site.view(features)))
        numbers = torch.stack([self.damage, self.loss, self.steepest], dim=1).tolist()
        return [
            Found(rows, damage, loss, gradient, steps)
            for rows, (damage, loss, gradient) in zip(self.best, numbers, strict=True)
        ]

    def _note(self, features: Tensor, loss: Tensor, damage: Tensor) -> None:
        """Keep points that are worse for the model; chosen on the device, so that nothing waits."""
        loss, damage = loss.detach().nan_to_num(nan=float("-inf")), damage.to(self.damage.dtype)
        better = (damage > self.damage) | ((damage == self.damage) & (loss > self.loss))
        torch.where(better[:, None, None], features, self.best, out=self.best)
        torch.where(better, damage, self.damage, out=self.damage)
        torch.where(better, loss, self.loss, out=self.loss)

    def _step(self) -> None:
        moving = self.point.detach().requires_grad_()
        features = self.space.features(moving, self.box)
        loss, damage = self.aim(self.site.view(features))
        gradient = torch.zeros_like(self.point)
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum(), moving, materialize_grads=True)
            gradient = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        with torch.no_grad():
            self._note(features.detach(), loss, damage)
            if gradient.numel():
                torch.maximum(self.steepest, gradient.abs().amax((1, 2)), out=self.steepest)
            self.space.project(self.point.add_(self.optimiser.move(gradient)), self.box)

    def _replay(self, steps: int) -> int:
        """Take all steps through a captured one and return how many were taken: fewer if it cannot be."""
        for _ in range(WARM_UP):
            self._step()
        passes, each = self.site.passes, self.point.shape[0]
        try:
            replay = Replay(self._step, self.point.device)
        except RuntimeError:
            self.site.passes = passes
            return WARM_UP
        for _ in range(steps - WARM_UP):
            replay()
        self.site.passes = passes + (steps - WARM_UP) * each
        return steps


def climb_of(
    site: Site,
    aim: Aim,
    start: Tensor,
    ways: Sequence[Way],
    box: Box,
    named: Mapping[str, Space] = SPACES,
) -> Climb:
    """Return the climb of points side by side, each in its own way.

    Args:
        site: where the new nodes are.
        aim: what each climbs, by the loss of its way.
        start: [B, M, F].
        ways: B of them; neighbours that share space and optimiser are moved at once.
        box: of the features.
        named: the spaces that ways name.
    """
    rates = start.new_tensor([way.rate * named[way.space].half for way in ways])
    spaces, optimisers, first = list[tuple[int, Space]](), list[tuple[int, Optimiser]](), 0
    for (space, optimiser), run in itertools.groupby(ways, key=lambda way: (way.space, way.optimiser)):
        size = len(list(run))
        rows = slice(first, first + size)
        spaces.append((size, named[space]))
        optimisers.append((size, OPTIMISERS[optimiser](start[rows], rates[rows, None, None])))
        first += size
    mover = optimisers[0][1] if len(optimisers) == 1 else Beside(optimisers)
    return Climb(site, aim, start, beside(spaces), mover, box)
