"""The nodes on a page, from models and records or from records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fgai.attacks import AttackResult
from fgai.attention import observe, prepared
from fgai.explanations.node import GraphView, Names, check_node, name_of
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.reports.results import _injections_at, _ModelResults, _over_layers
from fgai.tasks import task_of
from fgai.typed import typed

UNIT = 1e-6  # attention on the page is in whole multiples of this
ANY = -1  # an unlimited radius
LONGEST = 80  # characters of a name

MOST_NODES = 2000
MOST_ENTRIES = 120_000  # neighbour entries over all models; about 30 bytes each on the page
MOST_NEIGHBOURS = 40
WORST = 100  # nodes of each kind that are shown because the attack changed them most
CANDIDATES = 200  # nodes among which the first one is chosen by its overlap

SIZE = 36  # original nodes drawn
NEW = 6  # injected nodes drawn
GAP = 0.28  # radians between two of them

Ints = NDArray[np.int64]
Points = NDArray[np.float64]


@typed
@dataclass(frozen=True, eq=False)
class Case:
    """One row of a before/after figure: its name, a model, and the result of an attack on it."""

    name: str
    model: nn.Module
    attack: AttackResult


@typed
def before_after(case: Case, data: Any, layer: str | int = "mean") -> tuple[GraphView, GraphView]:
    """Return the attention and predictions of a case on the clean graph and on the attacked one."""
    graphs = as_graph(data), case.attack.graph
    clean, attacked = (observe(case.model, prepared(case.model, graph)) for graph in graphs)
    original = clean.graph.num_nodes
    return GraphView.of(clean, layer=layer), GraphView.of(attacked, layer=layer, original=original)


@dataclass(frozen=True, eq=False)
class _ModelViews:
    """One model before and after the attack."""

    name: str
    clean: GraphView
    attacked: GraphView  # the first N nodes are the original ones
    new: list[list[int]]  # the nodes each injected node is joined to
    changed: set[int]  # nodes whose features the attack changed
    ends: set[int]  # nodes the attack gave a new edge

    @classmethod
    def of(cls, case: Case, graph: Graph, layer: str | int = "mean") -> Self:
        change = case.attack.change
        edges = [part.flatten().tolist() for part in (change.endpoints, change.edges) if part is not None]
        new = [] if change.endpoints is None else change.endpoints.tolist()
        changed = set() if change.rows is None else set(change.rows.tolist())
        return cls(case.name, *before_after(case, graph, layer), new, changed, set().union(*edges))

    def kept(self, node: int, k: int) -> float:
        """Share of the node's top k that stay among its original neighbours; 1 without neighbours."""
        before, after = self.clean.weights(node), self.attacked.weights(node)
        first = _strongest(before, k)
        second = _strongest({n: weight for n, weight in after.items() if n in before}, k)
        return len({*first} & {*second}) / len(first) if first else 1.0

    def flipped(self, scored: Ints) -> list[int]:
        """Tested nodes whose predicted class the attack changed, those of highest confidence first."""
        flipped = scored[self.clean.predicted[scored] != self.attacked.predicted[scored]]
        order = np.argsort(-self.clean.confidence[flipped], kind="stable")
        return [int(node) for node in flipped[order][:WORST]]


def _strongest(weights: Mapping[int, float], k: int) -> list[int]:
    """The k neighbours with most attention, ties by number."""
    return sorted(weights, key=lambda n: (-weights[n], n))[:k]


def _in_units(weight: float | None) -> int | None:
    """Attention in units; None where the edge is not there."""
    return None if weight is None else round(weight / UNIT)


