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
    """Attention of every layer: one `LayerAttention` per run, in the order the layers ran.

    Two maps are compared only on edges that `align` matched by (source, destination).
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
            raise AttentionError(f"layer {index} was asked for, but the map has {len(self.layers)}")
        return self.layers[index]

    def __repr__(self) -> str:
        parts = ", ".join(f"{w.name or 'layer'} [{w.num_edges} × {w.num_heads}]" for w in self.layers)
        return f"AttentionMap({parts})"

    def tables(self) -> list[Table]:
        """Return one row per layer: its sizes, and the mean attention to the strongest neighbour."""
        sizes = [Column(name, "d") for name in ("nodes", "edges", "heads")]
        columns = [Column("layer"), *sizes, Column("strongest neighbour's share, mean")]
        rows = [
            [w.name or str(index), w.num_nodes, w.num_edges, w.num_heads, _strongest(w)]
            for index, w in enumerate(self.layers)
        ]
        return [Table("Attention, layer by layer", columns, rows)]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per layer, edge and head; `heads("mean")` first leaves one head."""
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
        """Number of layers that ran before each entry; entries of one layer have the same."""
        starts = [w.edge_type is None or _layer(w) != _layer(v) for v, w in pairwise(self.layers)]
        return list(accumulate(starts, initial=0)) if self.layers else []

    def of_type(self, edge_type: tuple[str, str, str]) -> AttentionMap:
        """Return the entries of one type of edges, one per layer; for models of heterogeneous graphs."""
        layers = tuple(w for w in self.layers if w.edge_type == tuple(edge_type))
        if not layers:
            types = sorted({w.edge_type for w in self.layers if w.edge_type is not None})
            raise AttentionError(f"the map has no edges of type {edge_type!r}; it has {types or 'no types'}")
        return AttentionMap(layers)

    def heads(self, how: str | int = "mean") -> AttentionMap:
        """Return the map with one head per layer: the `"mean"`, the `"max"`, the `"log"`, or one by number.

        With a word, `LayerAttention.ranking` stays that of all heads.
        """

        def reduced(w: LayerAttention) -> LayerAttention:
            ranks = None if isinstance(how, int) else w.ranking() if w.num_heads > 1 else w.scores
            return w.with_values(w.heads(how)[:, None], ranks)

        return self._each(reduced)

    def explanations(self) -> AttentionMap:
        """Return the map of `LayerAttention.explanation`, float64 [E, 1] per layer, with the same ranks."""
        return self._each(lambda w: w.with_values(w.explanation()[:, None], w.ranking()))

    def ranking(self) -> list[Tensor]:
        """Return what neighbours are ranked by, a vector [E_l] per layer; see `LayerAttention.ranking`."""
        return [w.ranking() for w in self.layers]

    def over_layers(self, how: str = "mean") -> LayerAttention:
        """Return the `"last"`, `"mean"` or `"max"` over layers as one layer [E, 1], its heads averaged.

        `AttentionError` if the layers have different edges (never for `"last"`).
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
        """Return one entry per layer, on the edges of all types; entries without a type stay as they are.

        Parallel edges of several types are added up, and the attention of every node is divided by its sum:
        where a layer normalises within each type, all types that a node has edges of have equal weight.
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
        """Return every layer with the edges of these `keys` [K] only; see `LayerAttention.restrict`."""
        return self._each(lambda w: w.restrict(keys))

    def align(self, other: AttentionMap) -> tuple[AttentionMap, AttentionMap]:
        """Return both maps on their common edges, so that their rows may be compared one by one.

        Edges of one map alone (injected or removed ones, added self-loops) are left out, so rows need not sum
        to one. Node numbers must mean the same nodes in both. `AttentionError` for different numbers of
        layers or heads, duplicated edges, or nothing in common.
        """
        if len(self) != len(other):
            raise AttentionError(f"one map has {len(self)} layers, the other {len(other)}; they do not match")
        pairs = [mine.align(theirs) for mine, theirs in zip(self.layers, other.layers, strict=True)]
        return AttentionMap(tuple(p[0] for p in pairs)), AttentionMap(tuple(p[1] for p in pairs))

    def _each(self, change: Callable[[LayerAttention], LayerAttention]) -> AttentionMap:
        return AttentionMap(tuple(change(w) for w in self.layers))


def _layer(entry: LayerAttention) -> str:
    kind = entry.edge_type
    return entry.name if kind is None else entry.name.removesuffix("." + "__".join(kind))


def _joined(entries: list[LayerAttention]) -> LayerAttention:
    first = entries[0]
    if first.edge_type is None:
        return first
    counts = sorted({w.num_heads for w in entries})
    if len(counts) > 1:
        text = f"types of edges of layer {_layer(first)!r} have {counts} heads"
        raise AttentionError(f"{text}; reduce them first with `heads`")
    values, source, destination = (
        torch.cat([getattr(w, name) for w in entries]) for name in ("values", "source", "destination")
    )
    joined = LayerAttention.from_edges(values, source, destination, first.num_nodes, _layer(first)).merged()
    totals = joined.sums().clamp(min=torch.finfo(values.dtype).tiny)
    return joined.with_values(joined.values / totals[joined.destination])


def _strongest(layer: LayerAttention) -> float | None:
    """Mean over the nodes that attend to something of their largest attention; heads are averaged."""
    if not layer.num_edges:
        return None
    return float(row_max(layer.heads("mean"), layer.rowptr)[layer.degree > 0].mean())
