"""Bounds of what an attention layer computes from an uncertain input: intervals, and a ball of all channels.

Behind limits a new neighbour may be at the end of any channel, but not of all of them. So after the first
layer a linear function `⟨g, x⟩` of a node's state moves by at most the smaller of

    Σ_c |g_c| r_c    and    Σ_c |g_c| s_c M |middle_c − x_c|  +  R ‖g · s M half‖₂

with r the half-width of the interval, M the attention mass of new neighbours, `middle ± half` the range of
their values, R the limit of their norm and s the largest slope of the activation on the interval.
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

ROUNDING = 1e-5  # error of float32 arithmetic, relative to what is summed; a margin must be larger


@dataclass(frozen=True, eq=False)
class Range:
    """Limits of one quantity that an attention layer computes for every node, rows [N, ...]."""

    low: Tensor  # [...]
    high: Tensor  # [...]
    radius: Tensor | None = None  # largest norm of a row, in units of half the range; None for no limit

    @classmethod
    def from_limits(cls, limits: Limits) -> Range:
        """Return the range of measured limits."""
        radius = limits.radius if bool(limits.radius.isfinite()) else None
        return cls(limits.low, limits.high, radius)

    @classmethod
    def measure(
        cls, rows: Tensor, clip_share: float, shrink: float, *, every: int = 1, with_norm: bool = True
    ) -> Range:
        """Measure rows [N, ...] as `Limits.measure` does, with gradients; quantiles of one row in `every`."""
        low, high = ranges(rows[::every] if clip_share else rows, clip_share)
        box = cls(low, high)
        if not with_norm:
            return box
        norms = box.norm(torch.clamp(rows[::every] if shrink else rows, low, high) - box.middle)
        return cls(low, high, largest(norms, shrink) * (1 + SLACK))

    @cached_property
    def middle(self) -> Tensor:
        """Middle of the range [...]."""
        return (self.low + self.high) / 2

    @cached_property
    def half(self) -> Tensor:
        """Half the width of the range [...]."""
        return (self.high - self.low) / 2

    @cached_property
    def max_abs(self) -> Tensor:
        """Largest absolute value in the range [...]."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def norm(self, difference: Tensor) -> Tensor:
        """Return the norm [N] of differences [N, ...] in units of half the range; of width 0 none counts."""
        tiny = torch.finfo(self.half.dtype).tiny
        unit = torch.where(self.half > 0, 1 / self.half.clamp(min=tiny), 0.0)
        return _sqrt((difference * unit).flatten(1).square().sum(1))

    def clip(self, rows: Tensor) -> Tensor:
        """Apply the limits to rows [N, ...]."""
        inside = torch.clamp(rows, self.low, self.high)
        if self.radius is None:
            return inside
        difference = inside - self.middle
        share = (self.radius / self.norm(difference)).clamp(max=1)  # `_sqrt` is never 0
        return self.middle + difference * share[(...,) + (None,) * (rows.dim() - 1)]

    def max_change(self, clipped: Tensor, change: Tensor) -> Tensor:
        """Bound how far rows, `clipped` now, move behind the limits if they move by `change` [N, ...] before.

        In units of half the range, a row moves by at most d, the norm of `change`, a channel by at most its
        own change and what the factor adds, `|y − middle| d / radius`.
        """
        if self.radius is None:
            return change
        norm = self.norm(change)[(...,) + (None,) * (change.dim() - 1)]
        factor = norm / self.radius.clamp(min=torch.finfo(change.dtype).tiny)
        return _minimum(self.half * norm, change + (clipped - self.middle).abs() * factor)


Ranges = Mapping[str, Range]  # of a layer: `value`, and `source` and `destination` (GAT), or `right` (GATv2)


def layer_ranges(layer: AttentionLayer) -> Ranges:
    """Return the ranges of a layer's limits."""
    assert layer.limits is not None
    return {n: Range.from_limits(one) for n, one in layer.limits.items() if isinstance(one, Limits)}


def _minimum(x: Tensor, y: Tensor) -> Tensor:
    """`torch.minimum` whose first argument gets the gradient of ties; NaN stays without gradients."""
    return torch.where(x <= y, x, y) if torch.is_grad_enabled() else torch.minimum(x, y)


def _maximum(x: Tensor, y: Tensor) -> Tensor:
    """`torch.maximum` whose second argument gets the gradient of ties."""
    return torch.where(x > y, x, y) if torch.is_grad_enabled() else torch.maximum(x, y)


