"""Certificates against injection: no few new neighbours, whatever their features, change a node's class.

Threat: nodes gain up to t injected neighbours each, with any features and any wiring of their own. Behind
limits (`fgai.limit`) whatever such a neighbour is, its value lies in the box and ball of the layer's limits
and its score has a ceiling. We carry what is known of every node through the network:

- first layer: old edges keep their scores, since features do not change. New neighbours take a mass of at
  most `M = t e^s / (Z + t e^s)`, s their score at its ceiling and Z the sum over old edges; so an output h
  lies between `h + M min(0, low − h)` and `h + M max(0, high − h)`, and in a ball, see `reading`;
- further layers: values and scores of old neighbours lie in intervals around those of the middle state. The
  least weighted mean `Σ e^{s_j} v_j / Σ e^{s_j}` is at least λ if `Σ_j min_s e^{s_j} (v_j − λ) ≥ 0`, new
  neighbours included; bisection on λ finds the best;
- output: the class stays if for every other class the same sum of `z_top − z_other` is positive at λ = 0. A
  new neighbour that scores high does not say the worst, and the other way round: both lie on an ellipse,
  whose arc between them is cut in sectors;
- top-k: members stay if the least score of each is above the largest of every other old neighbour. The
  destination's side is common to all of them.

The score of the destination is common to all neighbours; its interval is cut in pieces, the worst of which
counts. Everything is computed in float64 and never says more than what holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, leaky_relu

from fgai.attention import limits_of, model_name, observe, prepared
from fgai.certificates.familiar import unfamiliar
from fgai.certificates.injected import Injection, InjectionCertificate, LayerOrder
from fgai.certificates.injection_kernels import class_kept, mean_bounds, order_kept
from fgai.certificates.invariance import invariant_layers
from fgai.certificates.reading import Ball, Reading, State, bias_lead, limits_named, loudest
from fgai.checks import whole
from fgai.graph import Graph
from fgai.models import GAT, AttentionLayer, GATv2, as_graph
from fgai.ops import aggregate, edge_softmax
from fgai.sparse import Adjacency, Features
from fgai.tasks import get_task
from fgai.topk import topk_mask
from fgai.typed import typed
from fgai.version import versions

PIECES = 8
"""Into which the interval of a destination's score is cut."""
SECTORS = 16
"""Into which the arc between a new neighbour's highest score and its worst word is cut."""
ROUNDING = 1e-5
"""Of the model's own float32 arithmetic, relative to what is summed; a class must stay by more."""


