"""Bounds of attention scores, of the first layer's output and of class leads under injection.

From tensors alone, on any device and with gradients: certificates use them in float64, training in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, leaky_relu

from fgai.attention.limits import SAMPLE
from fgai.bounds.reading import (
    Range,
    Ranges,
    Reading,
    State,
    _Ball,
    _bias_lead,
    _larger,
    _largest,
    _leads_of,
    _root,
    _rounding_of,
    _smaller,
)
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import AttentionLayer, body_of
from fgai.ops import aggregate, edge_softmax, node_scores
from fgai.sparse import Adjacency, Features

SECTORS = 16  # of the arc between a new neighbour's highest score and its worst values
COLLINEAR = 1 - 1e-7  # cosine beyond which two directions count as one: an angle's slope is not finite there


@dataclass(frozen=True, eq=False)
class _Scores:
    """Ends of the scores of old edges [E, H], and bounds of a new neighbour."""

    low: Tensor  # of old edges
    high: Tensor
    new: Tensor  # ceilings of a new neighbour's score, [N, H, S] by sector
    new_lead: Tensor  # with each, its least lead of class a over b, [S, C, C]; empty where H > 1

    def read(self, layer: AttentionLayer, limits: Range, read_out: tuple[Tensor, Tensor]) -> _Scores:
        """The same with leads behind a linear map, whatever the score of the new neighbour."""
        across, shift = _leads_of(layer, read_out)
        least = -_largest(limits, -across.permute(1, 2, 0)[:, :, None])[..., 0] + shift
        least = least - _rounding_of(layer, limits.largest[0], read_out)
        return replace(self, new=self.new.amax(2, keepdim=True), new_lead=least[None])


def source_ends(own: Reading, others: Reading, adjacency: Adjacency) -> tuple[Tensor, Tensor]:
    """Ends of the source's side on every edge; `own` counts for a node itself."""
    source, destination = adjacency.source, adjacency.destination
    if own is others:
        first, last = own.source
        low = first.index_select(0, source)
        return low, low if first is last else last.index_select(0, source)
    itself = (source == destination)[(...,) + (None,) * (own.source[0].dim() - 1)]
    low, high = (
        torch.where(itself, mine.index_select(0, source), other.index_select(0, source))
        for mine, other in zip(own.source, others.source, strict=True)
    )
    return low, high


def scores_of(
    layer: AttentionLayer,
    ranges: Ranges,
    own: Reading,
    others: Reading,
    adjacency: Adjacency,
    pieces: int = 1,
) -> Iterator[_Scores]:
    """Scores for every piece of the destinations' intervals, the worst of which counts.

    `own` is what the layer reads of a node itself, `others` what of neighbours. An interval of GATv2 is one
    piece.
    """
    destination = adjacency.destination
    certain = own is others and all(first is last for first, last in (own.source, own.destination))
    exact = layer.score_edges(own.source[0], own.destination[0], adjacency) if certain else None
    if layer.score == "dynamic":
        ends = (exact, exact) if exact is not None else _dynamic(layer, ranges, own, others, adjacency)
        yield _Scores(*ends, *_dynamic_new(layer, ranges["value"], own.destination))
        return
    ceilings, new_lead = _sectors(layer, ranges)
    level, (start, stop) = ceilings[:, 0], own.destination
    if exact is not None:
        new = leaky_relu(ceilings[None] + start[:, :, None], layer.slope)
        yield _Scores(exact, exact, new, new_lead)
        return
    low, high = source_ends(own, others, adjacency)
    if own.clipped is None or start is stop:
        pieces = 1
    for piece in range(pieces):
        side: tuple[Tensor, ...] = own.destination
        if start is not stop:
            side = tuple(start + (stop - start) * (piece + end) / pieces for end in (0, 1))
        near = _each(side, lambda end: end.index_select(0, destination))
        above = _each(side, lambda end: end[:, :, None])
        yield _Scores(
            _relative(low, near, level, layer.slope, least=True),
            _relative(high, near, level, layer.slope),
            _relative(ceilings[None], above, level[:, None], layer.slope),
            new_lead,
        )


