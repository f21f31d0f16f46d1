"""Hidden layers: how far perturbing their attention, at all nodes at once, can move the logits.

The layers that follow mix nodes and recompute their attention, so nothing here is exact. We carry a radius
per node and channel from the perturbed layer to the output (interval arithmetic around the clean states):

- the perturbed layer moves channel c of head h by at most `R ‖(z_jhc)_j‖_dual`, exactly;
- ELU is monotone and convex, so it moves by at most `elu(x + r) - elu(x)`;
- scores of the next layer are linear in its input up to a leaky ReLU of slope at most 1, so each moves by at
  most ρ; a softmax whose scores move by at most ρ moves by at most `tanh(ρ / 2)` in total variation;
- `Σ w'_j z'_j - Σ w_j z_j = Σ w_j (z'_j - z_j) + Σ (w'_j - w_j) z'_j` moves by at most
  `Σ w_j r_j + tanh(ρ/2) · (max_j (z_j + r_j) - min_j (z_j - r_j))`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from fgai.certify.kernels import channel_norms, margin_extent, row_extent
from fgai.certify.observe import Observation
from fgai.certify.prediction import BOUND, Prediction, gaps, probability_change
from fgai.models import GAT, AttentionLayer, GATv2
from fgai.ops import Adjacency, aggregate
from fgai.segments import row_max


@dataclass(frozen=True, eq=False)
class Stage:
    """One attention layer as the bounds read it; float64 on the CPU.

    Attributes:
        layer: the module.
        attention: clean, [E, H].
        values: [N, H, C].
        output: [N, H·C], or [N, C] from the last layer.
        adjacency: the layer's edges.
    """

    layer: AttentionLayer
    attention: Tensor
    values: Tensor
    output: Tensor
    adjacency: Adjacency


def find_stages(model: nn.Module, seen: Observation) -> list[Stage] | str:
    """Return the layers of a GAT or GATv2 in order, or why its hidden layers cannot be followed."""
    if type(model) not in (GAT, GATv2):
        return (
            "perturbing a hidden layer changes the scores and the values of every later layer; only GAT and"
            " GATv2 are followed that far"
        )
    if model.task != "node" or not seen.runs:
        return "only node-level read-outs are followed"
    stages = []
    for run, recorded in zip(seen.runs, seen.attention, strict=True):
        layer = run.layer
        assert isinstance(layer, AttentionLayer) and run.output is not None
        if layer.input_norm is not None:
            return "layer normalisation after the perturbed layer is not followed"
        assert recorded.adjacency is not None
        with torch.no_grad():
            values = layer.attend(*run.inputs)[1].cpu().double()
        attention, output = recorded.values.cpu().double(), run.output.cpu().double()
        stages.append(Stage(layer, attention, values, output, recorded.adjacency.to("cpu")))
    return stages


def hidden_prediction(
    stages: Sequence[Stage], index: int, logits: Tensor, radius: float, radii: Sequence[float], norm: str
) -> Prediction:
    """Bound the change of every node's prediction when layer `index` is perturbed at all nodes.

    Args:
        stages: all layers, see `find_stages`.
        index: the perturbed one, not the last.
        logits: [N, C].
        radius: R, at which the changes are bounded.
        radii: rising; the class radius is the largest of them at which the class provably stays, or 0.
        norm: of the ball.
    """
    stage = stages[index]
    rates = channel_norms(stage.adjacency.rowptr, stage.adjacency.source, stage.values, norm).flatten(1)
    top, lead = gaps(logits)
    class_radius = torch.zeros(top.numel(), dtype=torch.float64)
    for size in sorted({*radii, radius}):
        lost = _reach(stages, index, size * rates, top)[1]
        safe = (lead - lost).amin(1) > 0
        # Holds at `size` itself, so the first radius at which it may break lies above.
        class_radius[safe] = math.nextafter(size, math.inf)
        if not bool(safe.any()):
            break
    change, lost = _reach(stages, index, radius * rates, top)
    gained = lost.scatter(1, top[:, None], 0.0).topk(2, dim=1).values.sum(1)
    return Prediction(
        class_radius=class_radius,
        alpha2_logits=change.sum(1) / 2,
        alpha2_probabilities=probability_change(logits, gained),
        class_status=BOUND,
        logits_status=BOUND,
        probabilities_status=BOUND,
        reason="intervals carried through the later layers, every node's attention perturbed at once",
    )


def _reach(stages: Sequence[Stage], index: int, radius: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Most each logit can move, [N, C], and most each class can gain on the top one, [N, C]."""
    for here, after in zip(stages[index:-1], stages[index + 1 :], strict=True):
        radius = elu(here.output + radius) - elu(here.output)
        if after is not stages[-1]:
            radius = _through(after, radius)
    last = stages[-1]
    return _through(last, radius), _margin_loss(last, radius, top)


