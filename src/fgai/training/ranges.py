"""Limits of a model in training: their ranges follow its weights and are frozen at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from fgai.attention import call_model, evaluating, limits_of, measuring
from fgai.graph import Graph


def range_pass(model: nn.Module, cut: float, *, sampled: bool = False) -> AbstractContextManager[Any]:
    """A block in which limits take their ranges from the forward pass; of a model without any, nothing.

    Args:
        model: with limits or without.
        cut: share left out at either end.
        sampled: estimate order statistics from some of the nodes, for steps that come often.
    """
    return measuring(model, cut, sampled=sampled) if limits_of(model) else nullcontext()


def set_ranges(model: nn.Module, graph: Graph, cut: float) -> None:
    """Take the ranges of a model's limits from a graph.

    Args:
        model: with limits.
        graph: prepared for it.
        cut: share left out at either end.
    """
    with evaluating(model, freeze=True), measuring(model, cut):
        call_model(model, graph)
