"""The nodes the page carries, from models and records or from records alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.explanations.node import Names, name_of
from fgai.graph import Graph
from fgai.reports.figures.layout import _between, _spring, _surroundings
from fgai.reports.parts import _of_nodes, _over_layers, _Part
from fgai.reports.views import (
    MOST_NEIGHBOURS,
    UNIT,
    WORST,
    _attacked_nodes,
    _choose,
    _coded,
    _flipped_nodes,
    _Seen,
    _telling_node,
    _View,
)

LONGEST = 80
ANY = -1  # an unlimited radius


def _facts(graph: Graph, nodes: Sequence[int], names: Names | None) -> dict[str, Any]:
    index = np.asarray(nodes, dtype=np.int64)
    loops = (graph.adjacency.source == graph.adjacency.destination).cpu().numpy()
    degree = graph.adjacency.degree.cpu().numpy().copy()
    np.subtract.at(degree, graph.adjacency.destination.cpu().numpy()[loops], 1)
    return {
        "id": list(nodes),
        "name": None if names is None else [_clipped(name_of(node, names)) for node in nodes],
        "label": None if graph.y is None else graph.y.cpu().numpy()[index].tolist(),
        "degree": degree[index].tolist(),
    }


def _clipped(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _neighbourhoods(seen: Sequence[_Seen], nodes: Sequence[int], k: int) -> dict[str, Any]:
    """Neighbours of each node and the attention each model pays them, before and after.

    Every node keeps its k strongest neighbours in every view, then the strongest in any view; the others are
    added up. Returns `neighbours` [n][d], `rest` [n], and per model `before`, `after` [n][d] in units,
    `rest_before` and `rest_after` [n].
    """
    keys = ("before", "after", "rest_before", "rest_after")
    models: list[dict[str, list[Any]]] = [{key: [] for key in keys} for _ in seen]
    out: dict[str, Any] = {"neighbours": [], "rest": [], "models": models}
    for node in nodes:
        rows = [[view.weights(node) for view in (one.clean, one.attacked)] for one in seen]
        strongest: dict[int, float] = {}
        kept: set[int] = set()
        for row in (row for pair in rows for row in pair):
            for neighbour, weight in row.items():
                strongest[neighbour] = max(weight, strongest.get(neighbour, 0.0))
            kept |= set(sorted(row, key=lambda n: (-row[n], n))[:k])
        others = sorted(strongest.keys() - kept, key=lambda n: (-strongest[n], n))
        kept |= set(others[: max(0, MOST_NEIGHBOURS - len(kept))])
        first = rows[0][0]
        listed = sorted(kept, key=lambda n: (-first.get(n, -1.0), n))
        out["neighbours"].append(listed)
        out["rest"].append(len(strongest) - len(listed))
        for entry, pair in zip(models, rows, strict=True):
            for name, row in zip(("before", "after"), pair, strict=True):
                entry[name].append([_coded(row.get(n)) for n in listed])
                entry[f"rest_{name}"].append(_coded(sum(w for n, w in row.items() if n not in kept)))
    return out


def _predictions(seen: _Seen, nodes: Sequence[int]) -> dict[str, Any]:
    """Class and confidence (in thousandths) of each node before and after."""
    index = np.asarray(nodes, dtype=np.int64)
    out: dict[str, Any] = {}
    for suffix, view in (("", seen.clean), ("_after", seen.attacked)):
        out[f"predicted{suffix}"] = view.predicted[index].tolist()
        out[f"confidence{suffix}"] = np.rint(1000 * view.confidence[index]).astype(int).tolist()
    return out


def _recorded(arrays: Mapping[str, NDArray[Any]], nodes: Sequence[int]) -> dict[str, Any]:
    """Values of each node in a record's per-node arrays, as far as there are any.

    `kept` and `kept_explanation` are percentages of the top-k kept, mean over layers; `reach` is whether the
    attack can have moved the node's attention.
    """
    index = np.asarray(nodes, dtype=np.int64)
    out: dict[str, Any] = {}
    for ours, theirs in (("predicted", "predicted_clean"), ("predicted_after", "predicted_attacked")):
        if theirs in arrays:
            out[ours] = arrays[theirs][index].tolist()
    for ours, theirs in (("kept", "overlap_prediction"), ("kept_explanation", "overlap_explanation")):
        if theirs in arrays:
            shares = _over_layers(arrays[theirs][:, index]).tolist()
            out[ours] = [round(100 * share) if math.isfinite(share) else None for share in shares]
    if "touched" in arrays:
        out["reach"] = arrays["touched"][:, index].any(0).astype(int).tolist()
    return out


def radii(layers: Sequence[Mapping[str, Any]], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Certified radii of each node, layer by layer: None if unknown, `ANY` if unlimited."""

    def rounded(values: NDArray[Any] | None) -> list[float | None] | None:
        if values is None:
            return None
        taken = values[np.asarray(nodes, dtype=np.int64)].tolist()
        return [None if math.isnan(v) else ANY if math.isinf(v) else float(f"{v:.3g}") for v in taken]

    out = []
    for layer in layers:
        costs = layer.get("costs")
        if costs is not None:
            costs = costs[:, 0] if costs.shape[1] else np.full(costs.shape[0], np.inf)
        words = {"name": str(layer.get("name", "")), "topk": rounded(costs)}
        words |= {"class": rounded(layer.get("class_radius"))}
        out.append({**words, "class_status": str(layer.get("class_status", "unknown"))})
    return out


