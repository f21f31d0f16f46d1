"""Hidden layers: how far perturbing their attention, at all nodes at once, can move the logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from fgai.attention import Limits, Observation
from fgai.bounds.intervals import Range
from fgai.certificates.integrity import _layer_values, _rows_near, find_alteration
from fgai.certificates.kernels import _channel_norms, _linear_norms, _margin_gains, _value_range
from fgai.certificates.linear import _BOUNDS, _probability_change, _top_and_margins
from fgai.certificates.record import TABLE_RADII, Prediction
from fgai.models import AttentionLayer, body_of
from fgai.ops import aggregate
from fgai.ops.segments import row_max
from fgai.progress import current_stage
from fgai.progress import stage as progress_of
from fgai.sparse import Adjacency
from fgai.tasks import get_task

_RADII = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
"""Radii tried for the class radius; each costs a pass over the graph."""
_MANY_EDGES = 1_000_000  # above, only the radii of the tables are tried


@dataclass(frozen=True, eq=False)
class _CleanLayer:
    """One attention layer without perturbations, float64 on the CPU."""

    layer: AttentionLayer
    attention: Tensor  # [E, H]
    values: Tensor  # [N, H, C]
    output: Tensor  # [N, D]
    adjacency: Adjacency
    input: Tensor | None  # [N, D]; None in the first layer, whose input does not move

    @cached_property
    def value_range(self) -> Tensor:
        return _value_range(self.adjacency.rowptr, self.adjacency.source, self.values)

    @cached_property
    def activated(self) -> Tensor:
        return elu(self.output)


def _clean_layers(model: nn.Module, observation: Observation) -> list[_CleanLayer] | str:
    """Return the layers of a GAT or GATv2 in order, or why its hidden layers cannot be followed."""
    if body_of(model) != "layers":
        return (
            "perturbing a hidden layer changes the scores and the values of every later layer; only GAT and"
            " GATv2 are followed that far"
        )
    if (alteration := find_alteration(model)) is not None:
        return f"{alteration}; only GAT and GATv2 as they are can be followed that far"
    if model.guard is not None:
        return "a guard computes weights of later layers' edges from the perturbed layer's output"
    if not get_task(str(model.task)).row_per_node or not observation.runs or observation.logits.shape[1] < 2:
        return "only node-level read-outs of two or more classes are followed"
    if not observation.ends_with_layer:
        return "an operation follows the last attention layer"
    layers: list[_CleanLayer] = []
    for run, recorded in zip(observation.runs, observation.attention, strict=True):
        layer, last = run.layer, run is observation.runs[-1]
        assert isinstance(layer, AttentionLayer) and run.output is not None
        if layer.input_norm is not None:
            return "layer normalisation after the perturbed layer is not followed"
        if layer.score not in ("additive", "dynamic") or (layer.heads > 1 and layer.concat == last):
            return f"layer {recorded.name!r} is not as in GAT and GATv2"
        values = _layer_values(run, recorded)
        if isinstance(values, str):
            return values
        if layers and not _rows_near(layers[-1].activated, run.inputs[0].cpu().double()):
            return f"the input of layer {recorded.name!r} is not the ELU of the layer before it"
        assert recorded.adjacency is not None
        attention, output = recorded.values.cpu().double(), run.output.cpu().double()
        before = layers[-1].activated if layers else None
        layers.append(_CleanLayer(layer, attention, values, output, recorded.adjacency.to("cpu"), before))
    return layers


def _hidden_predictions(
    model: nn.Module, observation: Observation, radius: float, norm: str, class_radii: bool = True
) -> list[Prediction]:
    """Bound every node's change at `radius` for each hidden layer, perturbed at all nodes."""
    hidden = len(observation.attention) - 1
    layers = _clean_layers(model, observation) if hidden else ""
    if isinstance(layers, str):
        return [Prediction(reason=layers)] * hidden
    radii = _RADII if observation.attention.last.num_edges <= _MANY_EDGES else TABLE_RADII
    tried = sorted({*radii, radius}) if class_radii else [radius]
    with progress_of("certifying", hidden * len(tried)):
        return [
            _hidden_prediction(layers[index:], observation.logits, radius, tried, norm)
            for index in range(hidden)
        ]


def _hidden_prediction(
    layers: Sequence[_CleanLayer], logits: Tensor, radius: float, tried: Sequence[float], norm: str
) -> Prediction:
    last, (top, margins) = layers[-1], _top_and_margins(logits)
    output = _PerturbedOutput(layers[0], norm)
    # Of the neighbours' margins, [N, H, C].
    ranges = _value_range(last.adjacency.rowptr, last.adjacency.source, last.values, top)
    class_radius = torch.zeros(top.numel(), dtype=torch.float64)
    stays = torch.ones_like(top, dtype=torch.bool)
    progress = current_stage()
    for size in tried:
        progress.advance()
        if size != radius and not bool(stays.any()):
            continue
        change = output.change(size)
        for layer in layers[1:-1]:
            change = _Change(elu(layer.output + _output_change(layer, change)).sub_(layer.activated))
        # A class that may change at a smaller radius is left out.
        loss = _margin_loss(last, change, top if size == radius else torch.where(stays, top, -1), ranges)
        if size == radius:
            moved, gain = _output_change(last, change), loss.topk(2, dim=1).values.sum(1)
        stays &= (margins - loss).amin(1) > 0
        # The class stays at `size` itself, so the first radius at which it may change is larger.
        class_radius[stays] = math.nextafter(size, math.inf)
    reason = "intervals propagated through the later layers, every node's attention perturbed at once"
    return Prediction(class_radius, moved.sum(1) / 2, _probability_change(logits, gain), *_BOUNDS, reason)


