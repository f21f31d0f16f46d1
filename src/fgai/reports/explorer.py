"""What the per-node explorer reads: neighbours, attention, predictions and certified radii, kept small."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.explanations.node import Names, name_of
from fgai.graph import Graph
from fgai.reports.choose import MOST_NEIGHBOURS
from fgai.reports.views import Seen, View, coded

LONGEST = 80
ANY = -1
"""Stands for a radius without end."""


def facts(graph: Graph, nodes: Sequence[int], names: Names | None) -> dict[str, Any]:
    """Number, name, class and degree of each node."""
    index = np.asarray(nodes, dtype=np.int64)
    loops = (graph.adjacency.source == graph.adjacency.destination).cpu().numpy()
    degree = graph.adjacency.degree.cpu().numpy().copy()
    np.subtract.at(degree, graph.adjacency.destination.cpu().numpy()[loops], 1)
    return {
        "id": list(nodes),
        "name": None if names is None else [clipped(name_of(node, names)) for node in nodes],
        "label": None if graph.y is None else graph.y.cpu().numpy()[index].tolist(),
        "degree": degree[index].tolist(),
    }


def clipped(text: str) -> str:
    """A name of bearable length."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def neighbourhoods(seen: Sequence[Seen], nodes: Sequence[int], k: int) -> dict[str, Any]:
    """Neighbours of each node and the attention each model pays them, before and after.

    Every node keeps its k strongest neighbours in every view, then the strongest in any view; the others are
    added up. Neighbours are ordered by the first model's clean attention.

    Returns:
        `neighbours` [n][d], `rest` [n] (how many are not listed), and per model `before`, `after` [n][d] in
        units (None where the edge is not there), `rest_before` and `rest_after` [n].
    """
    out: dict[str, Any] = {"neighbours": [], "rest": [], "models": []}
    models: list[dict[str, list[Any]]] = [
        {"before": [], "after": [], "rest_before": [], "rest_after": []} for _ in seen
    ]
    for node in nodes:
        rows = [[_row(view, node) for view in (one.clean, one.attacked)] for one in seen]
        strongest: dict[int, float] = {}
        kept: set[int] = set()
        for row in (row for pair in rows for row in pair):
            for neighbour, weight in row.items():
                strongest[neighbour] = max(weight, strongest.get(neighbour, 0.0))
            kept |= set(sorted(row, key=lambda n: (-row[n], n))[:k])
        for neighbour in sorted(strongest, key=lambda n: (-strongest[n], n)):
            if len(kept) >= MOST_NEIGHBOURS:
                break
            kept.add(neighbour)
        first = rows[0][0]
        listed = sorted(kept, key=lambda n: (-first.get(n, -1.0), n))
        out["neighbours"].append(listed)
        out["rest"].append(len(strongest) - len(listed))
        for entry, pair in zip(models, rows, strict=True):
            for name, row in zip(("before", "after"), pair, strict=True):
                entry[name].append([coded(row.get(n)) for n in listed])
                entry[f"rest_{name}"].append(coded(sum(w for n, w in row.items() if n not in kept)))
    out["models"] = models
    return out


def _row(view: View, node: int) -> dict[int, float]:
    sources, weights = view.row(node)
    return dict(zip(sources.tolist(), weights.tolist(), strict=True))


def predictions(seen: Seen, nodes: Sequence[int]) -> dict[str, Any]:
    """Class and confidence (in thousandths) of each node before and after."""
    index = np.asarray(nodes, dtype=np.int64)
    out: dict[str, Any] = {}
    for suffix, view in (("", seen.clean), ("_after", seen.attacked)):
        out[f"predicted{suffix}"] = view.predicted[index].tolist()
        out[f"confidence{suffix}"] = np.rint(1000 * view.confidence[index]).astype(int).tolist()
    return out


def recorded(arrays: Mapping[str, NDArray[Any]], nodes: Sequence[int]) -> dict[str, Any]:
    """What a record's per-node arrays say of each node, where they are there.

    `kept` and `kept_explanation` are percentages of the top-k kept under the two attacks, mean over layers;
    `reach` is whether the attack can have moved the node's attention at all.
    """
    index = np.asarray(nodes, dtype=np.int64)
    out: dict[str, Any] = {}
    for ours, theirs in (("predicted", "predicted_clean"), ("predicted_after", "predicted_attacked")):
        if theirs in arrays:
            out[ours] = arrays[theirs][index].tolist()
    for ours, theirs in (("kept", "overlap_prediction"), ("kept_explanation", "overlap_explanation")):
        if theirs in arrays:
            out[ours] = [_percent(value) for value in over_layers(arrays[theirs][:, index]).tolist()]
    if "touched" in arrays:
        out["reach"] = arrays["touched"][:, index].any(0).astype(int).tolist()
    return out


def over_layers(values: NDArray[Any]) -> NDArray[np.float64]:
    """[L, N] → [N]: mean over the layers where it is defined, NaN where it is nowhere."""
    defined = np.isfinite(values)
    total = np.where(defined, values, 0.0).sum(0)
    counts = defined.sum(0)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)


def _percent(value: float) -> int | None:
    return round(100 * value) if math.isfinite(value) else None


def radii(layers: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Certified radii of each node, layer by layer: None unknown, `ANY` without end.

    Args:
        layers: unpacked per-node arrays of a certificate, with `name` and `class_status`.
        nodes: which.
    """
    index = np.asarray(nodes, dtype=np.int64)
    out = []
    for layer in layers:
        costs, kind = layer.get("costs"), layer.get("class_radius")
        topk = None
        if costs is not None:
            first = costs[:, 0] if costs.shape[1] else np.full(costs.shape[0], np.inf)
            topk = [_radius(value) for value in first[index].tolist()]
        out.append(
            {
                "name": str(layer.get("name", "")),
                "topk": topk,
                "class": None if kind is None else [_radius(value) for value in kind[index].tolist()],
                "class_status": str(layer.get("class_status", "unknown")),
            }
        )
    return out


def _radius(value: float) -> float | None:
    if math.isnan(value):
        return None
    return ANY if math.isinf(value) else float(f"{value:.3g}")