def _sqrt(x: Tensor) -> Tensor:
    """Square root with a finite slope at 0, never below the true one."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).sqrt()


@dataclass(frozen=True, eq=False)
class _Ball:
    """The states `base + share · drift + spread · u`, share in [0, 1] by channel, ‖u‖₂ ≤ radius."""

    base: Tensor  # [N, D], the state without new neighbours
    drift: Tensor  # [N, D], signed
    spread: Tensor  # [N, D]
    radius: Tensor


@dataclass(frozen=True, eq=False)
class StateBounds:
    """Bounds of an uncertain input [N, D] of a layer."""

    low: Tensor
    high: Tensor
    ball: _Ball | None = None

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds [N, F] of `x @ weight + bias`."""
        middle, radius = (self.low + self.high) / 2, (self.high - self.low) / 2
        centre, width = middle @ weight, radius @ weight.abs()
        low, high = centre - width, centre + width
        if self.ball is not None:
            ball = self.ball
            rising, falling = ball.drift.clamp(min=0), ball.drift.clamp(max=0)
            down, up = _products(rising, falling, weight.clamp(max=0), weight.clamp(min=0))
            around = ball.radius * _sqrt(ball.spread.square() @ weight.square())
            clean = ball.base @ weight
            low, high = _maximum(low, clean + down - around), _minimum(high, clean + up + around)
            # Both bounds hold, so low ≤ high but for rounding.
            low, high = _minimum(low, high), _maximum(low, high)
        return (low, high) if bias is None else (low + bias, high + bias)

    def select(self, index: Tensor) -> StateBounds:
        """Return the bounds of some nodes, without the ball of others."""
        ball = self.ball
        if ball is not None:
            ball = _Ball(ball.base[index], ball.drift[index], ball.spread[index], ball.radius)
        return StateBounds(self.low[index], self.high[index], ball)

    def pointwise(self, function: Callable[[Tensor], Tensor], slope: Tensor) -> StateBounds:
        """Apply a monotone function of each number, no steeper than `slope` [N, D], negative if it falls."""
        ball, ends = self.ball, (function(self.low), function(self.high))
        if ball is not None:
            ball = _Ball(function(ball.base), slope * ball.drift, slope * ball.spread, ball.radius)
        return StateBounds(_minimum(*ends), _maximum(*ends), ball)


