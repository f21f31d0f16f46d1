"""`Box`: the interval of every feature that new nodes may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fgai.errors import InputError, ReliabilityWarning, warn
from fgai.graph import Graph

BEYOND = 0.1
"""How far a box from the data reaches beyond each feature's range, on both sides, as a share of its width."""
SLACK = 1e-6
"""Rounding that a check of a box forgives, as a share of half the width."""


@dataclass(frozen=True, eq=False)
class Box:
    """An interval for every feature; `low, high = box` unpacks it.

    A search moves points in [-1, 1]: -1 stands for the lower end of a feature's interval and 1 for the upper.
    So it does the same whatever the unit and the origin of a feature are.

    Attributes:
        low: [F] lower ends, or one number for all.
        high: [F] upper ends.
        middle: [F] between them.
        half: [F] half the width; 0 where a feature has one value only.
    """

    low: Tensor
    high: Tensor
    middle: Tensor = field(init=False)
    half: Tensor = field(init=False)

    def __post_init__(self) -> None:
        middle = ((self.low.double() + self.high.double()) / 2).to(self.low.dtype)
        half = torch.minimum(self.high - middle, middle - self.low)  # exact where it is small
        for _ in range(2):  # the corners stay inside, whatever rounding does
            outside = (middle + half > self.high) | (middle - half < self.low)
            half = torch.where(outside, half * (1 - torch.finfo(half.dtype).eps), half)
        object.__setattr__(self, "middle", middle)
        object.__setattr__(self, "half", half)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.low, self.high))

    @classmethod
    def of(cls, low: float, high: float, like: Tensor) -> Box:
        """Return one interval for all features; `like` [F] gives their number, type and device."""
        return cls(torch.full_like(like, low), torch.full_like(like, high))

    @classmethod
    def around(cls, low: Tensor, high: Tensor) -> Box:
        """Return the box of data between `low` and `high` [F], a share `BEYOND` of each width wider."""
        more = BEYOND * (high.double() - low.double())
        return cls((low.double() - more).to(low.dtype), (high.double() + more).to(low.dtype))

    def features(self, points: Tensor) -> Tensor:
        """Return what points [..., F] in [-1, 1] stand for; differentiable."""
        return self.middle + self.half * points

    def points(self, features: Tensor) -> Tensor:
        """Return the points [..., F] of features; 0 where a feature has one value only."""
        return torch.where(self.half > 0, (features - self.middle) / self.half, 0.0)

    def outside(self, features: Tensor) -> Tensor:
        """Whether features [..., F] leave the box by more than rounding; NaN does."""
        size = torch.maximum(self.low.abs(), self.high.abs())
        slack = SLACK * self.half + 16 * torch.finfo(size.dtype).eps * size
        return ~((features >= self.low - slack) & (features <= self.high + slack))


def data_range(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each feature, [F] each.

    Only `Graph.peers` are read, where the graph has them.

    Raises:
        InputError: a feature has a value that is not finite, or is too large to compute with.
    """
    if graph.features is None:
        return torch.zeros(0, device=graph.device), torch.zeros(0, device=graph.device)
    low, high = graph.features.range(graph.peers)
    wide = Box.around(low, high)
    bad = ~(torch.isfinite(wide.low) & torch.isfinite(wide.high))
    if bool(bad.any()):
        raise InputError(
            f"features of {graph.name!r} must be finite, and so must their range: {int(bad.sum())} of"
            f" {bad.numel()} are not (the first is feature {int(bad.nonzero()[0])}); replace or rescale them"
        )
    return low, high


def warn_if_narrow(interval: tuple[float, float] | None, low: Tensor, high: Tensor) -> None:
    """Warn where an interval leaves out values that the data has.

    Args:
        interval: for all features; None for a box from the data, which holds all of them.
        low: [F] smallest value of each feature.
        high: [F] largest.
    """
    if interval is None:
        return
    left = ((low < interval[0]) | (high > interval[1])).nonzero().flatten()
    if left.numel():
        first = int(left[0])
        text = (
            f"`box` [{interval[0]:.4g}, {interval[1]:.4g}] is narrower than the data: {left.numel()} of"
            f" {low.numel()} features leave it (feature {first} lies in [{float(low[first]):.4g},"
            f" {float(high[first]):.4g}]), so new nodes cannot have values that real ones have; widen it, or"
            " leave it out to take it from the data"
        )
        warn(ReliabilityWarning("box-narrower-than-data", text))
