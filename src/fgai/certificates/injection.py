"""Certificates against injection: no few new neighbours, whatever their features, change a node's class.

Threat: nodes gain up to t injected neighbours each, with any features and any wiring of their own. Behind
limits (`fgai.limit`) whatever such a neighbour is, its value lies in the box of the layer's limits and its
score has a ceiling. We carry an interval per node and channel through the network:

- first layer: old edges keep their scores, since features do not change. New neighbours take a mass of at
  most `M = t e^s / (Z + t e^s)`, s their score at its ceiling and Z the sum over old edges; so an output h
  lies between `h + M min(0, low − h)` and `h + M max(0, high − h)`;
- further layers: values and scores of old neighbours lie in intervals around those of the middle state. The
  least weighted mean `Σ e^{s_j} v_j / Σ e^{s_j}` is at least λ if `Σ_j min_s e^{s_j} (v_j − λ) ≥ 0`, new
  neighbours included; bisection on λ finds the best;
- output: the class stays if for every other class the same sum of `z_top − z_other` is positive at λ = 0.

The score of the destination is common to all neighbours; its interval is cut in pieces, the worst of which
counts. Everything is computed in float64 and never says more than what holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, leaky_relu

from fgai.attention import Limits, limits_of, prepared
from fgai.certificates.familiar import unfamiliar
from fgai.certificates.hidden import _behind
from fgai.certificates.injection_kernels import class_kept, mean_bounds
from fgai.checks import one_of, whole
from fgai.graph import Graph
from fgai.models import GAT, AttentionLayer, GATv2, as_graph
from fgai.ops import aggregate, edge_softmax
from fgai.sparse import Adjacency, Features
from fgai.tasks import get_task
from fgai.typed import typed

PIECES = 8
"""Into which the interval of a destination's score is cut."""
WHERE = ("any", "direct")
ROUNDING = 1e-5
"""Of the model's own float32 arithmetic, relative to what is summed; a class must stay by more."""


@dataclass(frozen=True, eq=False)
class InjectionCertificate:
    """Which nodes keep their class whatever is injected.

    Attributes:
        neighbours: t, injected neighbours of a node at most.
        where: `any`, every node may gain them, or `direct`, the certified node alone.
        holds: [N] bool, the class provably stays.
        classes: [N] the class that does.
        reason: why nothing is certified, or how it was; for readers.
        known: whether a bound could be computed at all.
    """

    neighbours: int
    where: str
    holds: Tensor
    classes: Tensor
    reason: str
    known: bool

    def share(self, nodes: Tensor | None = None) -> float:
        """Of all nodes, or of those under a mask, the certified ones."""
        chosen = self.holds if nodes is None else self.holds[nodes.to(self.holds.device)]
        return float(chosen.double().mean()) if chosen.numel() else 0.0


@typed
def certify_injection(
    model: nn.Module, data: Any, *, neighbours: int = 1, where: str = "any"
) -> InjectionCertificate:
    """Certify which nodes keep their predicted class when nodes with any features are injected.

    Args:
        model: GAT or GATv2 behind limits; of others nothing is known, and no node is certified.
        data: a `Graph` or PyG `Data`.
        neighbours: t, injected neighbours that a node gains at most.
        where: `any`: every node of the graph may gain t of them; `direct`: the certified node alone does.
            With more than two layers `direct` is answered by the bound for `any`, which holds for it, too.

    Returns:
        A certificate per node; `share(mask)` of it.

    Raises:
        InputError: an argument out of range.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.limit(fgai.train("GAT", data, epochs=20, progress=False), data)
        >>> certify_injection(model, data, neighbours=0).share()
        1.0
    """
    whole(neighbours, "neighbours", 0)
    one_of(where, "where", WHERE)
    graph = prepared(model, as_graph(data)).to("cpu")
    exact = copy.deepcopy(model).double().cpu().eval()
    with torch.no_grad():
        doubt = _doubt(exact, graph)
        if doubt is not None:
            return _unknown(graph, neighbours, where, doubt)
        return _certified(exact, graph, neighbours, where)


