"""`AttentionMap`: the attention of all layers of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.attention.layer import LayerAttention
from fgai.errors import AttentionError, InputError
from fgai.ops.segments import row_max
from fgai.records import Column, Table, Tabled, data_frame
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


@typed
@dataclass(frozen=True, eq=False)
class AttentionMap(Tabled):
    """Attention of every layer: one `LayerAttention` per run of a layer, in the order the layers ran.

    Two maps can have different edges: `align` keeps the common ones, so that they can be compared.
    """

    layers: tuple[LayerAttention, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence):
            raise InputError(f"`layers` must be a tuple of LayerAttention, got {type(self.layers).__name__}")
        object.__setattr__(self, "layers", tuple(self.layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerAttention]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> LayerAttention:
        if not -len(self.layers) <= index < len(self.layers):
            raise AttentionError(f"layer {index} was asked for, the map has {len(self)}; count from 0 or -1")
        return self.layers[index]

    def __repr__(self) -> str:
        parts = ", ".join(f"{w.name or 'layer'} [{w.num_edges} × {w.num_heads}]" for w in self.layers)
        return f"AttentionMap({parts})"

    def tables(self) -> list[Table]:
        """Return one row per layer: its sizes, and the mean attention to the strongest neighbour."""
        sizes = [Column(name, "d") for name in ("nodes", "edges", "heads")]
        columns = [Column("layer"), *sizes, Column("strongest neighbour's share, mean")]
        rows = [
            [w.name or str(index), w.num_nodes, w.num_edges, w.num_heads, _strongest_share(w)]
            for index, w in enumerate(self.layers)
        ]
        return [Table("Attention, layer by layer", columns, rows)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per layer, edge and head; call `heads("mean")` first for means."""
        names = [w.name or str(index) for index, w in enumerate(self.layers)]
        rows = [w.num_edges * w.num_heads for w in self.layers]
        columns = {
            "source": [w.source.repeat_interleave(w.num_heads) for w in self.layers],
            "destination": [w.destination.repeat_interleave(w.num_heads) for w in self.layers],
            "head": [torch.arange(w.num_heads).repeat(w.num_edges) for w in self.layers],
            "attention": [w.values.detach().flatten() for w in self.layers],
        }
        stacked = {name: torch.cat([part.cpu() for part in parts]).numpy() for name, parts in columns.items()}
        return data_frame({"layer": np.repeat(np.array(names, dtype=object), rows), **stacked})

    @property
    def last(self) -> LayerAttention:
        """The output layer's attention."""
        return self[-1]

    @property
    def depths(self) -> list[int]:
        """Number of layers before each entry; the entries of one layer, by edge type, have the same."""
        starts = [w.edge_type is None or _layer_name(w) != _layer_name(v) for v, w in pairwise(self.layers)]
        return list(accumulate(starts, initial=0)) if self.layers else []

    def of_type(self, edge_type: tuple[str, str, str]) -> AttentionMap:
        """Return the entries of one edge type of a heterogeneous graph, one per layer."""
        layers = tuple(w for w in self.layers if w.edge_type == tuple(edge_type))
        if not layers:
            types = sorted({w.edge_type for w in self.layers if w.edge_type is not None})
            raise AttentionError(f"the map has no edges of type {edge_type!r}; it has {types or 'no types'}")
        return AttentionMap(layers)

    def heads(self, how: str | int = "mean") -> AttentionMap:
        """Return the map with one head per layer, see `LayerAttention.heads`.

        The ranking of neighbours stays that of all heads, unless `how` is the number of one head.
        """

        def reduced(w: LayerAttention) -> LayerAttention:
            ranks = None if isinstance(how, int) else w.ranking() if w.num_heads > 1 else w.scores
            return w.with_values(w.heads(how)[:, None], ranks)

        return self._each(reduced)

    def explanations(self) -> AttentionMap:
        """Return the map with `LayerAttention.explanation` as values, float64 [E, 1], ranked as before."""
        return self._each(lambda w: w.with_values(w.explanation()[:, None], w.ranking()))

    def ranking(self) -> list[Tensor]:
        """Return `LayerAttention.ranking` of every layer: the numbers [E] that neighbours are ranked by."""
        return [w.ranking() for w in self.layers]

    def over_layers(self, how: str = "mean") -> LayerAttention:
        """Reduce the layers to one [E, 1]: the `"last"`, or `"mean"` or `"max"` over all; heads are averaged.

        `AttentionError` for `"mean"` and `"max"` if the layers have different edges.
        """
        checks.one_of(how, "how", ("last", "mean", "max"))
        if any(w.edge_type is not None for w in self.layers):
            return self.joined().over_layers(how)
        last = self.last
        if how == "last":
            return AttentionMap((last,)).heads().last
        for other in self.layers:
            last.require_same_edges(other)
        stacked = torch.stack([w.heads() for w in self.layers])
        values = stacked.amax(0) if how == "max" else stacked.mean(0)
        ends = last.source, last.destination
        return LayerAttention(values[:, None], *ends, last.num_nodes, f"{how} of layers", last.adjacency)

    def joined(self) -> AttentionMap:
        """Join the entries of all edge types of a layer to one; entries without a type stay as they are.

        Parallel edges are added up. The attention of every node is then divided by its sum, so in a layer
        that normalises within each type, all types that a node has edges of have equal weight.
        """
        groups = groupby(zip(self.depths, self.layers, strict=True), key=itemgetter(0))
        return AttentionMap(tuple(_joined([w for _, w in entries]) for _, entries in groups))

    def detach(self) -> AttentionMap:
        """Return the map without gradient history."""
        return self._each(LayerAttention.detach)

    def to(self, device: torch.device | str) -> AttentionMap:
        """Return the map on `device`."""
        return self._each(lambda w: w.to(device))

    def restrict(self, keys: Tensor) -> AttentionMap:
        """Keep only the edges with these `keys` [K] in every layer, see `LayerAttention.restrict`."""
        return self._each(lambda w: w.restrict(keys))

    def align(self, other: AttentionMap) -> tuple[AttentionMap, AttentionMap]:
        """Return both maps on their common edges, in the same order.

        Edges that only one map has (injected, removed, added self-loops) are left out, so the attention of a
        node need not sum to one. Node i must be the same in both. `AttentionError` if the numbers of
        layers or heads differ, an edge occurs twice, or no edge is common.
        """
        if len(self) != len(other):
            raise AttentionError(f"one map has {len(self)} layers, the other {len(other)}; they must match")
        pairs = [mine.align(theirs) for mine, theirs in zip(self.layers, other.layers, strict=True)]
        return AttentionMap(tuple(p[0] for p in pairs)), AttentionMap(tuple(p[1] for p in pairs))

    def _each(self, change: Callable[[LayerAttention], LayerAttention]) -> AttentionMap:
        return AttentionMap(tuple(change(w) for w in self.layers))


def _layer_name(entry: LayerAttention) -> str:
    kind = entry.edge_type
    return entry.name if kind is None else entry.name.removesuffix("." + "__".join(kind))


def _joined(entries: list[LayerAttention]) -> LayerAttention:
    first = entries[0]
    if first.edge_type is None:
        return first
    counts = sorted({w.num_heads for w in entries})
    if len(counts) > 1:
        text = f"edge types of layer {_layer_name(first)!r} have {counts} heads"
        raise AttentionError(f"{text}; reduce them first with `heads`")
    values, source, destination = (
        torch.cat([getattr(w, name) for w in entries]) for name in ("values", "source", "destination")
    )
    edges = source, destination, first.num_nodes
    joined = LayerAttention.from_edges(values, *edges, _layer_name(first)).merged()
    totals = joined.sums().clamp(min=torch.finfo(values.dtype).tiny)
    return joined.with_values(joined.values / totals[joined.destination])


def _strongest_share(layer: LayerAttention) -> float | None:
    """Return the largest attention of a node, averaged over nodes with incoming edges; heads are averaged."""
    if not layer.num_edges:
        return None
    return float(row_max(layer.heads("mean"), layer.rowptr)[layer.degree > 0].mean())