def _each(ends: tuple[Tensor, ...], change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Both ends changed; an end that is both is changed once."""
    first = change(ends[0])
    return first, first if ends[0] is ends[1] else change(ends[1])


def _relative(
    x: Tensor,
    side: tuple[Tensor, ...],
    level: Tensor,
    slope: float,
    weight: Tensor | None = None,
    *,
    least: bool = False,
) -> Tensor:
    """End of the score of a source x when the destination's side d lies between two ends.

    Scores of one destination count relative to each other, so what d adds to all of them is left out: with f
    the activation, `f(x + d) − f(level + d)` is monotone in d, and so extreme at its ends; where f has one
    slope, d cancels. The result is that end (the lower if `least`) plus the score of the level at the middle
    of d, times the `weight` of the channel.
    """
    factor = 1.0 if weight is None else weight
    if side[0] is side[1]:  # then the level is added and taken away again
        return leaky_relu(x + side[0], slope) * factor
    apart = [(leaky_relu(x + end, slope) - leaky_relu(level + end, slope)) * factor for end in side]
    middle = leaky_relu(level + (side[0] + side[1]) / 2, slope) * factor
    return (_smaller(*apart) if least else _larger(*apart)) + middle


def _sectors(layer: AttentionLayer, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Ceilings of the source's side of a new neighbour [H, S], and its least leads with each [S, C, C].

    In units of half the range a new neighbour is a point u of a ball of radius R. Its score `p + R|α| x` and
    `z_b − z_a = q + R|β| (x cos θ + y sin θ)` trace an ellipse; what is largest in both lies on the arc from
    the top of one to the top of the other.
    """
    limits, value = ranges["source"], ranges["value"]
    top = _smaller(limits.high, _largest(value, layer.source_weight))
    top = _larger(top, limits.low)
    if layer.heads > 1:
        return top[:, None], top.new_zeros(0, 0, 0)
    shift = _bias_lead(layer) - _rounding_of(layer, value.largest[0])
    half, middle, weight = value.half[0], value.middle[0], layer.source_weight[0]
    across = half[:, None] + half[None, :]
    if value.radius is None:
        least = middle[:, None] - middle[None, :] - across  # z_a − z_b in the box
        return top[:, None], (least + shift)[None]
    alpha, radius = weight * half, value.radius
    size = _root(alpha.square().sum())
    beta = _root(half[:, None].square() + half[None, :].square())
    product = (alpha * half)[None, :] - (alpha * half)[:, None]
    toward = product / (size * beta).clamp(min=torch.finfo(beta.dtype).tiny)
    angle = torch.acos(toward.clamp(-COLLINEAR, COLLINEAR))  # [a, b]: between the score and z_b − z_a
    slack = math.acos(COLLINEAR)
    centre = (weight * middle).sum()
    # Sectors are cut by the angle from the top of the score, up to π; beyond θ both only fall.
    cuts = torch.linspace(0, math.pi, SECTORS + 1, dtype=angle.dtype, device=angle.device)
    ceilings = _smaller(top[:, None], centre + radius * size * cuts[:-1].cos()).clamp(min=limits.low[:, None])
    nearest = (angle - cuts[1:, None, None] - slack).clamp(min=0)
    reach = _smaller(across, radius * beta * nearest.cos())
    return ceilings, middle[:, None] - middle[None, :] - reach + shift


def _dynamic(
    layer: AttentionLayer, ranges: Ranges, own: Reading, others: Reading, adjacency: Adjacency
) -> tuple[Tensor, Tensor]:
    """Ends of GATv2's scores [E, H]: each channel is monotone in both sides."""
    weight, slope, level = layer.score_weight, layer.slope, ranges["value"].middle
    near = _each(own.destination, lambda end: end.index_select(0, adjacency.destination))
    sources = source_ends(own, others, adjacency)
    least = most = [_relative(x, near, level, slope, weight, least=True) for x in sources]
    if near[0] is not near[1]:
        most = [_relative(x, near, level, slope, weight) for x in sources]
    return _smaller(*least).sum(2), _larger(*most).sum(2)


def _dynamic_new(layer: AttentionLayer, limits: Range, shown: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ceiling of a new neighbour's score in GATv2 [N, H, 1], and its least leads [1, C, C]."""
    weight, slope, level = layer.score_weight, layer.slope, limits.middle
    ends = (_relative(end, shown, level, slope, weight) for end in (limits.low, limits.high))
    ceiling = _larger(*ends).sum(2)
    if limits.radius is not None:
        steep = weight.abs() * max(1.0, abs(slope))
        around = limits.radius * _root((steep * limits.half).square().sum(1))
        calm = _relative(level, shown, level, slope, weight).sum(2)
        ceiling = _smaller(ceiling, calm + around)
    new_lead = ceiling.new_zeros(0, 0, 0)
    if layer.heads == 1:
        shift = _bias_lead(layer) - _rounding_of(layer, limits.largest[0])
        new_lead = (limits.low[0][:, None] - limits.high[0][None, :] + shift)[None]
    return ceiling[:, :, None], new_lead


def first_layer(
    layer: AttentionLayer,
    limits: Range,
    scores: _Scores,
    values: Tensor,
    adjacency: Adjacency,
    neighbours: int,
    heard: Tensor | float = 1.0,
) -> State:
    """Bounds of the first layer's output [N, D] with new neighbours, whose values lie in the box.

    `scores` of old edges are exact; `values` [N, H, C] are those of old nodes. Of the mass of new neighbours
    the share `heard` counts.
    """
    ceiling = scores.new.amax(2)
    index = adjacency.destination[:, None].expand_as(scores.low)
    top = torch.full_like(ceiling, -torch.inf).scatter_reduce(0, index, scores.high, "amax").detach()
    top = _larger(top, ceiling.detach())
    total = torch.zeros_like(top).index_add(
        0, adjacency.destination, torch.exp(scores.low - top[adjacency.destination])
    )
    new = heard * neighbours * torch.exp(ceiling - top)
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
    return State(low, high, ball, clean)


def check_followed(model: Any) -> None:
    """Raise `InputError` unless a model is GAT or GATv2 with two attention layers, the last of one head."""
    if body_of(model) != "layers":
        raise InputError(f"`certified` needs a GAT or GATv2 of fgai, got {type(model).__name__}; use 0")
    layers = list(model.convs)
    plain = model.guard is None and layers[0].input_norm is None
    if len(layers) != 2 or layers[-1].heads != 1 or not plain:
        raise InputError(
            "`certified` needs two attention layers, the last of one head, without norm or guard; use 0"
        )


def worst_leads(
    model: Any,
    graph: Graph,
    classes: Tensor,
    *,
    neighbours: int,
    clip_share: float,
    shrink: float,
    heard: Tensor | float = 1.0,
) -> Tensor:
    """Least lead of a node's class over every other one when all nodes gain new neighbours.

        Σ_j min e^{s_j} (z_top − z_other)_j  /  Σ_j e^{s_j}

    over old neighbours j and new ones, scores and values anywhere in their intervals; positive for all others
    means that the class stays. It is what `certify_injection` bounds, with the destination's score at the
    middle of its interval and the limits of this very pass: gradients reach the nodes at their ends.

    The model is one that `check_followed` accepts; its own limits are not read, but those of `clip_share` and
    `shrink`, see `fgai.limit`. Of the new neighbours' mass the share `heard` counts, for trainings that begin
    with little of it.

    Returns:
        [N, C], infinite at the class itself.
    """
    assert graph.features is not None
    adjacency = graph.adjacency
    first, last = model.convs
    assert isinstance(first, AttentionLayer) and isinstance(last, AttentionLayer)
    read, ranges = _read(first, graph.features, clip_share, shrink)
    (scores,) = scores_of(first, ranges, read, read, adjacency)
    state = first_layer(first, ranges["value"], scores, read.low, adjacency, neighbours, heard)
    state = state.pointwise(elu, state.high.clamp(max=0).exp())
    assert state.clean is not None
    _, ranges = _read(last, state.clean, clip_share, shrink)
    around = Reading.around(last, ranges, state)
    middle = (around.destination[0] + around.destination[1]) / 2
    around = replace(around, destination=(middle, middle))
    (scores,) = scores_of(last, ranges, around, around, adjacency)
    return _leads(adjacency, scores, around.lead(last), classes, heard * neighbours)


def _read(
    layer: AttentionLayer, x: Tensor | Features, clip_share: float, shrink: float
) -> tuple[Reading, Ranges]:
    """What a layer reads behind limits of its own input, and those limits."""

    def clipped(name: str, raw: Tensor, *, with_norm: bool = True) -> Tensor:
        every = max(1, raw.shape[0] // SAMPLE)
        ranges[name] = Range.measured(raw, clip_share, shrink, every=every, with_norm=with_norm)
        return ranges[name].clip(raw)

    ranges: dict[str, Range] = {}
    shape = (-1, layer.heads, layer.channels)
    values = clipped("value", layer.value(x).view(shape))
    if layer.score == "dynamic":
        right = clipped("right", layer.right(x).view(shape))
        return Reading(values, values, (values, values), (right, right)), ranges
    sides = node_scores(values, layer.source_weight, layer.destination_weight)
    source, destination = (
        clipped(name, side, with_norm=False)
        for name, side in zip(("source", "destination"), sides, strict=True)
    )
    return Reading(values, values, (source, source), (destination, destination)), ranges


def _leads(
    adjacency: Adjacency, scores: _Scores, lead: Tensor, classes: Tensor, neighbours: Tensor | float
) -> Tensor:
    """The worst weighted mean of leads [N, C], see `worst_leads`."""
    source, destination = adjacency.source, adjacency.destination
    low, high, new = scores.low[:, 0], scores.high[:, 0], scores.new[:, 0]
    peak = new.detach().amax(1).scatter_reduce(0, destination, high.detach(), "amax")
    width = lead.shape[1]
    # `index_select` rather than brackets: its backward pass does not sort.
    message = lead.flatten(0, 1).index_select(0, source * width + classes[destination])
    least, most = (torch.exp(end - peak[destination])[:, None] for end in (low, high))
    zeros = message.new_zeros(adjacency.num_nodes, message.shape[1])
    total = zeros.index_add(0, destination, torch.where(message < 0, most, least) * message)
    new_lead = scores.new_lead[:, classes].transpose(0, 1)  # [N, S, C]
    worst = (torch.exp(new - peak[:, None])[:, :, None] * new_lead).clamp(max=0).amin(1)
    size = zeros[:, 0].index_add(0, destination, torch.exp((low + high) / 2 - peak[destination]))
    lowest = (total + neighbours * worst) / size.clamp(min=torch.finfo(size.dtype).tiny)[:, None]
    return lowest.scatter(1, classes[:, None], torch.inf)
