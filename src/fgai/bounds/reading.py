"""What an attention layer reads behind limits when its input is uncertain: intervals, box and ball.

After the first layer every channel of a node lies in an interval, and all of them together in a ball: a new
neighbour may be at the end of any channel, but behind limits of its norm not at the end of all. So a linear
reading `⟨g, x⟩` of the state moves by at most the smaller of

    Σ_c |g_c| r_c                                         (the box)
    Σ_c |g_c| s_c M |middle_c − x_c|  +  R ‖g · s M half‖₂   (the ball)

with M the mass of new neighbours, `middle ± half` the range of their values, R their radius and s the
steepest slope of the activation in the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fgai.attention import Limits
from fgai.attention.limits import SLACK, largest, ranges
from fgai.models import AttentionLayer
from fgai.sparse import Features

ROUNDING = 1e-5
"""Of float32 arithmetic, relative to what is summed; a class must stay by more."""


@dataclass(frozen=True, eq=False)
class Range:
    """The range of one quantity that an attention layer reads of every node."""

    low: Tensor  # lower ends, of one row
    high: Tensor  # upper ends
    radius: Tensor | None = None  # largest norm of a row, in units of half the range; None for no bound

    @classmethod
    def of(cls, limits: Limits) -> Range:
        """Of measured limits."""
        radius = limits.radius if bool(limits.radius.isfinite()) else None
        return cls(limits.low, limits.high, radius)

    @classmethod
    def measured(
        cls, rows: Tensor, clip_share: float, shrink: float, *, every: int = 1, with_norm: bool = True
    ) -> Range:
        """From rows [N, ...], as `Limits.measure` takes it; gradients reach those at the ends.

        Order statistics are taken from one row in `every`; the norm is bounded `with_norm` alone.
        """
        low, high = ranges(rows[::every] if clip_share else rows, clip_share)
        box = cls(low, high)
        if not with_norm:
            return box
        counted = rows[::every] if shrink else rows
        norms = box.distance(torch.clamp(counted, low, high))
        return cls(low, high, largest(norms, shrink) * (1 + SLACK))

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

    def distance(self, rows: Tensor) -> Tensor:
        """[N]: length of rows [N, ...] seen from the middle."""
        return self.norm(rows - self.middle)

    def norm(self, apart: Tensor) -> Tensor:
        """[N]: length of rows [N, ...], in units of half the range."""
        return _root((apart * self.unit).flatten(1).square().sum(1))

    @cached_property
    def largest(self) -> Tensor:
        """Largest size of each number."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def clip(self, rows: Tensor) -> Tensor:
        """Rows [N, ...] behind these limits."""
        inside = torch.clamp(rows, self.low, self.high)
        if self.radius is None:
            return inside
        apart = inside - self.middle
        share = (self.radius / self.norm(apart)).clamp(max=1)  # a root is never 0
        return self.middle + apart * share[(...,) + (None,) * (rows.dim() - 1)]

    def moved(self, clipped: Tensor, by: Tensor) -> Tensor:
        """How far numbers, `clipped` now, move if they move by `by` [N, ...] before the limits.

        Clipping to the range moves nothing further. In units of half the range, shrinking rows to the radius
        r projects them on a ball, so a row moves no further than before, by d in the Euclidean norm; and
        channel by channel no further than `by` and what the change of the factor adds, at most `|y − middle|
        d / r`.
        """
        if self.radius is None:
            return by
        norm = self.norm(by)[(...,) + (None,) * (by.dim() - 1)]
        further = norm / self.radius.clamp(min=torch.finfo(by.dtype).tiny)
        return _smaller(self.half * norm, by + (clipped - self.middle).abs() * further)


Ranges = Mapping[str, Range]  # of a layer: `value`, and `source` and `destination`, or `right`


def ranges_of(layer: AttentionLayer) -> Ranges:
    """The ranges of a layer's limits."""
    assert layer.limits is not None
    return {name: Range.of(limits) for name, limits in layer.limits.items() if isinstance(limits, Limits)}


def _smaller(x: Tensor, y: Tensor) -> Tensor:
    """`torch.minimum` whose first argument gets the gradient of ties; NaN stays without gradients."""
    return torch.where(x <= y, x, y) if torch.is_grad_enabled() else torch.minimum(x, y)


def _larger(x: Tensor, y: Tensor) -> Tensor:
    """`torch.maximum` whose second argument gets the gradient of ties."""
    return torch.where(x > y, x, y) if torch.is_grad_enabled() else torch.maximum(x, y)


