"""`Tabled`: whatever can be read as tables, in a terminal, in a notebook, in a paper."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rich.console import Console

from fgai.records.table import Table


class Tabled(ABC):
    """A result that is shown as tables; a class says which, everything else follows."""

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
        """What a notebook shows."""
        return self.to_html()
