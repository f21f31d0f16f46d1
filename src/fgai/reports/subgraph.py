"""One neighbourhood before and after the attack: the same places for every model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fgai.figures.layout import Places, between, spring
from fgai.figures.subgraph import surroundings
from fgai.graph import Graph
from fgai.reports.views import Seen, View, coded

SIZE = 36
NEW = 6


def subgraph(seen: Sequence[Seen], graph: Graph, node: int, *, size: int = SIZE) -> dict[str, Any]:
    """Lay out the surroundings of a node and give every edge its attention in every view.

    An edge shows the stronger of its two directions; self-loops are left out.

    Args:
        seen: the models.
        graph: the clean one.
        node: in the middle.
        size: original nodes shown.

    Returns:
        `centre`, `nodes` (numbers, injected ones last), `x`, `y`, `edges` (pairs of positions) and per model
        `before`, `after` (attention in units, None where the edge is not there), `wrong`, `wrong_after` (bool
        per node; of the class before the attack where no truth is known), all in the order of `nodes`.
    """
    members = surroundings(graph, node, size)
    new = _new_nodes(seen, members, graph.num_nodes)
    shown = [*members, *new]
    index = {n: i for i, n in enumerate(shown)}
    views = [_weights(view, shown, index) for one in seen for view in (one.clean, one.attacked)]
    edges = sorted({pair for view in views for pair in view})
    known = [pair for pair in edges if max(pair) < len(members)]
    places = _filled(spring(len(members), np.array(known, dtype=np.int64).reshape(-1, 2)))
    ends = [[a for a, b in edges if b == len(members) + i] for i in range(len(new))]
    anchors = [[a for a in near if a < len(members)] for near in ends]
    if new:
        places = np.concatenate([places, between(places, anchors)])
    models = []
    for one, before, after in zip(seen, views[::2], views[1::2], strict=True):
        models.append(
            {
                "before": [coded(before.get(pair)) for pair in edges],
                "after": [coded(after.get(pair)) for pair in edges],
                **_wrong(one, graph, members),
            }
        )
    return {
        "centre": node,
        "nodes": shown,
        "x": np.round(places[:, 0], 4).tolist(),
        "y": np.round(places[:, 1], 4).tolist(),
        "edges": [list(pair) for pair in edges],
        "models": models,
    }


def _filled(places: Places) -> Places:
    """Stretch each axis to [-1, 1]: panels are wider than high."""
    low, high = places.min(0), places.max(0)
    return np.asarray((places - (low + high) / 2) / np.maximum((high - low) / 2, 1e-9))


def _new_nodes(seen: Sequence[Seen], members: list[int], original: int) -> list[int]:
    """The injected nodes joined to most of the members."""
    inside, reach = set(members), dict[int, int]()
    for one in seen:
        if one.new is not None:
            for spot, ends in enumerate(one.new.tolist()):
                joined = len(inside & set(ends))
                if joined:
                    reach[original + spot] = max(joined, reach.get(original + spot, 0))
    return sorted(sorted(reach), key=lambda n: -reach[n])[:NEW]


def _weights(view: View, shown: list[int], index: dict[int, int]) -> dict[tuple[int, int], float]:
    """Attention of the edges among the shown nodes, by pair of positions."""
    found: dict[tuple[int, int], float] = {}
    for node in shown:
        if node + 1 >= view.rowptr.size:
            continue
        sources, weights = view.row(node)
        for source, weight in zip(sources.tolist(), weights.tolist(), strict=True):
            if source in index and source != node:
                pair = (min(index[source], index[node]), max(index[source], index[node]))
                found[pair] = max(weight, found.get(pair, 0.0))
    return found


def _wrong(one: Seen, graph: Graph, members: list[int]) -> dict[str, list[int]]:
    truth = one.clean.predicted if graph.y is None else graph.y.cpu().numpy()
    known = np.array([truth[n] >= 0 for n in members])
    before = np.array([one.clean.predicted[n] != truth[n] for n in members]) & known
    after = np.array([one.attacked.predicted[n] != truth[n] for n in members]) & known
    return {"wrong": before.astype(int).tolist(), "wrong_after": after.astype(int).tolist()}
