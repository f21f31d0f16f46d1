"""`Range`: what limits let a node say, as tensors that a bound can read and a gradient can reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fgai.attention import Limits
from fgai.attention.limits import SLACK, largest, ranges
from fgai.models import AttentionLayer


@dataclass(frozen=True, eq=False)
class Range:
    """The range of one thing that an attention layer reads of every node.

    Attributes:
        low: lower ends, of one row.
        high: upper ends.
        radius: how loud a row may be, in units of half the range from its middle; None: as loud as its ends.
    """

    low: Tensor
    high: Tensor
    radius: Tensor | None = None

    @classmethod
    def of(cls, limits: Limits) -> Range:
        """Of limits that were measured."""
        loud = limits.radius if bool(limits.radius.isfinite()) else None
        return cls(limits.low, limits.high, loud)

    @classmethod
    def measured(
        cls, rows: Tensor, cut: float, soften: float, *, every: int = 1, whole: bool = True
    ) -> Range:
        """From what nodes say [N, ...], as `Limits.measure` takes it; gradients reach those at the ends.

        Args:
            rows: what nodes say.
            cut: share of the rows left out at either end of each channel.
            soften: share of the rows, the loudest, that are drawn to the loudness of the rest.
            every: take order statistics from one row in so many.
            whole: bound the loudness, too.
        """
        low, high = ranges(rows[::every] if cut else rows, cut)
        found = cls(low, high)
        if not whole:
            return found
        counted = rows[::every] if soften else rows
        loud = found.loudness(torch.clamp(counted, low, high))
        return cls(low, high, largest(loud, soften) * (1 + SLACK))

    @cached_property
    def middle(self) -> Tensor:
        """Of the range."""
        return (self.low + self.high) / 2

    @cached_property
    def half(self) -> Tensor:
        """Half the range."""
        return (self.high - self.low) / 2

    @cached_property
    def unit(self) -> Tensor:
        """One over half the range; 0 where there is none."""
        return torch.where(self.half > 0, 1 / self.half.clamp(min=torch.finfo(self.half.dtype).tiny), 0.0)

    def loudness(self, rows: Tensor) -> Tensor:
        """[N]: distance of rows [N, ...] from the middle, in units of half the range."""
        return self._size(rows - self.middle)

    def _size(self, apart: Tensor) -> Tensor:
        """[N]: length of rows [N, ...], in units of half the range."""
        return root((apart * self.unit).flatten(1).square().sum(1))

    def heard(self, rows: Tensor) -> Tensor:
        """Rows [N, ...] as a layer behind these limits hears them."""
        inside = torch.clamp(rows, self.low, self.high)
        if self.radius is None:
            return inside
        apart = inside - self.middle
        share = (self.radius / self._size(apart)).clamp(max=1)  # a root is never 0
        return self.middle + apart * share[(...,) + (None,) * (rows.dim() - 1)]

    def moved(self, said: Tensor, by: Tensor) -> Tensor:
        """How far numbers move behind the limits, if they move by `by` [N, ...] before.

        Clipping moves nothing further. In units of half the range, drawing loud rows to the radius r projects
        them on a ball, so a row moves no further than before, by d in the Euclidean norm; and channel by
        channel no further than `by` and what the change of the factor adds, at most `|y − middle| d / r`.

        Args:
            said: what is said now, behind the limits.
            by: before them.
        """
        return by if self.radius is None else self._drawn(by, (said - self.middle).abs())

    def moved_at_most(self, by: Tensor) -> Tensor:
        """As `moved`, whatever is said."""
        return by if self.radius is None else self._drawn(by, self.half)

    def _drawn(self, by: Tensor, away: Tensor) -> Tensor:
        assert self.radius is not None
        whole = self._size(by)[(...,) + (None,) * (by.dim() - 1)]
        further = whole / self.radius.clamp(min=torch.finfo(by.dtype).tiny)
        return smaller(self.half * whole, by + away * further)


Ranges = Mapping[str, Range]
"""Of a layer, by the name of what it reads: `value`, and `source` and `destination`, or `right`."""


def ranges_of(layer: AttentionLayer) -> Ranges:
    """The ranges of a layer's limits."""
    assert layer.limits is not None
    return {name: Range.of(limits) for name, limits in layer.limits.items() if isinstance(limits, Limits)}


def smaller(x: Tensor, y: Tensor) -> Tensor:
    """`torch.minimum`; of a gradient the first gets all where both are equal, by a third of the operations.

    Without gradients, as in a certificate, NaN on either side stays NaN.
    """
    return torch.where(x <= y, x, y) if torch.is_grad_enabled() else torch.minimum(x, y)


def larger(x: Tensor, y: Tensor) -> Tensor:
    """`torch.maximum`, likewise; where both are equal the second gets the gradient."""
    return torch.where(x > y, x, y) if torch.is_grad_enabled() else torch.maximum(x, y)


def root(x: Tensor) -> Tensor:
    """Square root with a finite slope at 0, never below the true one."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).sqrt()
