"""`Part`: one model's record and certificate as plain values, with their arrays unpacked and set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.certificates import InjectionCertificate
from fgai.records import look_up, unpack_array
from fgai.reports.explorer import over_layers
from fgai.reports.injections import Injections
from fgai.reports.numbers import score_of

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Part:
    """What is known of one model.

    Attributes:
        name: of the row.
        record: the evaluation as plain values, without per-node arrays.
        arrays: those arrays, by name.
        certificate: settings and curves as plain values, or None.
        layers: per layer of the certificate: `name`, `class_status` and per-node arrays.
        injections: certificates against injection.
    """

    name: str
    record: dict[str, Any]
    arrays: Arrays = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)
    injections: Sequence[InjectionCertificate] = ()

    def worst(self, count: int) -> list[int]:
        """The nodes whose explanation suffers most, those without a value left out."""
        for name in ("overlap_explanation", "overlap_prediction"):
            if name in self.arrays:
                values = over_layers(self.arrays[name])
                if "scored" in self.arrays:
                    values = np.where(self.arrays["scored"], values, np.nan)
                order = np.argsort(np.where(np.isfinite(values), values, 2.0), kind="stable")
                known = int(np.isfinite(values).sum())
                return [int(node) for node in order[: min(count, known)]]
        return []

    def overlaps(self, attack: str) -> dict[str, Any] | None:
        """How many of their k strongest neighbours the nodes in reach of an attack keep, as shares of nodes.

        Every layer counts the same, so the mean is the record's `overlap_touched.*.all`. None without the
        arrays, or if no node is in reach.
        """
        values = self.arrays.get(f"overlap_{attack}")
        if values is None:
            return None
        reach = self.arrays.get("touched")
        # Both attacks share their endpoints, so they reach the same nodes.
        counted = np.isfinite(values) & (True if reach is None or reach.shape != values.shape else reach)
        told = [row[mask].astype(np.float64) for row, mask in zip(values, counted, strict=True) if mask.any()]
        if not told:
            return None
        shares = [np.bincount(np.rint(self.k * row).astype(int), minlength=self.k + 1) for row in told]
        mean = np.mean([share / share.sum() for share in shares], axis=0)
        return {
            "name": self.name,
            "shares": [round(float(share), 5) for share in mean],
            "nodes": int(counted.any(0).sum()),
            "mean": float(np.mean([row.mean() for row in told])),
            "chance": look_up(self.record.get("metrics") or {}, "overlap_touched.chance.all"),
        }

    @property
    def note(self) -> str | None:
        """What its provenance remarks, e.g. that it was not trained."""
        note = (self.record.get("provenance") or {}).get("note")
        return None if note is None else f"{self.name}: {note}"

    @property
    def score(self) -> str:
        """Name of its headline score."""
        return score_of(self.record)

    @property
    def k(self) -> int:
        """Neighbours in an explanation."""
        k = (self.record.get("config") or {}).get("k", 5)
        return k if isinstance(k, int) and k > 0 else 5


def parts_of(
    records: Sequence[Mapping[str, Any]],
    certificates: Mapping[str, Mapping[str, Any]],
    notes: list[str],
    injections: Injections | None = None,
) -> list[Part]:
    """Split records and certificates into plain values and arrays.

    Args:
        records: as `EvaluationRecord.to_dict` gives them, perhaps with parts missing.
        certificates: as `CertificateRecord.to_dict` gives them, by the names of the rows.
        notes: gets a sentence for whatever cannot be read.
        injections: certificates against injection, by the names of the rows.
    """
    out = []
    for record in records:
        name = str(record.get("name", "model"))
        arrays = _unpacked(record.get("per_node"), f"the record of {name}", notes)
        proof, layers = certificates.get(name), list[dict[str, Any]]()
        if proof is not None and _of_another(record, proof):
            notes.append(f"The certificate given for {name} is of other weights or data: it is left out.")
            proof = None
        if proof is not None:
            for layer in proof.get("layers") or []:
                found = _unpacked(layer.get("per_node"), f"the certificate of {name}", notes)
                words = {"name": layer.get("name", ""), "class_status": layer.get("class_status", "unknown")}
                layers.append({**words, **found})
        kept = {key: value for key, value in record.items() if key != "per_node"}
        against = (injections or {}).get(name, ())
        out.append(Part(name, kept, arrays, None if proof is None else _summary(proof), layers, against))
    return out


def _of_another(record: Mapping[str, Any], proof: Mapping[str, Any]) -> bool:
    """Whether a certificate and a record name different weights or data."""
    ours, theirs = (entry.get("provenance") or {} for entry in (record, proof))
    return any(name in ours and name in theirs and ours[name] != theirs[name] for name in ("weights", "data"))


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list from a file; what is no object is passed over."""
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _unpacked(packed: Any, where: str, notes: list[str]) -> Arrays:
    out: Arrays = {}
    for name, value in (packed if isinstance(packed, Mapping) else {}).items():
        if value is None:
            continue
        try:
            out[str(name)] = unpack_array(value)
        except Exception as error:
            notes.append(f"The per-node values {str(name)!r} of {where} cannot be read ({error}).")
    return out


def _summary(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and curves of a certificate."""
    names = ("norm", "radius", "k2", "alpha", "beta", "divergence", "promise")
    summary = proof.get("summary") or {}
    return {
        **{name: proof.get(name) for name in names},
        "radii": summary.get("radii") or [],
        "layers": [
            {
                "name": layer.get("name"),
                "counted": layer.get("counted"),
                "topk": look_up(layer, "topk.curve") or [],
                "class": look_up(layer, "class.curve") or [],
                "topk_share": look_up(layer, "topk.share"),
                "class_share": look_up(layer, "class.share"),
                "class_status": look_up(layer, "class.status"),
                "reason": layer.get("reason"),
                "satisfied": layer.get("satisfied_share"),
            }
            for layer in objects(summary.get("layers"))
        ],
    }
