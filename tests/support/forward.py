"""Forward passes as the tests read them: pairs of logits and attention, and views of whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fgai.attention import AttentionMap, observe, prepared
from fgai.explanations import GraphView
from fgai.graph import Graph


def adding(deltas: Mapping[int, Tensor]) -> Callable[..., Tensor]:
    """A `perturb` that adds a delta [E] or [E, H] to the attention of some layers."""

    def perturb(layer: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        if layer not in deltas:
            return attention
        delta = deltas[layer].to(attention.dtype)
        return attention + (delta[:, None] if delta.dim() == 1 else delta)

    return perturb


def seen_by(model: nn.Module, graph: Graph, perturb: Any = None) -> tuple[Tensor, AttentionMap]:
    """Logits and the attention of every head, with gradients, in the mode the model is in."""
    seen = observe(model, graph, grad=True, perturb=perturb)
    return seen.logits, seen.attention


def view_of(model: nn.Module, graph: Graph, **options: Any) -> GraphView:
    """A model's view of a graph that need not be prepared; `options` are those of `GraphView.of`."""
    return GraphView.of(observe(model, prepared(model, graph)), **options)