def _choose(
    total: int, priorities: Sequence[tuple[str, Iterable[int]]], cost: Ints, *, models: int = 1
) -> tuple[list[int], str]:
    """Take nodes, of `cost` neighbours each, group by group until the page is full; also say so in words."""
    chosen, counts, taken = list[int](), Counter[str](), np.zeros(total, dtype=bool)
    left = MOST_ENTRIES // max(1, models)
    sample = np.random.Generator(np.random.PCG64(0)).permutation(total)
    for reason, nodes in (*priorities, ("drawn at random", sample.tolist())):
        for node in nodes:
            need = min(int(cost[node]), MOST_NEIGHBOURS) + 1
            if taken[node] or need > left or len(chosen) >= MOST_NODES:
                continue
            taken[node] = True
            left -= need
            chosen.append(int(node))
            counts[reason] += 1
    if len(chosen) == total:
        return chosen, f"This page carries all {total:,} nodes."
    *parts, last = (f"{count:,} {reason}" for reason, count in counts.items())
    listed = f"{', '.join(parts)} and {last}" if parts else last
    words = f"This page carries {len(chosen):,} of {total:,} nodes: {listed}."
    return chosen, f"{words} The numbers and curves above count all nodes."


def _default_node(
    models: Sequence[_ModelViews], degree: Ints, label: Ints | None, scored: Ints, k: int
) -> int:
    """The node the page opens with: attacked, of medium degree, and wrong in the first model alone."""
    first, last = models[0], models[-1]
    count = degree.size
    score = np.zeros(count)
    score[scored] += 8.0
    score[list(first.ends)] += 4.0
    score += 3.0 * ((degree > k) & (degree <= 12))
    truth = first.clean.predicted[:count] if label is None else label
    stays, stays_last = (view.attacked.predicted[:count] == truth for view in (first, last))
    right = (first.clean.predicted[:count] == truth) & (last.clean.predicted[:count] == truth)
    score += right * (2.0 + 2.0 * ~stays + 1.0 * stays_last)
    score += first.clean.confidence[:count] + np.minimum(degree, 12) / 50
    if first is not last:
        for node in np.argsort(-score, kind="stable")[:CANDIDATES]:
            score[node] += 4.0 * (last.kept(int(node), k) - first.kept(int(node), k))
    return int(score.argmax())


def _node_columns(graph: Graph, nodes: Sequence[int], names: Names | None) -> dict[str, Any]:
    source, destination = graph.adjacency.source.cpu().numpy(), graph.adjacency.destination.cpu().numpy()
    degree = np.bincount(destination[source != destination], minlength=graph.num_nodes)
    label = _labels(graph)
    return {
        "id": list(nodes),
        "name": None if names is None else [_shorten(name_of(node, names)) for node in nodes],
        "label": None if label is None else label[nodes].tolist(),
        "degree": degree[nodes].tolist(),
    }


def _labels(graph: Graph) -> Ints | None:
    """[N] the class of each node, of a pair it is an end of, or of its graph; -1 where unknown."""
    labels = task_of(graph).node_labels(graph)
    return None if labels is None else labels.cpu().numpy()


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _neighbourhoods(models: Sequence[_ModelViews], nodes: Sequence[int], k: int) -> dict[str, Any]:
    """Neighbours of each node and their attention in units in each model, before and after."""
    # A node keeps its k strongest neighbours in every view, then the strongest in any; others are the `rest`.
    keys = ("before", "after", "rest_before", "rest_after")
    columns: list[dict[str, list[Any]]] = [{key: [] for key in keys} for _ in models]
    out: dict[str, Any] = {"neighbours": [], "rest": [], "models": columns}
    for node in nodes:
        pairs = [(model.clean.weights(node), model.attacked.weights(node)) for model in models]
        largest: dict[int, float] = {}
        kept: set[int] = set()
        for weights in (weights for pair in pairs for weights in pair):
            kept |= set(_strongest(weights, k))
            for neighbour, weight in weights.items():
                largest[neighbour] = max(weight, largest.get(neighbour, 0.0))
        others = {n: weight for n, weight in largest.items() if n not in kept}
        kept |= set(_strongest(others, max(0, MOST_NEIGHBOURS - len(kept))))
        first = pairs[0][0]
        listed = sorted(kept, key=lambda n: (-first.get(n, -1.0), n))
        out["neighbours"].append(listed)
        out["rest"].append(len(largest) - len(listed))
        for column, pair in zip(columns, pairs, strict=True):
            for when, weights in zip(("before", "after"), pair, strict=True):
                column[when].append([_in_units(weights.get(n)) for n in listed])
                column[f"rest_{when}"].append(_in_units(sum(w for n, w in weights.items() if n not in kept)))
    return out


