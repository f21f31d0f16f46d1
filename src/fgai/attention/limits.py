"""Limits: clip what an attention layer computes for each node to the range seen on a reference graph.

Each channel is clipped; the norm, too, because a typical node is extreme in a few channels, not in all.
Limits measured with `clip_share=0` and `shrink=0` on all nodes of a graph change nothing on it, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention.hooks import _registered_for, find_layers
from fgai.attention.interface import TappedLayer, _layout_of, override, uncompiled
from fgai.errors import AttentionError, InputError
from fgai.ops import clip, range_norm
from fgai.threads import exclusive
from fgai.typed import typed

Limiter = Callable[[Any], None]  # adds limits to a layer, in place
SAMPLE = 4096  # rows that order statistics are computed from while a model trains
SLACK = 1e-5  # relative margin of ranges and radii: kernels that sum in another order round differently


@typed
class Limits(nn.Module):
    """Range and largest norm of a tensor [N, *size] that an attention layer computes per node.

    Both are infinite, and clip nothing, until `measure` sets them. With `derived=True` the norm is not
    limited: the tensor is computed from one whose norm is.

    Attributes:
        low: lower ends [*size].
        high: upper ends [*size].
        radius: largest norm, a scalar. The norm is the distance to the middle of the range in half widths.
        usual: share of the numbers clipped on the reference graph, a scalar.
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
        self._override: Callable[[Tensor], Tensor] | None = None

    def extra_repr(self) -> str:
        """Show size, mean width of the range, and radius."""
        width = (self.high - self.low).mean()
        return f"{tuple(self.low.shape)}, mean width {float(width):.3g}, radius {float(self.radius):.3g}"

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` [N, ...] clipped; may overwrite `x`, see `fgai.ops.clip`."""
        return self.clip(x) if self._override is None else self._override(x)

    def clip(self, x: Tensor, *, copied: bool = False) -> Tensor:
        """Return `x` [N, ...] clipped; with `copied`, you may change the range before the backward pass."""
        bounds = [self.low.view(x.shape[1:]), self.high.view(x.shape[1:]), self.radius]
        if copied:
            bounds = [bound.clone() for bound in bounds]
        return clip(x, *bounds, straight=self.straight)

    def from_unit_box(self, points: Tensor) -> Tensor:
        """Scale points [M, ...] between 0 and 1 to values between `low` and `high`."""
        return self.low + points * (self.high - self.low)

    def to_unit_box(self, x: Tensor) -> Tensor:
        """Scale values [M, ...] between `low` and `high` to points between 0 and 1."""
        width = self.high - self.low
        return torch.where(width > 0, (x - self.low) / width.clamp(min=1e-30), 0.5).clamp(0, 1)

    @torch.no_grad()
    def measure(
        self,
        x: Tensor,
        clip_share: float = 0.0,
        shrink: float = 0.0,
        *,
        stride: int = 1,
        earlier: Sequence[Tensor] = (),
        usual: bool = True,
    ) -> None:
        """Set range and radius from rows `x` [N, ...].

        The range leaves out a share `clip_share` at either end of each channel, the radius a share `shrink`
        of the rows, those with the largest norms; shares are taken of every `stride`-th row. Both also cover
        the rows of `earlier` runs. With `usual`, the attribute of that name is updated.
        """
        rows = x.detach().reshape(-1, *self.low.shape)
        low, high = measured = ranges(rows[::stride] if clip_share else rows, clip_share)
        if earlier:
            low, high = torch.minimum(low, self.low), torch.maximum(high, self.high)
        self.low.copy_(low)
        self.high.copy_(high)
        if not self.derived:
            counted = rows[::stride].contiguous() if shrink else rows
            radii = [largest(range_norm(clip(counted, *measured), low, high), shrink)]
            radii += [range_norm(one.reshape(-1, *low.shape), low, high).max() for one in earlier]
            self.radius.copy_(torch.stack(radii).max() * (1 + SLACK))
        if usual:
            moved = clip(rows, self.low, self.high, self.radius) != rows
            share = moved.to(self.usual.dtype).mean()
            self.usual.copy_((len(earlier) * self.usual + share) / (len(earlier) + 1))

    def fault(self) -> str | None:
        """Return the reason why these limits are invalid, or None."""
        if not bool((self.low <= self.high).all()):
            return "limits must have `low` at most `high`"
        if not bool(self.radius >= 0):
            return f"limits must have a `radius` of at least 0, got {float(self.radius):.3g}"
        return None

    @torch.no_grad()
    def set(self, low: Tensor, high: Tensor, radius: Tensor, usual: Tensor) -> None:
        """Set the attributes to values that were measured elsewhere."""
        for name, values in {"low": low, "high": high, "radius": radius, "usual": usual}.items():
            getattr(self, name).copy_(values)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the override that is set inside a `with` block."""
        return {**self.__dict__, "_override": None}


def ranges(x: Tensor, clip_share: float) -> tuple[Tensor, Tensor]:
    """Return the range of each channel without a share at either end; with share 0, wider by `SLACK`."""
    count = int(clip_share * x.shape[0])
    if count == 0:
        low, high = x.amin(0), x.amax(0)
        margin = SLACK * (high - low).detach()
        return low - margin, high + margin
    flat = x.flatten(1).t().contiguous()  # order statistics are found along memory
    low, high = (flat.kthvalue(rank, dim=1).values for rank in (count + 1, x.shape[0] - count))
    return low.view(x.shape[1:]), high.view(x.shape[1:])


def largest(x: Tensor, share: float) -> Tensor:
    """Return the largest of numbers [N] after leaving out a share of them."""
    count = int(share * x.numel())
    return x.max() if count == 0 else x.kthvalue(x.numel() - count).values


@typed
def limits_of(model: nn.Module) -> list[Limits]:
    """Return all limits of a model, in the order of its modules; empty if it has none."""
    return [module for module in model.modules() if isinstance(module, Limits)]


Clip = Callable[[Tensor], Tensor]
Step = Callable[[Limits, Clip, Tensor], Tensor]
"""(limits, function that clips to them, values [N, ...]) → values that the layer uses."""


@contextmanager
def _set(changes: Iterable[tuple[Limits, str, Any]]) -> Iterator[None]:
    """Set (limits, attribute, value) inside the block; such blocks in other threads wait."""
    with ExitStack() as stack:
        stack.enter_context(exclusive())
        for change in changes:
            stack.enter_context(override(*change))
        yield


@typed
def overriding(limits: Iterable[Limits], step: Step) -> AbstractContextManager[None]:
    """Inside the block, call `step` where these limits would clip; blocks may be nested."""
    return _set((one, "_override", partial(step, one, one._override or one.clip)) for one in limits)


@typed
def measuring(
    model: nn.Module,
    clip_share: float = 0.0,
    nodes: Tensor | None = None,
    *,
    shrink: float = 0.0,
    sampled: bool = False,
) -> AbstractContextManager[None]:
    """Measure a model's limits on the forward passes inside the block; all runs of a layer count.

    `clip_share` and `shrink` are those of `Limits.measure`. `nodes` (bool [N] or indices) are measured,
    all by default; with `sampled`, shares are estimated from a few thousand of them, evenly spread.
    """
    runs_of: dict[Limits, list[Tensor]] = {}

    def step(limits: Limits, _: Any, x: Tensor) -> Tensor:
        rows = x if nodes is None else x[nodes]
        stride = max(1, rows.shape[0] // SAMPLE) if sampled else 1
        runs = runs_of.setdefault(limits, [])  # a layer that runs twice has one range for both
        limits.measure(rows, clip_share, shrink, stride=stride, earlier=runs, usual=not sampled)
        inside = clip_share == shrink == 0 and nodes is None  # nothing to clip
        # A later run may widen the range before the backward pass reads it.
        out = x if inside else limits.clip(x, copied=True)
        runs.append((out if nodes is None else out[nodes]).detach())
        return out

    return overriding(limits_of(model), step)


@typed
def straight_through(model: nn.Module) -> AbstractContextManager[None]:
    """Inside the block, gradients ignore the clipping of a model's limits (straight-through estimator)."""
    return _set((limits, "straight", True) for limits in limits_of(model))


@typed
@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """Count the numbers that limits clip in the block; yield `[clipped, total]`."""
    count = [0, 0]

    def step(limits: Limits, clip_rows: Clip, x: Tensor) -> Tensor:
        before = x.detach().clone()  # `clip` may overwrite it
        out = clip_rows(x)
        count[0] += int(out.detach().ne(before).sum())
        count[1] += x.numel()
        return out

    with overriding(limits_of(model), step):
        yield count


@typed
def clipped_share(model: nn.Module) -> float:
    """Return the share of all numbers that a model's limits clipped on their reference graph."""
    sizes = [(limits, limits.low.numel()) for limits in limits_of(model)]
    total = sum(size for _, size in sizes)
    return sum(float(limits.usual) * size for limits, size in sizes) / total if total else 0.0


@typed
def replacing_values(points: Mapping[Limits, Tensor], chosen: Tensor) -> AbstractContextManager[None]:
    """Inside the block, replace what layers compute for the last M nodes, where `chosen` (bool [M]).

    `points` maps limits to values [M, ...] between 0 and 1, see `from_unit_box`; gradients reach them.
    """

    def step(limits: Limits, clip_rows: Clip, x: Tensor) -> Tensor:
        out, values = clip_rows(x), limits.from_unit_box(points[limits])
        first = out.shape[0] - values.shape[0]
        values = clip(values, limits.low, limits.high, limits.radius, straight=limits.straight)
        mask = chosen.view(-1, *[1] * (out.dim() - 1))
        last = torch.where(mask, values.view(-1, *out.shape[1:]).to(out.dtype), out[first:])
        return torch.cat([out[:first], last])

    return overriding(list(points), step)


@typed
def replacing_entry(entry: Sequence[Limits], points: Tensor) -> AbstractContextManager[None]:
    """Replace values of the last M nodes by `points` [M, D] in [0, 1], columns in the order of `entry`."""
    sizes = [limits.low.numel() for limits in entry]
    if points.dim() != 2 or points.shape[1] != sum(sizes):
        raise InputError(f"`entry_values` must have shape [nodes, {sum(sizes)}], got {tuple(points.shape)}")
    parts = zip(entry, torch.split(points, sizes, dim=1), strict=True)
    by_limits = {limits: part.reshape(-1, *limits.low.shape) for limits, part in parts}
    return replacing_values(by_limits, torch.ones(len(points), dtype=torch.bool, device=points.device))


def _limit_own(layer: TappedLayer) -> None:
    layer.limits = nn.ModuleDict(layer.new_limits()).to(next(layer.parameters()))


class _ClipOutput:
    """A forward hook that clips the output of a linear layer; copied and pickled with that layer."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.limits(output)  # type: ignore[no-any-return]


def _limit_pyg(find_linears: Callable[[Any], dict[str, nn.Module]], layer: Any) -> None:
    linears = find_linears(layer)
    width = layer.heads * layer.out_channels
    limits = {name: Limits(width) for name in linears}
    for name, linear in linears.items():
        linear.register_forward_hook(_ClipOutput(limits[name]))
    layer.limits = nn.ModuleDict(limits).to(next(layer.parameters()))


_LIMITERS: dict[type[nn.Module], Limiter] = {TappedLayer: _limit_own}


@typed
def register_limits(layer_type: type[nn.Module], limiter: Limiter) -> None:
    """Make `add_limits` support a class of attention layers, and its subclasses.

    `limiter(layer)` adds `Limits` modules to a layer, in place; the forward pass of the layer must call them.
    """
    if not isinstance(layer_type, type) or not issubclass(layer_type, nn.Module):
        raise InputError(f"`layer_type` must be a class of modules, got {layer_type!r}")
    _LIMITERS[layer_type] = limiter


def _limiter_of(layer: nn.Module) -> Limiter | None:
    return _registered_for(
        layer,
        _LIMITERS,
        lambda pyg: {kind: partial(_limit_pyg, linears) for kind, linears in pyg.PYG_LINEARS.items()},
    )


@typed
def add_limits(model: nn.Module) -> None:
    """Add infinite limits, in place, to every attention layer that has none; set them with `measuring`.

    `AttentionError` if the model has no attention layer, or one that cannot be limited.
    """
    for name, layer in find_layers(uncompiled(model)).items():
        if limits_of(layer):
            continue
        limiter = _limiter_of(layer)
        if limiter is None:
            text = f"layer {name!r} ({type(layer).__name__}) cannot be limited"
            raise AttentionError(f"{text}; add support with `fgai.attention.register_limits`")
        limiter(layer)


@typed
def entry_limits(model: nn.Module) -> list[Limits]:
    """Return the limits of the first attention layer, without derived ones; [] for heterogeneous models."""
    if _layout_of(model) is not None:  # some nodes are sources alone, others destinations alone
        return []
    first = next(iter(find_layers(uncompiled(model)).values()))
    return [limits for limits in limits_of(first) if not limits.derived]


@typed
def can_be_limited(model: nn.Module) -> bool:
    """Whether `add_limits` supports every attention layer of a model."""
    return all(
        _limiter_of(layer) is not None
        and not (isinstance(layer, TappedLayer) and type(layer).new_limits is TappedLayer.new_limits)
        for layer in find_layers(uncompiled(model)).values()
    )
