"""`Part`: one model's record and certificate as plain values, with their arrays unpacked and set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.evaluate.layout import look_up
from fgai.evaluate.record import unpack_array
from fgai.report.explorer import over_layers

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
    """

    name: str
    record: dict[str, Any]
    arrays: Arrays = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    layers: list[dict[str, Any]] = field(default_factory=list)

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
        """Counts of nodes in reach of an attack by the share of their top-k that stays, in steps of 10 %.

        A node's share is the mean over the layers where the attack can reach it. None without the arrays.
        """
        values = self.arrays.get(f"overlap_{attack}")
        if values is None:
            return None
        values = values.astype(np.float64)
        reach = self.arrays.get("touched")
        # Which nodes the explanation attack reaches is the same: both share their endpoints.
        if reach is not None and reach.shape == values.shape:
            values = np.where(reach, values, np.nan)
        share = over_layers(values)
        share = share[np.isfinite(share)]
        counts = np.bincount(np.rint(10 * share).astype(int), minlength=11) if share.size else np.zeros(11)
        chance = look_up(self.record.get("metrics") or {}, "overlap_touched.chance.all")
        return {
            "name": self.name,
            "counts": counts.astype(int).tolist(),
            "nodes": int(share.size),
            "mean": float(share.mean()) if share.size else None,
            "chance": chance,
        }


def parts_of(
    records: Sequence[Mapping[str, Any]], certificates: Mapping[str, Mapping[str, Any]], notes: list[str]
) -> list[Part]:
    """Split records and certificates into plain values and arrays.

    Args:
        records: as `EvaluationRecord.to_dict` gives them, perhaps with parts missing.
        certificates: as `CertificateRecord.to_dict` gives them, by the names of the rows.
        notes: gets a sentence for whatever cannot be read.
    """
    out = []
    for record in records:
        name = str(record.get("name", "model"))
        arrays = _unpacked(record.get("per_node"), f"the record of {name}", notes)
        proof, layers = certificates.get(name), list[dict[str, Any]]()
        if proof is not None:
            for layer in proof.get("layers") or []:
                found = _unpacked(layer.get("per_node"), f"the certificate of {name}", notes)
                words = {"name": layer.get("name", ""), "class_status": layer.get("class_status", "unknown")}
                layers.append({**words, **found})
        kept = {key: value for key, value in record.items() if key != "per_node"}
        out.append(Part(name, kept, arrays, None if proof is None else _summary(proof), layers))
    return out


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
            for layer in summary.get("layers") or []
        ],
    }