def _record_columns(result: _ModelResults, nodes: Sequence[int]) -> dict[str, Any]:
    """Values of each node in a record's per-node arrays, `kept` in % of the top-k, and certified radii."""
    arrays = result.arrays
    radii = [_radii(layer, nodes) for layer in result.layers]
    out: dict[str, Any] = {"name": result.name, "radii": radii or None}
    for key, array in (("predicted", "predicted_clean"), ("predicted_after", "predicted_attacked")):
        if array in arrays:
            out[key] = arrays[array][nodes].tolist()
    for key, array in (("kept", "overlap_prediction"), ("kept_explanation", "overlap_explanation")):
        if array in arrays:
            shares = _over_layers(arrays[array][:, nodes]).tolist()
            out[key] = [round(100 * share) if math.isfinite(share) else None for share in shares]
    if "touched" in arrays:
        out["reach"] = arrays["touched"][:, nodes].any(0).astype(int).tolist()
    return out


def _radii(layer: Mapping[str, Any], nodes: Sequence[int]) -> dict[str, Any]:
    """Certified radii of each node in a layer: None if unknown, `ANY` if unlimited."""

    def rounded(values: NDArray[Any] | None) -> list[float | None] | None:
        if values is None:
            return None
        return [
            None if math.isnan(v) else ANY if math.isinf(v) else float(f"{v:.3g}")
            for v in values[nodes].tolist()
        ]

    costs = layer.get("costs")
    if costs is not None:
        costs = costs[:, 0] if costs.shape[1] else np.full(costs.shape[0], np.inf)
    radii = {"topk": rounded(costs), "class": rounded(layer.get("class_radius"))}
    return {"name": str(layer["name"]), **radii, "class_status": str(layer["class_status"])}


def subgraph(models: Sequence[_ModelViews], graph: Graph, node: int, size: int = SIZE) -> dict[str, Any]:
    """Return positions of the nodes around one, injected ones last, and attention of their edges by view.

    The `size` nodes reached first are drawn, and the `NEW` injected ones that are joined to most of them. An
    edge shows the stronger of its two directions; self-loops are left out. Without labels, `wrong` compares
    with the class before the attack.
    """
    members = _surroundings(graph, node, size)
    count, new = len(members), _new_nodes(models, members, graph.num_nodes)[:NEW]
    shown = [*members, *new]
    weights = [[_edge_weights(view, shown) for view in (model.clean, model.attacked)] for model in models]
    edges = sorted({pair for views in weights for view in views for pair in view})
    inside = [pair for pair in edges if max(pair) < count]
    points = _spring(count, np.array(inside, dtype=np.int64).reshape(-1, 2))
    low, high = points.min(0), points.max(0)  # panels are wider than high: stretch each axis to [-1, 1]
    points = np.asarray((points - (low + high) / 2) / np.maximum((high - low) / 2, 1e-9))
    if new:
        anchors = [[a for a, b in edges if b == count + i and a < count] for i in range(len(new))]
        points = np.concatenate([points, _between(points, anchors)])
    columns, label = [], _labels(graph)
    for model, views in zip(models, weights, strict=True):
        truth = (model.clean.predicted if label is None else label)[members]
        before, after = ([_in_units(view.get(pair)) for pair in edges] for view in views)
        wrong, wrong_after = (
            ((view.predicted[members] != truth) & (truth >= 0)).astype(int).tolist()
            for view in (model.clean, model.attacked)
        )
        columns.append({"before": before, "after": after, "wrong": wrong, "wrong_after": wrong_after})
    return {
        "centre": node,
        "nodes": shown,
        "x": np.round(points[:, 0], 4).tolist(),
        "y": np.round(points[:, 1], 4).tolist(),
        "edges": [list(pair) for pair in edges],
        "models": columns,
    }


