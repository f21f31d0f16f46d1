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
- top-k: members stay if the least score of each is above the largest of every other old neighbour.

The destination's side of the score is common to all neighbours, so scores count relative to each other, see
`fgai.bounds.scores`; its interval is cut in pieces, the worst of which counts. Everything is computed in
float64; nodes for which the model, in its own precision, gives something else are not certified.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from fgai.attention import call_model, evaluating, limits_of, model_name, observe, prepared
from fgai.bounds.reading import Ranges, Reading, State, ranges_of
from fgai.bounds.scores import first_layer, scores_of, source_ends
from fgai.certificates.familiar import invariant_layers, unfamiliar
from fgai.certificates.kernels import _mean_bounds, class_kept, order_kept
from fgai.certificates.layer import _tensor_from
from fgai.checks import one_of, whole
from fgai.errors import CheckpointError
from fgai.files import check
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint_of
from fgai.models import AttentionLayer, as_graph, body_of
from fgai.records import (
    Cell,
    Column,
    PackedArray,
    Table,
    TabledDocument,
    data_frame,
    pack_array,
    plain,
    provenance,
)
from fgai.sparse import Adjacency, Features
from fgai.tasks import get_task
from fgai.topk import topk_mask
from fgai.typed import typed
from fgai.version import versions

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


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class InjectionCertificate(TabledDocument):
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
        held = self.layers[layer].holds
        if held is None:
            return None
        counted = self.degree > self.k
        if nodes is not None:
            counted &= nodes.to(counted.device)
        return _share_of(held, counted)

    def tables(self) -> list[Table]:
        """Return one row for the class and one for every layer."""
        rows: list[list[Cell]] = [["class", "bound" if self.known else "unknown", self.share(), self.reason]]
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; arrays are packed."""
        special: dict[str, Any] = {
            "holds": _packed(self.holds),
            "classes": pack_array(self.classes.numpy()),
            "degree": pack_array(self.degree.numpy()),
            "layers": [
                {"name": one.name, "status": one.status, "reason": one.reason, "holds": _packed(one.holds)}
                for one in self.layers
            ],
        }
        names = [f.name for f in dataclasses.fields(self) if f.name not in special]
        fields = {name: plain(getattr(self, name)) for name in names}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields, **special}

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the fields of a file."""
        arrays = dict.fromkeys(("holds", "classes", "degree"), PackedArray)
        return {**super().layout(), **arrays, "where": Literal[WHERE], "layers": list[_OrderLayout]}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        fields["holds"] = _unpacked(fields["holds"], "holds")
        for name in ("classes", "degree"):
            fields[name] = _tensor_from(fields[name], name, "<i8", 1)
        fields["layers"] = tuple(_order_from(layer) for layer in fields["layers"])
        found = cls(**fields)
        sizes = {len(found.holds), len(found.classes), len(found.degree)}
        sizes |= {len(layer.holds) for layer in found.layers if layer.holds is not None}
        if len(sizes) != 1:
            raise CheckpointError(f"the values of the record are of {sorted(sizes)} nodes")
        if found.neighbours < 0 or found.k < 1:
            raise CheckpointError("neighbours or k of the record is out of range")
        return found


def _order_from(values: Mapping[str, Any]) -> LayerOrder:
    check(values, _OrderLayout, "a layer")
    packed = values["holds"]
    held = None if packed is None else _unpacked(packed, "holds of a layer")
    return LayerOrder(values["name"], values["status"], values["reason"], held)


def _packed(holds: Tensor | None) -> dict[str, Any] | None:
    return None if holds is None else pack_array(holds.to(torch.uint8).numpy())


def _unpacked(packed: Mapping[str, Any], name: str) -> Tensor:
    found = _tensor_from(packed, name, "|u1", 1)
    if found is None or bool((found > 1).any()):
        raise CheckpointError(f"{name} must be zeros and ones")
    return found.bool()


def _share_of(holds: Tensor, nodes: Tensor | None) -> float:
    """Share of nodes, or of those under a mask, where a bool [N] holds; 0 of none."""
    chosen = holds if nodes is None else holds[nodes.to(holds.device)]
    return float(chosen.double().mean()) if chosen.numel() else 0.0


