"""Bounds of attention scores, of the first layer's output and of class margins, with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, leaky_relu

from fgai.attention.limits import SAMPLE
from fgai.bounds.intervals import (
    LayerBounds,
    Range,
    Ranges,
    StateBounds,
    _Ball,
    _bias_margins,
    _margin_map,
    _margin_rounding,
    _max_product,
    _maximum,
    _minimum,
    _sqrt,
)
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import AttentionLayer, body_of
from fgai.ops import aggregate, edge_softmax, node_scores
from fgai.sparse import Adjacency, Features

SECTORS = 16  # of the arc between a new neighbour's highest score and its smallest margin
COLLINEAR = 1 - 1e-7  # cosine beyond which two directions count as one: acos has no finite slope at 1


@dataclass(frozen=True, eq=False)
class _ScoreBounds:
    """Bounds of the scores of old edges, and of score and margins of a new neighbour, sector by sector."""

    low: Tensor  # [E, H]
    high: Tensor  # [E, H]
    new: Tensor  # [N, H, S], upper bound of a new neighbour's score in each sector
    new_margins: Tensor  # [S, C, C], lower bound of its margin of class a over b; empty where H > 1

    def behind(self, layer: AttentionLayer, limits: Range, read_out: tuple[Tensor, Tensor]) -> _ScoreBounds:
        """The same with margins behind a linear map, in one sector."""
        across, shift = _margin_map(layer, read_out)
        least = -_max_product(limits, -across.permute(1, 2, 0)[:, :, None])[..., 0] + shift
        least = least - _margin_rounding(layer, limits.max_abs[0], read_out)
        return replace(self, new=self.new.amax(2, keepdim=True), new_margins=least[None])


def source_bounds(own: LayerBounds, others: LayerBounds, adjacency: Adjacency) -> tuple[Tensor, Tensor]:
    """Return bounds of the source's side on every edge, `own` on self-loops and `others` elsewhere."""
    source, destination = adjacency.source, adjacency.destination
    if own is others:
        first, last = own.source
        low = first.index_select(0, source)
        return low, low if first is last else last.index_select(0, source)
    loop = (source == destination)[(...,) + (None,) * (own.source[0].dim() - 1)]
    low, high = (
        torch.where(loop, mine.index_select(0, source), other.index_select(0, source))
        for mine, other in zip(own.source, others.source, strict=True)
    )
    return low, high


def score_bounds(
    layer: AttentionLayer,
    ranges: Ranges,
    own: LayerBounds,
    others: LayerBounds,
    adjacency: Adjacency,
    pieces: int = 1,
) -> Iterator[_ScoreBounds]:
    """Yield score bounds for every piece of the destinations' intervals; a property must hold in all pieces.

    Destinations have the bounds `own`, neighbours `others`. GATv2 has one piece.
    """
    destination = adjacency.destination
    certain = own is others and all(first is last for first, last in (own.source, own.destination))
    exact = layer.score_edges(own.source[0], own.destination[0], adjacency) if certain else None
    if layer.score == "dynamic":
        ends = (exact, exact) if exact is not None else _gatv2_scores(layer, ranges, own, others, adjacency)
        yield _ScoreBounds(*ends, *_gatv2_new_neighbour(layer, ranges["value"], own.destination))
        return
    ceilings, new_margins = _sectors(layer, ranges)
    level, (start, stop) = ceilings[:, 0], own.destination
    if exact is not None:
        new = leaky_relu(ceilings[None] + start[:, :, None], layer.slope)
        yield _ScoreBounds(exact, exact, new, new_margins)
        return
    low, high = source_bounds(own, others, adjacency)
    if own.values is None or start is stop:
        pieces = 1
    for piece in range(pieces):
        side: tuple[Tensor, ...] = own.destination
        if start is not stop:
            side = tuple(start + (stop - start) * (piece + end) / pieces for end in (0, 1))
        by_edge = _map_ends(side, lambda end: end.index_select(0, destination))
        by_node = _map_ends(side, lambda end: end[:, :, None])
        yield _ScoreBounds(
            _relative_scores(low, by_edge, level, layer.slope, least=True),
            _relative_scores(high, by_edge, level, layer.slope),
            _relative_scores(ceilings[None], by_node, level[:, None], layer.slope),
            new_margins,
        )