def _doubt(model: nn.Module, graph: Graph) -> str | None:
    """Why nothing can be certified; None where it can."""
    if type(model) not in (GAT, GATv2):
        return "only GAT and GATv2 are followed"
    change = unfamiliar(model)
    if change is not None:
        return f"{change}; only GAT and GATv2 as they are can be followed"
    if model.guard is not None or graph.edge_weight is not None or graph.voices is not None:
        return "weights on edges, guards and voices are not followed"
    if not get_task(str(model.task)).row_per_node or graph.features is None:
        return "only node-level read-outs are followed"
    for layer in model.convs:
        assert isinstance(layer, AttentionLayer)
        if layer.limits is None or layer.input_norm is not None:
            return "a layer has no limits: one new neighbour may say anything; see `fgai.limit`"
        found = limits_of(layer)
        if not all(bool(one.low.isfinite().all() & one.high.isfinite().all()) for one in found):
            return "limits were not measured; see `fgai.limit`"
    if model.convs[-1].heads != 1 or not all(bool(p.isfinite().all()) for p in model.parameters()):
        return "an output layer of several heads, or weights that are not finite, are not followed"
    return None


def _unknown(graph: Graph, neighbours: int, where: str, reason: str) -> InjectionCertificate:
    nothing = torch.zeros(graph.num_nodes, dtype=torch.bool)
    classes = torch.full((graph.num_nodes,), -1)
    return InjectionCertificate(neighbours, where, nothing, classes, reason, known=False)


def _certified(model: Any, graph: Graph, neighbours: int, where: str) -> InjectionCertificate:
    assert graph.features is not None
    *hidden, last = model.convs
    adjacency = graph.adjacency
    features = Features.dense(graph.features.to_dense().double())
    clean: Tensor | Features = features
    ends: tuple[Tensor, Tensor] | None = None
    for layer in hidden:
        reading = _Reading.exact(layer, features) if ends is None else _Reading.around(layer, *ends)
        ends = _hidden(layer, reading, adjacency, neighbours)
        clean = elu(layer(clean, adjacency))
    point = _Reading.exact(last, clean)
    moved = point if ends is None else _Reading.around(last, *ends)
    if where == "direct" and len(hidden) <= 1:
        others, own = point, moved
    else:
        others, own = moved, moved
    classes = last(clean, adjacency).argmax(1)
    holds = torch.ones(graph.num_nodes, dtype=torch.bool)
    apart, mine = _lead(last, others), _lead(last, own)
    box = _box_lead(last)
    for scores in _scores(last, own, others, adjacency):
        holds &= class_kept(
            adjacency, scores.low, scores.high, scores.new, apart, mine, box, classes, neighbours, ROUNDING
        )
    reason = "intervals behind limits; new neighbours at the ceiling of their scores and values"
    return InjectionCertificate(neighbours, where, holds, classes, reason, known=True)


