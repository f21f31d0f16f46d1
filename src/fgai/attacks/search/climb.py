"""Gradient ascent from several starts at once, in tensors that stay in place for capture on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from fgai import checks
from fgai.attacks.budget import LARGEST, Box
from fgai.attacks.search.site import Score, _InjectionSite
from fgai.ops.capture import Replay
from fgai.progress import current_stage
from fgai.typed import typed

MIN_STEPS = 20  # from which a capture, which costs about as much as five steps, pays
WARM_UP = 3
LARGEST_START = 0.999  # distance of a start from the middle, in units of half the box: tanh never reaches 1
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's


@dataclass(frozen=True, eq=False)
class _Space:
    features: Callable[[Tensor, Box], Tensor]  # point → values inside the box, differentiable
    start: Callable[[Tensor, Box], Tensor] = lambda point, box: point  # values → point, if there is one
    project: Callable[[Tensor, Box], Tensor] = lambda point, box: point  # to an allowed point, in place
    half: float = 1.0  # half the width of the box in the units of points


SPACES = {
    "box": _Space(
        start=lambda features, box: box.points(features).clamp(-1.0, 1.0),
        features=lambda point, box: box.features(point),
        project=lambda point, box: point.clamp_(-1.0, 1.0),
    ),
    "tanh": _Space(
        start=lambda features, box: torch.atanh(box.points(features).clamp(-LARGEST_START, LARGEST_START)),
        features=lambda point, box: box.features(torch.tanh(point)),
    ),
}
# `tanh`: unbounded points, so that steps shrink smoothly towards the walls.


class _Sign:
    def __init__(self, like: Tensor, rate: Tensor) -> None:
        self.rate = rate

    def move(self, gradient: Tensor) -> Tensor:
        return self.rate * gradient.sign()


class _Adam(_Sign):
    def __init__(self, like: Tensor, rate: Tensor) -> None:
        super().__init__(like, rate)
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.turn = like.new_zeros(())

    def move(self, gradient: Tensor) -> Tensor:
        self.turn.add_(1)
        self.first.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        self.second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        mean = self.first / (1 - BETA1**self.turn)
        return self.rate * mean / ((self.second / (1 - BETA2**self.turn)).sqrt() + EPSILON)


class _Momentum(_Sign):
    def __init__(self, like: Tensor, rate: Tensor) -> None:
        super().__init__(like, rate)
        self.mean = torch.zeros_like(like)

    def move(self, gradient: Tensor) -> Tensor:
        self.mean.mul_(BETA1).add_(gradient / gradient.abs().mean((-2, -1), keepdim=True).clamp(min=1e-30))
        return self.rate * self.mean.sign()


OPTIMISERS: dict[str, type[_Sign]] = {"sign": _Sign, "adam": _Adam, "momentum": _Momentum}


@typed
@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """How one point climbs: its space, the optimiser that moves it, its rate, its loss and its steps."""

    space: str | _Space = "tanh"  # a name from `SPACES`, or one of your own
    optimiser: str = "adam"  # a name from `OPTIMISERS`
    rate: float = 0.1  # its step size or learning rate, in units of half the box
    loss: str = "margin"  # from `ROW_LOSSES`, for attacks on predictions; others climb the objective's own
    steps: int = 300

    def __post_init__(self) -> None:
        if not isinstance(self.space, _Space):
            checks.one_of(self.space, "space", tuple(SPACES))
        checks.one_of(self.optimiser, "optimiser", tuple(OPTIMISERS))
        checks.whole(self.steps, "steps", 0, LARGEST)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The point of a search with most damage, then the highest loss."""

    features: Tensor  # [M, F] the values there
    damage: float  # there
    loss: float  # climbed, there
    gradient: float = 0.0  # largest entry of any gradient, in size
    steps: int = 0
    last: Tensor | None = None  # the point where the search ended, in its space
    curve: Tensor | None = None  # [steps + 1] the damage of every point, in order, on the device
    seconds: float = 0.0  # its share of the time of all climbs side by side


