"""A model as stages that act row by row around each attention, so that some rows can be computed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from fgai.sparse import Adjacency, Features


class SplitLayer(Protocol):
    """An attention layer in pieces: row by row before the scores, over edges, row by row after the mixing.

    Attributes:
        heads: H.
        channels: width per head, C.
        score: `additive`, `dynamic` or `dot`.
        slope: of the leaky relu in the score.
    """

    heads: int
    channels: int
    score: str
    slope: float

    def sides(self, x: Tensor | Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the score reads of the source and of the destination, and the values, row by row."""

    def score_edges(self, source: Tensor, destination: Tensor, adjacency: Adjacency) -> Tensor:
        """Return the scores [E, H] from the two sides that `sides` gave."""

    def source_for(self, scores: Tensor, destination: Tensor) -> Tensor | None:
        """Return what sources must say to get these scores [V, H] at the destinations' sides [V, H, ...].

        None where none can.
        """

    def mean_scores(self, source: Tensor, destination: Tensor, adjacency: Adjacency) -> Tensor:
        """Return the mean of the scores over the heads [E], from what `sides` gave."""

    def fused(
        self,
        source: Tensor,
        destination: Tensor,
        values: Tensor,
        adjacency: Adjacency,
        *,
        written: bool,
        averaged: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the aggregated values [N, H, C] and the attention, from what `sides` gave."""

    def join(self, out: Tensor) -> Tensor:
        """Join the heads of [N, H, C], row by row."""


class Stage(NamedTuple):
    """One attention layer and what follows it.

    Attributes:
        layer: the attention; nodes meet nowhere else.
        update: (states before the layer or None, what the layer gives) → states after it, row by row.
    """

    layer: SplitLayer
    update: Callable[[Tensor | None, Tensor], Tensor]


class Layerwise(NamedTuple):
    """A model in evaluation mode: `leave(update_L(... update_1(enter(features), attention) ...))`.

    Attributes:
        enter: (features, positional encodings or None) → the first layer's input, row by row.
        stages: in the order they run.
        leave: last states → logits, row by row.
        keeps_state: whether `update` reads the states before the layer.
    """

    enter: Callable[[Features, Tensor | None], Tensor | Features]
    stages: list[Stage]
    leave: Callable[[Tensor], Tensor]
    keeps_state: bool