def _through(stage: Stage, radius: Tensor) -> Tensor:
    """Radii of a layer's outputs from radii [N, D] of its inputs."""
    layer = stage.layer
    moved = (radius @ _matrix(layer).abs()).view_as(stage.values)
    mixed = aggregate(stage.attention, moved, stage.adjacency)
    low, high = (stage.values - moved).flatten(1), (stage.values + moved).flatten(1)
    extent = row_extent(stage.adjacency.rowptr, stage.adjacency.source, low, high).view_as(stage.values)
    out = mixed + _softmax_change(stage, radius)[:, :, None] * extent
    return out.flatten(1) if layer.concat else out.mean(1)


def _margin_loss(stage: Stage, radius: Tensor, top: Tensor) -> Tensor:
    """Most each class can gain on the top one: as `_through`, for differences of two classes at once."""
    layer = stage.layer
    matrix = _matrix(layer).view(-1, layer.heads, layer.channels)
    # A common shift of all classes does not matter: taking out the middle one makes every radius smaller.
    matrix = matrix - matrix.median(dim=2, keepdim=True).values
    moved = torch.einsum("nd,dhc->nhc", radius, matrix.abs())
    mixed = aggregate(stage.attention, moved, stage.adjacency)
    mixed = mixed + mixed.gather(2, top[:, None, None].expand(-1, layer.heads, 1))
    extent = margin_extent(stage.adjacency.rowptr, stage.adjacency.source, stage.values, moved, top)
    lost = mixed + _softmax_change(stage, radius)[:, :, None] * extent
    return lost.mean(1).scatter(1, top[:, None], 0.0)


def _softmax_change(stage: Stage, radius: Tensor) -> Tensor:
    """[N, H]: most the attention of each node can move, in total variation."""
    layer, adjacency = stage.layer, stage.adjacency
    left, right = (radius @ part for part in _score_rates(layer))
    strongest = row_max(left[adjacency.source], adjacency.rowptr).clamp(min=0)
    alone = adjacency.degree < 2  # the softmax of one score is 1, whatever the score
    moved = (strongest + right) * max(1.0, abs(layer.slope))
    return torch.tanh(moved / 2).masked_fill(alone[:, None], 0.0)


def _score_rates(layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """[D, H] twice: how fast a score moves with each input channel of its source and of its destination."""
    shape = (-1, layer.heads, layer.channels)
    value = _matrix(layer).view(shape)
    if layer.score == "additive":
        source, target = (w.detach().cpu().double() for w in (layer.source_weight, layer.destination_weight))
        return (value * source).sum(2).abs(), (value * target).sum(2).abs()
    assert layer.score == "dynamic"
    weight = layer.score_weight.detach().cpu().double().abs()
    right = layer.right.weight.detach().cpu().double().view(shape)
    return (value.abs() * weight).sum(2), (right.abs() * weight).sum(2)


def _matrix(layer: AttentionLayer) -> Tensor:
    return layer.value.weight.detach().cpu().double()
