"""`LayerAttention`: one layer's attention and its edges."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import AttentionError, InputError
from fgai.ops.segments import row_index, row_max, row_sum
from fgai.sparse import Adjacency, edge_keys, edge_name, key_ends, match_edges
from fgai.sparse.adjacency import pointers
from fgai.typed import typed

REDUCTIONS = ("log", "mean", "max")

_LOG_OF_ZERO = -1e6
"""In place of log 0: `exp` of its distance from the logarithm of any positive float64 is 0."""


@typed
@dataclass(frozen=True, eq=False)
class LayerAttention:
    """Attention of one layer, `w[e, h]`, on edges sorted by (destination, source).

    Parallel edges have an entry each; add them up with `merged` before you compare layers.

    Attributes:
        values: [E, H], softmax over the incoming edges of each node, before dropout.
        source: [E] int64.
        destination: [E] int64, not decreasing.
        num_nodes: N; a node without incoming edges has no entry.
        name: the layer's name in the model, e.g. `"convs.0"`.
        adjacency: the edges as an `Adjacency`, if there is one.
        scores: [E], scores before the softmax, mean over heads: mean `log w` plus a constant per node.
        edge_type: type of these edges in a heterogeneous graph, where a layer has an entry per type.

    Example:
        >>> import torch
        >>> w = LayerAttention.from_edges(torch.tensor([[0.25], [0.75]]), [2, 0], [1, 1], num_nodes=3)
        >>> w.source.tolist(), w.values.flatten().tolist()
        ([0, 2], [0.75, 0.25])
    """

    values: Tensor
    source: Tensor
    destination: Tensor
    num_nodes: int
    name: str = ""
    adjacency: Adjacency | None = field(default=None, repr=False)
    scores: Tensor | None = field(default=None, repr=False)
    edge_type: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        if self.values.dim() != 2:
            raise InputError(f"`values` must have shape [edges, heads], got {tuple(self.values.shape)}")
        edges = (self.values.shape[0],)
        for name in ("source", "destination", "scores"):
            one = getattr(self, name)
            if one is not None and one.shape != edges:
                need = f"shape {list(edges)}, one entry per row of `values`"
                raise InputError(f"`{name}` must have {need}, got {tuple(one.shape)}")

    def __repr__(self) -> str:
        sizes = f"edges={self.num_edges}, heads={self.num_heads}, nodes={self.num_nodes}"
        return f"LayerAttention({self.name!r}, {sizes})"

    @classmethod
    def from_edges(
        cls,
        values: Tensor,
        source: Tensor | list[int],
        destination: Tensor | list[int],
        num_nodes: int,
        name: str = "",
    ) -> LayerAttention:
        """Build from edges [E] in any order; parallel ones keep their order."""
        ends = [torch.as_tensor(index, device=values.device).long() for index in (source, destination)]
        for end, index in zip(("source", "destination"), ends, strict=True):
            if index.shape != values.shape[:1]:
                raise InputError(f"`{end}` must have shape [{len(values)}], got {tuple(index.shape)}")
        checks.edge_index(torch.stack(ends), num_nodes)
        order = torch.argsort(edge_keys(*ends), stable=True)
        return cls(values[order], ends[0][order], ends[1][order], num_nodes, name)

    @classmethod
    def from_adjacency(
        cls, adjacency: Adjacency, values: Tensor, name: str = "", scores: Tensor | None = None
    ) -> LayerAttention:
        """Build from `values` [E, H], and `scores` [E] if known, in the order of an adjacency's edges."""
        if values.dim() != 2 or values.shape[0] != adjacency.num_edges:
            got = tuple(values.shape)
            raise InputError(f"`values` must have shape [{adjacency.num_edges}, heads], got {got}")
        layer = object.__new__(cls)  # without source and destination, which `__getattr__` reads when needed
        fields = {"values": values, "num_nodes": adjacency.num_nodes, "name": name}
        layer.__dict__.update(fields, adjacency=adjacency, scores=scores)
        return layer

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor:
            """Read source and destination from the adjacency when they are first needed."""
            if name not in ("source", "destination") or self.__dict__.get("adjacency") is None:
                raise AttributeError(f"'LayerAttention' object has no attribute {name!r}")
            self.__dict__[name] = getattr(self.adjacency, name)
            return self.__dict__[name]

    @property
    def num_edges(self) -> int:
        """Number of edges, E."""
        return int(self.values.shape[0])

    @property
    def num_heads(self) -> int:
        """Number of heads, H."""
        return int(self.values.shape[1])

    @cached_property
    def keys(self) -> Tensor:
        """[E] int64, sorted: `destination · 2³² + source`, the identity of each edge in every graph."""
        return self.adjacency.keys if self.adjacency is not None else edge_keys(self.source, self.destination)

    @cached_property
    def rowptr(self) -> Tensor:
        """[N + 1] int64: the incoming edges of node i are `rowptr[i]:rowptr[i + 1]`."""
        return pointers(self.destination, self.num_nodes) if self.adjacency is None else self.adjacency.rowptr

    @cached_property
    def degree(self) -> Tensor:
        """[N] int64, incoming edges per node."""
        return self.rowptr[1:] - self.rowptr[:-1]

    @cached_property
    def has_duplicates(self) -> bool:
        """Whether some edge occurs more than once."""
        return bool((self.keys[1:] == self.keys[:-1]).any())

    def with_values(self, values: Tensor, scores: Tensor | None = None) -> LayerAttention:
        """Return a layer with these values [E, H'] and scores [E] on the same edges."""
        if values.dim() != 2 or len(values) != self.num_edges:
            raise InputError(f"`values` must have shape [{self.num_edges}, heads], got {tuple(values.shape)}")
        other = object.__new__(LayerAttention)
        other.__dict__.update(self.__dict__, values=values, scores=scores)
        return other

    def ranking(self) -> Tensor:
        """Return the numbers [E] that rank the neighbours of a node, the largest first.

        These are the means over heads of `log w = score − log Z`: a new neighbour changes Z only, and
        cannot reorder the others in a layer with unchanged inputs. Compare numbers of one node only; use
        `explanation` to compare nodes.
        """
        if self.scores is not None:
            return self.scores
        if self.num_heads == 1:
            return self.values.squeeze(1)
        positive = self.values > 0  # a weight of 0 comes last
        logs = torch.where(positive, torch.where(positive, self.values, 1.0).double().log(), _LOG_OF_ZERO)
        return mean_heads(logs)

    def explanation(self) -> Tensor:
        """Return the normalised geometric mean of the heads, float64 [E]: one distribution per node.

            a_j = exp(mean_h log w_jh) / Σ_i exp(mean_h log w_ih)

        This is the softmax of the mean scores. A neighbour with weight 0 in some head gets 0; if every
        neighbour has such a head, those with the fewest such heads share all. With an `edge_type` the numbers
        of a node sum to its attention to that type, otherwise to 1.
        """
        if self.scores is None and self.num_heads == 1:
            return self.values.squeeze(1).double()
        ranks, row = self.ranking().double(), row_index(self.rowptr, self.num_edges)
        raised = (ranks - row_max(ranks, self.rowptr)[row]).exp()
        shares = raised / row_sum(raised, self.rowptr)[row]
        return shares if self.edge_type is None else shares * self.sums().mean(1)[self.destination]

    def heads(self, how: str | int = "mean") -> Tensor:
        """Reduce the heads to [E]: `"mean"`, `"max"`, `"log"` (see `explanation`), or one head by number."""
        if isinstance(how, int):
            if not -self.num_heads <= how < self.num_heads:
                raise InputError(f"`heads` must be a head, a number below {self.num_heads}, got {how}")
            return self.values[:, how]
        checks.one_of(how, "heads", REDUCTIONS)
        if how == "log":
            return self.explanation().to(self.values.dtype)
        if self.num_heads == 1:
            return self.values.squeeze(1)
        return self.values.mean(dim=1) if how == "mean" else self.values.amax(dim=1)

    def detach(self) -> LayerAttention:
        """Return a layer without gradient history."""
        return self.with_values(self.values.detach(), None if self.scores is None else self.scores.detach())

    def to(self, device: torch.device | str) -> LayerAttention:
        """Return the layer on `device`; the same object if it is already there."""
        device = checks.device(device)
        if self.values.device == device:
            return self
        values, scores = self.values.to(device), None if self.scores is None else self.scores.to(device)
        if self.adjacency is not None:
            return LayerAttention.from_adjacency(self.adjacency.to(device), values, self.name, scores)
        source, destination = self.source.to(device), self.destination.to(device)
        return replace(self, values=values, source=source, destination=destination, scores=scores)

    def same_edges(self, other: LayerAttention) -> bool:
        """Whether both layers have the same edges in the same order."""
        if self.adjacency is not None and self.adjacency is other.adjacency:
            return True
        if self.source is other.source and self.destination is other.destination:
            return True
        return self.source.device == other.source.device and torch.equal(self.keys, other.keys)

    def require_same_edges(self, other: LayerAttention) -> None:
        """Raise `AttentionError`, naming the first difference, unless both have the same edges."""
        if not self.same_edges(other):
            text = f"{self.name!r} ({self.num_edges} edges) and {other.name!r} ({other.num_edges})"
            difference = _first_difference(self, other)
            raise AttentionError(f"{text} have different edges ({difference}); match them with `align` first")

    def take(self, positions: Tensor, num_nodes: int | None = None) -> LayerAttention:
        """Keep the edges at `positions` [K], increasing; attention need not sum to one then."""
        ends = self.source[positions], self.destination[positions]
        scores = None if self.scores is None else self.scores[positions]
        values, nodes, kind = self.values[positions], num_nodes or self.num_nodes, self.edge_type
        return LayerAttention(values, *ends, nodes, self.name, scores=scores, edge_type=kind)

    def restrict(self, keys: Tensor) -> LayerAttention:
        """Keep the edges with these `keys` [K]; `AttentionError` if one is missing or occurs twice."""
        self._require_unique()
        keys = torch.unique(keys.to(self.keys.device))
        positions, _ = match_edges(self.keys, keys)
        if positions.numel() < keys.numel():
            first = int(keys[~torch.isin(keys, self.keys)][0])
            missing = keys.numel() - positions.numel()
            text = f"{missing} of {keys.numel()} edges asked for are not in layer {self.name!r}, the first is"
            raise AttentionError(f"{text} {edge_name(first)}; use `align` to keep the common ones")
        return self.take(positions)

    def align(self, other: LayerAttention) -> tuple[LayerAttention, LayerAttention]:
        """Return both layers on their common edges, matched by (source, destination).

        `AttentionError` if heads or devices differ, an edge occurs twice, or no edge is common.
        """
        if self.num_heads != other.num_heads:
            text = f"layer {self.name!r} has {self.num_heads} heads, {other.name!r} has {other.num_heads}"
            raise AttentionError(f"{text}; reduce them first with `heads`")
        if self.values.device != other.values.device:
            text = f"layer {self.name!r} is on {self.values.device}, {other.name!r} on {other.values.device}"
            raise AttentionError(f"{text}; use `to`")
        self._require_unique()
        other._require_unique()
        nodes = min(self.num_nodes, other.num_nodes)
        if self.num_nodes == other.num_nodes and self.same_edges(other):
            return self, other
        mine, theirs = match_edges(self.keys, other.keys)
        if mine.numel() == 0 and (self.num_edges or other.num_edges) and self.edge_type is None:
            raise AttentionError(f"attention of {self.name!r} and {other.name!r} has no edge in common")
        return self.take(mine, nodes), other.take(theirs, nodes)

    def merged(self) -> LayerAttention:
        """Add up parallel edges; the attention of a node still sums to one."""
        if not self.has_duplicates:
            return self
        keys, inverse = torch.unique(self.keys, return_inverse=True)
        values = self.values.new_zeros((keys.numel(), self.num_heads)).index_add(0, inverse, self.values)
        return LayerAttention(values, *key_ends(keys), self.num_nodes, self.name, edge_type=self.edge_type)

    def sums(self) -> Tensor:
        """Return the sums [N, H] over the incoming edges of each node, 0 for a node without any."""
        zeros = self.values.new_zeros((self.num_nodes, self.num_heads))
        return zeros.index_add(0, self.destination, self.values)

    def _require_unique(self) -> None:
        if self.has_duplicates:
            first = int(self.keys[1:][self.keys[1:] == self.keys[:-1]][0])
            text = f"edge {edge_name(first)} occurs more than once in layer {self.name!r}"
            raise AttentionError(f"{text}, so it cannot be matched; use `merged` to add parallel edges up")


def _first_difference(first: LayerAttention, second: LayerAttention) -> str:
    if first.source.device != second.source.device:
        return f"on {first.source.device} and {second.source.device}"
    shared = min(first.num_edges, second.num_edges)
    differs = (first.keys[:shared] != second.keys[:shared]).nonzero()
    if differs.numel() == 0:
        return f"one has {abs(first.num_edges - second.num_edges)} edges more"
    position = int(differs[0])
    ends = (edge_name(int(layer.keys[position])) for layer in (first, second))
    return f"at {position}: {' and '.join(ends)}"


def mean_heads(scores: Tensor) -> Tensor:
    """Return the mean [E] of scores [E, H] over heads, rounded alike whatever other edges there are."""
    return reduce(torch.add, scores.unbind(1)) / scores.shape[1]
