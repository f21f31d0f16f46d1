"""`_ModelResults`: one model's record and certificates as plain values, and their arrays unpacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fgai.certificates import InjectionCertificate, certify_injection
from fgai.evaluation.summary import FALL, SHARES, Interval, paired_interval, score_of
from fgai.graph import Graph
from fgai.records import look_up, unpack_array

NEIGHBOURS = 1  # injected neighbours that the page's certificates are about

Injections = Mapping[str, Sequence[InjectionCertificate]]  # by model: against new neighbours


def certify_injections(models: Mapping[str, nn.Module], graph: Graph, k: int) -> Injections:
    """Certify models against new neighbours of one node, and of all where that can be bounded."""
    out = {}
    for name, model in models.items():
        out[name] = [certify_injection(model, graph, neighbours=NEIGHBOURS, where="direct", k=k)]
        if out[name][0].known:
            out[name].append(certify_injection(model, graph, neighbours=NEIGHBOURS, k=k))
    return out


def injection_summary(
    certificates: Sequence[InjectionCertificate], scored: Tensor | None
) -> list[dict[str, Any]]:
    """Certified shares of one model by threat, over the nodes of `scored` (bool [N]; all by default)."""
    return [
        {
            **{name: getattr(one, name) for name in ("neighbours", "where", "k", "known", "reason")},
            "share": one.share(scored),
            "layers": [
                {"name": layer.name, "status": layer.status, "share": one.order_share(index, scored)}
                for index, layer in enumerate(one.layers)
            ],
            "promise": one.promise,
        }
        for one in certificates
    ]


def _injections_at(
    certificates: Sequence[InjectionCertificate], nodes: Sequence[int]
) -> list[dict[str, Any]]:
    """Whether class and order hold at each node, threat by threat: 1 or 0, or None where unknown."""
    index = torch.from_numpy(np.asarray(nodes, dtype=np.int64))

    def flags(mask: Tensor | None) -> list[int] | None:
        return None if mask is None else mask[index].int().tolist()

    return [
        {
            **{name: getattr(one, name) for name in ("neighbours", "where", "k")},
            "class": flags(one.certified) if one.known else None,
            "layers": [
                {"status": layer.status, "reason": layer.reason, "certified": flags(layer.certified)}
                for layer in one.layers
            ],
        }
        for one in certificates
    ]


Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class _ModelResults:
    name: str
    record: dict[str, Any]  # the evaluation as plain values, without per-node arrays
    arrays: Arrays = field(default_factory=dict)  # those arrays, by name
    certificate: dict[str, Any] | None = None  # settings and curves as plain values
    layers: list[dict[str, Any]] = field(default_factory=list)  # name, class_status and per-node arrays
    injections: Sequence[InjectionCertificate] = ()

    def worst(self, count: int) -> list[int]:
        """The nodes that keep least of their explanation, those without a value left out."""
        names = [name for name in ("overlap_explanation", "overlap_prediction") if name in self.arrays]
        if not names:
            return []
        values = np.where(self.arrays.get("scored", True), _over_layers(self.arrays[names[0]]), np.nan)
        order = np.argsort(values, kind="stable")  # NaN last
        return [int(node) for node in order[: min(count, int(np.isfinite(values).sum()))]]

    def overlaps(self, attack: str) -> dict[str, Any] | None:
        """Shares of the nodes in reach of an attack by how many of their top k they keep, layers alike."""
        values, reach = self.arrays.get(f"overlap_{attack}"), self.arrays.get("touched")
        if values is None:
            return None
        # Both attacks share their endpoints, so they reach the same nodes.
        counted = np.isfinite(values) & (True if reach is None or reach.shape != values.shape else reach)
        rows = [row[mask].astype(np.float64) for row, mask in zip(values, counted, strict=True) if mask.any()]
        if not rows:
            return None
        shares = [np.bincount(np.rint(self.k * row).astype(int), minlength=self.k + 1) for row in rows]
        mean = np.mean([share / share.sum() for share in shares], axis=0)
        return {
            "name": self.name,
            "shares": [round(float(share), 5) for share in mean],
            "nodes": int(counted.any(0).sum()),
            "mean": float(np.mean([row.mean() for row in rows])),
            "chance": look_up(self.record.get("metrics") or {}, "overlap_touched.chance.all"),
        }

    @property
    def k(self) -> int:
        k = (self.record.get("config") or {}).get("k", 5)
        return k if isinstance(k, int) and k > 0 else 5


def _results_of(
    records: Sequence[Mapping[str, Any]],
    certificates: Mapping[str, Mapping[str, Any]],
    notes: list[str],
    injections: Injections | None = None,
) -> list[_ModelResults]:
    """Split records and certificates into plain values and arrays, with a note on what cannot be read."""
    out = []
    for record in records:
        name = str(record.get("name", "model"))
        arrays = _arrays_of(record.get("per_node"), f"the record of {name}", notes)
        proof, layers = certificates.get(name), list[dict[str, Any]]()
        ours, theirs = (entry.get("provenance") or {} for entry in (record, proof or {}))
        shared = ours.keys() & theirs.keys() & {"weights", "data"}
        if any(ours[key] != theirs[key] for key in shared):
            notes.append(f"The certificate given for {name} is of other weights or data: it is left out.")
            proof = None
        for layer in (proof or {}).get("layers") or []:
            unpacked = _arrays_of(layer.get("per_node"), f"the certificate of {name}", notes)
            words = {"name": layer.get("name", ""), "class_status": layer.get("class_status", "unknown")}
            if layer.get("rows_are") in ("links", "graphs"):  # the page is about nodes
                unpacked.pop("class_radius", None)
                words["class_status"] = "unknown"
            layers.append({**words, **unpacked})
        kept = {key: value for key, value in record.items() if key != "per_node"}
        summary = None if proof is None else _summary(proof)
        out.append(_ModelResults(name, kept, arrays, summary, layers, (injections or {}).get(name, ())))
    return out


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _arrays_of(packed: Any, where: str, notes: list[str]) -> Arrays:
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
    names = ("norm", "radius", "k2", "alpha", "beta", "divergence", "promise")
    summary = proof.get("summary") or {}
    layers = [
        {
            **{name: layer.get(name) for name in ("name", "counted", "reason")},
            **{kind: look_up(layer, f"{kind}.curve") or [] for kind in ("topk", "class")},
            **{f"{kind}_share": look_up(layer, f"{kind}.share") for kind in ("topk", "class")},
            "class_status": look_up(layer, "class.status"),
            "definition": layer.get("definition") or {},
            "sentences": [text for text in layer.get("sentences") or [] if isinstance(text, str)],
        }
        for layer in _objects(summary.get("layers"))
    ]
    settings = {name: proof.get(name) for name in names}
    return {**settings, "radii": summary.get("radii") or [], "layers": layers}


def _intervals_of(results: Sequence[_ModelResults], reference: str) -> dict[str, dict[str, Any]]:
    """Return the interval of every difference whose values are known node by node."""
    first = next((result for result in results if result.name == reference), results[0])
    out: dict[str, dict[str, Any]] = {}
    for result in results:
        intervals = {FALL: _of_predictions(result, result, "clean", "attacked")}
        if result is not first:
            intervals |= {when: _of_predictions(first, result, when, when) for when in ("attacked", "clean")}
            intervals["kept"] = _of_overlaps(first, result, "prediction")
            intervals["aimed"] = _of_overlaps(first, result, "explanation")
            before, after = _proved(first), _proved(result)
            if before is not None and after is not None:
                intervals["proved"] = paired_interval(before, after)
        out[result.name] = {key: value._asdict() for key, value in intervals.items() if value is not None}
    return out


def _of_predictions(first: _ModelResults, second: _ModelResults, before: str, after: str) -> Interval | None:
    """Interval of the share that is classified right; only if the score is that share."""
    prefix = "item_" if "item_scored" in first.arrays else ""
    ours = first.arrays.get(f"{prefix}correct_{before}")
    theirs = second.arrays.get(f"{prefix}correct_{after}")
    if ours is None or theirs is None or score_of(first.record) not in SHARES:
        return None
    return paired_interval(ours, theirs, first.arrays.get(f"{prefix}scored"))


def _of_overlaps(first: _ModelResults, second: _ModelResults, attack: str) -> Interval | None:
    """Interval of the overlap of explanations, over the nodes that the attack reaches in both models."""
    before, after = (result.arrays.get(f"overlap_{attack}") for result in (first, second))
    ours, theirs = (result.arrays.get("touched") for result in (first, second))
    if before is None or after is None or ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    return paired_interval(before, after, ours & theirs)


def _proved(result: _ModelResults) -> NDArray[np.float64] | None:
    """1 where a node's top-k provably stays at the output layer, else 0; NaN with at most k neighbours."""
    layer, proof = result.layers[-1] if result.layers else {}, result.certificate or {}
    costs, degree, radius, k = layer.get("costs"), layer.get("degree"), proof.get("radius"), proof.get("k2")
    if costs is None or degree is None or not isinstance(radius, int | float) or not isinstance(k, int):
        return None
    proved = costs[:, 0] > radius if costs.shape[1] else np.ones(degree.shape, bool)
    return np.where(degree > k, proved.astype(np.float64), np.nan)


def _over_layers(values: NDArray[Any]) -> NDArray[np.float64]:
    """[L, N] → [N]: mean over the layers where it is defined, NaN where it is nowhere."""
    defined = np.isfinite(values)
    total = np.where(defined, values, 0.0).sum(0)
    counts = defined.sum(0)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
