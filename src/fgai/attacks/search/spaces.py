"""Parametrisations: the points a search moves, and the features they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fgai.attacks.budget import Box

NEARLY = 0.999
"""How close to the wall of the box a start may lie, in units of half the box: tanh never gets there."""


@dataclass(frozen=True)
class Space:
    """A parametrisation of features in a box.

    Attributes:
        name: for records.
        start: (features, box) → point.
        features: (point, box) → features inside the box, differentiable.
        project: (point, box), moves the point in place to the nearest that is allowed and returns it.
        half: half the width of the box in the units of points.
    """

    name: str
    start: Callable[[Tensor, Box], Tensor]
    features: Callable[[Tensor, Box], Tensor]
    project: Callable[[Tensor, Box], Tensor]
    half: float = 1.0


BOX = Space(
    "box",
    start=lambda features, box: box.points(features).clamp(-1.0, 1.0),
    features=lambda point, box: box.features(point),
    project=lambda point, box: point.clamp_(-1.0, 1.0),
)
"""The features themselves in units of the box, cut off at it."""

TANH = Space(
    "tanh",
    start=lambda features, box: torch.atanh(box.points(features).clamp(-NEARLY, NEARLY)),
    features=lambda point, box: box.features(torch.tanh(point)),
    project=lambda point, box: point,
)
"""Unbounded points behind a hyperbolic tangent: steps shrink smoothly towards the walls."""


def mixtures(pool: Tensor) -> Space:
    """Return the space of convex mixtures of given features; it begins at points, the logarithms of weights.

    Args:
        pool: [M, C, F], what each of M new nodes may be made of.
    """

    def mixed(point: Tensor, box: Box) -> Tensor:
        return torch.einsum("bmc,mcf->bmf", point.softmax(-1), pool)

    return Space("mixture", start=lambda point, box: point, features=mixed, project=lambda point, box: point)


def beside(spaces: Sequence[tuple[int, Space]]) -> Space:
    """Return the space of points side by side, each in its own space.

    Args:
        spaces: how many points are in each, in their order.
    """
    if len(spaces) == 1:
        return spaces[0][1]
    sizes = [size for size, _ in spaces]

    def project(points: Tensor, box: Box) -> Tensor:
        for part, (_, space) in zip(torch.split(points, sizes), spaces, strict=True):
            space.project(part, box)
        return points

    def each(name: str) -> Callable[[Tensor, Box], Tensor]:
        def together(points: Tensor, box: Box) -> Tensor:
            parts = zip(torch.split(points, sizes), spaces, strict=True)
            return torch.cat([getattr(space, name)(part, box) for part, (_, space) in parts])

        return together

    name = " | ".join(space.name for _, space in spaces)
    return Space(name, each("start"), each("features"), project)


SPACES = {space.name: space for space in (BOX, TANH)}
