"""Figures of records: losses, certified shares, F-curves, the four properties, explainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fgai.certificates import RADII, CertificateRecord, full_promise
from fgai.checks import real_number
from fgai.errors import InputError
from fgai.evaluation import EvaluationRecord
from fgai.metrics import FRACTIONS
from fgai.reports.figures import style
from fgai.training import History
from fgai.typed import typed


@typed
def loss_curves(histories: History | Mapping[str, History]) -> Figure:
    """Draw every loss term over the epochs, the kept one marked; one panel per training (`model.history`)."""
    named = {"": histories} if isinstance(histories, History) else dict(histories)
    if not named or any(not history.terms for history in named.values()):
        raise InputError("`histories` must hold at least one training with at least one epoch")
    with style.new_figure(3.6 * len(named) + 1.0, 2.8) as figure:
        panels = figure.subplots(1, len(named), squeeze=False)[0]
        for axes, (name, history) in zip(panels, named.items(), strict=True):
            _losses(axes, name, history)
    return figure


def _losses(axes: Axes, name: str, history: History) -> None:
    names = [term for term in history.terms[0] if term != "total"]
    epochs = range(1, len(history.terms) + 1)
    for index, term in enumerate(["total", *names] if len(names) > 1 else names):
        values = [max(terms.get(term, 0.0), 1e-12) for terms in history.terms]
        colour, line = (
            (style.INK, "-") if term == "total" else (style.COLOURS[index % 7 - 1], style.LINES[index % 7])
        )
        axes.plot(epochs, values, label=term.replace("_", " "), color=colour, linestyle=line)
    everything = [v for terms in history.terms for v in terms.values() if v > 1e-9]
    if everything and max(everything) > 30 * min(everything):
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(min(everything), max(everything) * 1e-6) / 2)
    axes.axvline(history.kept_epoch, color=style.FAINT, linewidth=1.0, zorder=0)
    axes.annotate(
        "kept", (history.kept_epoch, 0), xycoords=("data", "axes fraction"), xytext=(-2, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=7, color="#555555",
    )  # fmt: skip
    axes.set(title=name, xlabel="epoch", ylabel="loss")
    outside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(**(outside if len(names) > 3 else {}))  # so many lines leave no room for a legend


@typed
def certified_curves(records: CertificateRecord | Mapping[str, Any], *, layer: int = -1) -> Figure:
    """Draw the share of nodes whose top-k, and whose class, provably stay, by radius.

    Only nodes with more than k2 neighbours count. Means over seeds may stand for certificates. `InputError`
    if there are none.
    """
    named = dict(records) if isinstance(records, Mapping) else {"": records}
    if not named:
        raise InputError("`records` must hold at least one certificate")
    first = next(iter(named.values()))
    with style.new_figure(6.6, 2.7) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        titles = (("topk", f"Top-{first.k2 or 'all'} cannot change"), ("class", "Class cannot change"))
        for axes, (kind, title) in zip(panels, titles, strict=True):
            for index, (name, record) in enumerate(named.items()):
                curve = record.layer(layer).curve(kind)
                points = [(r, s) for r, s in zip(RADII, curve, strict=True) if s is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), label=name, **_line(index))
            axes.set(title=title, xscale="log", xlabel=f"radius R ({first.norm} ball)")
            if not axes.lines:
                axes.text(0.5, 0.5, "unknown", transform=axes.transAxes, ha="center", color="#555555")
        panels[0].set(ylim=(-0.02, 1.02), ylabel="share of nodes")
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        if len(named) > 1:
            panels[0].legend()
        notes = (full_promise(record.promise, record.explanation) for record in named.values())
        style.footnote(figure, " ".join(dict.fromkeys(notes)))
    return figure


@typed
def f_curves(records: Iterable[EvaluationRecord], *, scope: str = "node") -> Figure:
    """Draw the share of nodes still right as edges are removed by attention, clean and attacked.

    Solid: the strongest edges are removed first. Dashed: the weakest. `scope` is `node` (by neighbourhood,
    all layers) or `graph` (all edges, output layer; the paper's). `InputError` if no record holds such
    curves.
    """
    measured = [record for record in records if record.get(f"f_slope.{scope}") is not None]
    if not measured:
        raise InputError(f"no record holds F-curves of scope {scope!r}; evaluate with `curves=True`")
    with style.new_figure(6.6, 2.7) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, view in zip(panels, ("clean", "attacked"), strict=True):
            for index, record in enumerate(measured):
                curves: Mapping[str, Any] = record.value(f"f_slope.{scope}.{view}")
                look: dict[str, Any] = {"color": style.COLOURS[index % 7], "marker": style.MARKERS[index % 7]}
                hollow = {**look, "linestyle": "--", "markerfacecolor": style.PAPER}
                axes.plot(FRACTIONS, curves["curve_plus"], label=record.name, **look)
                axes.plot(FRACTIONS, curves["curve_minus"], **hollow)
            axes.set(title=f"{view.capitalize()} graph", xlabel="share of edges removed")
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panels[0].set_ylabel("share still right")
        panels[0].plot([], [], color=style.INK, label="strongest first")
        panels[0].plot([], [], color=style.INK, linestyle="--", label="weakest first")
        panels[0].legend()
    return figure


def _line(index: int) -> dict[str, Any]:
    return {"color": style.COLOURS[index % 7], "linestyle": style.LINES[index % 7]}


@typed
@dataclass(frozen=True)
class ExplainerDot:
    """One explainer on one dataset, shares of the top k."""

    name: str
    kept: Sequence[float]  # under attack, one per seed
    again: float | None  # mean with another seed on the clean graph; None if the seed has no effect
    chance: float  # of a random ranking
    ours: bool = False  # whether it is highlighted

    def __post_init__(self) -> None:
        if not len(self.kept):
            raise InputError(f"`kept` of {self.name!r} must hold a share for at least one seed, got none")
        for share in (*self.kept, self.chance, 0.0 if self.again is None else self.again):
            real_number(share, "kept, again and chance")


@typed
def explainer_dots(panels: Mapping[str, Sequence[ExplainerDot]], *, k: int = 5) -> Figure:
    """Draw how much of each explainer's top k stays, a panel per dataset and a line per explainer.

    Filled: under attack, mean over seeds, each seed as a small mark. Hollow: the same explainer with another
    seed, without an attack. Short line: a random ranking. `InputError` for nothing to draw, or unless every
    dataset has the same explainers in the same order.
    """
    names = [[dot.name for dot in dots] for dots in panels.values()]
    if not names or not names[0]:
        raise InputError("`panels` must hold at least one dataset with one explainer, got none")
    if any(other != names[0] for other in names[1:]):
        raise InputError("`panels` must hold the same explainers in the same order")
    with style.new_figure(2.2 + 1.9 * len(panels), 1.1 + 0.24 * len(names[0])) as figure:
        drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, dots) in zip(drawn, panels.items(), strict=True):
            for row, dot in enumerate(dots):
                _draw_dots(axes, row, dot)
            axes.set(title=title, xlabel=f"share of the top {k}", xlim=(0.0, 1.04))
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.tick_params(axis="y", length=0)
        drawn[0].set_yticks(range(len(names[0])), names[0])
        drawn[0].invert_yaxis()
        for label, dot in zip(drawn[0].get_yticklabels(), next(iter(panels.values())), strict=True):
            label.set_fontweight("bold" if dot.ours else "normal")
        handles, labels = drawn[0].get_legend_handles_labels()
        named = dict(zip(reversed(labels), reversed(handles), strict=True))  # the first of each label
        figure.legend(named.values(), named, loc="outside lower center", ncols=4 if len(panels) > 1 else 2)
    return figure


def _draw_dots(axes: Axes, row: int, dot: ExplainerDot) -> None:
    colour = style.INJECTED if dot.ours else style.COLOURS[0]
    axes.axhline(row, color=style.FAINT, linewidth=0.4, zorder=0)
    disc = {"marker": "o", "markersize": 5.5, "color": colour}
    marks: list[tuple[str, Sequence[float], dict[str, Any]]] = [
        ("chance", [dot.chance], {"marker": "|", "markersize": 12, "color": style.INK}),
        ("one seed", dot.kept, {"marker": ".", "alpha": 0.45, "color": colour}),
        ("kept under attack", [sum(dot.kept) / len(dot.kept)], disc),
    ]
    if dot.again is not None:
        marks.append(("another seed, no attack", [dot.again], {**disc, "markerfacecolor": "none"}))
    for label, shares, look in marks:
        axes.plot(list(shares), [row] * len(shares), linestyle="", label=label, **look)


_WORDS = {"any": "every node gains t", "direct": "the node itself gains t"}


@typed
@dataclass(frozen=True)
class InjectedCurve:
    """Certified shares of one model for each number of `neighbours` t, by `where` they are injected."""

    neighbours: Sequence[int]
    shares: Mapping[str, Sequence[float]]


@typed
def injected_curves(curves: Mapping[str, InjectedCurve], *, alone: float | None = None) -> Figure:
    """Draw the share of nodes whose class provably stays against t injected neighbours, model by model.

    `alone`, the share that features without edges classify right, is drawn as a line. `InputError` for no
    curves.
    """
    if not curves:
        raise InputError("`curves` must hold at least one model, got none")
    with style.new_figure(7.4, 2.9) as figure:
        panels = figure.subplots(1, len(_WORDS), sharey=True)
        for axes, (where, words) in zip(panels, _WORDS.items(), strict=True):
            for index, (name, curve) in enumerate(curves.items()):
                look: dict[str, Any] = {"label": name, "marker": "o", "markersize": 3, **_line(index)}
                axes.plot(curve.neighbours, curve.shares[where], **look)
            if alone is not None:
                axes.axhline(alone, color=style.INK, linewidth=0.8, linestyle=":", label="features alone")
            axes.set(title=words, xlabel="injected neighbours t", ylim=(-0.02, 1.02))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panels[0].set_ylabel("right and certified")
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


# (title, what is measured, path in the record)
_PROPERTIES = (
    ("1  Same neighbours", "top-{k} shared with\nthe vanilla model", "similarity.overlap.all"),
    ("2  They stay", "top-{k} kept under attack\n(nodes in its reach)", "overlap_touched.prediction.all"),
    ("3  Same predictions", "F1, clean graph", "f1.clean"),
    ("4  They stay", "F1, attacked graph", "f1.attacked"),
)
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo")


@typed
def four_properties(records: Iterable[EvaluationRecord]) -> Figure:
    """Draw one bar per model for each property: similarity, explanation stability, closeness, stability.

    Every bar is between 0 and 1 and higher is better. A model without a value gets a dash. `InputError` for
    no record.
    """
    rows = list(records)
    if not rows:
        raise InputError("`records` must hold at least one evaluation")
    k = rows[0].config.get("k", 5)
    with style.new_figure(7.2, 2.6 + 0.12 * len(rows)) as figure:
        panels = figure.subplots(1, 4, sharey=True)
        for axes, (title, measured, path) in zip(panels, _PROPERTIES, strict=True):
            for index, record in enumerate(rows):
                value = record.get(path)
                look: dict[str, Any] = {"color": style.COLOURS[index % 7], "hatch": _HATCHES[index % 7]}
                axes.bar(index, value or 0.0, width=0.72, edgecolor=style.PAPER, label=record.name, **look)
                text = "–" if value is None else f"{value:.2f}"
                axes.text(index, (value or 0.0) + 0.02, text, ha="center", fontsize=8)
            axes.set(xticks=[], xlim=(-0.7, len(rows) - 0.3), title=title)
            axes.set_xlabel(measured.format(k=k), fontsize=7.5)
        panels[0].set(ylim=(0, 1.12), yticks=[0, 0.5, 1])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(rows)))
    return figure