LEADS = 1 << 26
"""Leads of one class over another in memory at a time."""
PIECES = 8
"""Pieces of the interval of a destination's score."""
PRECISE = (torch.float32, torch.float64)
ROUNDING = 1e-5
"""Of float32 arithmetic, relative to what is summed; a class must stay by more."""


@typed
def certify_injection(
    model: nn.Module, data: Any, *, neighbours: int = 1, where: str = "any", k: int = 5
) -> InjectionCertificate:
    """Certify which nodes keep class and explanation when nodes with any features are injected.

    Args:
        model: GAT or GATv2 behind limits; of others only the first layer's ranking is certified, if their
            class declares `Capabilities`.
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
    original = as_graph(data)
    graph = prepared(model, original)
    with evaluating(model), torch.no_grad():
        doubt = _doubt(model, graph)
        orders = _orders(model, graph)
        if doubt is None:
            classes = call_model(model, graph).argmax(1).cpu()
            own = copy.deepcopy(model).cpu()
    graph = graph.to("cpu")
    with torch.no_grad():
        if doubt is None:
            seen = observe(own, graph)
            ranks = seen.attention.ranking()
            proof = _Proof(copy.deepcopy(own).double(), graph, neighbours, where)
            holds, reason = proof.classes(), proof.reason
            # The model computes in its own precision: where that says something else, nothing is proved.
            holds &= (classes == proof.logits.argmax(1)) & ~_rounded_away(own, graph, proof)
            holds &= ~_apart(seen.logits, proof.logits)
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
        provenance=provenance(model, fingerprint_of(original), command="fgai.certify_injection"),
    )


def _orders(model: nn.Module, graph: Graph) -> list[LayerOrder]:
    everything = torch.ones(graph.num_nodes, dtype=torch.bool)
    unknown = ("unknown", "its inputs change, and they are not followed here", None)
    return [
        LayerOrder(name, *(unknown if why is None else ("invariant", why, everything)))
        for name, why in invariant_layers(model, graph).items()
    ]


def _doubt(model: nn.Module, graph: Graph) -> str | None:
    """Why nothing can be certified; None where it can."""
    if body_of(model) != "layers":
        return "only GAT and GATv2 are followed"
    change = unfamiliar(model)
    if change is not None:
        return f"{change}; only GAT and GATv2 as they are can be followed"
    if model.guard is not None or graph.edge_weight is not None or graph.entry_values is not None:
        return "weights on edges, guards and replaced values are not followed"
    if not get_task(str(model.task)).row_per_node or graph.features is None:
        return "only node-level read-outs are followed"
    if not all(weight.dtype in PRECISE for weight in model.parameters()):
        return "weights of less than float32 round too coarsely; use model.float()"
    for layer in model.convs:
        assert isinstance(layer, AttentionLayer)
        if not 0 <= layer.slope <= 1:
            return f"a slope of {layer.slope} is not in [0, 1]: bounds of scores hold for no other"
        if layer.limits is None or layer.input_norm is not None:
            return "a layer has no limits: one new neighbour may say anything; see `fgai.limit`"
        found = limits_of(layer)
        if not all(bool(one.low.isfinite().all() & one.high.isfinite().all()) for one in found):
            return "limits were not measured; see `fgai.limit`"
        for fault in filter(None, (one.fault() for one in found)):
            return f"{fault}; see `fgai.limit`"
    if model.convs[-1].heads != 1 or not all(bool(p.isfinite().all()) for p in model.parameters()):
        return "an output layer of several heads, or weights that are not finite, are not followed"
    return None


class _Proof:
    """Bounds of what every layer reads; the model is float64, the graph prepared and on the CPU."""

    reason = "intervals behind limits; new neighbours at the ceiling of their scores and values"

    def __init__(self, model: Any, graph: Graph, neighbours: int, where: str) -> None:
        assert graph.features is not None
        self.layers: list[AttentionLayer] = list(model.convs)
        self.ranges = [ranges_of(layer) for layer in self.layers]
        self.adjacency, self.neighbours = graph.adjacency, neighbours
        clean: Tensor | Features = graph.features.to("cpu", torch.float64)
        state: State | None = None
        self.readings: list[Reading] = []
        self.exact: list[Reading] = []
        for layer, ranges in zip(self.layers, self.ranges, strict=True):
            point = Reading.exact(layer, clean)
            moved = point if state is None else Reading.around(layer, ranges, state)
            self.exact.append(point)
            self.readings.append(moved)
            out = layer(clean, self.adjacency)
            if layer is not self.layers[-1]:
                state, clean = _hidden(layer, ranges, moved, self.adjacency, self.neighbours), elu(out)
        self.logits = out
        self.direct = where == "direct" and len(self.layers) <= 2

    def classes(self) -> Tensor:
        """Return which nodes keep their class, bool [N]."""
        last, own = self.layers[-1], self.readings[-1]
        others = self.exact[-1] if self.direct else own
        classes = self.logits.argmax(1)
        holds = torch.ones(len(classes), dtype=torch.bool)
        part = max(1, LEADS // max(1, len(classes) * last.channels))
        for first in range(0, last.channels, part):
            ahead = slice(first, first + part)
            apart, mine = others.lead(last, ahead), own.lead(last, ahead)
            for scores in scores_of(last, self.ranges[-1], own, others, self.adjacency, PIECES):
                given = (apart, mine, classes, first, self.neighbours, ROUNDING)
                holds &= class_kept(self.adjacency, scores, *given)
        return holds

    def order(self, name: str, place: int, ranks: Tensor, k: int) -> LayerOrder:
        """Where the top-k among old neighbours provably stays."""
        layer, own = self.layers[place], self.readings[place]
        others = self.exact[place] if self.direct else own
        members = topk_mask(ranks, self.adjacency.rowptr, k)
        if layer.score == "additive":
            low, high = source_ends(own, others, self.adjacency)
            slope, why = layer.slope, "scores of sources apart; the destination's side is common"
        else:
            (scores,) = scores_of(layer, self.ranges[place], own, others, self.adjacency)
            low, high, slope, why = scores.low, scores.high, 1.0, "intervals of scores apart"
        holds = order_kept(self.adjacency, low, high, members, slope, ROUNDING)
        return LayerOrder(name, "bound", why, holds)


def _rounded_away(model: Any, graph: Graph, proof: _Proof) -> Tensor:
    """Nodes, bool [N], that read something the model computes otherwise than float64.

    Features with a large common offset, say, which the weights cancel: the sums are then all rounding.
    """
    source, destination = graph.adjacency.source, graph.adjacency.destination
    lost = torch.zeros(graph.num_nodes, dtype=torch.bool)
    state: Tensor | Features | None = graph.features
    for layer, exact in zip(model.convs, proof.exact, strict=True):
        sides = layer.sides(state)
        for own, other in zip(sides, (exact.source[0], exact.destination[0], exact.low), strict=True):
            lost |= _apart(own, other)
        lost = lost.index_fill(0, destination[lost[source]], True)
        out = layer(state, graph.adjacency)
        state = elu(out)
    return lost | _apart(out, proof.logits)


def _apart(own: Tensor, exact: Tensor) -> Tensor:
    """Rows, bool [N], that are further apart than `ROUNDING` of the largest number."""
    return (own.double() - exact).abs().flatten(1).amax(1) > ROUNDING * exact.abs().max()


def _hidden(
    layer: AttentionLayer, ranges: Ranges, reading: Reading, adjacency: Adjacency, neighbours: int
) -> State:
    """A hidden layer's activated output [N, D]."""
    limits = ranges["value"]
    # One piece: more of them say little more here, and cost as many times more.
    (scores,) = scores_of(layer, ranges, reading, reading, adjacency)
    if reading.said is None:
        return first_layer(layer, limits, scores, reading.low, adjacency, neighbours)
    box, new = (limits.low, limits.high), scores.new.amax(2)
    ends = _mean_bounds(adjacency, scores.low, scores.high, new, reading.low, reading.high, box, neighbours)
    return State(elu(layer.join(ends[0])), elu(layer.join(ends[1])))
