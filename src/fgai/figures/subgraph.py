"""Attention on a piece of the graph before and after an attack, in the same places and colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fgai.checks import at_least
from fgai.errors import InputError
from fgai.explanations import GraphView
from fgai.figures import style
from fgai.figures.cases import Case, before_after, of_layer
from fgai.figures.layout import Places, between, spring
from fgai.figures.node import colour_bar
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.typed import typed


@typed
def subgraph_attention(
    cases: Sequence[Case],
    data: Any,
    node: int,
    *,
    size: int = 40,
    injected: int = 6,
    layer: str | int = "mean",
) -> Figure:
    """Draw the surroundings of a node, edges by attention, before (left) and after (right) the attack.

    One row per model; places and colours are the same everywhere, so what differs is attention. An edge shows
    the stronger of its two directions; self-loops are left out. Injected nodes are diamonds outside.

    Args:
        cases: models with the attacks on them.
        data: the clean graph.
        node: in the middle of the piece.
        size: nodes shown, those reached first from `node`.
        injected: new nodes shown at most, those joined to most of the shown ones.
        layer: `mean`, `last` or `max` over layers, or one layer by number.

    Raises:
        InputError: no cases, or no such node.
    """
    at_least(size, "size", 2)
    if not cases:
        raise InputError("`cases` must hold at least one model with an attack on it")
    graph = as_graph(data)
    members = surroundings(graph, node, size)
    views = [before_after(case, graph, layer) for case in cases]
    drawn = [[_edges(view, members, injected) for view in pair] for pair in views]
    values = np.concatenate([weights for pair in drawn for _, weights, _ in pair] or [np.zeros(1)])
    norm = Normalize(0.0, max(1e-9, float(np.quantile(values, 0.98))) if values.size else 1.0)
    index = {n: i for i, n in enumerate(members)}
    inside = drawn[0][0][0]
    places = spring(len(members), np.array([[index[a], index[b]] for a, b in inside]).reshape(-1, 2))
    with style.styled():
        figure = style.blank(7.0, 0.4 + 3.0 * len(cases))
        grid = figure.subplots(len(cases), 2, squeeze=False)
        for row, case, pair, parts in zip(grid, cases, views, drawn, strict=True):
            for axes, view, part, when in zip(row, pair, parts, ("before", "after"), strict=True):
                _draw(axes, view, members, part, places, norm, node)
                axes.set_title(f"{case.name}, {when} the attack")
        label = f"attention, {of_layer(layer)}"
        colour_bar(figure, grid.ravel().tolist(), norm, label)
    return figure


def surroundings(graph: Graph, node: int, size: int) -> list[int]:
    """Return up to `size` nodes in the order a breadth-first walk from `node` meets them (loops ignored)."""
    if not 0 <= node < graph.num_nodes:
        raise InputError(f"`node` must be in 0..{graph.num_nodes - 1}, got {node}")
    rowptr, source = graph.adjacency.rowptr.tolist(), graph.adjacency.source
    found, spot = [node], 0
    seen = {node}
    while spot < len(found) and len(found) < size:
        here = found[spot]
        for neighbour in source[rowptr[here] : rowptr[here + 1]].tolist():
            if neighbour not in seen and len(found) < size:
                seen.add(neighbour)
                found.append(neighbour)
        spot += 1
    return found


Part = tuple[list[tuple[int, int]], NDArray[np.float64], list[int]]


def _edges(view: GraphView, members: list[int], injected: int) -> Part:
    """Undirected edges among the shown nodes, the stronger attention of each, the injected nodes shown."""
    inside = set(members)
    source, destination = view.attention.source.tolist(), view.attention.destination.tolist()
    weights = view.attention.values[:, 0].tolist()
    reach: dict[int, int] = {}
    for a, b in zip(source, destination, strict=True):
        if a >= view.num_original and b in inside:
            reach[a] = reach.get(a, 0) + 1
    new = sorted(sorted(reach), key=lambda n: -reach[n])[:injected]
    shown = inside | set(new)
    strongest: dict[tuple[int, int], float] = {}
    for a, b, weight in zip(source, destination, weights, strict=True):
        if a != b and a in shown and b in shown and (a in inside or b in inside):
            pair = (min(a, b), max(a, b))
            strongest[pair] = max(weight, strongest.get(pair, 0.0))
    return list(strongest), np.array(list(strongest.values())), new


def _draw(
    axes: Axes,
    view: GraphView,
    members: list[int],
    part: Part,
    places: Places,
    norm: Normalize,
    centre: int,
) -> None:
    style.bare(axes)
    axes.set_aspect("equal")
    axes.set_xlim(-1.4, 1.4)
    axes.set_ylim(-1.4, 1.4)
    edges, weights, new = part
    index = {n: i for i, n in enumerate(members)}
    anchors = [[index[min(e)] for e in edges if max(e) == n and min(e) in index] for n in new]
    spots = {n: places[i] for n, i in index.items()}
    spots |= dict(zip(new, between(places, anchors), strict=True))
    colours, order = style.attention_colours(), np.argsort(weights, kind="stable")
    shares = np.clip(np.asarray(norm(weights)), 0, 1) if len(weights) else weights
    for dashed in (False, True):
        chosen = [i for i in order if (max(edges[i]) >= view.num_original) == dashed]
        lines = [[tuple(spots[edges[i][0]]), tuple(spots[edges[i][1]])] for i in chosen]
        axes.add_collection(
            LineCollection(
                lines,
                colors=[colours(float(shares[i])) for i in chosen],
                linewidths=[0.6 + 3.0 * float(shares[i]) for i in chosen],
                linestyles=(0, (2, 1)) if dashed else "solid",
                zorder=1,
            )
        )
    original = np.array([spots[n] for n in members])
    axes.scatter(original[:, 0], original[:, 1], s=26, color=style.PAPER, edgecolors=style.INK, zorder=2)
    x, y = (float(value) for value in spots[centre])
    axes.scatter([x], [y], s=70, color=style.INK, zorder=3)
    axes.text(x + 0.06, y + 0.06, str(centre), fontsize=8, fontweight="bold", zorder=4)
    if new:
        extra = np.array([spots[n] for n in new])
        axes.scatter(
            extra[:, 0], extra[:, 1], s=44, marker="D", color="#f6d9c6", edgecolors=style.INJECTED, zorder=3
        )
        axes.text(
            0.0, 0.0, "◇ injected", transform=axes.transAxes, color=style.INJECTED, fontsize=8, va="bottom"
        )
