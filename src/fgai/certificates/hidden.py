"""Hidden layers: how far perturbing their attention, at all nodes at once, can move the logits.

The layers that follow mix nodes and recompute their attention, so nothing here is exact. We carry a radius
per node and channel from the perturbed layer to the output (interval arithmetic around the clean states):

- the perturbed layer moves channel c of head h by at most `R ‖(z_jhc)_j‖_dual`, exactly;
- ELU is monotone and convex, so it moves by at most `elu(x + r) - elu(x)`;
- scores of the next layer are linear in its input up to a leaky ReLU of slope at most 1, so each moves by at
  most ρ; then each attention w_j grows by at most the factor e^{2ρ}, and all of them move by at most
  `t = tanh(ρ / 2)` in total variation;
- `Σ w'_j z'_j - Σ w_j z_j = Σ w'_j (z'_j - z_j) + Σ (w'_j - w_j) z_j`, where the first sum is at most
  `Σ w'_j r_j`, itself at most `e^{2ρ} Σ w_j r_j` and at most `Σ w_j r_j + t (max_j r_j - min_j r_j)`, and the
  second is at most `t (max_j z_j - min_j z_j)`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from fgai.attention import Limits, Observation
from fgai.bounds.reading import Range
from fgai.certificates.familiar import _alike, _layer_values, unfamiliar
from fgai.certificates.kernels import channel_norms, margin_extent, mixed_margins, row_extent
from fgai.certificates.layer import _BOUNDS, Prediction, _gaps, _probability_change
from fgai.certificates.record import TABLE_RADII
from fgai.models import AttentionLayer, body_of
from fgai.ops import aggregate
from fgai.ops.segments import row_max
from fgai.progress import current
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
    """One attention layer, float64 on the CPU: attention [E, H], values [N, H, C], output [N, D]."""

    layer: AttentionLayer
    attention: Tensor
    values: Tensor
    output: Tensor
    adjacency: Adjacency

    @cached_property
    def extent(self) -> Tensor:
        """[N, H, C]: how far apart the values of a node's neighbours are."""
        flat, adjacency = self.values.flatten(1), self.adjacency
        return row_extent(adjacency.rowptr, adjacency.source, flat).view_as(self.values)

    @cached_property
    def activated(self) -> Tensor:
        return elu(self.output)


def _find_stages(model: nn.Module, seen: Observation) -> list[_Stage] | str:
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
    if not get_task(str(model.task)).row_per_node or not seen.runs or seen.logits.shape[1] < 2:
        return "only node-level read-outs of two or more classes are followed"
    if not seen.ends_with_layer:
        return "something acts on what the last attention layer gives"
    stages: list[_Stage] = []
    for run, recorded in zip(seen.runs, seen.attention, strict=True):
        layer = run.layer
        assert isinstance(layer, AttentionLayer) and run.output is not None
        if layer.input_norm is not None:
            return "layer normalisation after the perturbed layer is not followed"
        if layer.score not in _FOLLOWED or (layer.heads > 1 and layer.concat == (run is seen.runs[-1])):
            return f"layer {recorded.name!r} is not as GAT and GATv2 make it"
        values = _layer_values(run, recorded)
        if isinstance(values, str):
            return values
        if stages and not _alike(stages[-1].activated, run.inputs[0].cpu().double()):
            return f"layer {recorded.name!r} does not read the ELU of the layer before it"
        assert recorded.adjacency is not None
        attention, output = recorded.values.cpu().double(), run.output.cpu().double()
        stages.append(_Stage(layer, attention, values, output, recorded.adjacency.to("cpu")))
    return stages


def _hidden_predictions(model: nn.Module, seen: Observation, radius: float, norm: str) -> list[Prediction]:
    """Bound the change of every node's prediction for every layer but the last, perturbed at all nodes.

    Changes are bounded at R = `radius`. The class radius is the largest of R and the usual radii at which the
    class provably stays, or 0.
    """
    hidden = len(seen.attention) - 1
    stages = _find_stages(model, seen) if hidden else ""
    if isinstance(stages, str):
        return [Prediction(reason=stages)] * hidden
    radii = _RADII if seen.attention.last.num_edges <= _MANY_EDGES else TABLE_RADII
    last = stages[-1]
    top, _ = _gaps(seen.logits)
    apart = margin_extent(last.adjacency.rowptr, last.adjacency.source, last.values, top)
    tried = sorted({*radii, radius})
    with progress_of("certifying", hidden * len(tried)):
        return [
            _hidden_prediction(stages[index:], seen.logits, apart, radius, tried, norm)
            for index in range(hidden)
        ]


