"""`Sheet`: estimates over seeds as Markdown, LaTeX, CSV or in a terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from rich.console import Console

from experiments.statistics import Estimate, Interval
from fgai.metrics import Quantity, quantity
from fgai.records import MISSING, Column, Table

_LATEX = {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "×": r"$\times$", "–": "--", "−": "$-$"}
_LATEX |= {"&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "÷": r"$\div$", "✓": r"$\checkmark$"}
_LATEX |= {"→": r"$\rightarrow$", "≥": r"$\geq$", "≤": r"$\leq$", "…": r"\dots{}"}


class Published(NamedTuple):
    """One published number; `std` is None where the paper gives none."""

    mean: float
    std: float | None


@cache
def _tables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        files("experiments").joinpath("paper.json").read_text(encoding="utf-8")
    )
    return found


def published(table: str, metric: str, row: tuple[str, str, str]) -> Published | None:
    """Return a number of the paper for a model, dataset and method, or None where it has none.

    Datasets are known by their exact names, so `arxiv-tape` (other features) never gets the paper's arXiv
    numbers.

    Example:
        >>> published("f1", "attacked", ("GAT", "amazon-photo", "fgai"))
        Published(mean=0.8637, std=0.01)
    """
    level: Any = _tables()
    for name in (table, *row, metric):
        level = level.get(name)
        if level is None:
            return None
    return Published(*level)


HEADS = ("dataset", "method")
"""Headings of the labels of rows."""


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """One column of estimates."""

    shown: Quantity  # the number of each record, its heading, format and direction
    threat: str = "standard"  # which evaluation
    # table and metric of the published numbers, which get a column of their own
    paper: tuple[str, str] | None = None
    ratio: bool = False  # also show vanilla's mean divided by this one
    own: bool = True  # leave vanilla's value out, where it compares a model with itself


def estimated(path: str, title: str | None = None, form: str | None = None, **options: Any) -> Estimated:
    """Return a column of the number at a path; see `fgai.metrics.quantity` and `Estimated`."""
    return Estimated(shown=quantity(path, title, form), **options)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell: an estimate and what stands beside it."""

    estimate: Estimate | None = None  # mean and spread over seeds, or None
    interval: Interval | None = None  # of the paired difference to vanilla
    ratio: float | None = None  # vanilla's mean divided by this one
    published: Published | None = None  # the paper's number
    published_ratio: float | None = None  # the same ratio in the paper
    best: bool = False  # of its group
    wanted: int = 0  # seeds there should be

    def lines(self, form: str, *, apart: bool = True) -> list[str]:
        """The cell as printed: mean ± std, then the ratio, and where `apart` the interval."""
        if self.estimate is None:
            return [MISSING]
        mean, std, count = self.estimate
        first = f"{mean:{form}} ± {std:{form}}" if count > 1 else f"{mean:{form}}"
        if count < self.wanted:
            first += f" (n={count})"
        second = [] if self.ratio is None else [times(self.ratio)]
        if apart and self.interval is not None:
            second.append(f"[{self.interval.low:+{form}}, {self.interval.high:+{form}}]")
        return [
            line.replace("-", "−") if "e" not in form else line for line in (first, " ".join(second)) if line
        ]

    def paper(self) -> str:
        """The paper's number with the digits it was published with."""
        if self.published is None:
            return MISSING
        mean, std = self.published
        text = f"{mean:.5g}" if std is None else f"{mean:.5g} ± {std:.5g}"
        text = text if "e" in text else text.replace("-", "−")
        return text if self.published_ratio is None else f"{text} ({times(self.published_ratio)})"


