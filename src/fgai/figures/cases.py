"""A row of a before/after figure, and the explanations it compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fgai.attacks import AttackResult
from fgai.attention import observe, prepared
from fgai.explanations.node import GraphView
from fgai.models import as_graph
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class Case:
    """One row of a before/after figure.

    Attributes:
        name: of the row, e.g. `GAT`.
        model: attacked.
        attack: the result of an attack on it.
    """

    name: str
    model: nn.Module
    attack: AttackResult


@typed
def before_after(case: Case, data: Any, layer: str | int = "mean") -> tuple[GraphView, GraphView]:
    """Return what the model of a case says of the clean graph and of the attacked one."""
    seen = observe(case.model, prepared(case.model, as_graph(data)))
    after = observe(case.model, prepared(case.model, case.attack.graph))
    clean = GraphView.of(seen, layer=layer)
    return clean, GraphView.of(after, layer=layer, original=clean.num_original)


def of_layer(layer: str | int) -> str:
    """Say in words which attention is shown."""
    words = {"mean": "mean over layers", "last": "output layer", "max": "maximum over layers"}
    return words[layer] if isinstance(layer, str) else f"layer {layer}"