SIZE = 36  # original nodes shown
NEW = 6  # injected nodes shown


def subgraph(seen: Sequence[_Seen], graph: Graph, node: int) -> dict[str, Any]:
    """Lay out the surroundings of a node and give every edge its attention in every view.

    An edge shows the stronger of its two directions; self-loops are left out.

    Returns:
        `centre`, `nodes` (numbers, injected ones last), `x`, `y`, `edges` (pairs of positions) and per model
        `before`, `after` (attention in units, None where the edge is not there), `wrong`, `wrong_after` (per
        node; against the class before the attack where no truth is known).
    """
    members = _surroundings(graph, node, SIZE)
    new = _new_nodes(seen, members, graph.num_nodes)
    shown = [*members, *new]
    index = {n: i for i, n in enumerate(shown)}
    views = [_weights(view, shown, index) for one in seen for view in (one.clean, one.attacked)]
    edges = sorted({pair for view in views for pair in view})
    known = [pair for pair in edges if max(pair) < len(members)]
    places = _spring(len(members), np.array(known, dtype=np.int64).reshape(-1, 2))
    low, high = places.min(0), places.max(0)  # panels are wider than high: stretch each axis to [-1, 1]
    places = np.asarray((places - (low + high) / 2) / np.maximum((high - low) / 2, 1e-9))
    if new:
        count = len(members)
        anchors = [[a for a, b in edges if b == count + i and a < count] for i in range(len(new))]
        places = np.concatenate([places, _between(places, anchors)])
    models = []
    for one, before, after in zip(seen, views[::2], views[1::2], strict=True):
        coded = {"before": [_coded(before.get(pair)) for pair in edges]}
        coded["after"] = [_coded(after.get(pair)) for pair in edges]
        models.append({**coded, **_wrong(one, graph, members)})
    return {
        "centre": node,
        "nodes": shown,
        "x": np.round(places[:, 0], 4).tolist(),
        "y": np.round(places[:, 1], 4).tolist(),
        "edges": [list(pair) for pair in edges],
        "models": models,
    }


def _new_nodes(seen: Sequence[_Seen], members: list[int], original: int) -> list[int]:
    inside, reach = set(members), dict[int, int]()
    for one in seen:
        for number, ends in enumerate([] if one.new is None else one.new.tolist(), start=original):
            if joined := len(inside & set(ends)):
                reach[number] = max(joined, reach.get(number, 0))
    return sorted(reach, key=lambda n: (-reach[n], n))[:NEW]


def _weights(view: _View, shown: list[int], index: dict[int, int]) -> dict[tuple[int, int], float]:
    """Attention of the edges among the shown nodes, by pair of positions."""
    out: dict[tuple[int, int], float] = {}
    for node in shown:
        if node + 1 >= view.rowptr.size:
            continue
        sources, weights = view.row(node)
        for source, weight in zip(sources.tolist(), weights.tolist(), strict=True):
            if source in index and source != node:
                low, high = sorted((index[source], index[node]))
                out[low, high] = max(weight, out.get((low, high), 0.0))
    return out


def _wrong(one: _Seen, graph: Graph, members: list[int]) -> dict[str, list[int]]:
    truth = (one.clean.predicted if graph.y is None else graph.y.cpu().numpy())[members]
    pairs = (("wrong", one.clean), ("wrong_after", one.attacked))
    return {
        name: ((view.predicted[members] != truth) & (truth >= 0)).astype(int).tolist() for name, view in pairs
    }


