"""Limits: what a node may say to its neighbours lies in the range seen on the graph a model was made for.

An attention layer reads three things of every node: its value and the two sides of the score. Limits clip
each of them, channel by channel, and bound how loud it is as a whole: an honest node stands at the end of a
few channels, not of all. With the ranges of a graph itself nothing changes on that graph, not a bit; a node
that comes later can say nothing that no node has said before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.errors import InputError
from fgai.ops import clip, loudness
from fgai.typed import typed

SAMPLE = 4096
"""Rows that order statistics are taken from while a model trains; all of them once it is done."""
SLACK = 1e-5
"""By which ranges and radii are larger than what they were measured from: kernels that add in another order
round otherwise, and what they say must not be clipped for it."""


@typed
class Limits(nn.Module):
    """The range of one thing that an attention layer reads of every node, channel by channel and as a whole.

    Until it is measured it is infinite and clips nothing. What is derived from something with limits of its
    own has a range by channel alone.

    Args:
        *size: of one row, e.g. heads and channels.
        derived: whether the layer computes it from something that has limits of its own.

    Attributes:
        low: lower ends.
        high: upper ends.
        radius: how loud a node may be: its distance from the middle of the range, in units of half of it.
        usual: share of the numbers that were moved on the graph it was measured on.
        straight: let gradients pass through what was clipped, see `fgai.ops.clip`.
    """

    low: Tensor
    high: Tensor
    radius: Tensor
    usual: Tensor

    def __init__(self, *size: int, derived: bool = False) -> None:
        super().__init__()
        for count in size:
            checks.whole(count, "size", 0)
        checks.memory(math.prod(size), 8, "size")
        self.register_buffer("low", torch.full(size, -torch.inf))
        self.register_buffer("high", torch.full(size, torch.inf))
        self.register_buffer("radius", torch.full((), torch.inf))
        self.register_buffer("usual", torch.zeros(()))
        self.straight, self.derived = False, derived
        self._measuring: _Measuring | _Collecting | None = None
        self._points: tuple[Tensor, Tensor] | None = None
        self._heard: list[Tensor] | None = None
        self._count: list[int] | None = None

    def extra_repr(self) -> str:
        """Show the size, and how wide the ranges are."""
        width = (self.high - self.low).mean()
        return f"{tuple(self.low.shape)}, mean width {float(width):.3g}, radius {float(self.radius):.3g}"

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [N, ...] inside the range; its memory may be used, see `fgai.ops.clip`.

        Args:
            x: rows of the range's size, in one or more dimensions.
        """
        measuring = self._measuring
        if measuring is not None and measuring.take(self, x):
            return x
        low, high, radius = self.low.view(x.shape[1:]), self.high.view(x.shape[1:]), self.radius
        if measuring is not None:  # a later run may widen the range before the backward pass reads it
            low, high, radius = low.clone(), high.clone(), radius.clone()
        if self._count is not None:
            heard = clip(x.detach(), low, high, radius)
            self._count[0] += int(heard.ne(x.detach()).sum())
            self._count[1] += x.numel()
        out = clip(x, low, high, radius, straight=self.straight)
        if measuring is not None:
            measuring.keep(self, out)
        if self._points is not None:
            out = self._spoken(out)
        if self._heard is not None:
            self._heard.append(self.points_of(out.detach().view(-1, *self.low.shape)))
        return out

    def at(self, points: Tensor) -> Tensor:
        """Return what points of the unit box [M, ...] stand for: 0 is the lower end, 1 the upper."""
        return self.low + points * (self.high - self.low)

    def points_of(self, x: Tensor) -> Tensor:
        """Return the points of the unit box [M, ...] that stand for numbers inside the range."""
        width = self.high - self.low
        return torch.where(width > 0, (x - self.low) / width.clamp(min=1e-30), 0.5).clamp(0, 1)

    @torch.no_grad()
    def measure(
        self,
        x: Tensor,
        cut: float = 0.0,
        soften: float = 0.0,
        *,
        every: int = 1,
        earlier: Sequence[Tensor] = (),
    ) -> None:
        """Take range and radius from rows [N, ...].

        Args:
            x: what nodes say.
            cut: share of the rows left out at either end of each channel.
            soften: share of the rows, the loudest, that are drawn to the loudness of the rest.
            every: take order statistics from one row in so many.
            earlier: what nodes said in earlier runs of the layer, inside the range as it is; range and radius
                are widened to hold them, too.
        """
        rows = x.detach().reshape(-1, *self.low.shape)
        low, high = own = ranges(rows[::every] if cut else rows, cut)
        if earlier:
            low, high = torch.minimum(low, self.low), torch.maximum(high, self.high)
        self.low.copy_(low)
        self.high.copy_(high)
        if not self.derived:
            counted = rows[::every].contiguous() if soften else rows
            radii = [largest(loudness(clip(counted, *own), low, high), soften)]
            radii += [loudness(one.reshape(-1, *low.shape), low, high).max() for one in earlier]
            self.radius.copy_(torch.stack(radii).max() * (1 + SLACK))
        if every == 1:
            moved = clip(rows, self.low, self.high, self.radius) != rows
            share = moved.to(self.usual.dtype).mean()
            self.usual.copy_((len(earlier) * self.usual + share) / (len(earlier) + 1))

    def fault(self) -> str | None:
        """Say why these are no limits: `low` above `high`, or a `radius` below 0; None where they are."""
        if not bool((self.low <= self.high).all()):
            return "limits must have `low` at most `high`"
        if not bool(self.radius >= 0):
            return f"limits must have a `radius` of at least 0, got {float(self.radius):.3g}"
        return None

    @torch.no_grad()
    def set(self, low: Tensor, high: Tensor, radius: Tensor, usual: Tensor) -> None:
        """Take what was measured elsewhere; see the attributes."""
        for mine, theirs in zip(
            (self.low, self.high, self.radius, self.usual), (low, high, radius, usual), strict=True
        ):
            mine.copy_(theirs)

    def _spoken(self, x: Tensor) -> Tensor:
        """Put points of the unit box in the place of some of the last rows."""
        assert self._points is not None
        points, chosen = self._points
        first = x.shape[0] - points.shape[0]
        mask = chosen.view(-1, *[1] * (x.dim() - 1))
        words = clip(self.at(points), self.low, self.high, self.radius, straight=self.straight)
        said = torch.where(mask, words.view(-1, *x.shape[1:]).to(x.dtype), x[first:])
        return torch.cat([x[:first], said])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what lasts for a block only."""
        return {**self.__dict__, "_measuring": None, "_points": None, "_heard": None, "_count": None}


def ranges(x: Tensor, cut: float) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest of the rows of `x`, a share `cut` left out at either end.

    Where nothing is left out, each end is further out by a hundred-thousandth of the range, see `SLACK`.

    Example:
        >>> low, high = ranges(torch.arange(10.0)[:, None], 0.1)
        >>> low, high
        (tensor([1.]), tensor([8.]))
    """
    count = int(cut * x.shape[0])
    if count == 0:
        low, high = x.amin(0), x.amax(0)
        more = SLACK * (high - low).detach()
        return low - more, high + more
    flat = x.flatten(1).t().contiguous()  # order statistics are found along memory
    low, high = (flat.kthvalue(place, dim=1).values for place in (count + 1, x.shape[0] - count))
    return low.view(x.shape[1:]), high.view(x.shape[1:])