def _hidden_prediction(
    stages: Sequence[_Stage], logits: Tensor, apart: Tensor, radius: float, tried: Sequence[float], norm: str
) -> Prediction:
    """The first of `stages` is perturbed; `apart` as in `_margin_loss`."""
    stage, last = stages[0], stages[-1]
    top, lead = _gaps(logits)
    rates = channel_norms(stage.adjacency.rowptr, stage.adjacency.source, stage.values, norm).flatten(1)
    class_radius = torch.zeros(top.numel(), dtype=torch.float64)
    alive = torch.ones_like(top, dtype=torch.bool)
    progress = current()
    for size in tried:
        progress.advance()
        if size != radius and not bool(alive.any()):
            continue
        reached = _carried(stages, size * rates)
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


def _carried(stages: Sequence[_Stage], radius: Tensor) -> Tensor:
    """Radii [N, D] of the last layer's input, from those of the first layer's output."""
    for here, after in pairwise(stages):
        radius = elu(here.output + radius, inplace=True).sub_(here.activated)
        if after is not stages[-1]:
            radius = _through(after, radius)
    return radius


def _through(stage: _Stage, radius: Tensor) -> Tensor:
    """Radii of a layer's outputs from radii [N, D] of its inputs."""
    moved = _values_moved(stage, radius)
    growth, change = _softmax_change(stage, radius)
    out = aggregate(stage.attention, moved, stage.adjacency).mul_(growth).addcmul_(change, stage.extent)
    return out.flatten(1) if stage.layer.concat else out.mean(1)


def _margin_loss(stage: _Stage, radius: Tensor, top: Tensor, apart: Tensor) -> Tensor:
    """Most each class can gain on the top one, [N, C], 0 for itself: `_through` for differences of classes.

    `apart` [N, H, C] is from `margin_extent`. Nodes whose `top` is -1 are left out.
    """
    layer, adjacency = stage.layer, stage.adjacency
    if layer.limits is None:
        # A common shift of all classes does not matter: taking out the middle one makes every radius smaller.
        matrix = _matrix(layer).view(-1, layer.heads, layer.channels)
        matrix = matrix - matrix.median(dim=2, keepdim=True).values
        moved = (radius @ matrix.abs().flatten(1)).view_as(stage.values)
    else:  # behind limits it does: one class may be clipped and the other not
        moved = _values_moved(stage, radius)
    growth, change = _softmax_change(stage, radius)
    given = adjacency.rowptr, adjacency.source, stage.attention, moved, growth[:, :, 0], change[:, :, 0], top
    lost = mixed_margins(*given).addcmul_(change, apart)
    lost = lost[:, 0] if layer.heads == 1 else lost.mean(1)
    return lost.scatter_(1, top.clamp(min=0)[:, None], 0.0)


def _softmax_change(stage: _Stage, radius: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H, 1] twice: largest growth of an attention weight, and their total variation."""
    layer, adjacency = stage.layer, stage.adjacency
    left, right = _scores_moved(stage, radius)
    strongest = row_max(left[adjacency.source], adjacency.rowptr)
    alone = adjacency.degree < 2  # the softmax of one score is 1, whatever the score
    moved = ((strongest + right) * max(1.0, abs(layer.slope))).masked_fill(alone[:, None], 0.0)[:, :, None]
    return torch.exp(2 * moved), torch.tanh(moved / 2)


def _scores_moved(stage: _Stage, radius: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] twice: how far a score moves by its source and by its destination."""
    layer = stage.layer
    if layer.score == "additive":
        weights = [w.detach().cpu().double() for w in (layer.source_weight, layer.destination_weight)]
        if layer.limits is not None:  # each channel may be clipped or not, so none makes up for another
            moved = _values_moved(stage, radius)
            left, right = ((moved * weight.abs()).sum(2) for weight in weights)
            return left, right
        value = _matrix(layer).view(-1, layer.heads, layer.channels)
        left, right = (radius @ (value * weight).sum(2).abs() for weight in weights)
        return left, right
    assert layer.score == "dynamic"
    weight = layer.score_weight.detach().cpu().double().abs()
    shown = (radius @ layer.right.weight.detach().cpu().double().abs()).view_as(stage.values)
    if layer.limits is not None:
        shown = _range(layer.limits["right"]).moved_at_most(shown)
    return (_values_moved(stage, radius) * weight).sum(2), (shown * weight).sum(2)


def _values_moved(stage: _Stage, radius: Tensor) -> Tensor:
    """[N, H, C]: how far the values move."""
    moved = (radius @ _matrix(stage.layer).abs()).view_as(stage.values)
    limits = stage.layer.limits
    return moved if limits is None else _range(limits["value"]).moved(stage.values, moved)


def _range(limits: nn.Module) -> Range:
    """Of limits, in float64 on the CPU."""
    assert isinstance(limits, Limits)
    return Range.of(copy.deepcopy(limits).cpu().double())


def _matrix(layer: AttentionLayer) -> Tensor:
    return layer.value.weight.detach().cpu().double()
