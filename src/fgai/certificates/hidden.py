"""Hidden layers: how far perturbing their attention, at all nodes at once, can move the logits.

The layers that follow mix nodes and recompute their attention, so nothing here is exact. We carry from the
perturbed layer to the output how far the state of a node moves around its clean value:

- linear readings of the state after the perturbed layer move together, see `_State`; later states by a
  radius per channel (interval arithmetic);
- limits of a layer shrink what they clip, see `_Moving`; where none is active they change nothing;
- scores of a layer are linear in its values up to a leaky ReLU of slope at most 1, so each moves by at most
  ρ; then each attention w_j grows by at most the factor e^{2ρ}, and all of them move by at most
  `t = tanh(ρ / 2)` in total variation;
- `Σ w'_j z'_j - Σ w_j z_j = Σ w'_j (z'_j - z_j) + Σ (w'_j - w_j) z_j`, where the first sum is at most
  `Σ w'_j r_j`, itself at most `e^{2ρ} Σ w_j r_j` and at most `Σ w_j r_j + t (max_j r_j - min_j r_j)`, and the
  second is at most `t (max_j z_j - min_j z_j)`.
"""

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
from fgai.bounds.reading import Range
from fgai.certificates.familiar import _alike, _layer_values, unfamiliar
from fgai.certificates.kernels import channel_norms, extent, mixed_margins, reading_norms
from fgai.certificates.layer import _BOUNDS, Prediction, _gaps, _probability_change
from fgai.certificates.record import TABLE_RADII
from fgai.models import AttentionLayer, body_of
from fgai.ops import aggregate
from fgai.ops.segments import row_max
from fgai.progress import current_stage
from fgai.progress import stage as progress_of
from fgai.sparse import Adjacency
from fgai.tasks import get_task

_FOLLOWED = ("additive", "dynamic")
"""Scores whose rate of change with their input is known."""
_RADII = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
"""Radii tried for the class radius; each costs a pass over the graph."""
_MANY_EDGES = 1_000_000
"""Above, only the radii of the tables are tried."""


@dataclass(frozen=True, eq=False)
class _Stage:
    """One attention layer, float64 on the CPU: attention [E, H], values [N, H, C], output [N, D].

    `input` [N, D] is None in the first layer, whose input does not move.
    """

    layer: AttentionLayer
    attention: Tensor
    values: Tensor
    output: Tensor
    adjacency: Adjacency
    input: Tensor | None

    @cached_property
    def extent(self) -> Tensor:
        """[N, H, C]: how far apart the values of a node's neighbours are."""
        return extent(self.adjacency.rowptr, self.adjacency.source, self.values)

    @cached_property
    def activated(self) -> Tensor:
        return elu(self.output)


def _find_stages(model: nn.Module, observation: Observation) -> list[_Stage] | str:
    """Return the layers of a GAT or GATv2 in order, or why its hidden layers cannot be followed."""
    if body_of(model) != "layers":
        return (
            "perturbing a hidden layer changes the scores and the values of every later layer; only GAT and"
            " GATv2 are followed that far"
        )
    change = unfamiliar(model)
    if change is not None:
        return f"{change}; only GAT and GATv2 as they are can be followed that far"
    if model.guard is not None:
        return "a guard weighs the edges of later layers by what the perturbed one gives"
    if not get_task(str(model.task)).row_per_node or not observation.runs or observation.logits.shape[1] < 2:
        return "only node-level read-outs of two or more classes are followed"
    if not observation.ends_with_layer:
        return "something acts on what the last attention layer gives"
    stages: list[_Stage] = []
    for run, recorded in zip(observation.runs, observation.attention, strict=True):
        layer = run.layer
        assert isinstance(layer, AttentionLayer) and run.output is not None
        if layer.input_norm is not None:
            return "layer normalisation after the perturbed layer is not followed"
        if layer.score not in _FOLLOWED or (
            layer.heads > 1 and layer.concat == (run is observation.runs[-1])
        ):
            return f"layer {recorded.name!r} is not as GAT and GATv2 make it"
        values = _layer_values(run, recorded)
        if isinstance(values, str):
            return values
        if stages and not _alike(stages[-1].activated, run.inputs[0].cpu().double()):
            return f"layer {recorded.name!r} does not read the ELU of the layer before it"
        assert recorded.adjacency is not None
        attention, output = recorded.values.cpu().double(), run.output.cpu().double()
        before = stages[-1].activated if stages else None
        stages.append(_Stage(layer, attention, values, output, recorded.adjacency.to("cpu"), before))
    return stages