def _new_nodes(models: Sequence[_ModelViews], members: list[int], original: int) -> list[int]:
    """The injected nodes that are joined to most members in any model."""
    reach = Counter[int]()
    for model in models:
        for number, ends in enumerate(model.new, start=original):
            reach[number] = max(len(set(members) & set(ends)), reach[number])
    return sorted(+reach, key=lambda n: (-reach[n], n))


def _edge_weights(view: GraphView, shown: list[int]) -> dict[tuple[int, int], float]:
    """Attention of the edges among the shown nodes, by pair of positions."""
    index = {node: i for i, node in enumerate(shown)}
    out: dict[tuple[int, int], float] = {}
    for node in shown:
        for source, weight in view.weights(node).items():
            if source in index and source != node:
                low, high = sorted((index[source], index[node]))
                out[low, high] = max(weight, out.get((low, high), 0.0))
    return out


def _nodes_of_models(
    results: Sequence[_ModelResults],
    graph: Graph,
    models: Sequence[_ModelViews],
    node: int | None,
    node_names: Names | None,
) -> dict[str, Any]:
    """The nodes on the page, with their neighbourhoods; the one it opens with comes first."""
    k = results[0].k
    degree, label, mask = graph.adjacency.degree.numpy(), _labels(graph), graph.test_mask
    scored = np.arange(graph.num_nodes) if mask is None else mask.nonzero().flatten().numpy()
    centre = _default_node(models, degree, label, scored, k) if node is None else node
    close = _surroundings(graph, centre, SIZE)
    joined = {node for model in models for node in model.ends}
    attacked = sorted(joined.union(*(model.changed for model in models)))
    priorities: list[tuple[str, list[int]]] = [
        ("around the one drawn above", [centre, *close]),
        ("that the attack changed directly", attacked),
        *((f"that {model.name} predicts otherwise", model.flipped(scored)) for model in models),
        *((f"whose explanation {result.name} loses most", result.worst(WORST)) for result in results),
    ]
    nodes, words = _choose(graph.num_nodes, priorities, degree, models=len(models))
    if task_of(graph).needs_links:
        words += " Prediction and truth at a node are those of one pair it is an end of."
    around = _neighbourhoods(models, nodes, k)
    named = {result.name: result for result in reversed(results)}
    columns = [
        {
            **_record_columns(named[model.name], nodes),
            "predicted": model.clean.predicted[nodes].tolist(),
            "confidence": np.rint(1000 * model.clean.confidence[nodes]).astype(int).tolist(),
            "predicted_after": model.attacked.predicted[nodes].tolist(),
            "confidence_after": np.rint(1000 * model.attacked.confidence[nodes]).astype(int).tolist(),
            **attention,
            "changed": [int(node in model.changed) for node in nodes] if model.changed else None,
            "injections": _injections_at(named[model.name].injections, nodes),
        }
        for model, attention in zip(models, around["models"], strict=True)
    ]
    listed = {n for row in around["neighbours"] for n in row if n < graph.num_nodes}
    mentioned = _node_columns(graph, sorted(listed | set(close)), node_names)
    facts = {
        **_node_columns(graph, nodes, node_names),
        "neighbours": around["neighbours"],
        "rest": around["rest"],
        "truth": _truth(graph, nodes, around["neighbours"]),
        "joined": [int(n in joined) for n in nodes],
    }
    mentioned.pop("degree")
    return {**_explorer(k, graph.num_nodes, words, facts, columns), "around": mentioned}


def _nodes_of_records(results: Sequence[_ModelResults], node: int | None) -> dict[str, Any] | None:
    """Predictions and overlaps of single nodes without models; None without per-node values."""
    k = results[0].k
    results = [result for result in results if "degree" in result.arrays]
    if not results:
        return None
    first = results[0].arrays
    degree = first["degree"].astype(np.int64)
    worst = [(f"whose explanation {result.name} loses most", result.worst(WORST)) for result in results]
    priorities = [("asked for", [] if node is None else [node]), *worst]
    nodes, words = _choose(degree.size, priorities, np.zeros_like(degree))
    label = first["label"][nodes].tolist() if "label" in first else None
    facts = {"id": nodes, "name": None, "label": label, "degree": degree[nodes].tolist()}
    columns = [_record_columns(result, nodes) for result in results]
    return _explorer(k, int(degree.size), words, facts, columns)


