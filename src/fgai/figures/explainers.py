"""Explainers side by side: what each keeps under attack, and what another seed changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fgai.checks import number
from fgai.errors import InputError
from fgai.figures import style
from fgai.typed import typed


@typed
@dataclass(frozen=True)
class ExplainerDot:
    """One explainer on one dataset, shares of the top k.

    Attributes:
        name: of the explainer.
        kept: under attack, one per seed.
        again: with another seed on the clean graph, the mean; None where nothing is drawn.
        chance: of a random ranking.
        ours: whether it stands out.
    """

    name: str
    kept: Sequence[float]
    again: float | None
    chance: float
    ours: bool = False

    def __post_init__(self) -> None:
        if not len(self.kept):
            raise InputError(f"`kept` of {self.name!r} must hold a share for at least one seed, got none")
        shares = (*self.kept, self.chance, *(() if self.again is None else (self.again,)))
        for share in shares:
            number(share, "kept, again and chance")

    @property
    def mean(self) -> float:
        """Of what is kept."""
        return sum(self.kept) / len(self.kept)


@typed
def explainer_dots(panels: Mapping[str, Sequence[ExplainerDot]], *, k: int = 5) -> Figure:
    """Draw how much of each explainer's top k stays, a panel per dataset and a line per explainer.

    Filled: under attack, mean over seeds, each seed as a small mark. Hollow: the same explainer with another
    seed, nothing attacked. The short stroke is what a random ranking keeps: left of it, or on it, an
    explanation says nothing that stays.

    Args:
        panels: by dataset; the same explainers in the same order in each.
        k: neighbours in an explanation.

    Raises:
        InputError: nothing to draw, or panels of different explainers.
    """
    names = [[dot.name for dot in dots] for dots in panels.values()]
    if not names or not names[0]:
        raise InputError("`panels` must hold at least one dataset with one explainer, got none")
    if any(other != names[0] for other in names[1:]):
        raise InputError("`panels` must hold the same explainers in the same order")
    with style.styled():
        figure = style.blank(2.2 + 1.9 * len(panels), 1.1 + 0.24 * len(names[0]))
        drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, dots) in zip(drawn, panels.items(), strict=True):
            _panel(axes, title, dots, k)
        drawn[0].set_yticks(range(len(names[0])), names[0])
        drawn[0].invert_yaxis()
        for label, dot in zip(drawn[0].get_yticklabels(), next(iter(panels.values())), strict=True):
            label.set_fontweight("bold" if dot.ours else "normal")
        handles, labels = drawn[0].get_legend_handles_labels()
        named = dict(zip(reversed(labels), reversed(handles), strict=True))  # the first of each label
        figure.legend(named.values(), named, loc="outside lower center", ncols=4 if len(panels) > 1 else 2)
    return figure


def _panel(axes: Axes, title: str, dots: Sequence[ExplainerDot], k: int) -> None:
    for place, dot in enumerate(dots):
        colour = style.INJECTED if dot.ours else style.COLOURS[0]
        axes.axhline(place, color=style.FAINT, linewidth=0.4, zorder=0)
        marks: list[tuple[str, Sequence[float], dict[str, Any]]] = [
            ("chance", [dot.chance], {"marker": "|", "markersize": 12, "color": style.INK}),
            ("one seed", dot.kept, {"marker": ".", "alpha": 0.45, "color": colour}),
            ("kept under attack", [dot.mean], {"marker": "o", "markersize": 5.5, "color": colour}),
        ]
        if dot.again is not None:
            hollow = {"marker": "o", "markersize": 5.5, "color": colour, "markerfacecolor": "none"}
            marks.append(("another seed, no attack", [dot.again], hollow))
        for label, shares, look in marks:
            axes.plot(list(shares), [place] * len(shares), linestyle="", label=label, **look)
    axes.set_title(title)
    axes.set_xlabel(f"share of the top {k}")
    axes.set_xlim(0.0, 1.04)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(axis="y", length=0)
