"""Limits of a model in training: their ranges follow its weights and are frozen at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from fgai.attention import call_model, evaluating, limits_of, measuring
from fgai.errors import InputError
from fgai.graph import Graph


@dataclass(frozen=True)
class Tightness:
    """How many honest nodes limits leave out.

    Attributes:
        cut: share of the nodes at either end of each channel, which are clipped.
        soften: share of the nodes, the loudest as a whole, which are drawn to the loudness of the rest.
    """

    cut: float = 0.0
    soften: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.cut < 0.5:
            raise InputError(f"`cut` must be at least 0 and below 0.5, got {self.cut}")
        if not 0.0 <= self.soften < 1.0:
            raise InputError(f"`soften` must be at least 0 and below 1, got {self.soften}")


def range_pass(
    model: nn.Module, tightness: Tightness, *, sampled: bool = False
) -> AbstractContextManager[Any]:
    """A block in which limits take their ranges from the forward pass; of a model without any, nothing.

    Args:
        model: with limits or without.
        tightness: what is left out.
        sampled: estimate order statistics from some of the nodes, for steps that come often.
    """
    if not limits_of(model):
        return nullcontext()
    return measuring(model, tightness.cut, soften=tightness.soften, sampled=sampled)


def set_ranges(model: nn.Module, graph: Graph, tightness: Tightness) -> None:
    """Take the ranges of a model's limits from a graph.

    Args:
        model: with limits.
        graph: prepared for it.
        tightness: what is left out.
    """
    with evaluating(model, freeze=True), range_pass(model, tightness):
        call_model(model, graph)
