"""The four properties of a faithful attention, measured, in one picture."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fgai.errors import InputError
from fgai.evaluation import EvaluationRecord
from fgai.figures import style
from fgai.typed import typed

# (title, what is measured, path in the record)
PROPERTIES = (
    ("1  Same neighbours", "top-{k} shared with\nthe vanilla model", "similarity.overlap.all"),
    ("2  They stay", "top-{k} kept under attack\n(nodes in its reach)", "overlap_touched.prediction.all"),
    ("3  Same predictions", "F1, clean graph", "f1.clean"),
    ("4  They stay", "F1, attacked graph", "f1.attacked"),
)
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")


@typed
def four_properties(records: Iterable[EvaluationRecord]) -> Figure:
    """Draw one bar per model for each property: similarity, explanation stability, closeness, stability.

    Every bar is between 0 and 1 and higher is better. A model without a value (no vanilla model to compare
    with, no labels) gets a dash.

    Args:
        records: from `evaluate`; a `Comparison` will do.

    Raises:
        InputError: there is no record.
    """
    held = list(records)
    if not held:
        raise InputError("`records` must hold at least one evaluation")
    k = held[0].config.get("k", 5)
    with style.styled():
        figure = style.blank(7.2, 2.6 + 0.12 * len(held))
        panels = figure.subplots(1, 4, sharey=True)
        for axes, (title, measured, path) in zip(panels, PROPERTIES, strict=True):
            _panel(axes, held, path)
            axes.set_title(title)
            axes.set_xlabel(measured.format(k=k), fontsize=7.5)
        panels[0].set_ylim(0, 1.12)
        panels[0].set_yticks([0, 0.5, 1])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(held)))
    return figure


def _panel(axes: Axes, records: list[EvaluationRecord], path: str) -> None:
    for index, record in enumerate(records):
        value = record.get(path)
        axes.bar(
            index,
            0.0 if value is None else value,
            width=0.72,
            color=style.COLOURS[index % 7],
            edgecolor=style.PAPER,
            hatch=HATCHES[index % 7],
            label=record.name,
        )
        text = "–" if value is None else f"{value:.2f}"
        axes.text(index, (value or 0.0) + 0.02, text, ha="center", fontsize=8)
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(records) - 0.3)
