"""`CertificateRecord`: everything certified about one model on one graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fgai.certificates.base import _Certificate
from fgai.certificates.layer import RADII, UNKNOWN, LayerCertificate, _LayerLayout
from fgai.errors import CheckpointError, InputError
from fgai.records import Cell, Column, Table, data_frame, plain
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
DIVERGENCES = ("probabilities", "logits")
_ROUNDING = 1e-9


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class CertificateRecord(_Certificate):
    """The four properties of each node, measured (1, 3) and certified (2, 4).

    1. same explanation: `beta1`, overlap of the top-k1 with the vanilla model's
    2. stable explanation: `beta2(R)`, certified overlap of the top-k2, the explanation vector moved
       by at most R
    3. same prediction: `alpha1`, total variation to the vanilla model's prediction
    4. stable prediction: `alpha2(R)`, certified total variation, each head moved by at most R

    A node satisfies (D, R, α, β, k1, k2)-FGAI at a layer if 1 and 2 are at least β, 3 and 4 at most α;
    `shares` has the share of such nodes. A link has properties 1 and 2 if both its ends have them, a graph if
    all its nodes do; 3 and 4 are about the prediction of the link or graph itself.

    Attributes:
        model: class and settings.
        data: name and sizes.
        norm: of the balls.
        radius: R.
        k1: size of the top-k compared with vanilla.
        k2: size of the certified top-k.
        alpha: α, or None if it was not asked for.
        beta: β, or None if it was not asked for.
        divergence: D, total variation on "probabilities" or "logits".
        compared: whether there is a vanilla model.
        layers: one certificate per layer; the last one is the output layer's.
        alpha1_logits: float64 [N] or None.
        alpha1_probabilities: float64 [N] or None.
        trivial_probabilities: float64 [N], `1 - min_c p_c`, or None; no change of probabilities is larger.
        version: of fgai and torch.
        seconds: it took, by part.
        promise: what is certified, in words.
        explanation: the vector whose top-k is certified and compared.
        pairs: int64 [2, L], the ends of the predicted links, or None.
        batch: int64 [N], the graph of each node where graphs are predicted, or None.
        provenance: see `fgai.records.provenance`.
    """

    KIND: ClassVar[str] = "certificate"
    LAYER: ClassVar[type[LayerCertificate]] = LayerCertificate
    LAYER_LAYOUT: ClassVar[Any] = list[_LayerLayout]
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        **dict.fromkeys(("alpha1_logits", "alpha1_probabilities", "trivial_probabilities"), ("<f8", 1)),
        "pairs": ("<i8", 2),
        "batch": ("<i8", 1),
    }

    model: dict[str, Any]
    data: dict[str, Any]
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
    version: dict[str, str]
    seconds: dict[str, float]
    promise: str = PROMISE
    explanation: str = EXPLANATION
    pairs: Tensor | None = None
    batch: Tensor | None = None
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

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
        """Which nodes, links or graphs have which of the four properties: bool by name.

        None where one is unknown, or not measured because no vanilla model was given.
        """
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
        """Return what shares are of, bool: nodes with more than max(k1, k2) neighbours.

        Or links with such an end, graphs with such a node.
        """
        degree = self.layer(index).degree
        sizes = [k for k in (self.k1, self.k2) if k is not None]
        counted = degree > max(sizes) if len(sizes) == 2 else torch.zeros_like(degree, dtype=torch.bool)
        return ~self._rows(~counted)

    def shares(self, index: int = -1) -> dict[str, float | None]:
        """Share of the counted nodes with each property, and with `all_four`; None where unknown."""
        counted = self.counted(index)
        masks = {**self.properties(index), ALL_FOUR: self.satisfied(index)}
        some = bool(counted.any())
        return {
            name: None if mask is None or not some else float(mask[counted].double().mean())
            for name, mask in masks.items()
        }

    def sentences(self, index: int = -1) -> list[str]:
        """Return one sentence for each number of `shares`, and one that says which nodes are counted."""
        counted, shares, rows = self.counted(index), self.shares(index), self._row_name
        sentences = []
        for name, text in _property_texts(self).items():
            share, title = shares[name], name.replace("_", " ").capitalize()
            if share is None:
                word, why = _reason_missing(self, index, name)
                sentences.append(f"{title}: {word}, {why}.")
            else:
                sentences.append(f"{title} at {_percent(share)} of the {rows}{text}.")
        return [
            *sentences,
            f"Counted: {int(counted.sum())} of {len(counted)} {rows}, {_counted_text(self)}.",
        ]

    def informative_share(self, index: int = -1) -> float | None:
        """Share of nodes whose bound on probabilities is clearly (1 %) below the trivial `1 - min_c p_c`."""
        change = self.layer(index).prediction.alpha2_probabilities
        if change is None or self.trivial_probabilities is None:
            return None
        return float((change < 0.99 * self.trivial_probabilities).double().mean())

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
        return [_overview(self), _share_table(self)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per layer and node; NaN where unknown."""
        parts = [_node_columns(layer, self.radius) for layer in self.layers]
        return data_frame({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

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
        """Raise unless the layers and what is predicted are about the same nodes."""
        sizes = {layer.num_nodes for layer in self.layers}
        if len(sizes) != 1:
            raise CheckpointError(
                f"the layers of the record are of {sorted(sizes)} nodes, expected one number"
            )
        (nodes,) = sizes
        count = nodes
        if self.pairs is not None:
            if self.pairs.shape[0] != 2 or not _within(self.pairs, nodes):
                raise CheckpointError(f"pairs must be two rows of nodes 0..{nodes - 1}")
            count = self.pairs.shape[1]
        elif self.batch is not None:
            if len(self.batch) != nodes or not _within(self.batch, nodes):
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
        """Plural of what is predicted."""
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

    def _heads_share(self, layer: LayerCertificate) -> float | None:
        """Share of the counted nodes that keep the share β of the top-k while every head moves by R."""
        if layer.heads_beta2 is None or self.beta is None:
            return None
        return _mean((layer.heads_beta2 >= self.beta - _ROUNDING)[layer.counted])

    def _layer_summary(self, index: int) -> dict[str, Any]:
        layer = self.layers[index]
        prediction, counted = layer.prediction, layer.counted
        return {
            "name": layer.name,
            "nodes": layer.num_nodes,
            "counted": int(counted.sum()),
            "trivial_share": layer.trivial_share,
            "sharpness": layer.sharpness,
            "topk": {
                "share": layer.share("topk", self.radius),
                "median_radius": layer.median(layer.topk_radius),
                "mean_beta2": _mean(layer.beta2(self.radius)[counted]),
                "heads_share": self._heads_share(layer),
                "table": layer.curve("topk", TABLE_RADII),
                "curve": layer.curve("topk"),
            },
            "beta1": None if layer.beta1 is None else _mean(layer.beta1[counted]),
            "class": {
                "status": prediction.class_status,
                "share": layer.share("class", self.radius),
                "median_radius": layer.median(prediction.class_radius, predicted=True),
                "table": layer.curve("class", TABLE_RADII),
                "curve": layer.curve("class"),
            },
            "alpha2_logits": {
                "status": prediction.logits_status,
                "median": layer.median(prediction.alpha2_logits, predicted=True),
            },
            "alpha2_probabilities": {
                "status": prediction.probabilities_status,
                "median": layer.median(prediction.alpha2_probabilities, predicted=True),
                "informative_share": self.informative_share(index),
            },
            "reason": prediction.reason,
            "definition": {"counted": int(self.counted(index).sum()), **self.shares(index)},
            "sentences": self.sentences(index),
        }


def _within(index: Tensor, count: int) -> bool:
    return not index.numel() or bool((index >= 0).all() and (index < count).all())


def _mean(values: Tensor | None) -> float | None:
    if values is None or values.numel() == 0:
        return None
    mean = float(values.double().mean())
    return mean if math.isfinite(mean) else None


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
            text = _reason_missing(record, index, name)[0] if share is None else _percent(share)
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


def _share_table(record: CertificateRecord) -> Table:
    """Return the certified shares of the nodes with more than k2 neighbours, by radius."""
    rows: list[list[Cell]] = []
    for layer in record.layers:
        for kind, label in (("topk", f"top-{record.k2 or 'all'}"), ("class", "class")):
            shares = [_percent(share) for share in layer.curve(kind, TABLE_RADII)]
            status = "exact" if kind == "topk" else layer.prediction.class_status
            rows.append([layer.name, label, status, *shares])
    columns = [Column("layer"), Column("what"), Column("how"), *(Column(f"R = {r:g}") for r in TABLE_RADII)]
    note = full_promise(record.promise, record.explanation)
    return Table(f"Nodes certified, {record.norm} ball", columns, rows, (note,))


def _node_columns(layer: LayerCertificate, radius: float) -> dict[str, NDArray[Any]]:
    """Return one layer's columns of `to_pandas`; NaN where nothing is known about single nodes."""
    nodes, prediction = layer.num_nodes, layer.prediction if layer.prediction.rows_are == "nodes" else None
    names = ("class_radius", "alpha2_logits", "alpha2_probabilities")
    values = {name: getattr(prediction, name, None) for name in names} | {"beta1": layer.beta1}
    return {
        "layer": np.full(nodes, layer.name, dtype=object),
        "node": np.arange(nodes),
        "degree": layer.degree.numpy(),
        "topk_radius": layer.topk_radius.numpy(),
        "beta2": layer.beta2(radius).numpy(),
        **{key: np.full(nodes, np.nan) if one is None else one.numpy() for key, one in values.items()},
    }


def _reason_missing(record: CertificateRecord, index: int, name: str) -> tuple[str, str]:
    """Say why there is no share of a property: in a word or two, and the rest of the sentence."""
    masks = record.properties(index)
    absent = [one for one in (PROPERTIES if name == ALL_FOUR else (name,)) if masks[one] is None]
    if not absent:
        return "none counted", f"because no {record._row_name[:-1]} counts"
    if (record.beta if absent[0].endswith("explanation") else record.alpha) is None:
        return "not asked for", "because no bound was given"
    if absent[0].startswith("same") and not record.compared:
        return "not measured", "because no vanilla model was given"
    return UNKNOWN, f"because {record.layer(index).prediction.reason or 'it was not certified'}"


def _property_texts(record: CertificateRecord) -> dict[str, str]:
    """Return the text of each property with the record's bounds, and none for all four."""
    least = "" if record.beta is None or record.beta >= 1 else f"at least {100 * record.beta:g} % of "
    change = f"{record.alpha or 0.0:g} (total variation of {record.divergence})"
    moved = f"moves by at most {record.radius:g} ({record.norm})"
    theirs, own = (f"top {k}" if k else "neighbours" for k in (record.k1, record.k2))
    return {
        "same_explanation": f": {least}the vanilla model's {theirs} are among the model's {theirs}",
        "stable_explanation": f": {least}the {own} provably stay while the explanation {moved}",
        "same_prediction": f": the prediction differs from the vanilla model's by at most {change}",
        "stable_prediction": f": the prediction provably changes by at most {change} while each head {moved}",
        ALL_FOUR: "",
    }


def _counted_text(record: CertificateRecord) -> str:
    """Which nodes, links or graphs are counted."""
    if record.k1 is None or record.k2 is None:
        return "because an explanation of all neighbours cannot change"
    part = {"nodes": "", "links": "an end with ", "graphs": "a node with "}[record._row_name]
    return f"those with {part}more than {max(record.k1, record.k2)} neighbours"


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _with_status(part: dict[str, object], key: str) -> str:
    value, status = part[key], part["status"]
    if status == UNKNOWN or not isinstance(value, float):
        return UNKNOWN if status == UNKNOWN else "–"
    return f"{_number(value)} ({status})"
