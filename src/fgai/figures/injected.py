"""Certified shares against the number of injected neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fgai.errors import InputError
from fgai.figures import style
from fgai.typed import typed

WORDS = {"any": "every node gains t", "direct": "the node itself gains t"}


@typed
@dataclass(frozen=True)
class InjectedCurve:
    """What is certified of one model.

    Attributes:
        neighbours: t, increasing.
        shares: by `where`, of the nodes that count, one for each t.
    """

    neighbours: Sequence[int]
    shares: Mapping[str, Sequence[float]]


@typed
def injected_curves(curves: Mapping[str, InjectedCurve], *, alone: float | None = None) -> Figure:
    """Draw the share of nodes whose class provably stays against t injected neighbours.

    Args:
        curves: by model.
        alone: what features classify right without any edge; a line, below which nothing is protected.

    Raises:
        InputError: nothing to draw.
    """
    if not curves:
        raise InputError("`curves` must hold at least one model, got none")
    with style.styled():
        figure = style.blank(7.4, 2.9)
        panels = figure.subplots(1, len(WORDS), sharey=True)
        for axes, (where, words) in zip(panels, WORDS.items(), strict=True):
            _panel(axes, where, words, curves, alone)
        panels[0].set_ylabel("right and certified")
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _panel(
    axes: Axes, where: str, words: str, curves: Mapping[str, InjectedCurve], alone: float | None
) -> None:
    for index, (name, curve) in enumerate(curves.items()):
        axes.plot(
            curve.neighbours, curve.shares[where], marker="o", markersize=3, label=name,
            color=style.COLOURS[index % len(style.COLOURS)], linestyle=style.LINES[index % len(style.LINES)],
        )  # fmt: skip
    if alone is not None:
        axes.axhline(alone, color=style.INK, linewidth=0.8, linestyle=":", label="features alone")
    axes.set_title(words)
    axes.set_xlabel("injected neighbours t")
    axes.set_ylim(-0.02, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
