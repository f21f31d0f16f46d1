"""One node and its neighbours by attention: as a star and as bars, before and after an attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import nn

from fgai.attention import observe, prepared
from fgai.checks import at_least
from fgai.errors import InputError
from fgai.explanations import GraphView, NodeView
from fgai.figures import style
from fgai.figures.cases import Case, before_after, of_layer
from fgai.figures.layout import around
from fgai.models import as_graph
from fgai.typed import typed


@typed
def node_attention(
    model: nn.Module, data: Any, node: int, *, layer: str | int = "mean", most: int = 12
) -> Figure:
    """Show whom one node attends to: a star on the left, bars by falling attention on the right.

    The dotted line is what each neighbour would get if attention were uniform. Where the true explanation is
    known, its neighbours carry a tick.

    Args:
        model: fgai's or any PyG model the recorder supports.
        data: a `Graph` or PyG `Data`.
        node: whose attention to show.
        layer: `mean`, `last` or `max` over layers, or one layer by number.
        most: neighbours shown at most; the others are counted in the last bar.

    Raises:
        InputError: no such node, or one without neighbours.
    """
    at_least(most, "most", 1)
    view = GraphView.of(observe(model, prepared(model, as_graph(data))), layer=layer).node(node)
    if not view.neighbours:
        raise InputError(f"node {node} has no incoming edges, so it attends to nothing; pick another")
    with style.styled():
        shown = min(most, len(view.neighbours))
        figure = style.blank(6.6, max(2.9, 1.1 + 0.22 * shown))
        left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.15])
        norm = Normalize(0.0, max(view.weights))
        draw_star(left, view, norm, most)
        left.set_title(f"Node {node}: {_prediction(view)}")
        draw_bars(right, view, norm, most)
        right.set_title(f"Attention, {of_layer(layer)}")
        note = "" if view.informative is None else "\n✓ part of the true explanation"
        right.set_xlabel(f"share of the node's attention{note}")
    return figure


@typed
def node_before_after(
    cases: Sequence[Case], data: Any, node: int, *, layer: str | int = "mean", most: int = 12
) -> Figure:
    """Show how the attention and the prediction of one node move under attack, one row per model.

    Neighbours keep their places; injected nodes are diamonds. All panels share one colour scale.

    Args:
        cases: models with the attacks on them.
        data: the clean graph.
        node: whose attention to show.
        layer: `mean`, `last` or `max` over layers, or one layer by number.
        most: neighbours drawn at most, the strongest before and after.
    """
    at_least(most, "most", 1)
    if not cases:
        raise InputError("`cases` must hold at least one model with an attack on it")
    pairs = [[view.node(node) for view in before_after(case, data, layer)] for case in cases]
    highest = max([1e-9, *(w for pair in pairs for view in pair for w in view.weights[:most])])
    norm = Normalize(0.0, highest)
    with style.styled():
        figure = style.blank(6.2, 0.5 + 2.9 * len(cases))
        grid = figure.subplots(len(cases), 2, squeeze=False)
        places = _ring([view for pair in pairs for view in pair], most)
        for row, case, (clean, attacked) in zip(grid, cases, pairs, strict=True):
            for axes, view, when in zip(row, (clean, attacked), ("before", "after"), strict=True):
                draw_star(axes, view, norm, most, places)
                changed = view.predicted != clean.predicted
                axes.set_title(
                    f"{case.name}, {when} the attack\n{_prediction(view)}",
                    color=style.INJECTED if changed else style.INK,
                )
        colour_bar(figure, grid.ravel().tolist(), norm, f"attention of node {node}, {of_layer(layer)}")
    return figure


def draw_star(
    axes: Axes,
    view: NodeView,
    norm: Normalize,
    most: int,
    places: dict[int, tuple[float, float]] | None = None,
) -> None:
    """Draw the node in the middle and its strongest neighbours around it."""
    style.bare(axes)
    axes.set_aspect("equal")
    axes.set_xlim(-1.35, 1.35)
    axes.set_ylim(-1.35, 1.35)
    colours = style.attention_colours()
    spots = places if places is not None else _ring([view], most)
    own = 0.0
    for neighbour, weight in zip(view.neighbours, view.weights, strict=True):
        if neighbour == view.node:
            own = weight
        if neighbour not in spots:
            continue
        x, y = spots[neighbour]
        share = float(norm(weight))
        injected = neighbour >= view.num_original
        axes.plot(
            [0, x],
            [0, y],
            color=colours(share),
            linewidth=0.8 + 4.2 * share,
            linestyle=(0, (2, 1)) if injected else "-",
            zorder=1,
        )
    for neighbour in view.neighbours:
        if neighbour in spots:
            _disc(axes, view, neighbour, spots[neighbour])
    shade = colours(float(norm(own))) if own > 0 else style.PAPER
    axes.scatter([0], [0], s=470, color=shade, edgecolors=style.INK, linewidths=1.6, zorder=3)
    dark = own > 0 and float(norm(own)) > 0.55
    axes.text(
        0, 0, str(view.node), ha="center", va="center", zorder=4, fontsize=8, fontweight="bold",
        color=style.PAPER if dark else style.INK,
    )  # fmt: skip


def draw_bars(axes: Axes, view: NodeView, norm: Normalize, most: int) -> None:
    """Draw one bar per neighbour, strongest on top, and the uniform share as a dotted line."""
    colours = style.attention_colours()
    shown = list(zip(view.neighbours, view.weights, strict=True))[:most]
    for place, (_, weight) in enumerate(shown):
        axes.barh(place, weight, color=colours(float(norm(weight))), edgecolor=style.INK, linewidth=0.4)
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


def colour_bar(figure: Figure, axes: Sequence[Axes], norm: Normalize, label: str) -> None:
    """Draw the shared scale of attention colours."""
    scale = ScalarMappable(norm, style.attention_colours())
    figure.colorbar(scale, ax=list(axes), label=label, shrink=0.75, aspect=30, pad=0.02)


def _ring(views: Sequence[NodeView], most: int) -> dict[int, tuple[float, float]]:
    """Places of the strongest neighbours of any view: originals in the order of the first, then new ones."""
    wanted: list[int] = []
    for view in views:
        strongest = [n for n in view.neighbours if n != view.node][:most]
        wanted += [n for n in strongest if n not in wanted]
    wanted.sort(key=lambda n: n >= views[0].num_original)
    spots = around(len(wanted))
    return {n: (float(x), float(y)) for n, (x, y) in zip(wanted, spots, strict=True)}


def _disc(axes: Axes, view: NodeView, neighbour: int, place: tuple[float, float]) -> None:
    injected = neighbour >= view.num_original
    x, y = place
    axes.scatter(
        [x],
        [y],
        s=430,
        marker="D" if injected else "o",
        color="#f6d9c6" if injected else style.PAPER,
        edgecolors=style.INJECTED if injected else style.INK,
        linewidths=0.9,
        zorder=2,
    )
    axes.text(x, y, view.name(neighbour).replace(" ", "\n"), ha="center", va="center", fontsize=7, zorder=4)


def _prediction(view: NodeView) -> str:
    text = f"class {view.predicted} ({100 * view.confidence:.0f} %)"
    if view.label < 0:
        return text
    return f"{text}, right" if view.label == view.predicted else f"{text}, wrong (truth: {view.label})"
