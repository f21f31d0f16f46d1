"""Certificates against injection: no few new neighbours, whatever their features, change a node's class.

Threat: nodes gain up to t injected neighbours each, with any features and edges of their own. Behind limits
(`fgai.limit`) the value of such a neighbour lies in the box and ball of the layer's limits, and its score has
a ceiling. Bounds of every node are carried through the network:

- first layer: old edges keep their scores. New neighbours take a mass of at most `M = t e^s / (Z + t e^s)`,
  s their score at its ceiling and Z the sum over old edges; so an output h lies between
  `h + M min(0, low − h)` and `h + M max(0, high − h)`, and in a ball, see `fgai.bounds.reading`;
- further layers: values and scores of old neighbours lie in intervals. The least weighted mean
  `Σ e^{s_j} v_j / Σ e^{s_j}` is at least λ if `Σ_j min_s e^{s_j} (v_j − λ) ≥ 0`, new neighbours included;
  bisection on λ finds the best;
- output: the class stays if for every other class the same sum of `z_top − z_other` is positive at λ = 0. A
  new neighbour with a high score does not have the worst value: both lie on an ellipse, whose arc between
  them is cut in sectors;
- between and after layers: activations that never fall, batch norm and linear maps, see `fgai.bounds.steps`.
  An output layer of several heads, or behind an activation, has intervals; its classes are read off them;
- top-k: members stay if the least score of each is above the largest of every other old neighbour.

The destination's side of the score is common to all neighbours, so scores count relative to each other, see
`fgai.bounds.scores`; its interval is cut in pieces, the worst of which counts. Everything is computed in
float64; nodes for which the model, in its own precision, gives something else are not certified.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict, cast

import torch
from torch import Tensor, nn

from fgai.attention import evaluating
from fgai.bounds.reading import ROUNDING, Reading, State, ranges_of
from fgai.bounds.scores import first_layer, scores_of, source_ends
from fgai.bounds.steps import affine_map, follow
from fgai.certificates.arrays import BOOL, _ArrayDocument, packed, unpacked
from fgai.certificates.chain import Chain
from fgai.certificates.familiar import INVARIANT, invariant_layers
from fgai.certificates.kernels import _mean_bounds, class_kept, order_kept
from fgai.certificates.subject import _subject
from fgai.checks import one_of, whole
from fgai.errors import CheckpointError
from fgai.files import check
from fgai.graph import Graph
from fgai.records import Cell, Column, PackedArray, Table, data_frame
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


class _OrderLayout(TypedDict):
    """A layer in a file."""

    name: str
    status: Literal["invariant", "bound", "unknown"]
    reason: str
    holds: PackedArray | None


@typed
@dataclass(frozen=True, eq=False)
class LayerOrder:
    """What is proved about the ranking of old neighbours in one layer.

    Attributes:
        name: of the layer.
        status: `invariant`: no injection reorders them (if positional encodings are kept); `bound`;
            `unknown`.
        reason: in a sentence.
        holds: bool [N], the top-k among old neighbours stays; None where unknown.
    """

    name: str
    status: str
    reason: str
    holds: Tensor | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the array is packed."""
        return {**vars(self), "holds": packed(self.holds)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises `CheckpointError` for values that do not fit."""
        check(values, _OrderLayout, "a layer")
        holds = unpacked(values["holds"], "holds of a layer", BOOL, 1)
        return cls(values["name"], values["status"], values["reason"], holds)


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class InjectionCertificate(_ArrayDocument):
    """Which nodes keep their class, and which their explanation, whatever is injected.

    Attributes:
        neighbours: t, injected neighbours of a node at most.
        where: `any`, every node may gain them, or `direct`, the certified node alone.
        k: size of an explanation.
        holds: bool [N], the class provably stays.
        classes: int64 [N], that class; -1 where nothing is known.
        degree: int64 [N], neighbours, self-loops included.
        reason: why nothing is certified, or how it was.
        known: whether a bound of the class could be computed at all.
        layers: what is proved about the order of old neighbours, layer by layer.
        model: class and settings.
        data: name and sizes.
        version: of fgai and torch.
        seconds: it took.
        promise: what is certified, in a sentence.
        provenance: see `fgai.records.provenance`.
    """

    KIND: ClassVar[str] = "injection-certificate"
    LAYER: ClassVar[type[LayerOrder]] = LayerOrder
    LAYER_LAYOUT: ClassVar[Any] = list[_OrderLayout]
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        "holds": (BOOL, 1),
        "classes": ("<i8", 1),
        "degree": ("<i8", 1),
    }

    neighbours: int
    where: str
    k: int
    holds: Tensor
    classes: Tensor
    degree: Tensor
    reason: str
    known: bool
    layers: tuple[LayerOrder, ...]
    model: dict[str, Any]
    data: dict[str, Any]
    version: dict[str, str]
    seconds: float
    promise: str = INJECTION_PROMISE
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def share(self, nodes: Tensor | None = None) -> float:
        """Share of nodes, or of those under a mask, whose class is certified."""
        return _share_of(self.holds, nodes)

    def order_share(self, layer: int, nodes: Tensor | None = None) -> float | None:
        """Share of the nodes with more than k neighbours whose top-k is certified; None where unknown."""
        holds = self.layers[layer].holds
        if holds is None:
            return None
        counted = self.degree > self.k
        if nodes is not None:
            counted &= nodes.to(counted.device)
        return _share_of(holds, counted)

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
        orders = {f"top {self.k} of {one.name}": one.holds for one in self.layers if one.holds is not None}
        values = {"degree": self.degree, "class": self.classes, "class holds": self.holds, **orders}
        return data_frame({name: tensor.numpy() for name, tensor in values.items()})

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the fields of a file."""
        return {**super().layout(), "where": Literal[WHERE]}

    def _check_lengths(self) -> None:
        sizes = {len(self.holds), len(self.classes), len(self.degree)}
        sizes |= {len(layer.holds) for layer in self.layers if layer.holds is not None}
        if len(sizes) != 1:
            raise CheckpointError(f"the values of the record are of {sorted(sizes)} nodes")
        if self.neighbours < 0 or self.k < 1:
            raise CheckpointError("neighbours or k of the record is out of range")


def _share_of(holds: Tensor, nodes: Tensor | None) -> float:
    """Share of nodes, or of those under a mask, where a bool [N] holds; 0 of none."""
    chosen = holds if nodes is None else holds[nodes.to(holds.device)]
    return float(chosen.double().mean()) if chosen.numel() else 0.0


LEADS = 1 << 26
"""Leads of one class over another in memory at a time."""
PIECES = 8
"""Pieces of the interval of a destination's score."""


@typed
def certify_injection(
    model: nn.Module, data: Any, *, neighbours: int = 1, where: str = "any", k: int = 5
) -> InjectionCertificate:
    """Certify which nodes keep class and explanation when nodes with any features are injected.

    Args:
        model: GAT or GATv2 behind limits, or a user's of PyG's `GATConv` or `GATv2Conv` in a row, with
            activations, batch norm, linear layers and dropout between and after them. Of others only the
            first layer's ranking is certified, if their class declares `Capabilities`.
        data: a `Graph` or PyG `Data`.
        neighbours: t, injected neighbours that a node gains at most.
        where: `any`: every node of the graph may gain t of them; `direct`: the certified node alone does,
            which with more than two layers gets the bound for `any`.
        k: size of an explanation.

    Raises:
        InputError: an argument out of range.

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
    graph, chain, doubt = subject.graph, subject.chain, subject.doubt
    with evaluating(subject.model), torch.no_grad():
        orders = _orders(subject.model, subject.prepared, chain)
    with torch.no_grad():
        if isinstance(chain, str) or doubt is not None:
            holds = torch.zeros(graph.num_nodes, dtype=torch.bool)
            classes, reason = torch.full((graph.num_nodes,), -1), str(doubt)
        else:
            ranks = subject.observation.attention.ranking()
            proof = _Proof(copy.deepcopy(chain).double(), graph, neighbours, where)
            classes, reason = subject.classes, proof.reason
            holds = proof.classes() & ~subject.rounded(proof)
            orders = [
                order if order.status == "invariant" else proof.order(order.name, index, rank, k)
                for index, (order, rank) in enumerate(zip(orders, ranks, strict=True))
            ]
    return InjectionCertificate(
        neighbours=neighbours,
        where=where,
        k=k,
        holds=holds,
        classes=classes,
        degree=(graph.adjacency if isinstance(chain, str) else chain.adjacency(graph)).degree,
        reason=reason,
        known=doubt is None,
        layers=tuple(orders),
        seconds=perf_counter() - began,
        **subject.about("fgai.certify_injection"),
    )


def _orders(model: nn.Module, graph: Graph, chain: Chain | str) -> list[LayerOrder]:
    everything = torch.ones(graph.num_nodes, dtype=torch.bool)
    unknown = ("unknown", "its inputs change, and they are not followed here", None)
    reasons = invariant_layers(model, graph)
    if not isinstance(chain, str) and set(chain.names) == set(reasons):
        # What comes before the first layer is computed node by node.
        first = chain.names[0]
        reasons = {name: reasons[name] or (INVARIANT if name == first else None) for name in chain.names}
    return [
        LayerOrder(name, *(unknown if why is None else ("invariant", why, everything)))
        for name, why in reasons.items()
    ]


class _Proof:
    """Bounds of what every layer reads; the chain is float64, the graph prepared and on the CPU."""

    reason = "intervals behind limits; new neighbours at the ceiling of their scores and values"

    def __init__(self, chain: Chain, graph: Graph, neighbours: int, where: str) -> None:
        assert graph.features is not None
        self.layers, self.steps = chain.layers, chain.steps
        self.ranges = [ranges_of(layer) for layer in self.layers]
        self.adjacency = chain.adjacency(graph)
        self.direct = where == "direct" and len(self.layers) <= 2
        self.exact: list[Reading] = []
        clean = graph.features.to("cpu", torch.float64)
        for layer, x, out in chain.runs(clean, self.adjacency):
            self.exact.append(Reading.exact(layer, x))
            self.logits = out
        self.logits = chain.finish(self.logits)
        self._inject(neighbours)

    def _inject(self, neighbours: int) -> None:
        self.neighbours, self.readings = neighbours, self.exact[:1]  # behind injections
        for index in range(1, len(self.layers)):
            self.readings.append(self._reading(index))

    def against(self, neighbours: int) -> _Proof:
        """Return the same with another number of new neighbours."""
        other = copy.copy(self)
        other._inject(neighbours)
        return other

    def _reading(self, index: int) -> Reading:
        """What a further layer may read behind injections before it."""
        state = self._output(index - 1, self.readings[-1])
        for step in self.steps[index]:
            state = follow(step, state)
        return Reading.around(self.layers[index], self.ranges[index], state)

    def _output(self, index: int, others: Reading) -> State:
        """A layer's output [N, D]; `others` is what it reads of neighbours."""
        layer, ranges, own = self.layers[index], self.ranges[index], self.readings[index]
        limits = ranges["value"]
        # One piece: more of them say little more here, and cost as many times more.
        (scores,) = scores_of(layer, ranges, own, others, self.adjacency)
        if own.clipped is None:
            return first_layer(layer, limits, scores, own.low, self.adjacency, self.neighbours)
        low, high = _mean_bounds(
            self.adjacency,
            scores.low,
            scores.high,
            scores.new.amax(2),
            others.low,
            others.high,
            (limits.low, limits.high),
            self.neighbours,
            (own.low, own.high),
        )
        return State(layer.join(low), layer.join(high))

    def classes(self) -> Tensor:
        """Return which nodes keep their class, bool [N]."""
        last, own, ranges = self.layers[-1], self.readings[-1], self.ranges[-1]
        others = self.exact[-1] if self.direct else own
        classes = self.logits.argmax(1)
        read_out = affine_map(self.steps[-1], last.channels) if last.heads == 1 else None
        if read_out is None:
            return _leads_hold(self.steps[-1], self._output(len(self.layers) - 1, others), classes)
        plain = None if not self.steps[-1] else read_out
        holds = torch.ones(len(classes), dtype=torch.bool)
        width = self.logits.shape[1]
        part = max(1, LEADS // max(1, len(classes) * width))
        for first in range(0, width, part):
            ahead = slice(first, first + part)
            apart, mine = others.lead(last, ahead, plain), own.lead(last, ahead, plain)
            for scores in scores_of(last, ranges, own, others, self.adjacency, PIECES):
                read = scores if plain is None else scores.read(last, ranges["value"], plain)
                arguments = (apart, mine, classes, first, self.neighbours, ROUNDING)
                holds &= class_kept(self.adjacency, read, *arguments)
        return holds

    def order(self, name: str, index: int, ranks: Tensor, k: int) -> LayerOrder:
        """Where the top-k among old neighbours provably stays."""
        layer, own = self.layers[index], self.readings[index]
        others = self.exact[index] if self.direct else own
        members = topk_mask(ranks, self.adjacency.rowptr, k)
        if layer.score == "additive":
            low, high = source_ends(own, others, self.adjacency)
            slope, why = layer.slope, "scores of sources apart; the destination's side is common"
        else:
            (scores,) = scores_of(layer, self.ranges[index], own, others, self.adjacency)
            low, high, slope, why = scores.low, scores.high, 1.0, "intervals of scores apart"
        holds = order_kept(self.adjacency, low, high, members, slope, ROUNDING)
        return LayerOrder(name, "bound", why, holds)


def _leads_hold(steps: list[nn.Module], state: State, classes: Tensor) -> Tensor:
    """Where the class stays ahead of every other, bool [N], if what `steps` read lies in `state`."""
    final = [step for step in steps[-1:] if isinstance(step, nn.Linear)]
    for step in steps[: len(steps) - len(final)]:
        state = follow(step, state)
    weight, bias = cast(tuple[Tensor, Tensor], affine_map(final, state.low.shape[1]))
    holds = torch.ones(len(classes), dtype=torch.bool)
    for top in torch.unique(classes).tolist():
        rows = (classes == top).nonzero().flatten()
        ahead, shift = weight[:, top, None] - weight, bias[top] - bias
        sizes = weight[:, top, None].abs() + weight.abs()  # each logit is rounded by itself
        mine = state.rows(rows)
        size = torch.maximum(mine.low.abs(), mine.high.abs()) @ sizes + bias[top].abs() + bias.abs()
        kept = mine.through(ahead, shift)[0] > ROUNDING * size
        kept[:, top] = True
        holds[rows] = kept.all(1)
    return holds