@dataclass(frozen=True, eq=False)
class _Reading:
    """What a layer reads of every node, as intervals; float64.

    Attributes:
        low: of the values, [N, H, C].
        high: of the values.
        source: ends of the source's side of the score [N, H] (GAT) or of the values themselves (GATv2).
        destination: ends of the destination's side, [N, H] or [N, H, C].
        state: middle and radius of the input [N, D] where it is not exact.
        calm: [N], where nothing is clipped or softened anywhere in the interval.
    """

    low: Tensor
    high: Tensor
    source: tuple[Tensor, Tensor]
    destination: tuple[Tensor, Tensor]
    state: tuple[Tensor, Tensor] | None = None
    calm: Tensor | None = None

    @classmethod
    def exact(cls, layer: AttentionLayer, x: Tensor | Features) -> _Reading:
        """Without an interval."""
        source, destination, values = layer.sides(x)
        return cls(values, values, (source, source), (destination, destination))

    @classmethod
    def around(cls, layer: AttentionLayer, low: Tensor, high: Tensor) -> _Reading:
        """From an interval of the input [N, D]."""
        middle, radius = (low + high) / 2, (high - low) / 2
        source, destination, values = layer.sides(middle)
        moved = _moved(layer.limits["value"], values, radius, layer.value.weight)  # type: ignore[index]
        calm = _calm(layer, middle, radius)
        ends = _inside(layer, "value", values, moved)
        if layer.score == "dynamic":
            shown = _moved(layer.limits["right"], None, radius, layer.right.weight)  # type: ignore[index]
            return cls(*ends, ends, _inside(layer, "right", destination, shown), (middle, radius), calm)
        sides = []
        for name, clean, weight in (
            ("source", source, layer.source_weight),
            ("destination", destination, layer.destination_weight),
        ):
            far = (moved * weight.abs()).sum(2)
            map_ = (layer.value.weight.view(-1, layer.heads, layer.channels) * weight).sum(2)
            far = torch.where(calm[:, None], torch.minimum(far, radius @ map_.abs()), far)
            sides.append(_inside(layer, name, clean, far))
        return cls(*ends, sides[0], sides[1], (middle, radius), calm)


def _moved(limits: nn.Module, said: Tensor | None, radius: Tensor, weight: Tensor) -> Tensor:
    assert isinstance(limits, Limits)
    return _behind(limits, said, (radius @ weight.abs()).view(-1, *limits.low.shape))


