"""`attend`: the attention of a heterogeneous model, by layer and type of edges, on the edges as given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData

from fgai.attention import AttentionMap, LayerAttention, observe, prepared
from fgai.attention.hetero import HeteroCall
from fgai.attention.tap import EdgeType
from fgai.hetero.given import known_type
from fgai.hetero.view import HeteroView, wrapped
from fgai.records import Column, Table, Tabled
from fgai.sparse import edge_keys
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class TypeAttention:
    """Attention of one layer on the edges of one type.

    Attributes:
        layer: its name in the model.
        edge_type: of the edges.
        edge_index: [2, E], both ends numbered within their types: the edges as they were given, in that
            order, then the self-loops that the layer added, if any.
        values: [E, H], before dropout.
    """

    layer: str
    edge_type: EdgeType
    edge_index: Tensor
    values: Tensor

    def sums(self) -> Tensor:
        """[D, H]: what each destination with edges of this type gives them, by rising number."""
        rows, inverse = torch.unique(self.edge_index[1], return_inverse=True)
        return self.values.new_zeros(len(rows), self.values.shape[1]).index_add(0, inverse, self.values)


@typed
@dataclass(frozen=True, eq=False)
class HeteroAttention(Tabled):
    """Attention of all layers and types of edges, in the order they ran.

    Layers of `to_hetero`, `HeteroConv` and HANConv normalise within a type: what a node gives the edges of
    one type sums to one. HGTConv normalises over all types together: it sums to one over all of them.

    Attributes:
        entries: one for each layer and type.
        edges: of every type, as given.
    """

    entries: tuple[TypeAttention, ...]
    edges: dict[EdgeType, Tensor]

    def __getitem__(self, edge_type: Any) -> list[TypeAttention]:
        """Return the entries of one type, a layer each.

        Raises:
            InputError: there is no such type.
        """
        chosen = known_type(edge_type, list(self.edges))
        return [entry for entry in self.entries if entry.edge_type == chosen]

    def edge_masks(self) -> dict[EdgeType, Tensor]:
        """Return one number for each edge as given, [E] by type: the mean over heads and layers.

        That is what PyG's `AttentionExplainer` can show of a graph without types. Types that no layer attends
        to get 0.
        """
        found = {}
        for kind, edges in self.edges.items():
            layers = [entry.values.mean(1)[: edges.shape[1]] for entry in self[kind]]
            found[kind] = (
                torch.stack(layers).mean(0) if layers else torch.zeros_like(edges[0], dtype=torch.float)
            )
        return found

    def tables(self) -> list[Table]:
        """Return a row for each layer and type: its sizes, and what nodes give this type, on average."""
        columns = [Column("layer"), Column("edges of type"), Column("edges", "d"), Column("heads", "d")]
        rows = [
            [
                w.layer,
                " ".join(w.edge_type),
                *w.values.shape,
                float(w.sums().mean()) if len(w.values) else None,
            ]
            for w in self.entries
        ]
        return [Table("Attention, by layer and type", [*columns, Column("sum at a node, mean")], rows)]


@typed
def attend(model: nn.Module, data: HeteroData, *, call: HeteroCall | None = None) -> HeteroAttention:
    """Run a heterogeneous model once and return its attention by layer and type of edges.

    Args:
        model: of `to_hetero` or `HeteroConv` with GATConv, GATv2Conv or TransformerConv, or with HANConv or
            HGTConv; runs in evaluation mode and is left as it was.
        data: labels are not needed.
        call: how the model is called, see `HeteroView.wrap`.

    Raises:
        AttentionError: the model has no attention that can be recorded.
        InputError: data that cannot be read, see `HeteroView`, or a model that fails on it.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import HGTConv
        >>> data = HeteroData()
        >>> data["author"].x, data["paper"].x = torch.ones(2, 3), torch.ones(3, 5)
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 2]])
        >>> found = attend(HGTConv({"author": 3, "paper": 5}, 4, data.metadata(), heads=2), data)
        >>> found["author", "writes", "paper"][0].values.sum(0).tolist()
        [1.0, 1.0]
    """
    view = HeteroView(data)
    silent = wrapped(model, replace(view.layout, target=None), call)
    return by_type(observe(silent, prepared(silent, view.graph)).attention, view)


def by_type(attention: AttentionMap, view: HeteroView) -> HeteroAttention:
    """Return what a model of the view's graph showed, by type, on the edges as they were given."""
    edges = {kind: view.data[kind].edge_index for kind in view.layout.edge_types}
    return HeteroAttention(tuple(_as_given(w, view) for w in attention), edges)


def _as_given(w: LayerAttention, view: HeteroView) -> TypeAttention:
    assert w.edge_type is not None
    layout, kind = view.layout, w.edge_type
    given = view.data[kind].edge_index.to(w.values.device)
    first = torch.searchsorted(w.keys, edge_keys(*layout.ends(kind, *given)))
    others = torch.ones(w.num_edges, dtype=torch.bool, device=w.values.device)
    others[first] = False
    order = torch.cat([first, others.nonzero().flatten()])
    ends = layout.within(kind[0], w.source[order]), layout.within(kind[2], w.destination[order])
    return TypeAttention(w.name, kind, torch.stack(ends), w.values[order])
