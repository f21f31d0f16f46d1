"""Positions of the nodes of a small network: equal graphs get equal positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fgai.explanations.node import check_node
from fgai.graph import Graph

Points = NDArray[np.float64]


def _around(count: int) -> Points:
    """[count, 2] positions on a circle, clockwise from the top."""
    angle = np.pi / 2 - 2 * np.pi * np.arange(count) / max(1, count)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _spring(count: int, edges: NDArray[np.int64], *, rounds: int = 300) -> Points:
    """[count, 2] positions within ±1: edges [E, 2] attract, all pairs repel, by ever smaller steps.

    Starts on a circle. Takes time quadratic in `count`.

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
    out = np.zeros((len(anchors), 2))
    for index, ends in enumerate(anchors):
        middle = points[ends].mean(0) if ends else np.zeros(2)
        size = float(np.hypot(*middle))
        angle = np.arctan2(middle[1], middle[0]) if size > 1e-6 else 2.4 * index
        out[index] = 1.3 * np.array([np.cos(angle), np.sin(angle)])
    return _spread(out)


def _spread(points: Points, gap: float = 0.28) -> Points:
    """Move points on a circle apart until no two are closer than `gap` radians."""
    if len(points) < 2:
        return points
    angle = np.arctan2(points[:, 1], points[:, 0])
    order = np.argsort(angle, kind="stable")
    gap = min(gap, 1.8 * np.pi / len(points))
    turned = angle[order]
    for i in range(1, len(turned)):
        turned[i] = max(turned[i], turned[i - 1] + gap)
    angle[order] = turned - (turned - np.sort(angle)).mean()
    radius = np.hypot(points[:, 0], points[:, 1])
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


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