def _hidden_predictions(
    model: nn.Module, observation: Observation, radius: float, norm: str, class_radii: bool = True
) -> list[Prediction]:
    """Bound the change of every node's prediction for every layer but the last, perturbed at all nodes.

    Changes are bounded at R = `radius`. The class radius is the largest of R and, with `class_radii`, the
    usual radii at which the class provably stays, or 0.
    """
    hidden = len(observation.attention) - 1
    stages = _find_stages(model, observation) if hidden else ""
    if isinstance(stages, str):
        return [Prediction(reason=stages)] * hidden
    radii = _RADII if observation.attention.last.num_edges <= _MANY_EDGES else TABLE_RADII
    last = stages[-1]
    top, _ = _gaps(observation.logits)
    apart = extent(last.adjacency.rowptr, last.adjacency.source, last.values, top)
    tried = sorted({*radii, radius}) if class_radii else [radius]
    with progress_of("certifying", hidden * len(tried)):
        return [
            _hidden_prediction(stages[index:], observation.logits, apart, radius, tried, norm)
            for index in range(hidden)
        ]


def _hidden_prediction(
    stages: Sequence[_Stage], logits: Tensor, apart: Tensor, radius: float, tried: Sequence[float], norm: str
) -> Prediction:
    """The first of `stages` is perturbed; `apart` as in `_margin_loss`."""
    stage, last = stages[0], stages[-1]
    top, lead = _gaps(logits)
    state = _State(stage, norm)
    class_radius = torch.zeros(top.numel(), dtype=torch.float64)
    alive = torch.ones_like(top, dtype=torch.bool)
    progress = current_stage()
    for size in tried:
        progress.advance()
        if size != radius and not bool(alive.any()):
            continue
        reached = _carried(stages, state.moved(size))
        # What broke at a smaller radius stays broken.
        lost = _margin_loss(last, reached, top if size == radius else torch.where(alive, top, -1), apart)
        if size == radius:
            moved, gained = _through(last, reached), lost.topk(2, dim=1).values.sum(1)
        alive &= (lead - lost).amin(1) > 0
        # Holds at `size` itself, so the first radius at which it may break lies above.
        class_radius[alive] = math.nextafter(size, math.inf)
    reason = "intervals carried through the later layers, every node's attention perturbed at once"
    change = _probability_change(logits, gained)
    return Prediction(class_radius, moved.sum(1) / 2, change, *_BOUNDS, reason)


def _carried(stages: Sequence[_Stage], moved: _Moved) -> _Moved:
    """How the last layer's input moves, from how that of the layer after the perturbed one does."""
    for stage in stages[1:-1]:
        radius = elu(stage.output + _through(stage, moved), inplace=True).sub_(stage.activated)
        moved = _Moved(radius)
    return moved


class _State:
    """The ELU of the perturbed layer's output, and how far linear readings of it move.

    A perturbation moves the output of head h at node i by `Σ_j δ_j z_jh`, all of its channels together. With
    σ the slope of ELU at the clean output, a reading `⟨g, ·⟩` moves by at most

        R Σ_h ‖(⟨g_h σ_ih, z_jh⟩)_j‖_dual  +  Σ_c |g_c| ε_c(R)

    where ε is the largest distance of ELU from its tangent. Channel by channel, without σ and ε, is the
    other bound; the smaller one counts.
    """

    def __init__(self, stage: _Stage, norm: str) -> None:
        self.stage, self.norm = stage, norm
        self.edges = stage.adjacency.rowptr, stage.adjacency.source
        self.rates = channel_norms(*self.edges, stage.values, norm).flatten(1)
        self.slope = torch.where(stage.output > 0, 1.0, stage.output.clamp(max=0).exp())
        self.units: dict[bytes, Tensor] = {}

    def unit(self, reading: Tensor) -> Tensor:
        """The first sum at R = 1, [N, F], for the columns of [D, F]; computed once."""
        key = reading.numpy().tobytes()
        if key not in self.units:
            values = self.stage.values
            slope, parts = self.slope.view_as(values), reading.view(*values.shape[1:], -1)
            self.units[key] = reading_norms(*self.edges, values, slope, parts, self.norm)
        return self.units[key]

    def moved(self, size: float) -> _Moved:
        """How the state moves when the attention moves by `size`."""
        output, clean = self.stage.output, self.stage.activated
        far = size * self.rates
        up, down = elu(output + far) - clean, clean - elu(output - far)
        bent = torch.maximum(up - self.slope * far, self.slope * far - down).clamp(min=0)
        radius = torch.maximum(up, down)
        return _Moved(radius, lambda reading: size * self.unit(reading) + bent @ reading.abs())