def _root(x: Tensor) -> Tensor:
    """Square root with a finite slope at 0, never below the true one."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).sqrt()


@dataclass(frozen=True, eq=False)
class _Ball:
    """How the state can move: a drift that only grows, and a ball."""

    base: Tensor  # [N, D] the clean state
    drift: Tensor  # [N, D] signed; any share of it, channel by channel
    spread: Tensor  # [N, D] half-axes of the ball
    radius: Tensor  # its size


@dataclass(frozen=True, eq=False)
class State:
    """An uncertain input [N, D] of a layer."""

    low: Tensor  # lower ends
    high: Tensor  # upper ends
    ball: _Ball | None = None  # bounds all channels together, or None
    clean: Tensor | None = None  # [N, D] without new neighbours, where that is known

    def through(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ends of `x @ weight + bias` [N, F]."""
        middle, radius = (self.low + self.high) / 2, (self.high - self.low) / 2
        centre, far = middle @ weight, radius @ weight.abs()
        low, high = centre - far, centre + far
        if self.ball is not None:
            ball = self.ball
            up, down = weight.clamp(min=0), weight.clamp(max=0)
            rising, falling = ball.drift.clamp(min=0), ball.drift.clamp(max=0)
            least, most = _both(rising, falling, down, up)
            around = ball.radius * _root(ball.spread.square() @ weight.square())
            clean = ball.base @ weight
            low = _larger(low, clean + least - around)
            high = _smaller(high, clean + most + around)
            # Both hold, so they meet; rounding must not make them cross.
            low, high = _smaller(low, high), _larger(low, high)
        return (low, high) if bias is None else (low + bias, high + bias)

    def rows(self, index: Tensor) -> State:
        """Some of the nodes."""
        ball = self.ball
        if ball is not None:
            ball = _Ball(ball.base[index], ball.drift[index], ball.spread[index], ball.radius)
        clean = None if self.clean is None else self.clean[index]
        return State(self.low[index], self.high[index], ball, clean)

    def pointwise(self, function: Callable[[Tensor], Tensor], slope: Tensor) -> State:
        """Behind a monotone function of each number, no steeper than `slope` [N, D], below 0 if it falls."""
        ball, ends = self.ball, (function(self.low), function(self.high))
        if ball is not None:
            ball = _Ball(function(ball.base), slope * ball.drift, slope * ball.spread, ball.radius)
        clean = None if self.clean is None else function(self.clean)
        return State(_smaller(*ends), _larger(*ends), ball, clean)

    def mapped(self, weight: Tensor, bias: Tensor | None) -> State:
        """Behind a linear map; how its outputs hang together is left out."""
        clean = self.clean
        if clean is not None:
            clean = clean @ weight if bias is None else clean @ weight + bias
        return State(*self.through(weight, bias), None, clean)