def _map_ends(ends: tuple[Tensor, ...], function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Apply a function to both ends, once if they are the same tensor."""
    first = function(ends[0])
    return first, first if ends[0] is ends[1] else function(ends[1])


def _relative_scores(
    x: Tensor,
    side: tuple[Tensor, ...],
    level: Tensor,
    slope: float,
    weight: Tensor | None = None,
    *,
    least: bool = False,
) -> Tensor:
    """Bound the score of a source's side x from above, or from below if `least`.

    The destination's side d lies between the ends `side`. With f the leaky ReLU, `f(x + d) − f(level + d)` is
    monotone in d, so it is extreme at an end; `f(level + middle of d)` is common to all neighbours.
    """
    factor = 1.0 if weight is None else weight
    if side[0] is side[1]:  # then the level cancels
        return leaky_relu(x + side[0], slope) * factor
    apart = [(leaky_relu(x + end, slope) - leaky_relu(level + end, slope)) * factor for end in side]
    middle = leaky_relu(level + (side[0] + side[1]) / 2, slope) * factor
    return (_minimum(*apart) if least else _maximum(*apart)) + middle


def _sectors(layer: AttentionLayer, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Bound the source's side of a new neighbour from above [H, S], and its margins from below [S, C, C].

    In units of half the range a new neighbour is a point of a ball of radius R. With θ the angle between the
    score's direction α and that of `z_b − z_a`, β, the score `p + R|α| x` and `q + R|β| (x cos θ + y sin θ)`
    trace an ellipse: points where neither can grow are on the arc from the top of one to the other's.
    """
    limits, value = ranges["source"], ranges["value"]
    top = _minimum(limits.high, _max_product(value, layer.source_weight))
    top = _maximum(top, limits.low)
    if layer.heads > 1:
        return top[:, None], top.new_zeros(0, 0, 0)
    shift = _bias_margins(layer) - _margin_rounding(layer, value.max_abs[0])
    half, middle, weight = value.half[0], value.middle[0], layer.source_weight[0]
    across = half[:, None] + half[None, :]
    if value.radius is None:
        least = middle[:, None] - middle[None, :] - across  # z_a − z_b in the box
        return top[:, None], (least + shift)[None]
    alpha, radius = weight * half, value.radius
    size = _sqrt(alpha.square().sum())
    beta = _sqrt(half[:, None].square() + half[None, :].square())
    product = (alpha * half)[None, :] - (alpha * half)[:, None]
    cosine = product / (size * beta).clamp(min=torch.finfo(beta.dtype).tiny)
    angle = torch.acos(cosine.clamp(-COLLINEAR, COLLINEAR))  # θ, [a, b]
    slack = math.acos(COLLINEAR)
    centre = (weight * middle).sum()
    # Sectors are cut by the angle from α, up to π; beyond θ both quantities only fall.
    cuts = torch.linspace(0, math.pi, SECTORS + 1, dtype=angle.dtype, device=angle.device)
    ceilings = _minimum(top[:, None], centre + radius * size * cuts[:-1].cos()).clamp(min=limits.low[:, None])
    nearest = (angle - cuts[1:, None, None] - slack).clamp(min=0)
    reach = _minimum(across, radius * beta * nearest.cos())
    return ceilings, middle[:, None] - middle[None, :] - reach + shift


def _gatv2_scores(
    layer: AttentionLayer, ranges: Ranges, own: LayerBounds, others: LayerBounds, adjacency: Adjacency
) -> tuple[Tensor, Tensor]:
    """Bound GATv2's scores [E, H]: each channel is monotone in both sides."""
    weight, slope, level = layer.score_weight, layer.slope, ranges["value"].middle
    by_edge = _map_ends(own.destination, lambda end: end.index_select(0, adjacency.destination))
    sources = source_bounds(own, others, adjacency)
    least = most = [_relative_scores(x, by_edge, level, slope, weight, least=True) for x in sources]
    if by_edge[0] is not by_edge[1]:
        most = [_relative_scores(x, by_edge, level, slope, weight) for x in sources]
    return _minimum(*least).sum(2), _maximum(*most).sum(2)


def _gatv2_new_neighbour(
    layer: AttentionLayer, limits: Range, side: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Bound the score of a new neighbour in GATv2 from above [N, H, 1], its margins from below [1, C, C]."""
    weight, slope, level = layer.score_weight, layer.slope, limits.middle
    ends = (_relative_scores(end, side, level, slope, weight) for end in (limits.low, limits.high))
    ceiling = _maximum(*ends).sum(2)
    if limits.radius is not None:
        steep = weight.abs() * max(1.0, abs(slope))
        around = limits.radius * _sqrt((steep * limits.half).square().sum(1))
        ceiling = _minimum(ceiling, _relative_scores(level, side, level, slope, weight).sum(2) + around)
    new_margins = ceiling.new_zeros(0, 0, 0)
    if layer.heads == 1:
        shift = _bias_margins(layer) - _margin_rounding(layer, limits.max_abs[0])
        new_margins = (limits.low[0][:, None] - limits.high[0][None, :] + shift)[None]
    return ceiling[:, :, None], new_margins


def first_layer_output(
    layer: AttentionLayer,
    limits: Range,
    scores: _ScoreBounds,
    values: Tensor,
    adjacency: Adjacency,
    neighbours: int,
    mass_share: Tensor | float = 1.0,
) -> StateBounds:
    """Bound the first layer's output [N, D] when nodes gain `neighbours` new ones, with values in `limits`.

    Old nodes have the `values` [N, H, C]. New neighbours take the attention `M = t e^s / (Z + t e^s)`, of
    which the share `mass_share` counts.
    """
    ceiling = scores.new.amax(2)
    index = adjacency.destination[:, None].expand_as(scores.low)
    top = torch.full_like(ceiling, -torch.inf).scatter_reduce(0, index, scores.high, "amax").detach()
    top = _maximum(top, ceiling.detach())
    total = torch.zeros_like(top).index_add(
        0, adjacency.destination, torch.exp(scores.low - top[adjacency.destination])
    )
    new = mass_share * neighbours * torch.exp(ceiling - top)
    mass = (new / (total + new).clamp(min=torch.finfo(new.dtype).tiny))[:, :, None]
    mean = aggregate(edge_softmax(scores.low, adjacency), values, adjacency)
    clean = layer.join(mean)
    low = layer.join(mean + mass * (limits.low - mean).clamp(max=0))
    high = layer.join(mean + mass * (limits.high - mean).clamp(min=0))
    ball = None
    if limits.radius is not None and layer.concat:
        # Heads may attend to different new neighbours, each with a ball of its own.
        radius = limits.radius * math.sqrt(max(1, min(neighbours, layer.heads)))
        drift = (mass * (limits.middle - mean)).flatten(1)
        ball = _Ball(clean, drift, (mass * limits.half).flatten(1), radius)
    return StateBounds(low, high, ball)


def check_two_layers(model: Any) -> None:
    """Raise `InputError` unless a model is GAT or GATv2 with two attention layers, the last of one head."""
    if body_of(model) != "layers":
        raise InputError(
            f"the term `certified` needs a GAT or GATv2, got {type(model).__name__}; leave it out"
        )
    layers = list(model.convs)
    plain = model.guard is None and layers[0].input_norm is None
    if len(layers) != 2 or layers[-1].heads != 1 or not plain:
        raise InputError(
            "`certified` needs two attention layers, the last of one head, without norm or guard"
        )


def worst_margins(
    model: Any,
    graph: Graph,
    classes: Tensor,
    *,
    neighbours: int,
    clip_share: float,
    shrink: float,
    mass_share: Tensor | float = 1.0,
) -> Tensor:
    """Return the smallest margin of a node's class over every other one when all nodes gain new neighbours.

        Σ_j min e^{s_j} (z_top − z_other)_j  /  Σ_j e^{s_j}

    over old neighbours j and `neighbours` new ones, scores and values anywhere in their intervals; [N, C],
    infinite at the class itself. It is the bound of `certify_injection`, with the destination's score at the
    middle of its interval and limits (`clip_share` and `shrink` as in `fgai.limit`) measured in this pass:
    gradients reach the nodes at their ends. The model is as `check_two_layers` requires, the graph prepared
    for it; `classes` are int64 [N]. The share `mass_share` of the new neighbours' attention counts; a
    training may begin with little.
    """
    assert graph.features is not None
    adjacency = graph.adjacency
    first, last = model.convs
    assert isinstance(first, AttentionLayer) and isinstance(last, AttentionLayer)
    clean, ranges = _limited_layer(first, graph.features, clip_share, shrink)
    (scores,) = score_bounds(first, ranges, clean, clean, adjacency)
    output = first_layer_output(first, ranges["value"], scores, clean.low, adjacency, neighbours, mass_share)
    assert output.ball is not None  # the limits have a norm, and the heads of a hidden layer are concatenated
    state = output.pointwise(elu, output.high.clamp(max=0).exp())
    _, ranges = _limited_layer(last, elu(output.ball.base), clip_share, shrink)
    bounds = LayerBounds.from_state(last, ranges, state)
    middle = (bounds.destination[0] + bounds.destination[1]) / 2
    bounds = replace(bounds, destination=(middle, middle))
    (scores,) = score_bounds(last, ranges, bounds, bounds, adjacency)
    return _mean_margins(adjacency, scores, bounds.margins(last), classes, mass_share * neighbours)


def _limited_layer(
    layer: AttentionLayer, x: Tensor | Features, clip_share: float, shrink: float
) -> tuple[LayerBounds, Ranges]:
    """Return what a layer computes behind limits measured on its own input, and those limits."""

    def clipped(name: str, raw: Tensor, *, with_norm: bool = True) -> Tensor:
        every = max(1, raw.shape[0] // SAMPLE)
        ranges[name] = Range.measure(raw, clip_share, shrink, every=every, with_norm=with_norm)
        return ranges[name].clip(raw)

    ranges: dict[str, Range] = {}
    shape = (-1, layer.heads, layer.channels)
    values = clipped("value", layer.value(x).view(shape))
    if layer.score == "dynamic":
        right = clipped("right", layer.right(x).view(shape))
        return LayerBounds(values, values, (values, values), (right, right)), ranges
    sides = node_scores(values, layer.source_weight, layer.destination_weight)
    source, destination = (
        clipped(name, side, with_norm=False)
        for name, side in zip(("source", "destination"), sides, strict=True)
    )
    return LayerBounds(values, values, (source, source), (destination, destination)), ranges


def _mean_margins(
    adjacency: Adjacency, scores: _ScoreBounds, margins: Tensor, classes: Tensor, neighbours: Tensor | float
) -> Tensor:
    """Return the smallest weighted mean of the neighbours' margins [N, C], see `worst_margins`."""
    source, destination = adjacency.source, adjacency.destination
    low, high, new = scores.low[:, 0], scores.high[:, 0], scores.new[:, 0]
    peak = new.detach().amax(1).scatter_reduce(0, destination, high.detach(), "amax")
    width = margins.shape[1]
    # `index_select` rather than brackets: its backward pass does not sort.
    message = margins.flatten(0, 1).index_select(0, source * width + classes[destination])
    least, most = (torch.exp(end - peak[destination])[:, None] for end in (low, high))
    zeros = message.new_zeros(adjacency.num_nodes, message.shape[1])
    total = zeros.index_add(0, destination, torch.where(message < 0, most, least) * message)
    new_margins = scores.new_margins[:, classes].transpose(0, 1)  # [N, S, C]
    worst = (torch.exp(new - peak[:, None])[:, :, None] * new_margins).clamp(max=0).amin(1)
    size = zeros[:, 0].index_add(0, destination, torch.exp((low + high) / 2 - peak[destination]))
    lowest = (total + neighbours * worst) / size.clamp(min=torch.finfo(size.dtype).tiny)[:, None]
    return lowest.scatter(1, classes[:, None], torch.inf)