@dataclass(frozen=True, eq=False)
class _Change:
    """Bound on how far a layer's input moves: `radius` [N, D] by channel, `joint` of linear functions."""

    radius: Tensor
    joint: Callable[[Tensor], Tensor] | None = None

    def linear(self, weight: Tensor) -> Tensor:
        """Bound how far `x @ weight` moves [N, F]."""
        by_channel = self.radius @ weight.abs()
        return by_channel if self.joint is None else torch.minimum(by_channel, self.joint(weight))


class _PerturbedOutput:
    """ELU of a perturbed layer's output, and how linear functions of it move; see docs/certificates.md."""

    def __init__(self, layer: _CleanLayer, norm: str) -> None:
        self.layer, self.norm = layer, norm
        self.edges = layer.adjacency.rowptr, layer.adjacency.source
        self.rates = _channel_norms(*self.edges, layer.values, norm).flatten(1)
        self.slope = torch.where(layer.output > 0, 1.0, layer.output.clamp(max=0).exp())
        self.norms: dict[bytes, Tensor] = {}

    def _linear_norms(self, weight: Tensor) -> Tensor:
        """Return Σ_h ‖(⟨g_h σ_h, z_jh⟩)_j‖_dual [N, F] for the columns g of [D, F]; computed once."""
        key = weight.numpy().tobytes()
        if key not in self.norms:
            values = self.layer.values
            slope, by_head = self.slope.view_as(values), weight.view(*values.shape[1:], -1)
            self.norms[key] = _linear_norms(*self.edges, values, slope, by_head, self.norm)
        return self.norms[key]

    def change(self, size: float) -> _Change:
        output, clean = self.layer.output, self.layer.activated
        linear = size * self.rates
        up, down = elu(output + linear) - clean, clean - elu(output - linear)
        bend = torch.maximum(up - self.slope * linear, self.slope * linear - down).clamp(min=0)
        return _Change(
            torch.maximum(up, down), lambda weight: size * self._linear_norms(weight) + bend @ weight.abs()
        )


def _output_change(layer: _CleanLayer, change: _Change) -> Tensor:
    """Bound how far a layer's outputs move [N, D], from how its input moves."""
    values, growth, variation = _layer_change(layer, change)
    out = aggregate(layer.attention, values.channels(), layer.adjacency)
    out = out.mul_(growth).addcmul_(variation, layer.value_range)
    return out.flatten(1) if layer.layer.concat else out.mean(1)


def _margin_loss(layer: _CleanLayer, change: _Change, top: Tensor, ranges: Tensor) -> Tensor:
    """Bound how much each class gains on the top one [N, C], 0 for itself; nodes of `top` -1 are left out."""
    adjacency = layer.adjacency
    values, growth, variation = _layer_change(layer, change)
    weights = layer.attention, values.differences(), growth[:, :, 0], variation[:, :, 0]
    loss = _margin_gains(adjacency.rowptr, adjacency.source, *weights, top).addcmul_(variation, ranges)
    loss = loss[:, 0] if layer.layer.heads == 1 else loss.mean(1)
    return loss.scatter_(1, top.clamp(min=0)[:, None], 0.0)


def _layer_change(clean: _CleanLayer, change: _Change) -> tuple[_ValueChange, Tensor, Tensor]:
    """Bound the change of values, the growth of a weight and the total variation of all, [N, H, 1] each."""
    layer, adjacency = clean.layer, clean.adjacency
    values = _ValueChange(clean, "value", change)
    if layer.score == "additive":
        left, right = (
            values.score(weight.detach().cpu().double(), _range(layer, name))
            for name, weight in (("source", layer.source_weight), ("destination", layer.destination_weight))
        )
    else:
        weight = layer.score_weight.detach().cpu().double().abs()
        other = _ValueChange(clean, "right", change)
        left, right = ((one.channels() * weight).sum(2) for one in (values, other))
    strongest = row_max(left[adjacency.source], adjacency.rowptr)
    alone = adjacency.degree < 2  # the softmax of one score is 1, whatever the score
    most = ((strongest + right) * max(1.0, abs(layer.slope))).masked_fill(alone[:, None], 0.0)[:, :, None]
    return values, torch.exp(2 * most), torch.tanh(most / 2)


