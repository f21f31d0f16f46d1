"""The top-k neighbours of one node before and after an attack, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fgai.checks import at_least
from fgai.errors import InputError
from fgai.explanations import NodeView
from fgai.figures import style
from fgai.figures.cases import Case, before_after, of_layer
from fgai.typed import typed

SHARED, LOST = style.COLOURS[0], "#8c8c8c"


@typed
def top_neighbours(
    cases: Sequence[Case], data: Any, node: int, *, k: int = 5, layer: str | int = "mean"
) -> Figure:
    """List the k strongest neighbours of a node before and after the attack; lines join those in both lists.

    One panel per model. Filled marks and lines: the neighbour is in both lists. Open marks: it is in one.
    Diamonds: it was injected. With fewer than k neighbours all of them are listed.

    Args:
        cases: models with the attacks on them.
        data: the clean graph.
        node: whose neighbours to list.
        k: length of the lists.
        layer: `mean`, `last` or `max` over layers, or one layer by number.

    Raises:
        InputError: no cases, k below 1 or no such node.
    """
    at_least(k, "k", 1)
    if not cases:
        raise InputError("`cases` must hold at least one model with an attack on it")
    with style.styled():
        figure = style.blank(3.1 * len(cases), 1.5 + 0.34 * k)
        panels = figure.subplots(1, len(cases), squeeze=False)[0]
        for axes, case in zip(panels, cases, strict=True):
            clean, attacked = (view.node(node) for view in before_after(case, data, layer))
            _panel(axes, case.name, clean, attacked, k)
        figure.suptitle(
            f"Strongest neighbours of node {node} ({of_layer(layer)})", fontsize=9, x=0.01, ha="left"
        )
        figure.legend(handles=_legend(), loc="outside lower center", ncols=3, handletextpad=0.4)
    return figure


def _panel(axes: Axes, name: str, clean: NodeView, attacked: NodeView, k: int) -> None:
    style.bare(axes)
    first, second = clean.neighbours[:k], attacked.neighbours[:k]
    both = set(first) & set(second)
    axes.set_xlim(-0.75, 1.75)
    axes.set_ylim(max(len(first), len(second)) - 0.4, -1.0)
    axes.set_title(f"{name}: {len(both)} of {len(first)} stay")
    for x, view, listed, side in ((0, clean, first, "right"), (1, attacked, second, "left")):
        when = "before" if x == 0 else "after"
        axes.text(x, -0.75, f"{when}: class {view.predicted}", ha="center", fontsize=8, color="#555555")
        for rank, neighbour in enumerate(listed):
            shared, injected = neighbour in both, neighbour >= view.num_original
            edge = style.INJECTED if injected else SHARED if shared else LOST
            fill = SHARED if shared else style.PAPER
            axes.scatter(
                [x], [rank], s=46, color=fill, edgecolors=edge, marker="D" if injected else "o",
                linewidths=1.3, zorder=3,
            )  # fmt: skip
            label = f"{view.name(neighbour)}  {view.weights[rank]:.3f}"
            axes.text(
                x - 0.1 if side == "right" else x + 0.1, rank, label, ha=side, va="center",
                color=style.INK if shared else "#555555", fontweight="bold" if shared else "normal",
            )  # fmt: skip
    for neighbour in both:
        axes.plot([0, 1], [first.index(neighbour), second.index(neighbour)], color=SHARED, zorder=2)


def _legend() -> list[Line2D]:
    return [
        Line2D([], [], color=SHARED, marker="o", label="in both lists"),
        Line2D(
            [], [], color=LOST, marker="o", linestyle="none", markerfacecolor=style.PAPER, label="in one list"
        ),
        Line2D(
            [], [], color=style.INJECTED, marker="D", linestyle="none", markerfacecolor=style.PAPER,
            label="injected",
        ),
    ]  # fmt: skip