def _inside(layer: AttentionLayer, name: str, clean: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of an interval, cut at the layer's limits, which hold whatever the input is."""
    limits = layer.limits[name]  # type: ignore[index]
    assert isinstance(limits, Limits)
    return torch.maximum(clean - moved, limits.low), torch.minimum(clean + moved, limits.high)


def _calm(layer: AttentionLayer, middle: Tensor, radius: Tensor) -> Tensor:
    """[N]: whether the values' limits do nothing anywhere in the interval, so that they are linear."""
    limits = layer.limits["value"]  # type: ignore[index]
    assert isinstance(limits, Limits)
    shape = (-1, *limits.low.shape)
    weight, bias = layer.value.weight, layer.value.bias
    raw = middle @ weight if bias is None else middle @ weight + bias
    raw, far = raw.view(shape), (radius @ weight.abs()).view(shape)
    within = ((raw - far >= limits.low) & (raw + far <= limits.high)).flatten(1).all(1)
    half = ((limits.high - limits.low) / 2).clamp(min=1e-300)
    size = ((raw - (limits.low + limits.high) / 2).abs() + far) / half
    return within & (size.flatten(1).square().sum(1).sqrt() <= limits.radius)


@dataclass(frozen=True, eq=False)
class _Scores:
    """Ends of the scores of old edges [E, H], and the ceiling of a new neighbour's [N, H]."""

    low: Tensor
    high: Tensor
    new: Tensor


def _scores(
    layer: AttentionLayer, own: _Reading, others: _Reading, adjacency: Adjacency
) -> Iterator[_Scores]:
    """Scores for every piece of the destinations' intervals; `own` counts for a node itself."""
    source, destination = adjacency.source, adjacency.destination
    itself = (source == destination)[(...,) + (None,) * (own.source[0].dim() - 1)]
    ends = [
        torch.where(itself, mine[source], other[source])
        for mine, other in zip(own.source, others.source, strict=True)
    ]
    if layer.score == "dynamic":
        yield _dynamic(layer, ends, own.destination, destination)
        return
    limits = layer.limits["source"]  # type: ignore[index]
    assert isinstance(limits, Limits)
    start, stop = own.destination
    pieces = 1 if torch.equal(start, stop) else PIECES
    for piece in range(pieces):
        low, high = (start + (stop - start) * (piece + k) / pieces for k in (0, 1))
        yield _Scores(
            leaky_relu(ends[0] + low[destination], layer.slope),
            leaky_relu(ends[1] + high[destination], layer.slope),
            leaky_relu(limits.high + high, layer.slope),
        )


def _dynamic(
    layer: AttentionLayer, ends: list[Tensor], shown: tuple[Tensor, Tensor], destination: Tensor
) -> _Scores:
    """GATv2: each channel of the score is monotone in both sides."""
    weight = layer.score_weight
    limits = layer.limits["value"]  # type: ignore[index]
    assert isinstance(limits, Limits)
    small = leaky_relu(ends[0] + shown[0][destination], layer.slope) * weight
    large = leaky_relu(ends[1] + shown[1][destination], layer.slope) * weight
    new = [
        leaky_relu(end + side, layer.slope) * weight
        for end, side in ((limits.low, shown[0]), (limits.high, shown[1]))
    ]
    return _Scores(
        torch.minimum(small, large).sum(2),
        torch.maximum(small, large).sum(2),
        torch.maximum(*new).sum(2),
    )


def _hidden(
    layer: AttentionLayer, reading: _Reading, adjacency: Adjacency, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Ends of a hidden layer's activated output [N, D]."""
    limits = layer.limits["value"]  # type: ignore[index]
    assert isinstance(limits, Limits)
    ends: tuple[Tensor, Tensor] | None = None
    for scores in _scores(layer, reading, reading, adjacency):
        if reading.state is None:
            found = _first(scores, reading.low, limits, adjacency, neighbours)
        else:
            box = limits.low, limits.high
            found = mean_bounds(
                adjacency, scores.low, scores.high, scores.new, reading.low, reading.high, box, neighbours
            )
        ends = found if ends is None else (torch.minimum(ends[0], found[0]), torch.maximum(ends[1], found[1]))
    assert ends is not None
    low, high = (elu(layer.join(end)) for end in ends)
    return low, high


def _first(
    scores: _Scores, values: Tensor, limits: Limits, adjacency: Adjacency, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Scores and values of old edges are known: new neighbours take a mass and say something in the box."""
    index = adjacency.destination[:, None].expand_as(scores.low)
    top = torch.full_like(scores.new, -torch.inf).scatter_reduce(0, index, scores.high, "amax")
    top = torch.maximum(top, scores.new)
    total = torch.zeros_like(top).index_add(
        0, adjacency.destination, torch.exp(scores.low - top[adjacency.destination])
    )
    new = neighbours * torch.exp(scores.new - top)
    mass = (new / (total + new).clamp(min=1e-300))[:, :, None]
    mean = aggregate(edge_softmax(scores.low, adjacency), values, adjacency)
    return (
        mean + mass * (limits.low - mean).clamp(max=0),
        mean + mass * (limits.high - mean).clamp(min=0),
    )


def _lead(layer: AttentionLayer, reading: _Reading) -> Tensor:
    """[N, C, C]: least `z_a − z_b + bias_a − bias_b` of a neighbour, for classes a and b."""
    low, high = reading.low[:, 0], reading.high[:, 0]
    least = low[:, :, None] - high[:, None, :]
    if reading.state is not None:
        assert reading.calm is not None
        middle, radius = reading.state
        weight = layer.value.weight
        across = weight[:, :, None] - weight[:, None, :]
        plain = middle @ weight if layer.value.bias is None else middle @ weight + layer.value.bias
        linear = plain[:, :, None] - plain[:, None, :]
        linear = linear - (radius @ across.abs().flatten(1)).view_as(linear)
        least = torch.where(reading.calm[:, None, None], torch.maximum(least, linear), least)
    return least + _bias_lead(layer)


def _box_lead(layer: AttentionLayer) -> Tensor:
    """[C, C]: least lead that a new neighbour can say."""
    limits = layer.limits["value"]  # type: ignore[index]
    assert isinstance(limits, Limits)
    return limits.low[0][:, None] - limits.high[0][None, :] + _bias_lead(layer)


def _bias_lead(layer: AttentionLayer) -> Tensor:
    width = layer.channels
    bias = layer.value.weight.new_zeros(width) if layer.bias is None else layer.bias
    return bias[:, None] - bias[None, :]