def _explorer(
    k: int, total: int, words: str, nodes: dict[str, Any], models: list[dict[str, Any]]
) -> dict[str, Any]:
    values = {"k": k, "unit": UNIT, "total": total, "words": words, "classes": None}
    return {**values, "nodes": nodes, "models": models}


def _truth(graph: Graph, nodes: Sequence[int], neighbours: list[list[int]]) -> list[list[int]] | None:
    """Per listed neighbour, whether the edge belongs to the true explanation."""
    if graph.edge_truth is None:
        return None
    rowptr, source = graph.adjacency.rowptr.numpy(), graph.adjacency.source.numpy()
    truth = graph.edge_truth.numpy()
    out = []
    for node, listed in zip(nodes, neighbours, strict=True):
        row = slice(*rowptr[node : node + 2].tolist())
        good = set(source[row][truth[row]].tolist())
        out.append([int(n in good) for n in listed])
    return out


def _around(count: int) -> Points:
    """[count, 2] positions on a circle, clockwise from the top."""
    angle = np.pi / 2 - 2 * np.pi * np.arange(count) / max(1, count)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _spring(count: int, edges: Ints, *, rounds: int = 300) -> Points:
    """[count, 2] positions within ±1: edges [E, 2] attract, all pairs repel, by ever smaller steps.

    Reference: Fruchterman, Reingold, Graph Drawing by Force-directed Placement, 1991.
    """
    if count == 1:
        return np.zeros((1, 2))
    joined = np.zeros((count, count))
    pairs = edges[edges[:, 0] != edges[:, 1]]
    joined[pairs[:, 0], pairs[:, 1]] = joined[pairs[:, 1], pairs[:, 0]] = 1.0
    ideal = 1.0 / np.sqrt(count)
    points = _around(count) * 0.5
    points *= 0.75 + 0.25 * np.cos(7.0 * np.arange(count))[:, None]  # or opposite forces cancel
    for step in range(rounds):
        apart = points[:, None] - points[None]
        length = np.sqrt((apart**2).sum(-1)).clip(1e-3)
        force = ideal**2 / length**2 - joined * length / ideal
        push = (apart * force[:, :, None]).sum(1) - 0.4 * points
        size = np.sqrt((push**2).sum(-1, keepdims=True)).clip(1e-9)
        heat = 0.1 * (1 - step / rounds) + 1e-3
        points = points + push / size * np.minimum(size, heat)
    points = points - points.mean(0)
    return np.asarray(points / max(1e-9, float(np.abs(points).max())))


def _between(points: Points, anchors: list[list[int]]) -> Points:
    """Positions of injected nodes, outside the others, each in the direction of the nodes it is joined to."""
    angle = 2.4 * np.arange(len(anchors))
    for index, ends in enumerate(anchors):
        middle = points[ends].mean(0) if ends else np.zeros(2)
        if np.hypot(*middle) > 1e-6:
            angle[index] = np.arctan2(middle[1], middle[0])
    angle = np.arctan2(np.sin(angle), np.cos(angle))  # within ±π
    order = np.argsort(angle, kind="stable")
    gap = min(GAP, 1.8 * np.pi / len(angle))
    turned = angle[order]
    for i in range(1, len(turned)):
        turned[i] = max(turned[i], turned[i - 1] + gap)
    angle[order] = turned - (turned - angle[order]).mean()
    return 1.3 * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _surroundings(graph: Graph, node: int, size: int) -> list[int]:
    """Return up to `size` nodes, breadth first from `node`."""
    check_node(node, graph.num_nodes)
    rowptr, source = graph.adjacency.rowptr.tolist(), graph.adjacency.source
    queue = [node]
    for here in queue:
        near = dict.fromkeys(source[rowptr[here] : rowptr[here + 1]].tolist())
        queue += [n for n in near if n not in queue][: size - len(queue)]
        if len(queue) >= size:
            break
    return queue
