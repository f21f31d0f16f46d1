"""`explain`: whom one node of a heterogeneous graph attends to, type by type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from fgai import checks
from fgai.attention import AttentionMap, Observation, observe, prepared
from fgai.attention.hetero import HeteroCall
from fgai.attention.tap import EdgeType
from fgai.hetero.view import HeteroView
from fgai.records import Column, Table, Tabled, data_frame
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

LAYERS = ("mean", "last", "max")


@typed
@dataclass(frozen=True, kw_only=True)
class HeteroExplanation(Tabled):
    """The neighbours one node attends to, by type of edges.

    Attributes:
        node_type: of the node.
        node: its number within the type.
        layer: which attention: `mean`, `last` or `max` over layers, or a layer's number.
        k: neighbours of each type in the explanation.
        predicted: class with the largest logit; None for nodes that are not classified.
        confidence: its probability, likewise.
        label: true class, -1 where unknown; likewise.
        neighbours: for every type of edges that ends at such nodes, by falling attention: `node`, its number
            within its type, and `attention`. A type without edges at this node has an empty list.
    """

    node_type: str
    node: int
    layer: str
    k: int
    predicted: int | None
    confidence: float | None
    label: int | None
    neighbours: dict[EdgeType, list[dict[str, Any]]]

    def top(self) -> dict[EdgeType, list[int]]:
        """Return the first k neighbours of each type."""
        return {kind: [one["node"] for one in found[: self.k]] for kind, found in self.neighbours.items()}

    def tables(self) -> list[Table]:
        """Return all neighbours with their types."""
        said = f"{self.node_type} {self.node}"
        if self.predicted is not None and self.confidence is not None:
            said += f": class {self.predicted}, {100 * self.confidence:.0f} %"
        columns = [Column("neighbour"), Column("relation"), Column("attention"), Column("explains")]
        rows = [
            [f"{kind[0]} {one['node']}", kind[1], one["attention"], "yes" if rank < self.k else ""]
            for kind, found in self.neighbours.items()
            for rank, one in enumerate(found)
        ]
        notes = [f"no edges of type {' '.join(kind)}" for kind, found in self.neighbours.items() if not found]
        return [Table(said, columns, list(rows), notes)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the neighbours as a `DataFrame`, a row each.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(
            [
                {"source": kind[0], "relation": kind[1], **one}
                for kind, found in self.neighbours.items()
                for one in found
            ]
        )


@typed
def explain(
    model: nn.Module,
    data: HeteroData,
    node_type: str,
    node: int,
    *,
    k: int = 5,
    layer: str | int = "mean",
    target: str | None = None,
    call: HeteroCall | None = None,
) -> HeteroExplanation:
    """Say whom a node attends to, for each type of edges that ends at it.

    Of the heads it is the normalised geometric mean, see `LayerAttention.explanation`. Where layers
    normalise within a type, the weights of every type sum to one, and types do not compare; with HGTConv
    those of all types together do.

    Args:
        model: see `attend`.
        data: with labels, if the prediction shall be told, too.
        node_type: of the node.
        node: its number within the type.
        k: neighbours of each type in the explanation.
        layer: `mean`, `last` or `max` over layers, or one layer by number.
        target: type of the nodes that are classified; None takes the one that has labels.
        call: how the model is called, see `HeteroView.wrap`.

    Raises:
        InputError: no such type, no such node, or an argument out of range.
        AttentionError: the model has no attention that can be recorded, or no such layer.
    """
    checks.whole(k, "k", 1)
    if not isinstance(layer, int) or isinstance(layer, bool):
        checks.one_of(str(layer), "layer", LAYERS)
    view = HeteroView(data, target)
    number = view.number(node_type, node)
    wrapped = view.wrap(model, call)
    seen = observe(wrapped, prepared(wrapped, view.graph))
    kinds = [kind for kind in view.layout.edge_types if kind[2] == node_type]
    neighbours = {kind: _neighbours(seen.attention, view, kind, number, layer) for kind in kinds}
    predicted, confidence, label = (
        _prediction(seen, number) if node_type == view.layout.target else (None,) * 3
    )
    return HeteroExplanation(
        node_type=node_type,
        node=node,
        layer=str(layer),
        k=k,
        predicted=predicted,
        confidence=confidence,
        label=label,
        neighbours=neighbours,
    )


def _prediction(seen: Observation, number: int) -> tuple[int, float, int]:
    confidence, predicted = seen.logits[number].softmax(0).max(0)
    assert seen.graph.y is not None
    return int(predicted), float(confidence), int(seen.graph.y[number])


def _neighbours(
    attention: AttentionMap, view: HeteroView, kind: EdgeType, number: int, layer: str | int
) -> list[dict[str, Any]]:
    entries = attention.of_type(kind) if any(w.edge_type == kind for w in attention) else AttentionMap(())
    if not len(entries):
        return []
    chosen = AttentionMap((entries.layer(layer),)) if isinstance(layer, int) else entries
    for other in chosen:
        chosen.last.require_same_edges(other)
    values = _reduced(torch.stack([w.explanation() for w in chosen]), layer)
    first, last = chosen.last.rowptr[number : number + 2].tolist()
    order = first + torch.argsort(values[first:last], descending=True, stable=True)
    nodes = view.layout.within(kind[0], chosen.last.source[order]).tolist()
    return [
        {"node": one, "attention": value} for one, value in zip(nodes, values[order].tolist(), strict=True)
    ]


def _reduced(values: Tensor, layer: str | int) -> Tensor:
    """From [L, E] to [E]."""
    if layer == "max":
        return values.amax(0)
    return values.mean(0) if layer == "mean" else values[-1]
