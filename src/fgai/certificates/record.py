"""`CertificateRecord`: everything certified about one model on one graph, layer by layer and node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, Self, TypedDict

import numpy as np
import torch
from torch import Tensor

from fgai.certificates.base import _Certificate, _pack_tensor, _unpack_tensor
from fgai.checks import at_least, one_of
from fgai.errors import CheckpointError, InputError
from fgai.files import check, check_items
from fgai.records import Cell, Column, PackedArray, Table, data_frame, plain
from fgai.topk import check_k
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


EXPLANATION = "normalised geometric mean of the heads"
"""The vector whose top-k is certified, see `LayerAttention.explanation`."""
ARITHMETIC = "arithmetic mean of the heads"
"""The vector of older records, which name none."""
PROMISE = (
    "Certified: perturbations of one layer with its values fixed. The top-k: a node's explanation vector, the"
    f" {EXPLANATION}, moved by at most R. The prediction: each head moved by at most R. Injected nodes or"
    " edges change values too; against them this is no guarantee."
)
PROPERTIES = ("same_explanation", "stable_explanation", "same_prediction", "stable_prediction")
"""The four properties of Definition 1."""
ALL_FOUR = "all_four"
TABLE_RADII = (0.001, 0.003, 0.01, 0.03, 0.1)
RADII = tuple(10 ** (-3 + step / 8) for step in range(17))
"""Radii of curves: .001 to .1, eight steps a decade."""
DIVERGENCES = ("probabilities", "logits")
EXACT, BOUND, UNKNOWN = "exact", "bound", "unknown"
_KINDS = ("topk", "class")
_ROUNDING = 1e-9  # of an overlap such as 1 - 1/5
_VECTOR = ("<f8", 1)
_TENSORS = {"degree": ("<i8", 1), "costs": ("<f8", 2), "beta1": _VECTOR, "heads_beta2": _VECTOR}
_PREDICTION = dict.fromkeys(("class_radius", "alpha2_logits", "alpha2_probabilities"), _VECTOR)
_OWN = ("name", "heads", "k", "sharpness")
_TEXTS = ("class_status", "logits_status", "probabilities_status", "reason", "rows_are")
_Status = Literal["exact", "bound", "unknown"]


@typed
@dataclass(frozen=True, eq=False)
class Prediction:
    """How far perturbing one layer's attention can move the prediction of each node.

    The first three are each `exact` (attained inside the ball), a sound `bound`, or `unknown` and then None.

    Attributes:
        class_radius: float64 [N], no perturbation of this size or below changes the predicted class; infinite
            where the attention does not matter, 0 where two classes tie.
        alpha2_logits: float64 [N], largest change of the logits in total variation at the radius asked for.
        alpha2_probabilities: float64 [N], the same for probabilities.
        class_status, logits_status, probabilities_status: of each.
        reason: why one is unknown, or the method of a bound.
        rows_are: `nodes`, `links` or `graphs`.
    """

    class_radius: Tensor | None = None
    alpha2_logits: Tensor | None = None
    alpha2_probabilities: Tensor | None = None
    class_status: str = UNKNOWN
    logits_status: str = UNKNOWN
    probabilities_status: str = UNKNOWN
    reason: str = ""
    rows_are: str = "nodes"


class _LayerLayout(TypedDict):
    name: str
    heads: int
    k: int | None
    sharpness: float | None
    class_status: _Status
    logits_status: _Status
    probabilities_status: _Status
    reason: str
    rows_are: NotRequired[Literal["nodes", "links", "graphs", "unknown"]]
    per_node: dict[str, PackedArray | None]


@typed
@dataclass(frozen=True, eq=False)
class LayerCertificate:
    """Certificates of one layer, for perturbations of this layer alone with its values fixed.

    For `costs` and the top-k the explanation vector (`LayerAttention.explanation`) moves by R, for
    `prediction` each of the `heads` does. The top-k of nodes with at most k neighbours cannot change; shares
    count the others.

    Attributes:
        k: k2, the size of the explanation, or None for all neighbours.
        sharpness: see `fgai.metrics.sharpness`; NaN if no node has two neighbours.
        degree: int64 [N], neighbours of each node in this layer, self-loops included.
        costs: float64 [N, M], c(m) of `fgai.topk.swap_costs`; infinite where m members cannot leave.
        beta1: float64 [N], overlap of the top-k1 with the vanilla model's, or None.
        heads_beta2: float64 [N], lower bound of the overlap while every head moves by the record's radius;
            None in older records.
    """

    LAYOUT: ClassVar[Any] = list[_LayerLayout]

    name: str
    heads: int
    k: int | None
    sharpness: float
    degree: Tensor
    costs: Tensor
    beta1: Tensor | None
    prediction: Prediction
    heads_beta2: Tensor | None = None

    def __post_init__(self) -> None:
        check_k(self.k)

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.degree)

    @property
    def counted(self) -> Tensor:
        """Mask of the nodes with more than k neighbours, bool [N]."""
        if self.k is None:
            return torch.zeros_like(self.degree, dtype=torch.bool)
        return self.degree > self.k

    @property
    def topk_radius(self) -> Tensor:
        """float64 [N]: below this radius the top-k set cannot change; infinite for trivial nodes."""
        if not self.costs.shape[1]:
            return torch.full((self.num_nodes,), torch.inf, dtype=torch.float64)
        return self.costs[:, 0]

    def beta2(self, radius: float) -> Tensor:
        """Certified overlap at `radius`: `1 - max{m : c(m) <= R} / k`, float64 [N]; ties count as lost."""
        at_least(radius, "radius", 0.0)
        if self.k is None:
            return torch.ones(self.num_nodes, dtype=torch.float64)
        return 1 - (self.costs <= radius).sum(1).double() / self.k

    def share(self, kind: str, radius: float) -> float | None:
        """Share of the counted nodes, or of all links or graphs, certified at `radius`; None if unknown.

        `kind` is "topk" or "class", whichever stays; `InputError` for another, or a negative or infinite
        radius.
        """
        one_of(kind, "kind", _KINDS)
        at_least(radius, "radius", 0.0)
        if kind == "topk":
            return _mean(self.topk_radius > radius, self.counted)
        safe = self.prediction.class_radius
        return None if safe is None else _mean(safe > radius, self._counted_rows())

    def curve(self, kind: str, radii: tuple[float, ...] = RADII) -> list[float | None]:
        """`share` at each of `radii`."""
        return [self.share(kind, radius) for radius in radii]

    def _counted_rows(self) -> Tensor:
        """`counted`, or everything where predictions are not those of nodes."""
        radius = self.prediction.class_radius
        if radius is None or self.prediction.rows_are in ("nodes", UNKNOWN):
            return self.counted
        return torch.ones_like(radius, dtype=torch.bool)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; arrays are packed."""
        arrays = {name: getattr(self, name) for name in _TENSORS}
        arrays |= {name: getattr(self.prediction, name) for name in _PREDICTION}
        if self.heads_beta2 is None:
            del arrays["heads_beta2"]
        return {
            **{name: plain(getattr(self, name)) for name in _OWN},
            **{name: getattr(self.prediction, name) for name in _TEXTS},
            "per_node": {name: _pack_tensor(tensor) for name, tensor in arrays.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises `CheckpointError` for values that are missing or do not fit."""
        check(values, _LayerLayout, "a layer")
        shapes = {**_TENSORS, **_PREDICTION}
        kinds, required = dict.fromkeys(shapes, PackedArray | None), shapes.keys() - {"heads_beta2"}
        check_items(values["per_node"], kinds, "per_node of a layer", required=required)
        arrays = values["per_node"]
        fields: dict[str, Any] = {
            name: _unpack_tensor(arrays.get(name), name, *shape) for name, shape in shapes.items()
        }
        prediction = {name: fields.pop(name) for name in _PREDICTION}
        prediction |= {name: values.get(name, UNKNOWN) for name in _TEXTS}
        fields |= {name: values[name] for name in _OWN}
        if fields["sharpness"] is None:
            fields["sharpness"] = math.nan
        if fields["degree"] is None or fields["costs"] is None:
            raise CheckpointError("a layer lacks its degrees or its costs")
        layer = cls(prediction=Prediction(**prediction), **fields)
        layer._check_shapes()
        return layer

    def _check_shapes(self) -> None:
        prediction = self.prediction
        rows = {len(t) for name in _PREDICTION if (t := getattr(prediction, name)) is not None}
        parts = (self.degree, self.costs, self.beta1, self.heads_beta2)
        nodes = {len(part) for part in parts if part is not None}
        if prediction.rows_are == "nodes":
            nodes |= rows
        if len(nodes) > 1 or len(rows) > 1:
            raise CheckpointError(f"the values of a layer are of {sorted(nodes | rows)} nodes")
        if self.heads < 1 or (self.k is not None and not self.k >= 1) or bool((self.degree < 0).any()):
            raise CheckpointError("heads, k or a degree of a layer is out of range")


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class CertificateRecord(_Certificate):
    """The four properties of each node, measured (1, 3) and certified (2, 4); see `certify_attention`.

    A link has properties 1 and 2 if both its ends have them, a graph if all its nodes do; 3 and 4 are about
    the prediction of the link or graph itself.

    Attributes:
        norm, radius, k1, k2, alpha, beta, divergence: the arguments; alpha and beta may be None.
        layers: one certificate per layer; the last one is the output layer's.
        alpha1_logits, alpha1_probabilities: float64 [N] or None.
        trivial_probabilities: float64 [N], `1 - min_c p_c`, or None; no change of probabilities is larger.
        seconds: run time, by part.
        promise: what is certified, in words.
        explanation: the vector whose top-k is certified and compared.
        pairs: int64 [2, L], the ends of the predicted links, or None.
        batch: int64 [N], the graph of each node where graphs are predicted, or None.
    """

    KIND: ClassVar[str] = "certificate"
    LAYER: ClassVar[type[LayerCertificate]] = LayerCertificate
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        **dict.fromkeys(("alpha1_logits", "alpha1_probabilities", "trivial_probabilities"), ("<f8", 1)),
        "pairs": ("<i8", 2),
        "batch": ("<i8", 1),
    }

    norm: str
    radius: float
    k1: int | None
    k2: int | None
    alpha: float | None
    beta: float | None
    divergence: str
    compared: bool
    layers: tuple[LayerCertificate, ...]
    alpha1_logits: Tensor | None
    alpha1_probabilities: Tensor | None
    trivial_probabilities: Tensor | None
    seconds: dict[str, float]
    promise: str = PROMISE
    explanation: str = EXPLANATION
    pairs: Tensor | None = None
    batch: Tensor | None = None

    def layer(self, index: int = -1) -> LayerCertificate:
        """Return one layer's certificate, by default the output layer's."""
        if not -len(self.layers) <= index < len(self.layers):
            raise InputError(f"`index` must name one of {len(self.layers)} layers, got {index}")
        return self.layers[index]

    def alpha2(self, index: int = -1) -> Tensor | None:
        """float64 [N]: certified change of the prediction at `radius`, in the record's divergence."""
        prediction = self.layer(index).prediction
        return prediction.alpha2_logits if self.divergence == "logits" else prediction.alpha2_probabilities

    @property
    def alpha1(self) -> Tensor | None:
        """float64 [N]: distance to the vanilla prediction, in the record's divergence."""
        return self.alpha1_logits if self.divergence == "logits" else self.alpha1_probabilities

    def properties(self, index: int = -1) -> dict[str, Tensor | None]:
        """Which nodes, links or graphs have which property: bool by name, None if unknown or not measured."""
        layer = self.layer(index)
        masks: dict[str, Tensor | None] = dict.fromkeys(PROPERTIES)
        if self.beta is not None:
            least = self.beta - _ROUNDING
            if layer.beta1 is not None:
                masks["same_explanation"] = self._rows(layer.beta1 >= least)
            masks["stable_explanation"] = self._rows(layer.beta2(self.radius) >= least)
        if self.alpha is not None:
            change = self.alpha2(index)
            masks["same_prediction"] = None if self.alpha1 is None else self.alpha1 <= self.alpha
            masks["stable_prediction"] = None if change is None else change <= self.alpha
        return masks

    def satisfied(self, index: int = -1) -> Tensor | None:
        """Which nodes, links or graphs have all four properties, bool; None if one is unknown."""
        masks = [mask for mask in self.properties(index).values() if mask is not None]
        return torch.stack(masks).all(0) if len(masks) == len(PROPERTIES) else None

    def counted(self, index: int = -1) -> Tensor:
        """Mask of the rows that count: nodes of over max(k1, k2) neighbours; links, graphs with one."""
        degree = self.layer(index).degree
        sizes = [k for k in (self.k1, self.k2) if k is not None]
        counted = degree > max(sizes) if len(sizes) == 2 else torch.zeros_like(degree, dtype=torch.bool)
        return ~self._rows(~counted)

    def shares(self, index: int = -1) -> dict[str, float | None]:
        """Share of the counted nodes with each property, and with `all_four`; None where unknown."""
        counted = self.counted(index)
        masks = {**self.properties(index), ALL_FOUR: self.satisfied(index)}
        return {name: _mean(mask, counted) for name, mask in masks.items()}

    def sentences(self, index: int = -1) -> list[str]:
        """Return one sentence for each number of `shares`, and one that says which nodes are counted."""
        counted, shares, rows = self.counted(index), self.shares(index), self._row_name
        least = "" if self.beta is None or self.beta >= 1 else f"at least {100 * self.beta:g} % of "
        change = f"{self.alpha or 0.0:g} (total variation of {self.divergence})"
        moved = f"moves by at most {self.radius:g} ({self.norm})"
        theirs, own = (f"top {k}" if k else "neighbours" for k in (self.k1, self.k2))
        texts = (
            f": {least}the vanilla model's {theirs} are among the model's {theirs}",
            f": {least}the {own} provably stay while the explanation {moved}",
            f": the prediction differs from the vanilla model's by at most {change}",
            f": the prediction provably changes by at most {change} while each head {moved}",
            "",
        )
        sentences = []
        for (name, share), text in zip(shares.items(), texts, strict=True):
            title = name.replace("_", " ").capitalize()
            if share is None:
                word, why = self._reason_missing(index, name)
                sentences.append(f"{title}: {word}, {why}.")
            else:
                sentences.append(f"{title} at {_percent(share)} of the {rows}{text}.")
        who = "because an explanation of all neighbours cannot change"
        if self.k1 is not None and self.k2 is not None:
            part = {"nodes": "", "links": "an end with ", "graphs": "a node with "}[rows]
            who = f"those with {part}more than {max(self.k1, self.k2)} neighbours"
        return [*sentences, f"Counted: {int(counted.sum())} of {len(counted)} {rows}, {who}."]

    def _reason_missing(self, index: int, name: str) -> tuple[str, str]:
        """Say why there is no share of a property: in a word or two, and the rest of the sentence."""
        masks = self.properties(index)
        absent = [one for one in (PROPERTIES if name == ALL_FOUR else (name,)) if masks[one] is None]
        if not absent:
            return "none counted", f"because no {self._row_name[:-1]} counts"
        if (self.beta if absent[0].endswith("explanation") else self.alpha) is None:
            return "not asked for", "because no bound was given"
        if absent[0].startswith("same") and not self.compared:
            return "not measured", "because no vanilla model was given"
        return UNKNOWN, f"because {self.layer(index).prediction.reason or 'it was not certified'}"

    def summary(self) -> dict[str, Any]:
        """Return shares, medians and curves as plain values, for tables and figures."""
        return {
            "promise": self.promise,
            "explanation": self.explanation,
            "radii": list(RADII),
            "table_radii": list(TABLE_RADII),
            "layers": [self._layer_summary(index) for index in range(len(self.layers))],
            "alpha1": _mean(self.alpha1),
        }

    def tables(self) -> list[Table]:
        """Return an overview of every layer, and the certified shares against the radius."""
        rows: list[list[Cell]] = []
        for layer in self.layers:
            for kind, label in (("topk", f"top-{self.k2 or 'all'}"), ("class", "class")):
                status = EXACT if kind == "topk" else layer.prediction.class_status
                rows.append([layer.name, label, status, *map(_percent, layer.curve(kind, TABLE_RADII))])
        columns = [Column("layer"), Column("what"), Column("how")]
        columns += [Column(f"R = {radius:g}") for radius in TABLE_RADII]
        note = full_promise(self.promise, self.explanation)
        return [_overview(self), Table(f"Nodes certified, {self.norm} ball", columns, rows, (note,))]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per layer and node; NaN where unknown, as of links and graphs."""
        columns: dict[str, list[Any]] = {}
        for layer in self.layers:
            of_nodes = layer.prediction if layer.prediction.rows_are == "nodes" else None
            unknown = np.full(layer.num_nodes, np.nan)
            values = {
                "layer": np.full(layer.num_nodes, layer.name, dtype=object),
                "node": np.arange(layer.num_nodes),
                "degree": layer.degree,
                "topk_radius": layer.topk_radius,
                "beta2": layer.beta2(self.radius),
                **{name: getattr(of_nodes, name, None) for name in _PREDICTION},
                "beta1": layer.beta1,
            }
            for name, one in values.items():
                columns.setdefault(name, []).append(unknown if one is None else np.asarray(one))
        return data_frame({name: np.concatenate(parts) for name, parts in columns.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: settings, packed arrays and the summary."""
        return {**super().to_dict(), "summary": plain(self.summary())}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a record that names no vector is about the arithmetic mean of the heads."""
        if isinstance(values, Mapping) and "explanation" not in values:
            if EXPLANATION in str(values.get("promise")):
                raise CheckpointError("the record lacks `explanation`, which its promise names")
            values = {"explanation": ARITHMETIC, **values}
        return super().from_dict(values)

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the fields of a file."""
        return {**super().layout(), "divergence": Literal[DIVERGENCES], "summary": dict[str, Any]}

    def _check_shapes(self) -> None:
        sizes = {layer.num_nodes for layer in self.layers}
        if len(sizes) != 1:
            raise CheckpointError(f"the layers of the record are of {sorted(sizes)} nodes, not of one number")
        (nodes,) = sizes
        count = nodes
        if self.pairs is not None:
            if self.pairs.shape[0] != 2 or bool(((self.pairs < 0) | (self.pairs >= nodes)).any()):
                raise CheckpointError(f"pairs must be two rows of nodes 0..{nodes - 1}")
            count = self.pairs.shape[1]
        elif self.batch is not None:
            if len(self.batch) != nodes or bool(((self.batch < 0) | (self.batch >= nodes)).any()):
                raise CheckpointError(f"batch must name a graph for each of {nodes} nodes")
            count = int(self.batch.max()) + 1 if nodes else 0
        predicted = [self.alpha1_logits, self.alpha1_probabilities, self.trivial_probabilities]
        if any(values is not None and len(values) != count for values in predicted):
            raise CheckpointError(f"alpha1 and trivial_probabilities must have {count} entries each")
        bounds = [self.radius, self.alpha, self.beta, *(k - 1 for k in (self.k1, self.k2) if k is not None)]
        if any(bound is not None and bound < 0 for bound in bounds):
            raise CheckpointError("radius, alpha, beta, k1 or k2 of the record is out of range")

    @property
    def _row_name(self) -> str:
        return "links" if self.pairs is not None else "graphs" if self.batch is not None else "nodes"

    def _rows(self, nodes: Tensor) -> Tensor:
        """Return nodes [N] as rows of predictions: nodes, links with both ends, or graphs with all nodes."""
        if self.pairs is not None:
            return nodes[self.pairs].all(0)
        if self.batch is not None:
            out = torch.ones(int(self.batch.max()) + 1, dtype=torch.bool)
            out[self.batch[~nodes]] = False
            return out
        return nodes

    def _layer_summary(self, index: int) -> dict[str, Any]:
        layer = self.layers[index]
        prediction, counted, rows = layer.prediction, layer.counted, layer._counted_rows()
        change, trivial = prediction.alpha2_probabilities, self.trivial_probabilities
        heads = layer.heads_beta2
        if heads is not None:  # who keeps the share β of the top-k while every head moves
            heads = None if self.beta is None else heads >= self.beta - _ROUNDING
        # Bounds on probabilities that are clearly (1 %) below the trivial one.
        informative = None if change is None or trivial is None else change < 0.99 * trivial
        return {
            "name": layer.name,
            "nodes": layer.num_nodes,
            "counted": int(counted.sum()),
            "trivial_share": 1.0 - float(counted.double().mean()),
            "sharpness": layer.sharpness,
            "topk": {
                "share": layer.share("topk", self.radius),
                "median_radius": _median(layer.topk_radius, counted),
                "mean_beta2": _mean(layer.beta2(self.radius), counted),
                "heads_share": _mean(heads, counted),
                "table": layer.curve("topk", TABLE_RADII),
                "curve": layer.curve("topk"),
            },
            "beta1": _mean(layer.beta1, counted),
            "class": {
                "status": prediction.class_status,
                "share": layer.share("class", self.radius),
                "median_radius": _median(prediction.class_radius, rows),
                "table": layer.curve("class", TABLE_RADII),
                "curve": layer.curve("class"),
            },
            "alpha2_logits": {
                "status": prediction.logits_status,
                "median": _median(prediction.alpha2_logits, rows),
            },
            "alpha2_probabilities": {
                "status": prediction.probabilities_status,
                "median": _median(change, rows),
                "informative_share": _mean(informative),
            },
            "reason": prediction.reason,
            "definition": {"counted": int(self.counted(index).sum()), **self.shares(index)},
            "sentences": self.sentences(index),
        }


def _mean(values: Tensor | None, counted: Tensor | None = None) -> float | None:
    """Return the mean over the counted entries, or over all; None of none and where it is not finite."""
    values = values if values is None or counted is None else values[counted]
    if values is None or values.numel() == 0:
        return None
    mean = float(values.double().mean())
    return mean if math.isfinite(mean) else None


def _median(values: Tensor | None, counted: Tensor) -> float | None:
    if values is None or not bool(counted.any()):
        return None
    return float(values[counted].quantile(0.5, interpolation="lower"))


@typed
def full_promise(promise: str, explanation: str) -> str:
    """Return a certificate's promise with the vector that the top-k is of, unless the promise names it."""
    if explanation in promise:
        return promise
    return f"{promise} The top-k is that of the {explanation}; with one head, of the attention."


def _overview(record: CertificateRecord) -> Table:
    """Return a column per layer and a row per number; medians are over nodes with more than k2 neighbours."""
    summary = record.summary()["layers"]
    at = f"at R = {record.radius:g}"
    rows: dict[str, list[Cell]] = {}
    for index, layer in enumerate(summary):
        topk, classes, probabilities = layer["topk"], layer["class"], layer["alpha2_probabilities"]
        cells: dict[str, Cell] = {}
        for name, share in record.shares(index).items():
            text = record._reason_missing(index, name)[0] if share is None else _percent(share)
            cells[name.replace("_", " ")] = text
        cells |= {
            "nodes counted": f"{layer['counted']} of {layer['nodes']}",
            "top-k trivial (share of nodes)": _percent(layer["trivial_share"]),
            "sharpness": _number(layer["sharpness"]),
            "top-k radius, median": _number(topk["median_radius"]),
            f"top-k cannot change {at}": _percent(topk["share"]),
            f"certified overlap β₂, mean {at}": _number(topk["mean_beta2"]),
            "stable explanation, every head moved (bound)": _percent(topk["heads_share"]),
            "class radius, median": _with_status(classes, "median_radius"),
            f"class cannot change {at}": _percent(classes["share"]),
            f"α₂ on logits, median {at}": _with_status(layer["alpha2_logits"], "median"),
            f"α₂ on probabilities, median {at}": _with_status(probabilities, "median"),
            "… below the trivial bound (share)": _percent(probabilities["informative_share"]),
        }
        if record.compared:
            cells["overlap with vanilla β₁, mean"] = _number(layer["beta1"])
            cells["change from vanilla α₁, mean"] = _number(_mean(record.alpha1))
        for name, cell in cells.items():
            rows.setdefault(name, [name]).append(cell)
    columns = [Column(""), *(Column(layer["name"]) for layer in summary)]
    title = f"Certificates of {record.model['class']} on {record.data['name']}, {record.norm} ball"
    alpha, beta = ("·" if bound is None else f"{bound:g}" for bound in (record.alpha, record.beta))
    definition = f"(TV, {record.radius:g}, {alpha}, {beta}, {record.k1}, {record.k2})-FGAI"
    notes = [
        f"First rows: share of the {record._row_name} that satisfy {definition}.",
        f"{summary[-1]['name']}: {' '.join(record.sentences())}",
        full_promise(record.promise, record.explanation),
    ]
    notes += [
        f"{layer.name}: prediction unknown, {layer.prediction.reason}."
        for layer in record.layers
        if UNKNOWN in (layer.prediction.class_status, layer.prediction.probabilities_status)
    ]
    return Table(title, columns, list(rows.values()), notes)


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _with_status(part: dict[str, Any], key: str) -> str:
    value, status = part[key], part["status"]
    return status if status == UNKNOWN else "–" if value is None else f"{_number(value)} ({status})"
