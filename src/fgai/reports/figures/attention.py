"""Figures of attention before and after an attack: one node, its top-k neighbours, a subgraph.

In all of them `data` is the clean graph, `cases` are models with the attacks on them, and `layer` is `mean`,
`last` or `max` over layers, or one layer by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import nn

from fgai.attention import observe, prepared
from fgai.checks import at_least
from fgai.errors import InputError
from fgai.explanations.node import GraphView, NodeView
from fgai.models import as_graph
from fgai.reports.figures import style
from fgai.reports.nodes import UNIT, Case, _around, _ModelViews, before_after, subgraph
from fgai.typed import typed


@typed
def node_attention(
    model: nn.Module, data: Any, node: int, *, layer: str | int = "mean", most: int = 12
) -> Figure:
    """Show the attention of one node: its neighbours around it, and bars by falling attention.

    The dotted line is uniform attention; neighbours of the true explanation, where known, carry a tick. Of
    more than `most` neighbours the others share the last bar. `InputError` for no such node, or one without
    neighbours.
    """
    at_least(most, "most", 1)
    view = GraphView.of(observe(model, prepared(model, as_graph(data))), layer=layer).node(node)
    if not view.neighbours:
        raise InputError(f"node {node} has no incoming edges, so it attends to nothing; pick another")
    shown = min(most, len(view.neighbours))
    with style.new_figure(6.6, max(2.9, 1.1 + 0.22 * shown)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.15])
        norm = Normalize(0.0, max(view.weights))
        _draw_star(left, view, norm, _ring([view], most))
        left.set_title(f"Node {node}: {_prediction(view)}")
        _draw_bars(right, view, norm, most)
        right.set_title(f"Attention, {_of_layer(layer)}")
        note = "" if view.informative is None else "\n✓ part of the true explanation"
        right.set_xlabel(f"share of the node's attention{note}")
    return figure


@typed
def node_before_after(
    cases: Sequence[Case], data: Any, node: int, *, layer: str | int = "mean", most: int = 12
) -> Figure:
    """Show how the attention and the prediction of one node change under attack, one row per model.

    The `most` strongest neighbours before and after are drawn and keep their positions; injected nodes are
    diamonds. All panels share one colour scale.
    """
    at_least(most, "most", 1)
    _check_cases(cases)
    pairs = [[view.node(node) for view in before_after(case, data, layer)] for case in cases]
    highest = max([1e-9, *(w for pair in pairs for view in pair for w in view.weights[:most])])
    norm = Normalize(0.0, highest)
    with style.new_figure(6.2, 0.5 + 2.9 * len(cases)) as figure:
        grid = figure.subplots(len(cases), 2, squeeze=False)
        positions = _ring([view for pair in pairs for view in pair], most)
        for row, case, (clean, attacked) in zip(grid, cases, pairs, strict=True):
            for axes, view, when in zip(row, (clean, attacked), ("before", "after"), strict=True):
                _draw_star(axes, view, norm, positions)
                colour = style.INK if view.predicted == clean.predicted else style.INJECTED
                axes.set_title(f"{case.name}, {when} the attack\n{_prediction(view)}", color=colour)
        _colour_bar(figure, grid.ravel().tolist(), norm, f"attention of node {node}, {_of_layer(layer)}")
    return figure


def _check_cases(cases: Sequence[Case]) -> None:
    if not cases:
        raise InputError("`cases` must hold at least one model with an attack on it")


def _network_axes(axes: Axes, limit: float) -> None:
    style.hide_axes(axes)
    axes.set(aspect="equal", xlim=(-limit, limit), ylim=(-limit, limit))


def _draw_star(
    axes: Axes, view: NodeView, norm: Normalize, positions: dict[int, tuple[float, float]]
) -> None:
    _network_axes(axes, 1.35)
    colours = style.attention_colours()
    weights = dict(zip(view.neighbours, view.weights, strict=True))
    drawn = [(neighbour, weight) for neighbour, weight in weights.items() if neighbour in positions]
    for neighbour, weight in drawn:
        (x, y), share = positions[neighbour], float(norm(weight))
        line: Any = "-"
        marker, fill, edge = "o", style.PAPER, style.INK
        if neighbour >= view.num_original:
            marker, fill, edge, line = "D", "#f6d9c6", style.INJECTED, (0, (2, 1))
        axes.plot([0, x], [0, y], color=colours(share), linewidth=0.8 + 4.2 * share, linestyle=line, zorder=1)
        axes.scatter([x], [y], s=430, marker=marker, color=fill, edgecolors=edge, linewidths=0.9, zorder=2)
        label = view.name(neighbour).replace(" ", "\n")
        axes.text(x, y, label, ha="center", va="center", fontsize=7, zorder=4)
    own = weights.get(view.node, 0.0)
    shade = colours(float(norm(own))) if own > 0 else style.PAPER
    axes.scatter([0], [0], s=470, color=shade, edgecolors=style.INK, linewidths=1.6, zorder=3)
    ink = style.PAPER if own > 0 and float(norm(own)) > 0.55 else style.INK
    look: dict[str, Any] = {"zorder": 4, "fontsize": 8, "fontweight": "bold", "color": ink}
    axes.text(0, 0, str(view.node), ha="center", va="center", **look)


def _draw_bars(axes: Axes, view: NodeView, norm: Normalize, most: int) -> None:
    """Draw one bar per neighbour, strongest on top, and the uniform share as a dotted line."""
    colours = style.attention_colours()
    shown = list(zip(view.neighbours, view.weights, strict=True))[:most]
    for rank, (_, weight) in enumerate(shown):
        axes.barh(rank, weight, color=colours(float(norm(weight))), edgecolor=style.INK, linewidth=0.4)
    labels = [view.name(neighbour) for neighbour, _ in shown]
    rest = len(view.neighbours) - len(shown)
    if rest:
        left = sum(view.weights[most:])
        axes.barh(len(shown), left, color=style.PAPER, edgecolor=style.FAINT, hatch="////", linewidth=0.4)
        labels.append(f"{rest} others")
    if view.informative is not None:
        labels = [f"✓ {name}" if good else name for name, good in zip(labels, view.informative, strict=False)]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    uniform = 1 / len(view.neighbours)
    axes.axvline(uniform, color=style.INK, linestyle=":", linewidth=1.0)
    axes.annotate("uniform", (uniform, -0.6), xytext=(3, 1), textcoords="offset points", fontsize=7)


def _colour_bar(figure: Figure, axes: Sequence[Axes], norm: Normalize, label: str) -> None:
    scale = ScalarMappable(norm, style.attention_colours())
    figure.colorbar(scale, ax=list(axes), label=label, shrink=0.75, aspect=30, pad=0.02)


def _ring(views: Sequence[NodeView], most: int) -> dict[int, tuple[float, float]]:
    """Positions on a circle of the strongest neighbours of any view, injected ones last."""
    strongest = [[n for n in view.neighbours if n != view.node][:most] for view in views]
    shown = sorted(dict.fromkeys(chain(*strongest)), key=lambda n: n >= views[0].num_original)
    return {n: (float(x), float(y)) for n, (x, y) in zip(shown, _around(len(shown)), strict=True)}


def _prediction(view: NodeView) -> str:
    text = f"{_class(view, view.predicted)} ({100 * view.confidence:.0f} %)"
    if view.label < 0:
        return text
    if view.label == view.predicted:
        return f"{text}, right"
    return f"{text}, wrong (truth: {_class(view, view.label).removeprefix('class ')})"


def _class(view: NodeView, number: int) -> str:
    """The class in words; a dollar sign in its name must not begin a formula."""
    return f"class {view.class_name(number)}".replace("$", r"\$")


_SHARED, _LOST = style.COLOURS[0], "#8c8c8c"


@typed
def top_neighbours(
    cases: Sequence[Case], data: Any, node: int, *, k: int = 5, layer: str | int = "mean"
) -> Figure:
    """List the k strongest neighbours of a node before and after the attack; lines join those in both lists.

    One panel per model. Filled marks: in both lists. Open marks: in one. Diamonds: injected. `InputError` for
    no cases, k below 1 or no such node.
    """
    at_least(k, "k", 1)
    _check_cases(cases)
    with style.new_figure(3.1 * len(cases), 1.5 + 0.34 * k) as figure:
        for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
            clean, attacked = (view.node(node) for view in before_after(case, data, layer))
            _list_panel(axes, case.name, clean, attacked, k)
        title = f"Strongest neighbours of node {node} ({_of_layer(layer)})"
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": style.PAPER}
        marks = [
            Line2D([], [], color=_SHARED, marker="o", label="in both lists"),
            Line2D([], [], color=_LOST, marker="o", label="in one list", **hollow),
            Line2D([], [], color=style.INJECTED, marker="D", label="injected", **hollow),
        ]
        figure.legend(handles=marks, loc="outside lower center", ncols=3, handletextpad=0.4)
    return figure


def _list_panel(axes: Axes, name: str, clean: NodeView, attacked: NodeView, k: int) -> None:
    style.hide_axes(axes)
    first, second = clean.neighbours[:k], attacked.neighbours[:k]
    both = set(first) & set(second)
    title, bottom = f"{name}: {len(both)} of {len(first)} stay", max(len(first), len(second)) - 0.4
    axes.set(xlim=(-0.75, 1.75), ylim=(bottom, -1.0), title=title)
    views = ((0, clean, first, "right", "before"), (1, attacked, second, "left", "after"))
    for x, view, listed, side, when in views:
        title = f"{when}: {_class(view, view.predicted)}"
        axes.text(x, -0.75, title, ha="center", fontsize=8, color="#555555")
        for rank, neighbour in enumerate(listed):
            shared, injected = neighbour in both, neighbour >= view.num_original
            edge, marker = (style.INJECTED, "D") if injected else (_SHARED if shared else _LOST, "o")
            fill = _SHARED if shared else style.PAPER
            axes.scatter(
                [x], [rank], s=46, color=fill, edgecolors=edge, marker=marker, linewidths=1.3, zorder=3
            )
            label = f"{view.name(neighbour)}  {view.weights[rank]:.3f}"
            ink, weight = (style.INK, "bold") if shared else ("#555555", "normal")
            beside = x - 0.1 if side == "right" else x + 0.1
            axes.text(beside, rank, label, ha=side, va="center", color=ink, fontweight=weight)
    for neighbour in both:
        axes.plot([0, 1], [first.index(neighbour), second.index(neighbour)], color=_SHARED, zorder=2)


@typed
def subgraph_attention(
    cases: Sequence[Case], data: Any, node: int, *, size: int = 40, layer: str | int = "mean"
) -> Figure:
    """Draw the subgraph around a node, edges by attention, before (left) and after (right) the attack.

    One row per model; positions and colours are the same everywhere. The `size` nodes reached first from
    `node` are shown, and outside them, as diamonds, the six new nodes with most edges to them. An edge shows
    the stronger of its two directions; self-loops are left out. `InputError` for no cases, or no such node.
    """
    at_least(size, "size", 2)
    _check_cases(cases)
    graph = as_graph(data)
    drawn = subgraph([_ModelViews.of(case, graph, layer) for case in cases], graph, node, size)
    panels = [(model[when], when) for model in drawn["models"] for when in ("before", "after")]
    weights = [weight * UNIT for values, _ in panels for weight in values if weight is not None]
    norm = Normalize(0.0, max(1e-9, float(np.quantile(weights, 0.98))) if weights else 1.0)
    with style.new_figure(7.0, 0.4 + 3.0 * len(cases)) as figure:
        axes = figure.subplots(len(cases), 2, squeeze=False).ravel().tolist()
        for number, (panel, (values, when)) in enumerate(zip(axes, panels, strict=True)):
            _draw_subgraph(panel, drawn, values, norm, graph.num_nodes)
            panel.set_title(f"{cases[number // 2].name}, {when} the attack")
        _colour_bar(figure, axes, norm, f"attention, {_of_layer(layer)}")
    return figure


def _draw_subgraph(
    axes: Axes, drawn: dict[str, Any], values: list[int | None], norm: Normalize, original: int
) -> None:
    _network_axes(axes, 1.4)
    points = np.stack([drawn["x"], drawn["y"]], axis=1)
    fake = np.array(drawn["nodes"]) >= original
    shares = [None if value is None else min(1.0, float(norm(value * UNIT))) for value in values]
    pairs = zip(shares, drawn["edges"], strict=True)
    present = sorted((share, ends) for share, ends in pairs if share is not None)
    colours = style.attention_colours()
    for dashed in (False, True):
        chosen = [(share, ends) for share, ends in present if fake[ends].any() == dashed]
        look: dict[str, Any] = {
            "colors": [colours(share) for share, _ in chosen],
            "linewidths": [0.6 + 3.0 * share for share, _ in chosen],
            "linestyles": (0, (2, 1)) if dashed else "solid",
        }
        axes.add_collection(LineCollection([points[ends] for _, ends in chosen], zorder=1, **look))
    x, y = points[~fake].T
    axes.scatter(x, y, s=26, color=style.PAPER, edgecolors=style.INK, zorder=2)
    axes.scatter(x[:1], y[:1], s=70, color=style.INK, zorder=3)  # the node in the middle comes first
    axes.text(x[0] + 0.06, y[0] + 0.06, str(drawn["centre"]), fontsize=8, fontweight="bold", zorder=4)
    joined = sorted({end for _, ends in present for end in ends if fake[end]})
    if joined:
        (x, y), red = points[joined].T, style.INJECTED
        axes.scatter(x, y, s=44, marker="D", color="#f6d9c6", edgecolors=red, zorder=3)
        axes.text(0.0, 0.0, "◇ injected", transform=axes.transAxes, color=red, fontsize=8, va="bottom")


def _of_layer(layer: str | int) -> str:
    words = {"mean": "mean over layers", "last": "output layer", "max": "maximum over layers"}
    return words[layer] if isinstance(layer, str) else f"layer {layer}"
