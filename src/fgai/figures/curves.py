"""Curves from records: losses over epochs, certified shares over radii, predictions as edges are removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fgai.certificates import RADII, Promising, promised
from fgai.errors import InputError
from fgai.evaluation import EvaluationRecord
from fgai.figures import style
from fgai.metrics import FRACTIONS
from fgai.training import History
from fgai.typed import typed


@typed
def loss_curves(histories: History | Mapping[str, History]) -> Figure:
    """Draw every loss term over the epochs; one panel per training, the kept epoch marked.

    Args:
        histories: of one training (`model.history`), or several by name.

    Raises:
        InputError: nothing to draw.
    """
    named = {"": histories} if isinstance(histories, History) else dict(histories)
    if not named or any(not history.terms for history in named.values()):
        raise InputError("`histories` must hold at least one training with at least one epoch")
    with style.styled():
        figure = style.blank(3.6 * len(named) + 1.0, 2.8)
        panels = figure.subplots(1, len(named), squeeze=False)[0]
        for axes, (name, history) in zip(panels, named.items(), strict=True):
            _losses(axes, name, history)
    return figure


def _losses(axes: Axes, name: str, history: History) -> None:
    names = [term for term in history.terms[0] if term != "total"]
    epochs = range(1, len(history.terms) + 1)
    for index, term in enumerate(["total", *names] if len(names) > 1 else names):
        values = [max(terms.get(term, 0.0), 1e-12) for terms in history.terms]
        colour = style.INK if term == "total" else style.COLOURS[index % len(style.COLOURS) - 1]
        line = "-" if term == "total" else style.LINES[index % len(style.LINES)]
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
    axes.set_title(name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    if len(names) > 3:  # so many lines leave no room for a legend among them
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.legend()


class CertifiedLayer(Protocol):
    """What `certified_curves` reads of a layer."""

    def curve(self, kind: str) -> Sequence[float | None]:
        """The share of nodes at each of `RADII`, None where nothing is known."""


@runtime_checkable
class Certified(Promising, Protocol):
    """What `certified_curves` reads: a `CertificateRecord`, or what stands for several."""

    @property
    def k2(self) -> int | None:
        """Size of the certified top-k."""

    @property
    def norm(self) -> str:
        """Of the balls."""

    def layer(self, index: int) -> CertifiedLayer:
        """One layer's shares."""


@typed
def certified_curves(records: Certified | Mapping[str, Certified], *, layer: int = -1) -> Figure:
    """Draw the share of nodes whose top-k, and whose class, provably stay, against the radius.

    Only nodes with more than k2 neighbours count. A panel says so where nothing is known. What is promised,
    and what is not, stands below.

    Args:
        records: one certificate, or several by name.
        layer: which layer's.
    """
    named = dict(records) if isinstance(records, Mapping) else {"": records}
    if not named:
        raise InputError("`records` must hold at least one certificate")
    first = next(iter(named.values()))
    with style.styled():
        figure = style.blank(6.6, 2.7)
        panels = figure.subplots(1, 2, sharey=True)
        titles = (("topk", f"Top-{first.k2 or 'all'} cannot change"), ("class", "Class cannot change"))
        for axes, (kind, title) in zip(panels, titles, strict=True):
            known = 0
            for index, (name, record) in enumerate(named.items()):
                curve = record.layer(layer).curve(kind)
                points = [(r, s) for r, s in zip(RADII, curve, strict=True) if s is not None]
                if points:
                    known += 1
                    axes.plot(*zip(*points, strict=True), label=name, **_look(index))
            axes.set_title(title)
            axes.set_xscale("log")
            axes.set_xlabel(f"radius R ({first.norm} ball)")
            if not known:
                axes.text(0.5, 0.5, "unknown", transform=axes.transAxes, ha="center", color="#555555")
        panels[0].set_ylim(-0.02, 1.02)
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
        panels[0].set_ylabel("share of nodes")
        if len(named) > 1:
            panels[0].legend()
        style.footnote(figure, " ".join(dict.fromkeys(promised(record) for record in named.values())))
    return figure


@typed
def f_curves(records: Iterable[EvaluationRecord], *, scope: str = "node") -> Figure:
    """Draw the share of nodes still right as edges are removed by attention, clean and attacked.

    Solid: the strongest edges go first (a good explanation falls fast). Dashed: the weakest go first (it
    stays up). The wider the gap between the two, the more the attention says about the prediction.

    Args:
        records: from `evaluate(..., curves=True)`; a `Comparison` will do.
        scope: `node` (by neighbourhood, all layers) or `graph` (all edges, output layer; the paper's).

    Raises:
        InputError: no record holds curves of this scope.
    """
    held = [record for record in records if record.get(f"f_slope.{scope}") is not None]
    if not held:
        raise InputError(f"no record holds F-curves of scope {scope!r}; evaluate with `curves=True`")
    with style.styled():
        figure = style.blank(6.6, 2.7)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, view in zip(panels, ("clean", "attacked"), strict=True):
            for index, record in enumerate(held):
                curves: Mapping[str, Any] = record.value(f"f_slope.{scope}.{view}")
                colour, marker = style.COLOURS[index % 7], style.MARKERS[index % 7]
                axes.plot(FRACTIONS, curves["curve_plus"], color=colour, marker=marker, label=record.name)
                axes.plot(
                    FRACTIONS, curves["curve_minus"], color=colour, marker=marker, linestyle="--",
                    markerfacecolor=style.PAPER,
                )  # fmt: skip
            axes.set_title(f"{view.capitalize()} graph")
            axes.set_xlabel("share of edges removed")
            axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panels[0].set_ylabel("share still right")
        panels[0].plot([], [], color=style.INK, label="strongest first")
        panels[0].plot([], [], color=style.INK, linestyle="--", label="weakest first")
        panels[0].legend()
    return figure


def _look(index: int) -> dict[str, Any]:
    return {"color": style.COLOURS[index % 7], "linestyle": style.LINES[index % 7]}