@dataclass(frozen=True)
class Row:
    """One line: its labels and one entry per metric."""

    labels: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Sheet:
    """Estimates of several models, in sections."""

    title: str  # printed above
    columns: Sequence[Estimated]  # one per metric
    sections: dict[str, list[Row]]  # rows by the name of their section (a model)
    notes: Sequence[str] = field(default_factory=tuple)  # printed below

    def to_markdown(self) -> str:
        """Return one Markdown table per section; the best of a group in bold, without intervals."""
        parts = [f"**{self.title}**"]
        line = "| " + " | ".join(self._headings()) + " |"
        rule = "|" + "---|" * len(HEADS) + "---:|" * (len(self._headings()) - len(HEADS))
        for name, rows in self.sections.items():
            cells = [self._cells(row, " ", "**{}**", apart=False) for row in rows]
            body = ["| " + " | ".join(line).replace(" ± ", "±") + " |" for line in cells]
            parts.append("\n".join([*([f"*{name}*\n"] if name else []), line, rule, *body]))
        return "\n\n".join([*parts, *self.notes])

    def to_latex(self) -> str:
        """Return one LaTeX `tabular` per section in booktabs style; cells of two lines need no package."""
        parts = ["\n".join(f"% {note}" for note in (self.title, *self.notes))]
        for name, rows in self.sections.items():
            width = len(self._headings()) - len(HEADS)
            lines = [
                rf"\begin{{tabular}}{{{'l' * len(HEADS)}{'r' * width}}}",
                r"\toprule",
                " & ".join(map(_escape, self._headings())) + r" \\",
                r"\midrule",
            ]
            for row in rows:
                cells = [_stacked(cell) for cell in self._cells(row, "\n", "\0{}\1")]
                lines.append(" & ".join(cells) + r" \\")
            parts.append("\n".join([f"% {name}", *lines, r"\bottomrule", r"\end{tabular}"]))
        return "\n\n".join(parts)

    def to_csv(self) -> str:
        """Return one line per estimate, full precision."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        numbers = ("seeds", "mean", "std", "ratio_to_vanilla", "difference", "low", "high", "best")
        writer.writerow(["table", "model", *HEADS, "metric", "threat", *numbers, "paper_mean", "paper_std"])
        for name, rows in self.sections.items():
            for row in rows:
                for column, entry in zip(self.columns, row.entries, strict=True):
                    mean, std, count = entry.estimate or ("", "", 0)
                    apart = ("", "", "") if entry.interval is None else entry.interval[:3]
                    known = ("", "") if entry.published is None else entry.published
                    ratio = "" if entry.ratio is None else entry.ratio
                    names = (self.title, name, *row.labels, column.shown.title, column.threat)
                    values = (count, mean, std, ratio, *apart, int(entry.best), *known)
                    writer.writerow([*names, *("" if value is None else value for value in values)])
        return out.getvalue()

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal, a table per section."""
        for name, rows in self.sections.items():
            columns = [Column(heading) for heading in self._headings()]
            cells = [self._cells(row, "\n", "{}*") for row in rows]
            Table(f"{self.title} – {name}" if name else self.title, columns, cells).show(console)
        console = console or Console()
        for note in (*self.notes, "* best of its group"):
            console.print(note, style="dim", markup=False, highlight=False)

    def _headings(self) -> list[str]:
        found = list(HEADS)
        for column in self.columns:
            heading = column.shown.heading
            found += [heading, "paper"] if column.paper is not None else [heading]
        return found

    def _cells(self, row: Row, new_line: str, bold: str, *, apart: bool = True) -> list[str]:
        found = list(row.labels)
        for column, entry in zip(self.columns, row.entries, strict=True):
            first, *rest = entry.lines(column.shown.form, apart=apart)
            found.append(new_line.join([bold.format(first) if entry.best else first, *rest]))
            if column.paper is not None:
                found.append(entry.paper())
        return found


def times(ratio: float) -> str:
    """A ratio in three digits or so."""
    return f"{ratio:.0f}×" if ratio >= 100 else f"{ratio:.1f}×"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def _stacked(text: str) -> str:
    """A cell in LaTeX: bold between the marks, lines on top of each other."""
    lines = [_escape(line).replace("\0", r"\textbf{").replace("\1", "}") for line in text.split("\n")]
    return lines[0] if len(lines) == 1 else r"\shortstack[r]{" + r" \\ ".join(lines) + "}"