@typed
def certify_injection(
    model: nn.Module, data: Any, *, neighbours: int = 1, where: str = "any", k: int = 5
) -> InjectionCertificate:
    """Certify which nodes keep class and explanation when nodes with any features are injected.

    Args:
        model: GAT or GATv2 behind limits; of others no class is certified. Of the ranking of old neighbours
            the first layer is certified without limits, too, see `fgai.certificates.invariance`.
        data: a `Graph` or PyG `Data`.
        neighbours: t, injected neighbours that a node gains at most.
        where: `any`: every node of the graph may gain t of them; `direct`: the certified node alone does.
            With more than two layers `direct` is answered by the bound for `any`, which holds for it, too.
        k: size of an explanation.

    Returns:
        A certificate per node; `share(mask)` of it.

    Raises:
        InputError: an argument out of range.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.limit(fgai.train("GAT", data, epochs=20, progress=False), data)
        >>> found = certify_injection(model, data, neighbours=0)
        >>> found.share(), found.layers[0].status
        (1.0, 'invariant')
    """
    began = perf_counter()
    threat = Injection(neighbours, where)
    whole(k, "k", 1)
    graph = prepared(model, as_graph(data)).to("cpu")
    exact = copy.deepcopy(model).cpu().eval()
    with torch.no_grad():
        doubt = _doubt(exact, graph)
        orders = _orders(exact, graph)
        if doubt is None:
            ranks = observe(exact, graph).attention.ranking()
            proof = _Proof(exact.double(), graph, threat)
            holds, classes, reason = *proof.classes(), proof.reason
            orders = [
                order if order.status == "invariant" else proof.order(order.name, place, rank, k)
                for place, (order, rank) in enumerate(zip(orders, ranks, strict=True))
            ]
        else:
            holds = torch.zeros(graph.num_nodes, dtype=torch.bool)
            classes, reason = torch.full((graph.num_nodes,), -1), doubt
    return InjectionCertificate(
        neighbours=neighbours,
        where=where,
        k=k,
        holds=holds,
        classes=classes,
        degree=graph.adjacency.degree,
        reason=reason,
        known=doubt is None,
        layers=tuple(orders),
        model={"class": model_name(model), "config": getattr(model, "config", None)},
        data={"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges},
        version=versions(),
        seconds=perf_counter() - began,
    )


def _orders(model: nn.Module, graph: Graph) -> list[LayerOrder]:
    """What is known of every layer's ranking without any bound."""
    everything = torch.ones(graph.num_nodes, dtype=torch.bool)
    return [
        LayerOrder(name, "unknown", "its inputs change, and they are not followed here", None)
        if why is None
        else LayerOrder(name, "invariant", why, everything)
        for name, why in invariant_layers(model, graph).items()
    ]


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


class _Proof:
    """What every layer reads under the threat.

    Args:
        model: GAT or GATv2 behind limits, float64, in eval mode.
        graph: prepared for it, on the CPU.
        threat: what is injected.
    """

    reason = "intervals behind limits; new neighbours at the ceiling of their scores and values"

    def __init__(self, model: Any, graph: Graph, threat: Injection) -> None:
        assert graph.features is not None
        self.layers: list[AttentionLayer] = list(model.convs)
        self.adjacency, self.neighbours = graph.adjacency, threat.neighbours
        clean: Tensor | Features = graph.features.to("cpu", torch.float64)
        state: State | None = None
        self.readings: list[Reading] = []
        self.exact: list[Reading] = []
        for layer in self.layers:
            point = Reading.exact(layer, clean)
            moved = point if state is None else Reading.around(layer, state)
            self.exact.append(point)
            self.readings.append(moved)
            out = layer(clean, self.adjacency)
            if layer is not self.layers[-1]:
                state, clean = _hidden(layer, moved, self.adjacency, self.neighbours), elu(out)
        self.logits = out
        self.direct = threat.where == "direct" and len(self.layers) <= 2

    def classes(self) -> tuple[Tensor, Tensor]:
        """Return which nodes keep their class, and the classes."""
        last, own = self.layers[-1], self.readings[-1]
        others = self.exact[-1] if self.direct else own
        classes = self.logits.argmax(1)
        holds = torch.ones(len(classes), dtype=torch.bool)
        apart, mine = others.lead(last), own.lead(last)
        for scores in _scores(last, own, others, self.adjacency):
            holds &= class_kept(
                self.adjacency,
                scores.low,
                scores.high,
                scores.new,
                apart,
                mine,
                scores.words,
                classes,
                self.neighbours,
                ROUNDING,
            )
        return holds, classes

    def order(self, name: str, place: int, ranks: Tensor, k: int) -> LayerOrder:
        """Where the top-k among old neighbours provably stays."""
        layer, own = self.layers[place], self.readings[place]
        others = self.exact[place] if self.direct else own
        members = topk_mask(ranks, self.adjacency.rowptr, k)
        if layer.score == "additive":
            low, high = _source_ends(own, others, self.adjacency)
            slope, why = layer.slope, "scores of sources apart; the destination's side is common"
        else:
            (scores,) = _scores(layer, own, others, self.adjacency)
            low, high, slope, why = scores.low, scores.high, 1.0, "intervals of scores apart"
        holds = order_kept(self.adjacency, low, high, members, slope, ROUNDING)
        return LayerOrder(name, "bound", why, holds)


@dataclass(frozen=True, eq=False)
class _Scores:
    """Ends of the scores of old edges [E, H], and what a new neighbour may do.

    Attributes:
        low: of old edges.
        high: of old edges.
        new: ceilings of a new neighbour's score, [N, H, S] by sector.
        words: with each, the least lead of class a over b that it says then, [S, C, C]; empty where H > 1.
    """

    low: Tensor
    high: Tensor
    new: Tensor
    words: Tensor


def _source_ends(own: Reading, others: Reading, adjacency: Adjacency) -> tuple[Tensor, Tensor]:
    """Ends of the source's side on every edge; `own` counts for a node itself."""
    source, destination = adjacency.source, adjacency.destination
    itself = (source == destination)[(...,) + (None,) * (own.source[0].dim() - 1)]
    low, high = (
        torch.where(itself, mine[source], other[source])
        for mine, other in zip(own.source, others.source, strict=True)
    )
    return low, high


def _scores(layer: AttentionLayer, own: Reading, others: Reading, adjacency: Adjacency) -> Iterator[_Scores]:
    """Scores for every piece of the destinations' intervals."""
    low, high = _source_ends(own, others, adjacency)
    destination, slope = adjacency.destination, layer.slope
    if layer.score == "dynamic":
        yield _dynamic(layer, low, high, own.destination, destination)
        return
    ceilings, words = _sectors(layer)
    start, stop = own.destination
    pieces = 1 if torch.equal(start, stop) else PIECES
    for piece in range(pieces):
        first, last = (start + (stop - start) * (piece + end) / pieces for end in (0, 1))
        yield _Scores(
            leaky_relu(low + first[destination], slope),
            leaky_relu(high + last[destination], slope),
            leaky_relu(ceilings[None] + last[:, :, None], slope),
            words,
        )


def _sectors(layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """Ceilings of the source's side of a new neighbour [H, S], and its least leads with each [S, C, C].

    In units of half the range a new neighbour is a point u of a ball of radius R. Its score `p + R|α| x` and
    `z_b − z_a = q + R|β| (x cos θ + y sin θ)` trace an ellipse; what is largest in both lies on the arc from
    the top of one to the top of the other.
    """
    limits, value = limits_named(layer, "source"), limits_named(layer, "value")
    top = torch.minimum(limits.high, loudest(value, layer.source_weight))
    top = torch.maximum(top, limits.low)
    if layer.heads > 1:
        return top[:, None], top.new_zeros(0, 0, 0)
    half, middle = (value.high - value.low)[0] / 2, (value.high + value.low)[0] / 2
    weight, radius = layer.source_weight[0], value.radius
    across = half[:, None] + half[None, :]
    least = middle[:, None] - middle[None, :] - across  # z_a − z_b in the box
    if not bool(radius.isfinite()):
        return top[:, None], (least + bias_lead(layer))[None]
    alpha = weight * half
    size = alpha.square().sum().sqrt()
    beta = (half[:, None].square() + half[None, :].square()).sqrt()
    product = (alpha * half)[None, :] - (alpha * half)[:, None]
    toward = product / (size * beta).clamp(min=1e-300)
    angle = torch.acos(toward.clamp(-1, 1))  # [a, b]: between the score and z_b − z_a
    centre = (weight * middle).sum()
    ceilings, words = [], []
    for sector in range(SECTORS):
        # Sectors are cut by the angle from the top of the score, up to π; beyond θ both only fall.
        first, last = math.pi * sector / SECTORS, math.pi * (sector + 1) / SECTORS
        ceilings.append(torch.minimum(top, centre + radius * size * math.cos(first)).clamp(min=limits.low))
        nearest = torch.where(angle <= last, 0.0, angle - last)
        said = torch.minimum(across, radius * beta * nearest.cos())
        words.append(middle[:, None] - middle[None, :] - said)
    return torch.stack(ceilings, dim=1), torch.stack(words) + bias_lead(layer)


def _dynamic(
    layer: AttentionLayer, low: Tensor, high: Tensor, shown: tuple[Tensor, Tensor], destination: Tensor
) -> _Scores:
    """GATv2: each channel of the score is monotone in both sides."""
    weight, slope, limits = layer.score_weight, layer.slope, limits_named(layer, "value")
    small = leaky_relu(low + shown[0][destination], slope) * weight
    large = leaky_relu(high + shown[1][destination], slope) * weight
    new = [
        leaky_relu(end + side, slope) * weight
        for end, side in ((limits.low, shown[0]), (limits.high, shown[1]))
    ]
    ceiling = torch.maximum(*new).sum(2)
    if bool(limits.radius.isfinite()):
        middle, half = (limits.low + limits.high) / 2, (limits.high - limits.low) / 2
        steep = weight.abs() * max(1.0, abs(slope))
        calm = [leaky_relu(middle + side, slope) * weight for side in shown]
        around = limits.radius * (steep * half).square().sum(1).sqrt()
        ceiling = torch.minimum(ceiling, torch.maximum(*calm).sum(2) + around)
    words = low.new_zeros(0, 0, 0)
    if layer.heads == 1:
        words = (limits.low[0][:, None] - limits.high[0][None, :] + bias_lead(layer))[None]
    return _Scores(
        torch.minimum(small, large).sum(2), torch.maximum(small, large).sum(2), ceiling[:, :, None], words
    )


def _hidden(layer: AttentionLayer, reading: Reading, adjacency: Adjacency, neighbours: int) -> State:
    """A hidden layer's activated output [N, D]."""
    limits = limits_named(layer, "value")
    if reading.said is None:
        (scores,) = _scores(layer, reading, reading, adjacency)
        return _first(layer, scores, reading.low, adjacency, neighbours)
    ends: tuple[Tensor, Tensor] | None = None
    for scores in _scores(layer, reading, reading, adjacency):
        box, new = (limits.low, limits.high), scores.new.amax(2)
        common = (scores.low, scores.high, new, reading.low, reading.high, box, neighbours)
        found = mean_bounds(adjacency, *common)
        ends = found if ends is None else (torch.minimum(ends[0], found[0]), torch.maximum(ends[1], found[1]))
    assert ends is not None
    return State(elu(layer.join(ends[0])), elu(layer.join(ends[1])))


def _first(
    layer: AttentionLayer, scores: _Scores, values: Tensor, adjacency: Adjacency, neighbours: int
) -> State:
    """Scores and values of old edges are known: new neighbours take a mass and say something in the box."""
    limits = limits_named(layer, "value")
    ceiling = scores.new.amax(2)
    index = adjacency.destination[:, None].expand_as(scores.low)
    top = torch.full_like(ceiling, -torch.inf).scatter_reduce(0, index, scores.high, "amax")
    top = torch.maximum(top, ceiling)
    total = torch.zeros_like(top).index_add(
        0, adjacency.destination, torch.exp(scores.low - top[adjacency.destination])
    )
    new = neighbours * torch.exp(ceiling - top)
    mass = (new / (total + new).clamp(min=1e-300))[:, :, None]
    mean = aggregate(edge_softmax(scores.low, adjacency), values, adjacency)
    low = layer.join(mean + mass * (limits.low - mean).clamp(max=0))
    high = layer.join(mean + mass * (limits.high - mean).clamp(min=0))
    ball = None
    if bool(limits.radius.isfinite()) and layer.concat:
        slope = high.clamp(max=0).exp()  # of ELU, largest at the upper end
        middle, half = (limits.low + limits.high) / 2, (limits.high - limits.low) / 2
        # Heads may listen to different new neighbours: each of them brings a ball of its own.
        radius = limits.radius * math.sqrt(max(1, min(neighbours, layer.heads)))
        drift, spread = slope * (mass * (middle - mean)).flatten(1), slope * (mass * half).flatten(1)
        ball = Ball(elu(layer.join(mean)), drift, spread, radius)
    return State(elu(low), elu(high), ball)