@dataclass(frozen=True, eq=False)
class _Moved:
    """How far the input of a layer moves: `radius` [N, D] by channel; `bound` is another one, of readings."""

    radius: Tensor
    bound: Callable[[Tensor], Tensor] | None = None

    def along(self, reading: Tensor) -> Tensor:
        """How far linear readings move, [N, F], for the columns of [D, F]."""
        by_channel = self.radius @ reading.abs()
        return by_channel if self.bound is None else torch.minimum(by_channel, self.bound(reading))


def _through(stage: _Stage, moved: _Moved) -> Tensor:
    """Radii of a layer's outputs from how its input moves."""
    values = _Moving(stage, "value", moved)
    growth, change = _softmax_change(stage, values, moved)
    out = aggregate(stage.attention, values.most(), stage.adjacency)
    out = out.mul_(growth).addcmul_(change, stage.extent)
    return out.flatten(1) if stage.layer.concat else out.mean(1)


def _margin_loss(stage: _Stage, moved: _Moved, top: Tensor, apart: Tensor) -> Tensor:
    """Most each class can gain on the top one, [N, C], 0 for itself: `_through` for differences of classes.

    `apart` [N, H, C] is from `margin_extent`. Nodes whose `top` is -1 are left out.
    """
    adjacency = stage.adjacency
    values = _Moving(stage, "value", moved)
    growth, change = _softmax_change(stage, values, moved)
    weights = stage.attention, values.differences(), growth[:, :, 0], change[:, :, 0]
    lost = mixed_margins(adjacency.rowptr, adjacency.source, *weights, top).addcmul_(change, apart)
    lost = lost[:, 0] if stage.layer.heads == 1 else lost.mean(1)
    return lost.scatter_(1, top.clamp(min=0)[:, None], 0.0)


def _softmax_change(stage: _Stage, values: _Moving, moved: _Moved) -> tuple[Tensor, Tensor]:
    """[N, H, 1] twice: largest growth of an attention weight, and their total variation."""
    layer, adjacency = stage.layer, stage.adjacency
    left, right = _scores_moved(stage, values, moved)
    strongest = row_max(left[adjacency.source], adjacency.rowptr)
    alone = adjacency.degree < 2  # the softmax of one score is 1, whatever the score
    most = ((strongest + right) * max(1.0, abs(layer.slope))).masked_fill(alone[:, None], 0.0)[:, :, None]
    return torch.exp(2 * most), torch.tanh(most / 2)


def _scores_moved(stage: _Stage, values: _Moving, moved: _Moved) -> tuple[Tensor, Tensor]:
    """[N, H] twice: how far a score moves by its source and by its destination."""
    layer = stage.layer
    if layer.score == "additive":
        sides = {"source": layer.source_weight, "destination": layer.destination_weight}
        left, right = (
            values.reading(weight.detach().cpu().double(), _range(layer, name))
            for name, weight in sides.items()
        )
        return left, right
    assert layer.score == "dynamic"
    weight = layer.score_weight.detach().cpu().double().abs()
    other = _Moving(stage, "right", moved)
    return (values.most() * weight).sum(2), (other.most() * weight).sum(2)