@dataclass(frozen=True, eq=False)
class Reading:
    """What a layer reads of every node."""

    low: Tensor  # of the values, [N, H, C]
    high: Tensor  # of the values
    source: tuple[Tensor, Tensor]  # ends of the source's side [N, H] (GAT), or of the values (GATv2)
    destination: tuple[Tensor, Tensor]  # ends of the destination's side, [N, H] or [N, H, C]
    clipped: _Clipped | None = None  # how the values follow the input, where that is uncertain

    @classmethod
    def exact(cls, layer: AttentionLayer, x: Tensor | Features) -> Reading:
        """Without uncertainty."""
        source, destination, values = layer.sides(x)
        return cls(values, values, (source, source), (destination, destination))

    @classmethod
    def around(cls, layer: AttentionLayer, ranges: Ranges, state: State) -> Reading:
        """From an uncertain input."""
        values = _Clipped(state, layer.value.weight, layer.value.bias, ranges["value"])
        low, high = values.low, values.high
        if layer.score == "dynamic":
            right = _Clipped(state, layer.right.weight, layer.right.bias, ranges["right"])
            return cls(low, high, (low, high), (right.low, right.high), values)
        weights = (layer.source_weight, layer.destination_weight)
        ends = [end.chunk(2, 1) for end in values.through(torch.cat([_by_head(w) for w in weights], 1))]
        source, destination = (
            (ranges[name].clip(first), ranges[name].clip(last))
            for name, first, last in zip(("source", "destination"), *ends, strict=True)
        )
        return cls(low, high, source, destination, values)

    def lead(
        self,
        layer: AttentionLayer,
        ahead: slice = slice(None),
        read_out: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """[N, A, C]: least `z_a − z_b + bias_a − bias_b` of a neighbour, for classes a in `ahead` and b.

        The last layer has one head. `read_out` is weight [C', C] and bias of a linear map that follows.
        """
        if read_out is not None:
            across, shift = _leads_of(layer, read_out)
            across, shift = across[:, ahead].flatten(1), shift[ahead]
            least = self.low[:, 0] @ across if self.clipped is None else self.clipped.through(across)[0]
            return least.view(-1, *shift.shape) + shift - self._rounding(layer, read_out)[:, ahead]
        least = self.low[:, 0, ahead, None] - self.high[:, 0, None, :]
        if self.clipped is not None:
            one = torch.eye(layer.channels, dtype=least.dtype, device=least.device)
            across = (one[:, ahead, None] - one[:, None, :]).flatten(1)
            least = _larger(least, self.clipped.through(across)[0].view_as(least))
        return least + _bias_lead(layer)[ahead] - self._rounding(layer)[:, ahead]

    def _rounding(self, layer: AttentionLayer, read_out: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return _rounding_of(layer, torch.maximum(self.low.abs(), self.high.abs())[:, 0], read_out)


class _Clipped:
    """Values behind limits that follow an uncertain input; `weight` of their map is [D, H · C]."""

    def __init__(self, state: State, weight: Tensor, bias: Tensor | None, limits: Range) -> None:
        self.state, self.weight, self.bias, self.limits = state, weight, bias, limits
        raw = [end.view(-1, *limits.low.shape) for end in state.through(weight, bias)]
        low, high = (torch.clamp(end, limits.low, limits.high) for end in raw)
        self.drawn = low.new_zeros(low.shape[0], 1)  # share by which rows may be drawn to the middle
        if limits.radius is not None:
            middle = limits.middle
            distances = limits.distance(middle + _larger((low - middle).abs(), (high - middle).abs()))
            self.drawn = (1 - limits.radius / distances).clamp(min=0)[:, None]
        ends = _drawn(low, high, limits.middle, self.drawn[:, :, None])
        clipped = limits.clip((raw[0] + raw[1]) / 2)
        moved = limits.moved(clipped, (raw[1] - raw[0]) / 2)
        # [N, H · C]: by how much values may be above and below the range before it is enforced.
        self.over = (raw[1] - limits.high).clamp(min=0).flatten(1)
        self.under = (limits.low - raw[0]).clamp(min=0).flatten(1)
        self.low, self.high = _larger(ends[0], clipped - moved), _smaller(ends[1], clipped + moved)

    def through(self, reading: Tensor) -> tuple[Tensor, Tensor]:
        """Ends of `⟨g, value⟩` [N, F] for readings g, the columns of [H · C, F].

        Linear in the input but for the limits: a value above the range is lowered by the excess, so a reading
        moves by at most `g · over`; a row outside the radius goes some of the way to the middle.
        """
        up, down = reading.clamp(min=0), (-reading).clamp(min=0)
        low, high = self.low.flatten(1), self.high.flatten(1)
        least, most = _both(low, high, up, -down)
        shift = None if self.bias is None else self.bias @ reading
        first, last = self.state.through(self.weight @ reading, shift)
        lowered, raised = _both(self.over, self.under, up, down)
        first, last = first - lowered, last + raised
        middle = self.limits.middle.flatten() @ reading
        first, last = _drawn(first, last, middle, self.drawn)
        least, most = _larger(least, first), _smaller(most, last)
        return _smaller(least, most), _larger(least, most)


def _both(x: Tensor, y: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """`x @ one + y @ two` and `x @ two + y @ one`, in one product."""
    maps = torch.cat([torch.cat([one, two], 1), torch.cat([two, one], 1)])
    first, second = (torch.cat([x, y], 1) @ maps).chunk(2, 1)
    return first, second


def _drawn(low: Tensor, high: Tensor, middle: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of numbers drawn to the middle by any share up to the given one."""
    return _smaller(low, low + share * (middle - low)), _larger(high, high + share * (middle - high))


def _by_head(weight: Tensor) -> Tensor:
    """[H · C, H]: one column per head, from [H, C]."""
    heads = torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return (weight[:, :, None] * heads[:, None, :]).flatten(0, 1)


def _bias_lead(layer: AttentionLayer) -> Tensor:
    """[C, C]: the part of the layer's bias in the lead of class a over b."""
    bias = layer.value.weight.new_zeros(layer.channels) if layer.bias is None else layer.bias
    return bias[:, None] - bias[None, :]


def _leads_of(layer: AttentionLayer, read_out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Lead of class a over b in the logits behind a linear map: weight [C', C, C] of values, bias [C, C]."""
    weight, bias = read_out
    if layer.bias is not None:
        bias = bias + layer.bias @ weight
    return weight[:, :, None] - weight[:, None, :], bias[:, None] - bias[None, :]


def _rounding_of(
    layer: AttentionLayer, values: Tensor, read_out: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """[..., C, C]: rounding of the lead of class a over b, from the largest `values` [..., C] of a channel.

    Logits are rounded relative to themselves, not to how far they are apart: not with a large common offset.
    """
    size = values.detach()
    if layer.bias is not None:
        size = size + layer.bias.detach().abs()
    if read_out is not None:
        size = size @ read_out[0].abs() + read_out[1].abs()
    return ROUNDING * (size[..., :, None] + size[..., None, :])


def _largest(limits: Range, weight: Tensor) -> Tensor:
    """[...]: the largest `⟨weight, v⟩` over values v [H, C] inside a range, summed over C."""
    size = weight * limits.half
    far = size.abs().sum(-1)
    if limits.radius is not None:
        far = _smaller(far, limits.radius * _root(size.square().sum(-1)))
    return (weight * limits.middle).sum(-1) + far