@dataclass(frozen=True, eq=False)
class LayerBounds:
    """Bounds of the values of every node in a layer, and of the two sides of its scores, as (low, high)."""

    low: Tensor  # of the values, [N, H, C]
    high: Tensor
    source: tuple[Tensor, Tensor]  # [N, H] in GAT; the values, [N, H, C], in GATv2
    destination: tuple[Tensor, Tensor]  # [N, H] in GAT, [N, H, C] in GATv2
    values: _ClippedValues | None = None  # as a function of the input, where that is uncertain

    @classmethod
    def exact(cls, layer: AttentionLayer, x: Tensor | Features) -> LayerBounds:
        """Return what a layer computes for an input [N, D] that is known."""
        source, destination, values = layer.sides(x)
        return cls(values, values, (source, source), (destination, destination))

    @classmethod
    def from_state(cls, layer: AttentionLayer, ranges: Ranges, state: StateBounds) -> LayerBounds:
        """Return the bounds for an uncertain input."""
        values = _ClippedValues(state, layer.value.weight, layer.value.bias, ranges["value"])
        low, high = values.low, values.high
        if layer.score == "dynamic":
            right = _ClippedValues(state, layer.right.weight, layer.right.bias, ranges["right"])
            return cls(low, high, (low, high), (right.low, right.high), values)
        weights = (layer.source_weight, layer.destination_weight)
        ends = [end.chunk(2, 1) for end in values.linear(torch.cat([_block_diagonal(w) for w in weights], 1))]
        source, destination = (
            (ranges[name].clip(first), ranges[name].clip(last))
            for name, first, last in zip(("source", "destination"), *ends, strict=True)
        )
        return cls(low, high, source, destination, values)

    def margins(
        self, layer: AttentionLayer, tops: slice = slice(None), read_out: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Bound margins `z_a − z_b + bias_a − bias_b` [N, A, C] from below, for classes a in `tops`.

        Only for a last layer of one head. `read_out` is weight [C', C] and bias of a linear map behind it.
        """
        rounding = _margin_rounding(layer, torch.maximum(self.low.abs(), self.high.abs())[:, 0], read_out)
        if read_out is not None:
            across, shift = _margin_map(layer, read_out)
            across, shift = across[:, tops].flatten(1), shift[tops]
            least = self.low[:, 0] @ across if self.values is None else self.values.linear(across)[0]
            return least.view(-1, *shift.shape) + shift - rounding[:, tops]
        least = self.low[:, 0, tops, None] - self.high[:, 0, None, :]
        if self.values is not None:
            one = torch.eye(layer.channels, dtype=least.dtype, device=least.device)
            across = (one[:, tops, None] - one[:, None, :]).flatten(1)
            least = _maximum(least, self.values.linear(across)[0].view_as(least))
        return least + _bias_margins(layer)[tops] - rounding[:, tops]


class _ClippedValues:
    """Bounds of values behind limits, of a linear map with `weight` [D, H · C] of an uncertain input."""

    def __init__(self, state: StateBounds, weight: Tensor, bias: Tensor | None, limits: Range) -> None:
        self.state, self.weight, self.bias, self.limits = state, weight, bias, limits
        raw = [end.view(-1, *limits.low.shape) for end in state.linear(weight, bias)]
        low, high = (torch.clamp(end, limits.low, limits.high) for end in raw)
        self.shrinkage = low.new_zeros(low.shape[0], 1)  # largest share by which rows move to the middle
        if limits.radius is not None:
            middle = limits.middle
            norms = limits.norm(middle + _maximum((low - middle).abs(), (high - middle).abs()) - middle)
            self.shrinkage = (1 - limits.radius / norms).clamp(min=0)[:, None]
        ends = _shrink(low, high, limits.middle, self.shrinkage[:, :, None])
        clipped = limits.clip((raw[0] + raw[1]) / 2)
        change = limits.max_change(clipped, (raw[1] - raw[0]) / 2)
        # [N, H · C]: largest distance of the unclipped value above and below the range.
        self.above = (raw[1] - limits.high).clamp(min=0).flatten(1)
        self.below = (limits.low - raw[0]).clamp(min=0).flatten(1)
        self.low, self.high = _maximum(ends[0], clipped - change), _minimum(ends[1], clipped + change)

    def linear(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds [N, F] of `value @ weight`, for weights g [H · C, F]."""
        up, down = weight.clamp(min=0), weight.clamp(max=0)
        least, most = _products(self.low.flatten(1), self.high.flatten(1), up, down)
        shift = None if self.bias is None else self.bias @ weight
        first, last = self.state.linear(self.weight @ weight, shift)
        # Clipping lowers a product with g > 0 by at most `g · above`; shrinking moves it to the middle.
        lowered, raised = _products(self.above, self.below, up, -down)
        middle = self.limits.middle.flatten() @ weight
        first, last = _shrink(first - lowered, last + raised, middle, self.shrinkage)
        least, most = _maximum(least, first), _minimum(most, last)
        return _minimum(least, most), _maximum(least, most)


def _products(x: Tensor, y: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x @ one + y @ two` and `x @ two + y @ one`, computed in one product."""
    maps = torch.cat([torch.cat([one, two], 1), torch.cat([two, one], 1)])
    first, second = (torch.cat([x, y], 1) @ maps).chunk(2, 1)
    return first, second


def _shrink(low: Tensor, high: Tensor, middle: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of numbers that move towards the middle by any share up to the given one."""
    return _minimum(low, low + share * (middle - low)), _maximum(high, high + share * (middle - high))


def _block_diagonal(weight: Tensor) -> Tensor:
    """Return [H · C, H], a column per head, from [H, C]."""
    heads = torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return (weight[:, :, None] * heads[:, None, :]).flatten(0, 1)


def _bias_margins(layer: AttentionLayer) -> Tensor:
    """Return [C, C], the margins of class a over b in the layer's bias."""
    bias = layer.value.weight.new_zeros(layer.channels) if layer.bias is None else layer.bias
    return bias[:, None] - bias[None, :]


def _margin_map(layer: AttentionLayer, read_out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the margins of class a over b behind a linear map: weight [C', C, C], bias [C, C]."""
    weight, bias = read_out
    if layer.bias is not None:
        bias = bias + layer.bias @ weight
    return weight[:, :, None] - weight[:, None, :], bias[:, None] - bias[None, :]


def _margin_rounding(
    layer: AttentionLayer, values: Tensor, read_out: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return the rounding [..., C, C] of margins, relative to the largest logits, of |values| [..., C]."""
    size = values.detach()
    if layer.bias is not None:
        size = size + layer.bias.detach().abs()
    if read_out is not None:
        size = size @ read_out[0].abs() + read_out[1].abs()
    return ROUNDING * (size[..., :, None] + size[..., None, :])


def _max_product(limits: Range, weight: Tensor) -> Tensor:
    """Return the largest `⟨weight, v⟩` [...] of values v inside limits, summed over the last dimension."""
    size = weight * limits.half
    reach = size.abs().sum(-1)
    if limits.radius is not None:
        reach = _minimum(reach, limits.radius * _sqrt(size.square().sum(-1)))
    return (weight * limits.middle).sum(-1) + reach
