"""`attend` and `explain_node`: attention of a heterogeneous model by type of edges, and of one node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from fgai import checks
from fgai.attention import AttentionMap, LayerAttention, observe, prepared
from fgai.attention.interface import EdgeType
from fgai.hetero.model import HeteroCall, HeteroModel
from fgai.hetero.view import HeteroView, _check_edge_type
from fgai.records import Cell, Column, Table, Tabled, data_frame
from fgai.sparse import edge_keys
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


@typed
@dataclass(frozen=True, eq=False)
class TypeAttention:
    """Attention of one layer on the edges of one type, `values` [E, H] before dropout.

    The ends of `edge_index` [2, E] are numbered within their types: the edges in the order of the data, then
    the self-loops that the layer added, if any.
    """

    layer: str
    edge_type: EdgeType
    edge_index: Tensor
    values: Tensor

    def sums(self) -> Tensor:
        """[D, H] the sum at each destination with edges of this type, by ascending number."""
        rows, inverse = torch.unique(self.edge_index[1], return_inverse=True)
        return self.values.new_zeros(len(rows), self.values.shape[1]).index_add(0, inverse, self.values)


@typed
@dataclass(frozen=True, eq=False)
class HeteroAttention(Tabled):
    """Attention of all layers and types of edges, an entry each in the order they ran.

    Layers of `to_hetero`, `HeteroConv` and HANConv normalise within a type: at a node the attention of one
    type sums to one. HGTConv normalises over all types together. `edges`: `edge_index` of every type in the
    data.
    """

    entries: tuple[TypeAttention, ...]
    edges: dict[EdgeType, Tensor]

    def __getitem__(self, edge_type: Any) -> list[TypeAttention]:
        """Return the entries of one type, a layer each; `InputError` if there is no such type."""
        chosen = _check_edge_type(edge_type, list(self.edges))
        return [entry for entry in self.entries if entry.edge_type == chosen]

    def edge_masks(self) -> dict[EdgeType, Tensor]:
        """Return the mean over heads and layers for each edge of the data, [E] by type; 0 without values."""
        masks = {}
        for kind, edges in self.edges.items():
            layers = [entry.values.mean(1)[: edges.shape[1]] for entry in self[kind]]
            none = torch.zeros_like(edges[0], dtype=torch.float)
            masks[kind] = torch.stack(layers).mean(0) if layers else none
        return masks

    def tables(self) -> list[Table]:
        """Return a row for each layer and type: its sizes, and the mean sum of its attention at a node."""
        columns = [Column("layer"), Column("edges of type"), Column("edges", "d"), Column("heads", "d")]
        rows: list[list[Cell]] = []
        for w in self.entries:
            mean = float(w.sums().mean()) if len(w.values) else None
            rows.append([w.layer, " ".join(w.edge_type), *w.values.shape, mean])
        return [Table("Attention, by layer and type", [*columns, Column("sum at a node, mean")], rows)]


@typed
def attend(model: nn.Module, data: HeteroData, *, call: HeteroCall | None = None) -> HeteroAttention:
    """Run a heterogeneous model once and return its attention by layer and type of edges.

    It runs in evaluation mode, and its mode is restored. Data need no labels. `call`: see `HeteroView.wrap`.
    `AttentionError` if the model has no attention that can be recorded, `InputError` for data that cannot be
    read, see `HeteroView`, or a model that fails on it.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import HGTConv
        >>> data = HeteroData()
        >>> data["author"].x, data["paper"].x = torch.ones(2, 3), torch.ones(3, 5)
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 2]])
        >>> attention = attend(HGTConv({"author": 3, "paper": 5}, 4, data.metadata(), heads=2), data)
        >>> attention["author", "writes", "paper"][0].values.sum(0).tolist()
        [1.0, 1.0]
    """
    view = HeteroView(data)
    model_of_view = HeteroModel(model, replace(view.layout, target=None), call)
    attention = observe(model_of_view, prepared(model_of_view, view.graph)).attention
    edges = {kind: data[kind].edge_index for kind in view.layout.edge_types}
    return HeteroAttention(tuple(_type_attention(w, view) for w in attention), edges)


def _type_attention(w: LayerAttention, view: HeteroView) -> TypeAttention:
    """The attention of a layer in the order of the data's edges."""
    assert w.edge_type is not None
    layout, kind = view.layout, w.edge_type
    edges = view.data[kind].edge_index.to(w.values.device)
    first = torch.searchsorted(w.keys, edge_keys(*layout.ends(kind, *edges)))
    others = torch.ones(w.num_edges, dtype=torch.bool, device=w.values.device)
    others[first] = False
    order = torch.cat([first, others.nonzero().flatten()])
    ends = layout.to_local(kind[0], w.source[order]), layout.to_local(kind[2], w.destination[order])
    return TypeAttention(w.name, kind, torch.stack(ends), w.values[order])