class _ValueChange:
    """How far a linear map z of a layer's input and its value v behind limits move; [N, H, C] unless said.

    `v = m + f · (y − m)` with y = z clipped to its range, m the middle of the range and f ≤ 1 the factor that
    bounds the norm, so `v' − v = f' (y' − y) + (f' − f) (y − m)`. A channel moves with z if its interval lies
    inside the range, not at all where it lies outside.
    """

    def __init__(self, clean: _CleanLayer, name: str, change: _Change) -> None:
        layer, span = clean.layer, _range(clean.layer, name)
        projection = getattr(layer, name)
        assert clean.input is not None
        weight, shape = projection.weight.detach().cpu().double(), (-1, layer.heads, layer.channels)
        z = clean.input @ weight
        z = z if projection.bias is None else z + projection.bias.detach().cpu().double()
        z, by = z.view(shape), change.linear(weight).view(shape)
        y, low, high = (torch.clamp(end, span.low, span.high) for end in (z, z - by, z + by))
        one = torch.ones(len(z), 1, 1, dtype=z.dtype)
        self.weight, self.input = weight.view(shape), change  # [D, H, C]
        self.z_change, self.y_change = by, torch.maximum(high - y, y - low)
        self.inside = (z - by >= span.low) & (z + by <= span.high)  # y moves as z does
        self.outside = ((z + by <= span.low) | (z - by >= span.high)) & ~self.inside  # y does not move
        self.clean = y  # v
        self.factor, self.factor_change = one, one * 0  # largest f' and |f' − f|, [N, 1, 1]
        self.offset = torch.zeros_like(y)  # y − m
        self.joint = torch.full_like(y, torch.inf)  # bound on |v' − v| by the norm of all channels
        if span.radius is not None:
            offset, step = y - span.middle, self.y_change
            least, largest = (offset.abs() - step).clamp(min=0), offset.abs() + step
            most, now, fewest = (
                (span.radius / span.norm(one)).clamp(max=1)[:, None, None] for one in (least, offset, largest)
            )
            self.offset, self.factor = offset, most
            self.factor_change = torch.maximum(most - now, now - fewest)
            self.clean = span.middle + now * offset
            self.joint = span.half * span.norm(step)[:, None, None]

    def channels(self) -> Tensor:
        by_channel = self.factor * self.y_change + self.factor_change * self.offset.abs()
        return torch.minimum(by_channel, self.joint)

    def score(self, weight: Tensor, span: Range) -> Tensor:
        """Bound how far `⟨weight, v⟩` moves behind the limits of the score, [N, H], for weights [H, C]."""
        # Channels that move with the input may cancel each other; the others may not.
        heads = (self.weight * weight).sum(2)  # [D, H]
        clipped = self.z_change.masked_fill(self.inside, 0.0)
        cancelled = self.input.linear(heads) + (clipped * weight.abs()).sum(2)
        parts = zip(self.inside.double().unbind(1), self.weight.unbind(1), weight.unbind(0), strict=True)
        linear = [(self.input.radius * (inside @ (map_ * w).t()).abs()).sum(1) for inside, map_, w in parts]
        between = self.y_change.masked_fill(self.inside | self.outside, 0.0)
        change = torch.minimum(cancelled, torch.stack(linear, 1) + (between * weight.abs()).sum(2))
        turned = self.factor_change[:, :, 0] * (self.offset * weight).sum(2).abs()
        change = self.factor[:, :, 0] * change + turned
        change = torch.minimum(change, (self.channels() * weight.abs()).sum(2))
        score = (self.clean * weight).sum(2)
        low, now, high = (torch.clamp(score + change * sign, span.low, span.high) for sign in (-1, 0, 1))
        return torch.maximum(high - now, now - low)

    def differences(self) -> Tensor:
        """Return radii [N, H, C]: those of two classes add up to a bound on their values' difference."""
        # A shift that all classes of a node share does not matter: without the middle one radii are smaller.
        middle = self.weight.median(dim=2, keepdim=True).values
        shifted = self.input.linear((self.weight - middle).flatten(1)).view_as(self.y_change)
        shift = self.input.linear(middle.flatten(1))[:, :, None].expand_as(shifted)
        between = torch.maximum(shifted, shift)
        moved = torch.where(self.inside, shifted, torch.where(self.outside, shift, between))
        turned = (self.offset - self.offset.median(dim=2, keepdim=True).values).abs()
        relative, plain = self.factor * moved + self.factor_change * turned, self.channels()
        return torch.where(relative.sum(2, keepdim=True) < plain.sum(2, keepdim=True), relative, plain)


def _range(layer: AttentionLayer, name: str) -> Range:
    """Return one of a layer's limits, in float64 on the CPU; infinite where it has none."""
    if layer.limits is None:
        end = torch.full((), torch.inf, dtype=torch.float64)
        return Range(-end, end)
    limits = layer.limits[name]
    assert isinstance(limits, Limits)
    return Range.from_limits(copy.deepcopy(limits).cpu().double())