def climb(
    site: _InjectionSite, score: Score, start: Tensor, specs: Sequence[SearchSpec], box: Box
) -> list[SearchResult]:
    """Maximise a score at a site from the starts [B, M, F], independently.

    Of each the point with most damage counts, then the highest loss; more steps never find less. The B
    `specs` have equal steps; neighbours that share space and optimiser are moved at once.
    """
    began = perf_counter()
    results = _Climb(site, score, start, specs, box).run(specs[0].steps)
    return [replace(one, seconds=(perf_counter() - began) / len(results)) for one in results]


class _Climb:
    def __init__(
        self, site: _InjectionSite, score: Score, start: Tensor, specs: Sequence[SearchSpec], box: Box
    ) -> None:
        self.site, self.score, self.box = site, score, box
        self.groups: list[tuple[slice, _Space, _Sign]] = []
        points, first, count = [], 0, start.shape[0]
        for (kind, optimiser), run in itertools.groupby(specs, key=lambda spec: (spec.space, spec.optimiser)):
            space = kind if isinstance(kind, _Space) else SPACES[kind]
            rates = start.new_tensor([spec.rate * space.half for spec in run])
            rows = slice(first, first + len(rates))
            points.append(space.start(start[rows], box))
            self.groups.append((rows, space, OPTIMISERS[optimiser](points[-1], rates[:, None, None])))
            first = rows.stop
        self.point = torch.cat(points)
        self.best = self.features(self.point).clone()
        self.damage, self.loss = (start.new_full((count,), float("-inf")) for _ in range(2))
        self.steepest, self.ones = start.new_zeros(count), start.new_ones(count)
        self.curve = start.new_zeros(specs[0].steps + 1, count)
        self.turn = torch.zeros(1, dtype=torch.long, device=start.device)

    def features(self, point: Tensor) -> Tensor:
        parts = [space.features(point[rows], self.box) for rows, space, _ in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def run(self, steps: int) -> list[SearchResult]:
        left = steps
        if self.point.is_cuda and self.point.numel() and steps >= MIN_STEPS:
            left = steps - self._replay(steps)
        progress, climbs = current_stage(), self.point.shape[0]
        progress.advance((steps - left) * climbs)
        for _ in range(left):
            self._step()
            progress.advance(climbs)
        with torch.no_grad():
            features = self.features(self.point)
            self._note(features, *self.score(self.site.run(features)))
        numbers = torch.stack([self.damage, self.loss, self.steepest], dim=1).tolist()
        rows = zip(self.best, numbers, self.point, self.curve.T, strict=True)
        return [
            SearchResult(best, damage, loss, gradient, steps, last, curve)
            for best, (damage, loss, gradient), last, curve in rows
        ]

    def _note(self, features: Tensor, loss: Tensor, damage: Tensor) -> None:
        """Keep points that are worse for the model; chosen on the device, so that nothing waits."""
        loss, damage = loss.detach().nan_to_num(nan=float("-inf")), damage.to(self.damage.dtype)
        better = torch.where(damage == self.damage, loss > self.loss, damage > self.damage)
        torch.where(better[:, None, None], features, self.best, out=self.best)
        torch.where(better, damage, self.damage, out=self.damage)
        torch.where(better, loss, self.loss, out=self.loss)
        self.curve.index_copy_(0, self.turn, damage[None])
        self.turn.add_(1)

    def _step(self) -> None:
        moving = self.point.detach().requires_grad_()
        features = self.features(moving)
        loss, damage = self.score(self.site.run(features))
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, moving, self.ones, materialize_grads=True)
            gradient = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        else:
            gradient = torch.zeros_like(self.point)
        with torch.no_grad():
            self._note(features.detach(), loss, damage)
            if gradient.numel():
                largest = torch.linalg.vector_norm(gradient, torch.inf, dim=(1, 2))
                torch.maximum(self.steepest, largest, out=self.steepest)
            for rows, space, optimiser in self.groups:
                space.project(self.point[rows].add_(optimiser.move(gradient[rows])), self.box)

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