class _Moving:
    """A linear map z of a layer's input and its value v behind limits, while the input moves.

    Limits give `v = m + f · (y − m)` with y = z clipped to its range, m the middle of the range and f ≤ 1
    the factor that bounds the norm. So

        v' − v = f' (y' − y) + (f' − f) (y − m).

    A channel moves with z where its interval lies inside the range, not at all where it lies outside, and
    by a share of z's movement in between. Without limits, or where none is active in the whole ball, v is z.
    `name` is the projection, `value` or `right`. Tensors are [N, H, C] unless said.
    """

    def __init__(self, stage: _Stage, name: str, moved: _Moved) -> None:
        layer, projection, span = stage.layer, getattr(stage.layer, name), _range(stage.layer, name)
        assert stage.input is not None
        weight, shape = projection.weight.detach().cpu().double(), (-1, layer.heads, layer.channels)
        z = stage.input @ weight
        z = z if projection.bias is None else z + projection.bias.detach().cpu().double()
        z, by = z.view(shape), moved.along(weight).view(shape)
        y, low, high = (torch.clamp(end, span.low, span.high) for end in (z, z - by, z + by))
        one = torch.ones(len(z), 1, 1, dtype=z.dtype)
        self.weight, self.input = weight.view(shape), moved  # [D, H, C]
        self.by, self.step = by, torch.maximum(high - y, y - low)  # largest |z' − z| and |y' − y|
        self.inside = (z - by >= span.low) & (z + by <= span.high)  # y moves as z does
        self.outside = ((z + by <= span.low) | (z - by >= span.high)) & ~self.inside  # y does not move
        self.clean = y  # v
        self.factor, self.turn = one, one * 0  # largest f' and |f' − f|, [N, 1, 1]
        self.away = torch.zeros_like(y)  # y − m
        self.joint = torch.full_like(y, torch.inf)  # bound on |v' − v| by the norm of all channels
        if span.radius is not None:
            away, step = y - span.middle, self.step
            sizes = away.abs() + step, away, (away.abs() - step).clamp(min=0)  # largest, clean and least norm
            most, now, least = (
                (span.radius / span.norm(size)).clamp(max=1)[:, None, None] for size in reversed(sizes)
            )
            self.away, self.factor, self.turn = away, most, torch.maximum(most - now, now - least)
            self.clean = span.middle + now * away
            self.joint = span.half * span.norm(step)[:, None, None]

    def most(self) -> Tensor:
        """How far each value moves, [N, H, C]."""
        return torch.minimum(self.factor * self.step + self.turn * self.away.abs(), self.joint)

    def reading(self, weight: Tensor, span: Range) -> Tensor:
        """How far `⟨weight, v⟩` moves behind the limits of the score, [N, H], for weights [H, C].

        Channels that move with the input may cancel each other; the others may not.
        """
        heads = (self.weight * weight).sum(2)  # [D, H]
        clipped = self.by.masked_fill(self.inside, 0.0)
        cancelled = self.input.along(heads) + (clipped * weight.abs()).sum(2)
        parts = zip(self.inside.double().unbind(1), self.weight.unbind(1), weight.unbind(0), strict=True)
        linear = [(self.input.radius * (inside @ (map_ * w).t()).abs()).sum(1) for inside, map_, w in parts]
        between = self.step.masked_fill(self.inside | self.outside, 0.0)
        kept = torch.stack(linear, 1) + (between * weight.abs()).sum(2)
        moved = torch.minimum(cancelled, kept)
        turned = self.turn[:, :, 0] * (self.away * weight).sum(2).abs()
        moved = self.factor[:, :, 0] * moved + turned
        moved = torch.minimum(moved, (self.most() * weight.abs()).sum(2))
        score = (self.clean * weight).sum(2)
        low, now, high = (
            torch.clamp(score + moved * sign, span.low, span.high) for sign in (-1, 0, 1)
        )  # a clip of the score shrinks the interval
        return torch.maximum(high - now, now - low)

    def differences(self) -> Tensor:
        """Radii [N, H, C] whose sum over two classes bounds how far the difference of their values moves.

        A shift that all classes of a node share does not matter: taking out the middle one makes radii
        smaller where channels are not clipped. Each node takes the better of both.
        """
        middle = self.weight.median(dim=2, keepdim=True).values
        shifted = self.input.along((self.weight - middle).flatten(1)).view_as(self.step)
        shift = self.input.along(middle.flatten(1))[:, :, None].expand_as(shifted)
        between = torch.maximum(shifted, shift)
        moved = torch.where(self.inside, shifted, torch.where(self.outside, shift, between))
        turned = (self.away - self.away.median(dim=2, keepdim=True).values).abs()
        relative, plain = self.factor * moved + self.turn * turned, self.most()
        better = relative.sum(2, keepdim=True) < plain.sum(2, keepdim=True)
        return torch.where(better, relative, plain)


def _range(layer: AttentionLayer, name: str) -> Range:
    """The limits of one thing a layer reads, in float64 on the CPU; infinite where it has none."""
    if layer.limits is None:
        end = torch.full((), torch.inf, dtype=torch.float64)
        return Range(-end, end)
    limits = layer.limits[name]
    assert isinstance(limits, Limits)
    return Range.of(copy.deepcopy(limits).cpu().double())
