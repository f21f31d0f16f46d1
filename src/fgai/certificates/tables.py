"""Certificates as tables: an overview of every layer, and certified shares against the radius."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fgai.certificates.layer import LayerCertificate
from fgai.certificates.prediction import UNKNOWN
from fgai.records import Cell, Column, Table
from fgai.typed import typed

TABLE_RADII = (0.001, 0.003, 0.01, 0.03, 0.1)


class _Certified(Protocol):
    """What a table reads of a `CertificateRecord`; the fields are described there."""

    @property
    def model(self) -> dict[str, Any]: ...
    @property
    def data(self) -> dict[str, Any]: ...
    @property
    def norm(self) -> str: ...
    @property
    def radius(self) -> float: ...
    @property
    def k1(self) -> int | None: ...
    @property
    def k2(self) -> int | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def beta(self) -> float | None: ...
    @property
    def compared(self) -> bool: ...
    @property
    def layers(self) -> tuple[LayerCertificate, ...]: ...
    @property
    def promise(self) -> str: ...
    @property
    def explanation(self) -> str: ...
    def summary(self) -> dict[str, Any]: ...


@runtime_checkable
class Promising(Protocol):
    """What `promised` reads of a certificate."""

    @property
    def promise(self) -> str:
        """What is certified, in words."""

    @property
    def explanation(self) -> str:
        """The vector whose top-k is certified."""


@typed
def promised(record: Promising) -> str:
    """The promise of a certificate; it names the vector whose top-k is meant, or that is added."""
    if record.explanation in record.promise:
        return record.promise
    return f"{record.promise} The top-k is that of the {record.explanation}; with one head, of the attention."


def overview(record: _Certified) -> Table:
    """One column per layer, one row per property; medians are over nodes with more than k2 neighbours."""
    summary = record.summary()["layers"]
    at = f"at R = {record.radius:g}"
    rows: list[list[Cell]] = [
        ["nodes counted", *(f"{layer['counted']} of {layer['nodes']}" for layer in summary)],
        ["top-k trivial (share of nodes)", *(_percent(layer["trivial_share"]) for layer in summary)],
        ["sharpness", *(_number(layer["sharpness"]) for layer in summary)],
        ["top-k radius, median", *(_number(layer["topk"]["median_radius"]) for layer in summary)],
        [f"top-k cannot change {at}", *(_percent(layer["topk"]["share"]) for layer in summary)],
        [f"certified overlap β₂, mean {at}", *(_number(layer["topk"]["mean_beta2"]) for layer in summary)],
        ["class radius, median", *(_marked(layer["class"], "median_radius") for layer in summary)],
        [f"class cannot change {at}", *(_percent(layer["class"]["share"]) for layer in summary)],
        [f"α₂ on logits, median {at}", *(_marked(layer["alpha2_logits"], "median") for layer in summary)],
        [
            f"α₂ on probabilities, median {at}",
            *(_marked(layer["alpha2_probabilities"], "median") for layer in summary),
        ],
        [
            "… below the trivial bound (share)",
            *(_percent(layer["alpha2_probabilities"]["informative_share"]) for layer in summary),
        ],
    ]
    if record.compared:
        rows.append(["overlap with vanilla β₁, mean", *(_number(layer["beta1"]) for layer in summary)])
        rows.append(["change from vanilla α₁, mean", *(_number(record.summary()["alpha1"]) for _ in summary)])
    if record.alpha is not None or record.beta is not None:
        rows.append(
            [f"{_definition(record)} (share)", *(_percent(layer["satisfied_share"]) for layer in summary)]
        )
    columns = [Column(""), *(Column(layer["name"]) for layer in summary)]
    return Table(_title(record), columns, rows, _notes(record))


def share_table(record: _Certified, radii: tuple[float, ...] = TABLE_RADII) -> Table:
    """Certified shares of the nodes with more than k2 neighbours, against the radius."""
    rows: list[list[Cell]] = []
    for layer in record.layers:
        for kind, label in (("topk", f"top-{record.k2 or 'all'}"), ("class", "class")):
            shares = [_percent(share) for share in layer.curve(kind, radii)]
            status = "exact" if kind == "topk" else layer.prediction.class_status
            rows.append([layer.name, label, status, *shares])
    columns = [Column("layer"), Column("what"), Column("how"), *(Column(f"R = {r:g}") for r in radii)]
    return Table(f"Nodes certified, {record.norm} ball", columns, rows, (promised(record),))


def node_columns(layer: LayerCertificate, radius: float) -> dict[str, NDArray[Any]]:
    """What is certified about every node at one layer, by name; NaN where that is unknown of single nodes."""
    nodes, prediction = layer.num_nodes, layer.prediction

    def predicted(values: Tensor | None) -> NDArray[Any]:
        return _or_nan(values if prediction.rows_are == "nodes" else None, nodes)

    return {
        "layer": np.full(nodes, layer.name, dtype=object),
        "node": np.arange(nodes),
        "degree": layer.degree.numpy(),
        "topk_radius": layer.topk_radius.numpy(),
        "beta2": layer.beta2(radius).numpy(),
        "class_radius": predicted(prediction.class_radius),
        "alpha2_logits": predicted(prediction.alpha2_logits),
        "alpha2_probabilities": predicted(prediction.alpha2_probabilities),
        "beta1": _or_nan(layer.beta1, nodes),
    }


def _or_nan(values: Tensor | None, count: int) -> NDArray[Any]:
    return np.full(count, np.nan) if values is None else values.numpy()


def _title(record: _Certified) -> str:
    return f"Certificates of {record.model['class']} on {record.data['name']}, {record.norm} ball"


def _definition(record: _Certified) -> str:
    alpha = "·" if record.alpha is None else f"{record.alpha:g}"
    beta = "·" if record.beta is None else f"{record.beta:g}"
    half = "" if record.compared else ", stability half only"
    return f"(TV, {record.radius:g}, {alpha}, {beta}, {record.k1}, {record.k2})-FGAI{half}"


def _notes(record: _Certified) -> list[str]:
    notes = [promised(record)]
    for layer in record.layers:
        prediction = layer.prediction
        if UNKNOWN in (prediction.class_status, prediction.probabilities_status):
            notes.append(f"{layer.name}: prediction unknown, {prediction.reason}.")
    return notes


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _marked(part: dict[str, object], key: str) -> str:
    value, status = part[key], part["status"]
    if status == UNKNOWN or not isinstance(value, float):
        return UNKNOWN if status == UNKNOWN else "–"
    return f"{_number(value)} ({status})"
