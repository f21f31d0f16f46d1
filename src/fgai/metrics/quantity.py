"""`Quantity`: one number of a record as tables show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgai.checks import one_of
from fgai.records import Column
from fgai.typed import typed

DIRECTIONS = ("higher", "lower")


@typed
@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number of a record.

    Attributes:
        path: dotted, in the metrics of a record: `f1.attacked`.
        title: heading.
        form: how it prints, e.g. `.3f`.
        direction: "higher" or "lower", whichever is better; empty where neither is.
        about: one sentence, or nothing.
    """

    path: str
    title: str
    form: str = ".3f"
    direction: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        one_of(self.direction, "direction", (*DIRECTIONS, ""))

    @property
    def sign(self) -> int:
        """1 where higher is better, -1 where lower is, 0 where neither is."""
        return {"higher": 1, "lower": -1, "": 0}[self.direction]

    @property
    def column(self) -> Column:
        """The column that shows it."""
        return Column(self.title, self.form, self.direction)

    def best(self, values: Iterable[float]) -> float:
        """The best of at least one value.

        Example:
            >>> Quantity(path="g_tvd.rel", title="g-TVD rel", direction="lower").best([0.5, 0.25])
            0.25
        """
        return max(values) if self.sign > 0 else min(values)