def _nodes_of_models(
    parts: Sequence[_Part],
    graph: Graph,
    seen: Sequence[_Seen],
    node: int | None,
    node_names: Names | None,
) -> dict[str, Any]:
    """The nodes the page carries, with their neighbourhoods; the one it opens with comes first."""
    k = parts[0].k
    degree = graph.adjacency.degree.numpy()
    label = None if graph.y is None else graph.y.numpy()
    mask = graph.test_mask
    scored = np.arange(graph.num_nodes) if mask is None else mask.nonzero().flatten().numpy()
    centre = _telling_node(seen, degree, label, scored, k) if node is None else node
    close = _surroundings(graph, centre, SIZE)
    priorities: list[tuple[str, list[int]]] = [
        ("around the one drawn above", [centre, *close]),
        ("that the attack changed directly", _attacked_nodes(seen)),
    ]
    priorities += [(f"that {one.name} predicts otherwise", _flipped_nodes(one, scored)) for one in seen]
    priorities += [(f"whose explanation {p.name} loses most", p.worst(WORST)) for p in parts]
    choice = _choose(graph.num_nodes, priorities, degree, models=len(seen))
    around = _neighbourhoods(seen, choice.nodes, k)
    joined = {int(n) for one in seen for n in one.ends}
    models = []
    for spot, one in enumerate(seen):
        part = next(p for p in parts if p.name == one.name)
        models.append(
            {
                "name": one.name,
                **_recorded(part.arrays, choice.nodes),
                **_predictions(one, choice.nodes),
                **around["models"][spot],
                "changed": np.isin(choice.nodes, one.changed).astype(int).tolist()
                if one.changed.size
                else None,
                "radii": radii(part.layers, choice.nodes) if part.layers else None,
                "injections": _of_nodes(part.injections, choice.nodes),
            }
        )
    listed = {n for row in around["neighbours"] for n in row if n < graph.num_nodes}
    mentioned = _facts(graph, sorted(listed | set(close)), node_names)
    return {
        "k": k,
        "unit": UNIT,
        "total": graph.num_nodes,
        "words": choice.words(graph.num_nodes),
        "nodes": {
            **_facts(graph, choice.nodes, node_names),
            "neighbours": around["neighbours"],
            "rest": around["rest"],
            "truth": _truth(graph, choice.nodes, around["neighbours"]),
            "joined": [int(n in joined) for n in choice.nodes],
        },
        "around": {key: mentioned[key] for key in ("id", "name", "label")},
        "models": models,
    }


def _nodes_of_records(parts: Sequence[_Part], node: int | None) -> dict[str, Any] | None:
    """Predictions and overlaps of single nodes without models; None without per-node values."""
    k = parts[0].k
    parts = [part for part in parts if "degree" in part.arrays]
    if not parts:
        return None
    first = parts[0].arrays
    degree = first["degree"].astype(np.int64)
    priorities: list[tuple[str, list[int]]] = [("asked for", [] if node is None else [node])]
    priorities += [(f"whose explanation {p.name} loses most", p.worst(WORST)) for p in parts]
    choice = _choose(degree.size, priorities, np.zeros_like(degree))
    index = np.asarray(choice.nodes)
    return {
        "k": k,
        "unit": UNIT,
        "total": int(degree.size),
        "words": choice.words(int(degree.size)),
        "nodes": {
            "id": choice.nodes,
            "name": None,
            "label": first["label"][index].tolist() if "label" in first else None,
            "degree": degree[index].tolist(),
        },
        "models": [
            {
                "name": part.name,
                **_recorded(part.arrays, choice.nodes),
                "radii": radii(part.layers, choice.nodes) if part.layers else None,
            }
            for part in parts
        ],
        "classes": None,
    }


def _truth(graph: Graph, nodes: Sequence[int], neighbours: list[list[int]]) -> list[list[int]] | None:
    """Per listed neighbour, whether the edge belongs to the true explanation."""
    if graph.edge_truth is None:
        return None
    rowptr, source = graph.adjacency.rowptr.numpy(), graph.adjacency.source.numpy()
    truth = graph.edge_truth.numpy()
    out = []
    for node, listed in zip(nodes, neighbours, strict=True):
        part = slice(int(rowptr[node]), int(rowptr[node + 1]))
        good = set(source[part][truth[part]].tolist())
        out.append([int(n in good) for n in listed])
    return out
