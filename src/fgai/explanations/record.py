"""`NodeExplanation`: why one node was classified as it was, and how far that can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from fgai.explanations.view import neighbour_table, show
from fgai.records import Table, TabledDocument, data_frame
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


@typed
@dataclass(frozen=True, kw_only=True)
class NodeExplanation(TabledDocument):
    """The neighbours one node attends to, what an attack leaves of that, and what is proved about it.

    Attributes:
        dataset: name of the graph.
        node: its number.
        name: how it is called, its number where it has no name.
        layer: which explanation: `mean`, `last` or `max` over layers, or a layer's number.
        k: neighbours in the explanation.
        predicted: class with the largest logit.
        confidence: its probability.
        label: true class, -1 where unknown.
        neighbours: by falling weight, each with `node`, `name`, `attention` (its weight in the explanation,
            see `LayerAttention.explanation`), `itself`, `injected` (False here), `informative` (None where no
            truth is known) and `attacked`, its weight under attack.
        attacked: under attack: `threat`, `predicted`, `confidence`, `kept` (nodes of the top-k that stay
            among the original neighbours), `overlap`, `chance` (the overlap of a random order),
            `new_neighbours` and the share of attention they take, `new_attention`; None without an attack.
        certified: `norm`, `k`, `shown_radius` (of the top-k that is shown, where layers are averaged: the
            explanation vector of each moved by less; None for the maximum and where nothing can change),
            `layers` (each layer's own `topk`, its radius, that of the class, and what is known of it),
            `promise` and `injection` (layers that injected nodes cannot reorder, the `condition` for that,
            and whether the class holds against one of them); None if it was not asked for.
    """

    KIND: ClassVar[str] = "explanation"

    dataset: str
    node: int
    name: str
    layer: str
    k: int
    predicted: int
    confidence: float
    label: int
    neighbours: list[dict[str, Any]]
    attacked: dict[str, Any] | None = None
    certified: dict[str, Any] | None = None

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal."""
        show(self.to_dict(), console or Console())

    def tables(self) -> list[Table]:
        """Return the neighbours; what the attack did and what is proved stands in notes."""
        return [neighbour_table(self.to_dict())]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the neighbours as a `DataFrame`, by falling attention.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.neighbours)
