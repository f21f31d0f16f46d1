"""Certificates against injection: no few new neighbours, whatever their features, change a node's class.

Nodes gain up to t injected neighbours each, with any features and edges of their own. Behind limits
(`fgai.limit`) their values lie in an interval and a ball, and their scores have an upper bound:

- first layer: old edges keep their scores. New neighbours take at most the share `M = t e^s / (Z + t e^s)` of
  the attention, s their largest score and Z the sum over old edges; so an output h lies between
  `h + M min(0, low − h)` and `h + M max(0, high − h)`, and in a ball, see `fgai.bounds.intervals`;
- further layers: the weighted mean `Σ e^{s_j} v_j / Σ e^{s_j}` over intervals of scores and values is at
  least λ if `Σ_j min_s e^{s_j} (v_j − λ) ≥ 0`, new neighbours included; bisection finds the largest λ;
- output: the class stays if for every other class the same sum of `z_top − z_other` is positive at λ = 0. A
  new neighbour with the highest score does not have the smallest margin, see `fgai.bounds.scores`;
- between and after layers: see `fgai.bounds.steps`. An output layer of several heads, or in front of an
  activation, has intervals, and margins follow from them;
- top-k: members stay if the lowest score of each is above the highest of every other old neighbour.

The destination's side of the score is common to all neighbours, so scores count relative to each other; its
interval is cut in pieces, and all must hold. All is computed in float64; nodes for which the model, in its
own precision, gives something else are not certified.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict, cast

import torch
from torch import Tensor, nn

from fgai.attention import call_model, duplicate, evaluating, observe, prepared
from fgai.attention.interface import originals
from fgai.bounds.intervals import ROUNDING, LayerBounds, StateBounds, layer_ranges
from fgai.bounds.scores import first_layer_output, score_bounds, source_bounds
from fgai.bounds.steps import linear_map, propagate
from fgai.certificates.base import (
    BOOL,
    PRECISE,
    _Certificate,
    _pack_tensor,
    _record_fields,
    _share_of,
    _unpack_tensor,
)
from fgai.certificates.chain import _Chain, _same_outputs
from fgai.certificates.integrity import INVARIANT, find_alteration, invariant_layers
from fgai.certificates.kernels import _lost_members, _mean_bounds
from fgai.checks import one_of, whole
from fgai.errors import CheckpointError
from fgai.files import check
from fgai.graph import Graph
from fgai.models import as_graph, body_of
from fgai.records import Cell, Column, PackedArray, Table, data_frame
from fgai.sparse import Adjacency
from fgai.topk import topk_mask
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


WHERE = ("any", "direct")
INJECTION_PROMISE = (
    "Certified: new nodes with any features and any wiring, where a node gains at most t of them as"
    " neighbours. Old edges and features stay, and so do positional encodings, where a model reads them, as"
    " computed on the original graph. New neighbours may rank above old ones: order means the order of those"
    " that were there."
)


@dataclass(frozen=True, eq=False)
class _Subject:
    """A model and its graph; with a `problem` nothing about classes can be certified."""

    model: nn.Module
    original: Graph
    graph: Graph  # prepared, on the CPU
    chain: _Chain | None  # on the CPU; None if the model is no chain
    problem: str | None
    classes: Tensor  # int64 [N], of the model on its own device; -1 with a problem
    observation: Any  # of the model on the CPU; None with a problem


def _subject(model: nn.Module, data: Any) -> _Subject:
    """Read a model as a chain of layers; it is left as it was."""
    (model,) = originals(model)
    original = as_graph(data)
    graph, observation = prepared(model, original), None
    near, classes = graph.to("cpu"), torch.full((graph.num_nodes,), -1)
    with evaluating(model), torch.no_grad():
        chain = _chain_of(model, graph)
        if isinstance(chain, str):
            return _Subject(model, original, near, None, chain, classes, None)
        own_classes = call_model(model, graph).argmax(1).cpu()
        own, chain = duplicate(model).cpu(), copy.deepcopy(chain).cpu()
    with torch.no_grad():
        problem = _problem(own, chain, near)
        if problem is None:
            classes, observation = own_classes, observe(own, near)
    return _Subject(model, original, near, chain, problem, classes, observation)


def _chain_of(model: Any, graph: Graph) -> _Chain | str:
    """Return a model in evaluation mode as a chain, or why it is none."""
    if graph.features is None:
        return "the graph has no features"
    if graph.edge_weight is not None or graph.edge_attr is not None or graph.entry_values is not None:
        return "values on edges, guards and replaced values are not followed"
    if graph.batch is not None or graph.links is not None:
        return "only node-level read-outs are followed"
    if body_of(model) != "layers":
        if "torch_geometric.nn" not in sys.modules:  # then no layer is PyG's
            return "only GAT, GATv2 and models of PyG's GATConv and GATv2Conv are followed"
        from fgai.certificates.traced import _trace

        return _trace(model, graph)
    if (alteration := find_alteration(model)) is not None:
        return f"{alteration}; only GAT and GATv2 as they are can be followed"
    if model.guard is not None:
        return "weights on edges, guards and replaced values are not followed"
    if not model.is_rowwise:
        return "only node-level read-outs are followed"
    layers = list(model.convs)
    between: list[list[nn.Module]] = [[nn.ELU()] for _ in layers[1:]]
    return _Chain([f"convs.{index}" for index in range(len(layers))], layers, [[], *between, []])


def _problem(model: nn.Module, chain: _Chain, graph: Graph) -> str | None:
    if not all(weight.dtype in PRECISE for weight in model.parameters()):
        return "weights of less than float32 round too coarsely; use model.float()"
    if (problem := chain.problem()) is not None:
        return problem
    if not bool((chain.adjacency(graph).degree > 0).all()):
        return "some nodes have no neighbour, not even themselves; add self-loops"
    if body_of(model) == "layers":  # declared, not traced
        return None
    assert graph.features is not None
    precise = graph.replace(features=graph.features.to("cpu", torch.float64))
    if not _same_outputs(duplicate(model).double(), copy.deepcopy(chain).double(), precise):
        return "its layers, put together again, give something else than the model"
    return None


class _OrderLayout(TypedDict):
    name: str
    status: Literal["invariant", "bound", "unknown"]
    reason: str
    certified: PackedArray | None


@typed
@dataclass(frozen=True, eq=False)
class LayerOrder:
    """Which nodes keep the ranking of their old neighbours in the layer `name`.

    Attributes:
        status: `invariant`: no injection reorders them (positional encodings kept); `bound`; `unknown`.
        reason: in a sentence.
        certified: bool [N], the top-k among old neighbours provably stays; None where unknown.
    """

    LAYOUT: ClassVar[Any] = list[_OrderLayout]

    name: str
    status: str
    reason: str
    certified: Tensor | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the array is packed."""
        return {**vars(self), "certified": _pack_tensor(self.certified)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises `CheckpointError` for values that do not fit."""
        check(values, _OrderLayout, "a layer")
        certified = _unpack_tensor(values["certified"], "certified of a layer", BOOL, 1)
        return cls(**{**values, "certified": certified})


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class InjectionCertificate(_Certificate):
    """Which nodes provably keep their class, and which their explanation, whatever is injected.

    Attributes:
        certified: bool [N], the class provably stays.
        classes: int64 [N], that class; -1 where nothing is known.
        degree: int64 [N], neighbours, self-loops included.
        reason: why nothing is certified, or the method.
        known: whether classes could be bounded at all.
        layers: the order of old neighbours, layer by layer.
    """

    KIND: ClassVar[str] = "injection-certificate"
    LAYER: ClassVar[type[LayerOrder]] = LayerOrder
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        "certified": (BOOL, 1),
        "classes": ("<i8", 1),
        "degree": ("<i8", 1),
    }
    OLD_NAMES: ClassVar[dict[str, str]] = {"holds": "certified"}

    neighbours: int
    where: str
    k: int
    certified: Tensor
    classes: Tensor
    degree: Tensor
    reason: str
    known: bool
    layers: tuple[LayerOrder, ...]
    seconds: float
    promise: str = INJECTION_PROMISE

    def share(self, nodes: Tensor | None = None) -> float:
        """Share of nodes, or of those under a mask, whose class is certified."""
        return _share_of(self.certified, nodes)

    def order_share(self, layer: int, nodes: Tensor | None = None) -> float | None:
        """Share of the nodes with more than k neighbours whose top-k is certified; None where unknown."""
        certified, counted = self.layers[layer].certified, self.degree > self.k
        if nodes is not None:
            counted &= nodes.to(counted.device)
        return None if certified is None else _share_of(certified, counted)

    def tables(self) -> list[Table]:
        """Return one row for the class and one for every layer."""
        share = self.share() if self.known else None
        rows: list[list[Cell]] = [["class", "bound" if self.known else "unknown", share, self.reason]]
        for index, layer in enumerate(self.layers):
            share = self.order_share(index)
            rows.append([f"top {self.k} of {layer.name}", layer.status, share, layer.reason])
        threat = f"t = {self.neighbours} injected neighbours, {self.where}"
        columns = [Column("what stays"), Column("status"), Column("share", ".3f"), Column("why")]
        title = f"{self.model['class']} on {self.data['name']}: {threat}"
        return [Table(title, columns, rows, (self.promise,))]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per node, and a column for every layer whose order is known."""
        values = {"degree": self.degree, "class": self.classes, "class certified": self.certified}
        for layer in self.layers:
            if layer.certified is not None:
                values[f"top {self.k} of {layer.name}"] = layer.certified
        return data_frame({name: tensor.numpy() for name, tensor in values.items()})

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the fields of a file."""
        return {**super().layout(), "where": Literal[WHERE]}

    def _check_shapes(self) -> None:
        super()._check_shapes()
        if {len(one.certified) for one in self.layers if one.certified is not None} - {len(self.classes)}:
            raise CheckpointError("the layers of the record are of another number of nodes than its classes")
        if self.neighbours < 0 or self.k < 1:
            raise CheckpointError("neighbours or k of the record is out of range")


PIECES = 8  # pieces of the interval of a destination's score


@typed
def certify_injection(
    model: nn.Module, data: Any, *, neighbours: int = 1, where: str = "any", k: int = 5
) -> InjectionCertificate:
    """Certify which nodes keep class and explanation when nodes with any features are injected.

    The model is a GAT or GATv2 behind limits, or a user's of PyG's `GATConv` or `GATv2Conv` in a row, with
    activations, batch norm, linear layers and dropout between and after them. Of others only the first
    layer's ranking is certified, if their class declares `Capabilities`. A node gains at most t =
    `neighbours` injected ones: with `where="any"` every node of the graph may, with `"direct"` only the
    certified one (models of more than two layers get the bound of `any`). Explanations are of size k. Raises
    `InputError` for an argument out of range.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.limit(fgai.train("GAT", data, epochs=20, progress=False), data)
        >>> certificate = certify_injection(model, data, neighbours=0)
        >>> certificate.share(), certificate.layers[0].status
        (1.0, 'invariant')
    """
    began = perf_counter()
    whole(neighbours, "neighbours", 0)
    one_of(where, "where", WHERE)
    whole(k, "k", 1)
    subject = _subject(model, data)
    graph, chain = subject.graph, subject.chain
    orders = _first_layer_orders(subject.model, graph, chain)
    certified, reason = torch.zeros(graph.num_nodes, dtype=torch.bool), subject.problem
    if reason is None:
        ranks = subject.observation.attention.ranking()
        with torch.no_grad():
            proof = _InjectionBounds(subject, where)
            reason, precise = proof.reason, ~proof.imprecise_nodes(subject)
            bounds = proof.bounds(neighbours)
            certified = proof.certified_classes(bounds, neighbours) & precise
            for index, (own, rank) in enumerate(zip(bounds, ranks, strict=True)):
                if orders[index].status != "invariant":
                    orders[index] = proof.order(orders[index].name, index, own, rank, k, precise)
    return InjectionCertificate(
        neighbours=neighbours,
        where=where,
        k=k,
        certified=certified,
        classes=subject.classes,
        degree=(graph.adjacency if chain is None else chain.adjacency(graph)).degree,
        reason=reason,
        known=subject.problem is None,
        layers=tuple(orders),
        seconds=perf_counter() - began,
        **_record_fields(subject.model, graph, subject.original, "fgai.certify_injection"),
    )


def _first_layer_orders(model: nn.Module, graph: Graph, chain: _Chain | None) -> list[LayerOrder]:
    """Return the order of each layer: invariant, with all nodes certified, or unknown."""
    reasons = invariant_layers(model, graph)
    if chain is not None and set(chain.names) == set(reasons):
        # The steps before the first layer act on each node alone.
        reasons = {name: reasons[name] for name in chain.names}
        reasons[chain.names[0]] = reasons[chain.names[0]] or INVARIANT
    unknown = ("unknown", "its inputs change, and they are not followed here", None)
    everything = torch.ones(graph.num_nodes, dtype=torch.bool)
    return [
        LayerOrder(name, *(unknown if why is None else ("invariant", why, everything)))
        for name, why in reasons.items()
    ]


@dataclass(frozen=True, eq=False)
class _Terms:
    """Terms of margins over exp(peak [N]): of old edges [E, C], of a new one [N, C]; 0 for the class top."""

    edges: Tensor
    new: Tensor
    peak: Tensor

    def margins(self, adjacency: Adjacency, classes: Tensor, neighbours: int) -> Tensor:
        """Bound the margins of `classes` [N] over the others [N, C] from below; infinite over themselves."""
        total = torch.zeros_like(self.new).index_add(0, adjacency.destination, self.edges)
        return (total + neighbours * self.new).scatter(1, classes[:, None], torch.inf)


class _InjectionBounds:
    """Bounds of every layer when nodes gain new neighbours, `clean` without them; float64 on the CPU."""

    reason = "intervals behind limits; new neighbours at the ceiling of their scores and values"

    def __init__(self, subject: _Subject, where: str = "any") -> None:
        assert subject.chain is not None and subject.graph.features is not None
        chain = copy.deepcopy(subject.chain).double()
        self.layers, self.steps, last = chain.layers, chain.steps, chain.layers[-1]
        self.ranges = [layer_ranges(layer) for layer in self.layers]
        self.adjacency = chain.adjacency(subject.graph)
        self.direct = where == "direct" and len(self.layers) <= 2
        # The linear map behind a last layer of one head; None if there is none.
        self.read_out = linear_map(self.steps[-1], last.channels) if last.heads == 1 else None
        features = subject.graph.features.to("cpu", torch.float64)
        inputs, self.logits = chain.run(features, self.adjacency)
        self.clean = [LayerBounds.exact(layer, x) for layer, x in inputs]

    def bounds(self, neighbours: int) -> list[LayerBounds]:
        """Return the bounds of every layer when all nodes gain `neighbours` new ones."""
        bounds = self.clean[:1]
        for index in range(1, len(self.layers)):
            state = self._output(index - 1, bounds[-1], bounds[-1], neighbours)
            for step in self.steps[index]:
                state = propagate(step, state)
            bounds.append(LayerBounds.from_state(self.layers[index], self.ranges[index], state))
        return bounds

    def _output(self, index: int, own: LayerBounds, others: LayerBounds, neighbours: int) -> StateBounds:
        """Bound a layer's output [N, D]; nodes have the bounds `own`, their neighbours `others`."""
        layer, ranges = self.layers[index], self.ranges[index]
        limits = ranges["value"]
        # One piece: more of them are hardly tighter here, and cost as many times more.
        (scores,) = score_bounds(layer, ranges, own, others, self.adjacency)
        if own.values is None:
            return first_layer_output(layer, limits, scores, own.low, self.adjacency, neighbours)
        ends = (others.low, others.high), (own.low, own.high), (limits.low, limits.high)
        low, high = _mean_bounds(self.adjacency, scores, *ends, neighbours)
        return StateBounds(layer.join(low), layer.join(high))

    def certified_classes(self, bounds: list[LayerBounds], neighbours: int) -> Tensor:
        """Return which nodes keep their class, bool [N]."""
        own, classes = bounds[-1], self.logits.argmax(1)
        others = self.clean[-1] if self.direct else own
        if self.read_out is None:
            output = self._output(len(self.layers) - 1, own, others, neighbours)
            return _margins_positive(self.steps[-1], output, classes)
        certified = self.adjacency.degree > 0
        for terms in self.margin_terms(own, others, classes, certified, PIECES):
            certified = certified & (terms.margins(self.adjacency, classes, neighbours) > 0).all(1)
        return certified

    def margin_terms(
        self,
        own: LayerBounds,
        others: LayerBounds,
        classes: Tensor,
        nodes: Tensor,
        pieces: int,
        peak: Tensor | None = None,
    ) -> Iterator[_Terms]:
        """Yield terms of the margins of `classes` in the last layer, 0 but for `nodes`, bool [N], by piece.

        Nodes have the bounds `own`, neighbours `others`. `peak` is by default the first largest score.
        """
        layer, ranges, adjacency = self.layers[-1], self.ranges[-1], self.adjacency
        read_out = self.read_out if self.steps[-1] else None
        of_edge = torch.where(nodes, classes, -1)[adjacency.destination]
        parts = []
        for top in torch.unique(classes[nodes]).tolist():
            tops = slice(top, top + 1)
            margins = others.margins(layer, tops, read_out)[:, 0]
            loops = margins if own is others else own.margins(layer, tops, read_out)[:, 0]
            index = (of_edge == top).nonzero().flatten()
            parts.append((top, index, (nodes & (classes == top)).nonzero().flatten(), margins, loops))
        for scores in score_bounds(layer, ranges, own, others, adjacency, pieces):
            if read_out is not None:
                scores = scores.behind(layer, ranges["value"], read_out)
            low, high, new = scores.low[:, 0], scores.high[:, 0], scores.new[:, 0]
            if peak is None:
                peak = new.amax(1).scatter_reduce(0, adjacency.destination, high, "amax")
            edges = low.new_zeros(adjacency.num_edges, self.logits.shape[1])
            of_new = torch.zeros_like(self.logits)
            for top, index, rows, margins, loops in parts:
                source, ends = adjacency.source[index], adjacency.destination[index]
                least = torch.where((source == ends)[:, None], loops[source], margins[source])
                weak, strong = ((end[index] - peak[ends]).exp()[:, None] for end in (low, high))
                term = torch.where(least < 0, strong, weak) * least
                term = term - ROUNDING * term.abs()
                term[:, top] = 0.0
                edges[index] = term
                worst = (new[rows] - peak[rows][:, None]).exp()[:, :, None] * scores.new_margins[:, top]
                of_new[rows] = (1 + ROUNDING) * worst.clamp(max=0).amin(1)
            yield _Terms(edges, of_new, peak)

    def order(
        self, name: str, index: int, own: LayerBounds, ranks: Tensor, k: int, precise: Tensor
    ) -> LayerOrder:
        """Return where the top-k among old neighbours provably stays, among the `precise` nodes."""
        layer = self.layers[index]
        others = self.clean[index] if self.direct else own
        members = topk_mask(ranks, self.adjacency.rowptr, k)
        if layer.score == "additive":
            low, high = source_bounds(own, others, self.adjacency)
            slope, why = layer.slope, "scores of sources apart; the destination's side is common"
        else:
            (scores,) = score_bounds(layer, self.ranges[index], own, others, self.adjacency)
            low, high, slope, why = scores.low, scores.high, 1.0, "intervals of scores apart"

        def ahead(first: Tensor, second: Tensor) -> Tensor:
            gap, size = low[first] - high[second], low[first].abs() + high[second].abs()
            return torch.where(gap > 0, slope * gap, gap).sum(1) > ROUNDING * size.sum(1)

        stays = _lost_members(self.adjacency.rowptr, members, k, ahead) == 0
        return LayerOrder(name, "bound", why, stays & precise)

    def imprecise_nodes(self, subject: _Subject) -> Tensor:
        """Return the nodes, bool [N], whose logits or received values differ in the model's own precision."""
        # As with a large common offset of features that the weights cancel: the sums are then all rounding.
        chain, graph = subject.chain, subject.graph
        assert chain is not None and graph.features is not None
        imprecise = subject.classes != self.logits.argmax(1)
        source, destination = self.adjacency.source, self.adjacency.destination
        received = torch.zeros_like(imprecise)
        inputs, logits = chain.run(graph.features, self.adjacency)
        for clean, (layer, x) in zip(self.clean, inputs, strict=True):
            exact = clean.source[0], clean.destination[0], clean.low
            for own, other in zip(layer.sides(x), exact, strict=True):
                received |= _differ(own, other)
            received = received.index_fill(0, destination[received[source]], True)
        imprecise |= received | _differ(logits, self.logits)
        return imprecise | _differ(subject.observation.logits, self.logits)


def _differ(own: Tensor, exact: Tensor) -> Tensor:
    """Return which rows, bool [N], are NaN or differ by more than `ROUNDING` of the largest number."""
    # Of the row, or of the median row: numbers of a row may be small because they cancel.
    difference, size = (one.abs().flatten(1).amax(1) for one in (own.double() - exact, exact))
    return ~(difference <= ROUNDING * size.clamp(min=size.median()))


def _margins_positive(steps: list[nn.Module], state: StateBounds, classes: Tensor) -> Tensor:
    """Return where the class stays ahead of every other after `steps`, bool [N]."""
    final = [step for step in steps[-1:] if isinstance(step, nn.Linear)]
    for step in steps[: len(steps) - len(final)]:
        state = propagate(step, state)
    weight, bias = cast(tuple[Tensor, Tensor], linear_map(final, state.low.shape[1]))
    certified = torch.ones(len(classes), dtype=torch.bool)
    for top in torch.unique(classes).tolist():
        rows = (classes == top).nonzero().flatten()
        across, shift = weight[:, top, None] - weight, bias[top] - bias
        sizes = weight[:, top, None].abs() + weight.abs()  # each logit is rounded by itself
        part = state.select(rows)
        size = torch.maximum(part.low.abs(), part.high.abs()) @ sizes + bias[top].abs() + bias.abs()
        positive = part.linear(across, shift)[0] > ROUNDING * size
        positive[:, top] = True
        certified[rows] = positive.all(1)
    return certified
