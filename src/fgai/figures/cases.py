"""What the figures of attention read: a model's view of one node, and a model with the attack on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from fgai.attacks import AttackResult
from fgai.attention import LayerAttention, Observation, observe, prepared
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.typed import typed

REDUCERS = ("mean", "last", "max")


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
@dataclass(frozen=True)
class NodeView:
    """What a model says of one node.

    Attributes:
        node: its number.
        neighbours: sources of its incoming edges by falling weight (ties by number); it may be among them.
        weights: of the explanation, summing to one (not with `max` over layers).
        predicted: class with the largest logit.
        confidence: its probability.
        label: true class, -1 where unknown.
        informative: per neighbour, whether the edge belongs to the true explanation, or None.
        num_original: nodes from this number on were injected.
    """

    node: int
    neighbours: tuple[int, ...]
    weights: tuple[float, ...]
    predicted: int
    confidence: float
    label: int
    informative: tuple[bool, ...] | None
    num_original: int

    def name(self, neighbour: int) -> str:
        """How a neighbour is written: its number, `itself`, or `new` and a number for an injected one."""
        if neighbour == self.node:
            return "itself"
        return str(neighbour) if neighbour < self.num_original else f"new {neighbour - self.num_original}"


@typed
@dataclass(frozen=True, eq=False)
class GraphView:
    """What a model says of a whole graph: one attention value per edge, and the predictions.

    Attributes:
        graph: as the model read it.
        attention: float64 [E, 1], `LayerAttention.explanation` of a layer, or layers reduced.
        predicted: class of each node.
        confidence: probability of that class.
        num_original: nodes from this number on were injected.
    """

    graph: Graph
    attention: LayerAttention
    predicted: list[int]
    confidence: list[float]
    num_original: int

    @classmethod
    def of(cls, seen: Observation, *, layer: str | int = "mean", original: int | None = None) -> Self:
        """Make the view from what a model showed.

        Args:
            seen: see `fgai.attention.observe`.
            layer: `mean`, `last` or `max` over layers, or one layer by number; of the heads their normalised
                geometric mean, see `LayerAttention.explanation`.
            original: number of nodes that were not injected; all by default.
        """
        if isinstance(layer, str):
            one_of(layer, "layer", REDUCERS)
        shown = seen.attention.explanations()
        reduced = shown.layer(layer) if isinstance(layer, int) else shown.over_layers(layer)
        confidence, predicted = seen.logits.softmax(1).max(1)
        return cls(
            graph=seen.graph,
            attention=reduced.to("cpu"),
            predicted=predicted.tolist(),
            confidence=confidence.tolist(),
            num_original=seen.graph.num_nodes if original is None else original,
        )

    def node(self, node: int) -> NodeView:
        """Return the part of the view that concerns one node.

        Raises:
            InputError: there is no such node.
        """
        if isinstance(node, bool) or not 0 <= node < self.num_original:
            raise InputError(f"`node` must be in 0..{self.num_original - 1}, got {node}")
        first, last = self.attention.rowptr[node : node + 2].tolist()
        sources = self.attention.source[first:last]
        weights = self.attention.values[first:last, 0]
        order = torch.argsort(self.attention.ranking()[first:last], descending=True, stable=True)
        truth = self.graph.edge_truth
        informative = None
        if truth is not None and self.attention.num_edges == self.graph.num_edges:
            informative = tuple(truth[first:last][order].tolist())
        return NodeView(
            node=node,
            neighbours=tuple(sources[order].tolist()),
            weights=tuple(weights[order].tolist()),
            predicted=self.predicted[node],
            confidence=self.confidence[node],
            label=-1 if self.graph.y is None else int(self.graph.y[node]),
            informative=informative,
            num_original=self.num_original,
        )


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