def largest(x: Tensor, share: float) -> Tensor:
    """The largest of numbers [N], a share of them left out."""
    count = int(share * x.numel())
    return x.max() if count == 0 else x.kthvalue(x.numel() - count).values


class _Measuring:
    """One block of `measuring`: what is left out, the nodes that count, and the rows of each run."""

    def __init__(self, cut: float, soften: float, nodes: Tensor | None, sampled: bool) -> None:
        self.cut, self.soften, self.nodes, self.sampled = cut, soften, nodes, sampled
        self.earlier: dict[Limits, list[Tensor]] = {}

    def take(self, limits: Limits, x: Tensor) -> bool:
        """Measure `x`; return whether nothing of it can be outside."""
        rows = x if self.nodes is None else x[self.nodes]
        every = max(1, rows.shape[0] // SAMPLE) if self.sampled else 1
        # A layer that runs twice has one range for both.
        earlier = self.earlier.setdefault(limits, [])
        limits.measure(rows, self.cut, self.soften, every=every, earlier=earlier)
        inside = self.cut == self.soften == 0 and self.nodes is None
        if inside:
            self.keep(limits, x)
        return inside

    def keep(self, limits: Limits, x: Tensor) -> None:
        """Keep the rows of a run, inside the range, for later runs."""
        self.earlier[limits].append((x if self.nodes is None else x[self.nodes]).detach())


class _Collecting:
    """One block of `collecting`: what is said goes to whoever asked, and on as it is."""

    def __init__(self, note: Callable[[Limits, Tensor], None]) -> None:
        self.note = note

    def take(self, limits: Limits, x: Tensor) -> bool:
        """Hand `x` over."""
        self.note(limits, x.detach())
        return True

    def keep(self, limits: Limits, x: Tensor) -> None:
        """Nothing is kept."""


@typed
def limits_of(model: nn.Module) -> list[Limits]:
    """Return all limits of a model, in the order of its modules; empty where it has none."""
    return [module for module in model.modules() if isinstance(module, Limits)]


@typed
@contextmanager
def measuring(
    model: nn.Module,
    cut: float = 0.0,
    nodes: Tensor | None = None,
    *,
    soften: float = 0.0,
    sampled: bool = False,
) -> Iterator[None]:
    """Take the ranges of a model's limits from every forward pass in the block; of all runs of a layer.

    Args:
        model: with limits.
        cut: share of the nodes left out at either end of each channel; they are clipped in the same pass.
        nodes: bool [N] or indices of those whose ranges count; all by default.
        soften: share of the nodes, the loudest, that are drawn to the loudness of the rest.
        sampled: take order statistics from at most a few thousand nodes, evenly spread.
    """
    with _each(model, "_measuring", _Measuring(cut, soften, nodes, sampled)):
        yield


@typed
@contextmanager
def collecting(limits: Sequence[Limits], note: Callable[[Limits, Tensor], None]) -> Iterator[None]:
    """Hand over what reaches some limits in the block, which let it pass as it is.

    Args:
        limits: of one model.
        note: called with the limits and what reached them, rows in the order they came.
    """
    with ExitStack() as stack:
        for one in limits:
            stack.enter_context(_set(one, "_measuring", _Collecting(note)))
        yield


@typed
@contextmanager
def straight_through(model: nn.Module) -> Iterator[None]:
    """Let gradients pass straight through a model's limits in the block."""
    with _each(model, "straight", True):
        yield


@typed
def usual_share(model: nn.Module) -> float:
    """Of all numbers that nodes say, those that limits moved on the graph they were measured on."""
    found = limits_of(model)
    total = sum(limits.low.numel() for limits in found)
    return sum(float(limits.usual) * limits.low.numel() for limits in found) / total if total else 0.0


@typed
@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """Count what limits clip in the block.

    Yields:
        Two numbers, filled in by forward passes: numbers clipped, numbers seen.
    """
    count = [0, 0]
    with _each(model, "_count", count):
        yield count


@typed
@contextmanager
def speaking(points: Mapping[Limits, Tensor], chosen: Tensor) -> Iterator[None]:
    """Let some of the last nodes say points of the unit box, whatever their features are, in the block.

    A layer that runs more than once reads them in every run.

    Args:
        points: for limits, [M, ...] in the unit box; gradients reach them.
        chosen: bool [M], which of the last M nodes do.
    """
    with ExitStack() as stack:
        for limits, values in points.items():
            stack.enter_context(_set(limits, "_points", (values, chosen)))
        yield


@typed
@contextmanager
def hearing(entry: Sequence[Limits]) -> Iterator[dict[Limits, list[Tensor]]]:
    """Note what is said in the block, as points of the unit box: for each of `entry`, [N, ...] a pass."""
    heard: dict[Limits, list[Tensor]] = {limits: [] for limits in entry}
    with ExitStack() as stack:
        for limits, said in heard.items():
            stack.enter_context(_set(limits, "_heard", said))
        yield heard


@typed
@contextmanager
def voiced(entry: Sequence[Limits], voices: Tensor) -> Iterator[None]:
    """Let the last nodes say `voices` [M, D], points of the unit boxes of `entry` side by side."""
    sizes = [limits.low.numel() for limits in entry]
    if voices.dim() != 2 or voices.shape[1] != sum(sizes):
        raise InputError(f"`voices` must have shape [nodes, {sum(sizes)}], got {tuple(voices.shape)}")
    parts = torch.split(voices, sizes, dim=1)
    points = {limits: part.reshape(-1, *limits.low.shape) for limits, part in zip(entry, parts, strict=True)}
    with speaking(points, torch.ones(voices.shape[0], dtype=torch.bool, device=voices.device)):
        yield


@contextmanager
def _each(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for limits in limits_of(model):
            stack.enter_context(_set(limits, name, value))
        yield


@contextmanager
def _set(limits: Limits, name: str, value: Any) -> Iterator[None]:
    before = getattr(limits, name)
    setattr(limits, name, value)
    try:
        yield
    finally:
        setattr(limits, name, before)