@typed
@dataclass(frozen=True)
class HeteroExplanation(Tabled):
    """The neighbours one node, by its number within the type, attends to, by type of edges.

    `predicted`, its probability `confidence` and the true `label`, -1 where unknown, are None for nodes
    without a prediction. `neighbours` have `node` and `attention`, by descending attention, for every type of
    edges to this type of nodes; they are empty for a type without edges to this node.
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
        return {kind: [one["node"] for one in entries[: self.k]] for kind, entries in self.neighbours.items()}

    def tables(self) -> list[Table]:
        """Return all neighbours with their types."""
        title = f"{self.node_type} {self.node}"
        if self.predicted is not None and self.confidence is not None:
            title += f": class {self.predicted}, {100 * self.confidence:.0f} %"
        columns = [Column(name) for name in ("neighbour", "relation", "attention", "explains")]
        rows = [
            [f"{kind[0]} {one['node']}", kind[1], one["attention"], "yes" if rank < self.k else ""]
            for kind, entries in self.neighbours.items()
            for rank, one in enumerate(entries)
        ]
        notes = [f"no edges of type {' '.join(kind)}" for kind, own in self.neighbours.items() if not own]
        return [Table(title, columns, list(rows), notes)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the neighbours as a `DataFrame`, a row each; `MissingExtraError` without pandas."""
        pairs = [(kind, one) for kind, entries in self.neighbours.items() for one in entries]
        return data_frame([{"source": kind[0], "relation": kind[1], **one} for kind, one in pairs])


@typed
def explain_node(
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
    """Return the neighbours a node attends to, for each type of edges that ends at it.

    Heads are combined by the normalised geometric mean, see `LayerAttention.explanation`. If layers normalise
    within a type, the weights of every type sum to one, and types cannot be compared; with HGTConv the
    weights of all types together sum to one.

    `layer` is `mean`, `last` or `max` over layers, or one layer by number. Nodes of the type `target`, by
    default the one that has labels, are classified. `call`: see `HeteroView.wrap`. `InputError` for no such
    type or node, or an argument out of range, `AttentionError` for no attention that can be recorded, or no
    such layer.
    """
    checks.whole(k, "k", 1)
    if not isinstance(layer, int) or isinstance(layer, bool):
        checks.one_of(str(layer), "layer", ("mean", "last", "max"))
    view = HeteroView(data, target)
    number = view.number(node_type, node)
    hetero = view.wrap(model, call)
    observation = observe(hetero, prepared(hetero, view.graph))
    kinds = [kind for kind in view.layout.edge_types if kind[2] == node_type]
    neighbours = {kind: _neighbours(observation.attention, view, kind, number, layer) for kind in kinds}
    predicted, confidence, label = None, None, None
    if node_type == view.layout.target and observation.graph.y is not None:
        most, index = observation.logits[number].softmax(0).max(0)
        predicted, confidence, label = int(index), float(most), int(observation.graph.y[number])
    return HeteroExplanation(node_type, node, str(layer), k, predicted, confidence, label, neighbours)


def _neighbours(
    attention: AttentionMap, view: HeteroView, kind: EdgeType, number: int, layer: str | int
) -> list[dict[str, Any]]:
    if not any(w.edge_type == kind for w in attention):
        return []
    entries = attention.of_type(kind)
    chosen = AttentionMap((entries[layer],)) if isinstance(layer, int) else entries
    for other in chosen:
        chosen.last.require_same_edges(other)
    stacked = torch.stack([w.explanation() for w in chosen])
    values = {"max": stacked.amax(0), "mean": stacked.mean(0)}.get(str(layer), stacked[-1])
    first, last = chosen.last.rowptr[number : number + 2].tolist()
    order = first + torch.argsort(values[first:last], descending=True, stable=True)
    nodes = view.layout.to_local(kind[0], chosen.last.source[order]).tolist()
    pairs = zip(nodes, values[order].tolist(), strict=True)
    return [{"node": one, "attention": value} for one, value in pairs]
