"""`Table`: rows of plain values that print in a terminal and as Markdown, HTML, LaTeX, CSV or pandas."""

from __future__ import annotations

import csv
import html
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from fgai.errors import InputError, MissingExtraError
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

Cell = str | float | int | None

MISSING = "–"
_PROSE = 40  # columns with longer texts are aligned left
ARROWS = {"higher": "↑", "lower": "↓", "": ""}
"""Which direction is better, as headings show it."""
_LATEX = {letter: f"\\{letter}" for letter in "&%#_${}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "×": r"$\times$", "–": "--", "−": "$-$", "±": r"$\pm$"}


@typed
@dataclass(frozen=True)
class Column:
    """One column: title, format of numbers, and which direction is better (`higher`, `lower` or nothing)."""

    title: str
    form: str = ".3f"
    better: str = ""

    @property
    def heading(self) -> str:
        """The title with its arrow."""
        return f"{self.title} {ARROWS[self.better]}".strip()

    def text(self, cell: Cell) -> str:
        """Return a cell as it is printed; undefined values as a dash."""
        if cell is None:
            return MISSING
        return cell if isinstance(cell, str) else format(cell, self.form)


@typed
@dataclass(frozen=True)
class Table:
    """Columns, rows of cells, a title printed above and notes printed below.

    Example:
        >>> table = Table("Scores", (Column("model"), Column("F1", ".2f", "higher")), [["GAT", 0.925]])
        >>> print(table.to_markdown())
        | model | F1 ↑ |
        |---|---|
        | GAT | 0.93 |
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default_factory=tuple)

    def texts(self) -> list[list[str]]:
        """Return every row as printed."""
        return [
            [column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows
        ]

    def transposed(self) -> Table:
        """Return the table with rows and columns swapped; cells become text."""
        cells = self.texts()
        columns = [Column(self.columns[0].heading), *(Column(row[0]) for row in cells)]
        rows = [[column.heading, *(row[i] for row in cells)] for i, column in enumerate(self.columns) if i]
        return Table(self.title, columns, rows, self.notes)

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal: transposed, wrapped or as a list where it is too wide."""
        console = console or Console()
        tables = (self, self.transposed())
        wrapped = [table for table in tables if _line_width(table._longest_words()) <= console.width]
        if wrapped:
            first = next((table for table in tables if table._width() <= console.width), None)
            console.print((first or min(wrapped, key=Table._width))._rich(console.width))
        else:
            console.print(max(tables, key=lambda table: len(table.rows))._list())
        for note in self.notes:
            console.print(note, style="dim", markup=False, highlight=False)

    def _cells(self) -> list[tuple[str, ...]]:
        return list(zip(*[[column.heading for column in self.columns], *self.texts()], strict=True))

    def _width(self) -> int:
        return _line_width(max(map(len, cells)) for cells in self._cells())

    def _longest_words(self) -> list[int]:
        return [
            max((len(word) for cell in cells for word in cell.split()), default=0) for cells in self._cells()
        ]

    def _widths(self, most: int) -> list[int]:
        """Characters of each column: those of its cells, the widest narrowed down to whole words."""
        least = self._longest_words()
        widths = [max(map(len, cells)) for cells in self._cells()]
        while _line_width(widths) > most and widths != least:
            spare = [width if width > low else 0 for width, low in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
        return widths

    def _rich(self, most: int) -> RichTable:
        """Widths are set here: rich would narrow columns below their longest word and cut the last ones."""
        out = RichTable(title=escape(self.title), title_justify="left")
        for index, (column, width) in enumerate(zip(self.columns, self._widths(most), strict=True)):
            side: Literal["left", "right"] = "left" if index == 0 else "right"
            out.add_column(escape(column.heading), justify=side, overflow="fold", width=width)
        for row in self.texts():
            out.add_row(*map(escape, row))
        return out

    def _list(self) -> Text:
        headings = [column.heading for column in self.columns[1:]]
        room = max(map(len, headings), default=0)
        lines = [Text(self.title, style="italic")]
        for name, *values in self.texts():
            lines.append(Text(name, style="bold"))
            lines += [
                Text(f"  {head:<{room}}  {value}") for head, value in zip(headings, values, strict=True)
            ]
        return Text("\n").join(lines)

    def to_markdown(self) -> str:
        """Return a Markdown table, notes below it."""
        head, *body = (
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in ([column.heading for column in self.columns], *self.texts())
        )
        lines = [head, "|" + "---|" * len(self.columns), *body]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def to_html(self) -> str:
        """Return an HTML table, notes below it; every text is escaped."""
        left = [index == 0 or max(map(len, cells)) > _PROSE for index, cells in enumerate(self._cells())]
        head = _html_row([column.heading for column in self.columns], left, "th")
        body = "".join(_html_row(row, left, "td") for row in self.texts())
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self.notes)
        caption = f'<caption style="text-align:left">{html.escape(self.title)}</caption>'
        table = f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"
        return f'<div class="fgai-table" style="overflow-x:auto">{table}{notes}</div>'

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` (needs pandas) with full precision; undefined values are missing."""
        return data_frame(self.rows, [column.title for column in self.columns])

    def to_latex(self) -> str:
        """Return a LaTeX `tabular` in booktabs style, notes as comments."""
        head, *body = (
            " & ".join("".join(_LATEX.get(letter, letter) for letter in cell) for cell in row) + r" \\"
            for row in ([column.heading for column in self.columns], *self.texts())
        )
        begin = rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}"
        notes = [f"% {line}" for note in self.notes for line in note.splitlines()]
        lines = [*notes, begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Return CSV with full precision; undefined values are empty."""
        return csv_text([[column.title for column in self.columns], *self.rows])


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV with full precision; None is empty."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


@typed
def data_frame(
    values: Mapping[str, Any] | Sequence[Any], columns: Sequence[str] | None = None
) -> pandas.DataFrame:
    """Return a `DataFrame` of columns by name, or of rows with the names of their `columns`.

    Values that do not fit raise `InputError`, a missing pandas `MissingExtraError`.
    """
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("pandas", "pandas") from None
    try:
        return pandas.DataFrame(values, columns=columns)
    except ValueError as error:
        raise InputError(f"`values` do not fit a table: {error}") from error


def _line_width(widths: Iterable[int]) -> int:
    """Characters of a line in a terminal, with borders."""
    return sum(width + 3 for width in widths) + 1


def _html_row(texts: Sequence[str], left: Sequence[bool], tag: str) -> str:
    cells = (
        f'<{tag} style="text-align:{"left" if at_left else "right"}">{html.escape(text)}</{tag}>'
        for text, at_left in zip(texts, left, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


class Tabled(ABC):
    """A result that is shown as tables; a subclass defines `tables`."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """Return the tables, in the order they are shown."""

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal."""
        for table in self.tables():
            table.show(console)

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        return "\n\n".join(f"**{table.title}**\n\n{table.to_markdown()}" for table in self.tables())

    def to_latex(self) -> str:
        """Return the tables as LaTeX."""
        return "\n\n".join(table.to_latex() for table in self.tables())

    def to_html(self) -> str:
        """Return the tables as HTML; names are shown as text, whatever they hold."""
        return "\n".join(table.to_html() for table in self.tables())

    def _repr_html_(self) -> str:
        return self.to_html()
