"""`_Part`: one model's record and certificate as plain values, with their arrays unpacked and set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fgai.certificates import Injection, InjectionCertificate, certify
from fgai.evaluation.paired import Interval, paired_interval
from fgai.graph import Graph
from fgai.records import look_up, unpack_array
from fgai.reports.numbers import SHARES, _score_of

NEIGHBOURS = 1
"""Injected neighbours that the page's certificates are about."""

Injections = Mapping[str, Sequence[InjectionCertificate]]
"""By model: against new neighbours of the node alone, and of every node."""


def certify_injections(models: Mapping[str, nn.Module], graph: Graph, k: int) -> Injections:
    """Certify models against new neighbours of one node, and of all where that can be bounded at all."""
    out = {}
    for name, model in models.items():
        found = [certify(model, graph, threat=Injection(NEIGHBOURS, "direct"), k2=k)]
        if found[0].known:
            found.append(certify(model, graph, threat=Injection(NEIGHBOURS, "any"), k2=k))
        out[name] = found
    return out


def summary(certificates: Sequence[InjectionCertificate], scored: Tensor | None) -> list[dict[str, Any]]:
    """Shares of the scored nodes, threat by threat, without what is known of single nodes.

    Args:
        certificates: of one model.
        scored: bool [N], the nodes that count; all by default.
    """
    return [
        {
            "neighbours": one.neighbours,
            "where": one.where,
            "k": one.k,
            "known": one.known,
            "reason": one.reason,
            "share": one.share(scored),
            "layers": [
                {"name": layer.name, "status": layer.status, "share": one.order_share(place, scored)}
                for place, layer in enumerate(one.layers)
            ],
            "promise": one.promise,
        }
        for one in certificates
    ]


def _of_nodes(certificates: Sequence[InjectionCertificate], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """What holds at each node, threat by threat: 1 and 0, or None where nothing is known.

    Args:
        certificates: of one model.
        nodes: which.
    """
    index = torch.from_numpy(np.asarray(nodes, dtype=np.int64))

    def flags(holds: Tensor | None) -> list[int] | None:
        return None if holds is None else holds[index].int().tolist()

    return [
        {
            "neighbours": one.neighbours,
            "where": one.where,
            "k": one.k,
            "class": flags(one.holds) if one.known else None,
            "layers": [
                {"status": layer.status, "reason": layer.reason, "holds": flags(layer.holds)}
                for layer in one.layers
            ],
        }
        for one in certificates
    ]


Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class _Part:
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
                values = _over_layers(self.arrays[name])
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
        return _score_of(self.record)

    @property
    def k(self) -> int:
        """Neighbours in an explanation."""
        k = (self.record.get("config") or {}).get("k", 5)
        return k if isinstance(k, int) and k > 0 else 5


def _parts_of(
    records: Sequence[Mapping[str, Any]],
    certificates: Mapping[str, Mapping[str, Any]],
    notes: list[str],
    injections: Injections | None = None,
) -> list[_Part]:
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
        out.append(_Part(name, kept, arrays, None if proof is None else _summary(proof), layers, against))
    return out


def _of_another(record: Mapping[str, Any], proof: Mapping[str, Any]) -> bool:
    """Whether a certificate and a record name different weights or data."""
    ours, theirs = (entry.get("provenance") or {} for entry in (record, proof))
    return any(name in ours and name in theirs and ours[name] != theirs[name] for name in ("weights", "data"))


def _objects(value: Any) -> list[Mapping[str, Any]]:
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
            for layer in _objects(summary.get("layers"))
        ],
    }


Intervals = Mapping[str, Mapping[str, Any]]
"""By model and measure: `difference`, `low`, `high` and `nodes`, as the document carries them."""
FALL = "fall"
"""The measure that compares a model with itself: right under attack against right without."""


def _intervals_of(parts: Sequence[_Part], reference: str) -> dict[str, dict[str, Any]]:
    """Return the interval of every difference whose values are known node by node.

    Of each model that of its own fall under attack; of all but the reference also those of the difference
    from it, by the keys of `fgai.reports.words`.

    Args:
        parts: records and certificates with their arrays.
        reference: name of the model the others are compared with.
    """
    first = next((part for part in parts if part.name == reference), parts[0])
    out: dict[str, dict[str, Any]] = {}
    for part in parts:
        found = {FALL: _of_predictions(part, part, "clean", "attacked")}
        if part is not first:
            found |= {when: _of_predictions(first, part, when, when) for when in ("attacked", "clean")}
            found |= {
                key: _of_overlaps(first, part, attack)
                for key, attack in (("kept", "prediction"), ("aimed", "explanation"))
            }
            found["proved"] = _of_proofs(first, part)
        out[part.name] = {key: interval._asdict() for key, interval in found.items() if interval is not None}
    return out


def _interval_in(intervals: Intervals | None, name: str, key: str) -> Interval | None:
    """Return one interval of a document; None where it has none that can be read."""
    found = ((intervals or {}).get(name) or {}).get(key)
    try:
        interval = None if found is None else Interval(**found)
    except TypeError:  # from a file of another version
        return None
    return interval if interval and all(isinstance(value, int | float) for value in interval) else None


def _of_predictions(first: _Part, second: _Part, before: str, after: str) -> Interval | None:
    """What is classified right; only where the score is that share."""
    prefix = "item_" if "item_scored" in first.arrays else ""
    clean, attacked = (
        first.arrays.get(f"{prefix}correct_{before}"),
        second.arrays.get(f"{prefix}correct_{after}"),
    )
    if clean is None or attacked is None or first.score not in SHARES:
        return None
    return paired_interval(clean, attacked, first.arrays.get(f"{prefix}scored"))


def _of_overlaps(first: _Part, second: _Part, attack: str) -> Interval | None:
    """What stays of explanations, over the nodes that the attack reaches in both models."""
    before, after = (part.arrays.get(f"overlap_{attack}") for part in (first, second))
    ours, theirs = (part.arrays.get("touched") for part in (first, second))
    if before is None or after is None or ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    return paired_interval(before, after, ours & theirs)


def _of_proofs(first: _Part, second: _Part) -> Interval | None:
    """Whose top-k is proved to stay, at the output layer, over the nodes with more than k neighbours."""
    before, after = _proved(first), _proved(second)
    return None if before is None or after is None else paired_interval(before, after)


def _proved(part: _Part) -> NDArray[np.float64] | None:
    """1 where a node's top-k is proved to stay and 0 where it is not; NaN with at most k neighbours."""
    layer, proof = part.layers[-1] if part.layers else {}, part.certificate or {}
    costs, degree, radius, k = layer.get("costs"), layer.get("degree"), proof.get("radius"), proof.get("k2")
    if costs is None or degree is None or not isinstance(radius, int | float) or not isinstance(k, int):
        return None
    held = costs[:, 0] > radius if costs.shape[1] else np.ones(degree.shape, bool)
    return np.where(degree > k, held.astype(np.float64), np.nan)


def _over_layers(values: NDArray[Any]) -> NDArray[np.float64]:
    """[L, N] → [N]: mean over the layers where it is defined, NaN where it is nowhere."""
    defined = np.isfinite(values)
    total = np.where(defined, values, 0.0).sum(0)
    counts = defined.sum(0)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
