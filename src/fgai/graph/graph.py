"""`Graph`: an immutable graph, and edits of it that say which edge became which."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fgai import checks
from fgai.cache import cached_on
from fgai.errors import FgaiWarning, InputError, warn
from fgai.graph.fields import _NODE_FIELDS, FILL, Links, _check_values, _merge_values, arguments_from_data
from fgai.ops.attach import attach, check_targets
from fgai.sparse import Adjacency, EdgeMap, Features, edge_keys, key_ends, match_edges
from fgai.sparse.features import as_features
from fgai.typed import typed

if TYPE_CHECKING:
    from torch_geometric.data import Data


FLOOR = 0.1  # size of an eigenvalue below which its inverse is damped


def extend_encoding(
    vectors: Tensor, values: Tensor, degree: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Extend Laplacian encodings to new nodes (Nyström).

    An eigenvector `v` of the normalised adjacency with eigenvalue `μ` satisfies at every node u

        v_u = 1/μ · Σ_{j ∈ N(u)} v_j / √(d_u d_j).

    For a new node this becomes the definition, with an eigenvalue per node, as components have different
    spectra,

        v_u = Σ_{j ∈ N(u)} g(μ_j) · v_j / √(d_u d_j),      g(μ) = μ / max(μ², FLOOR²).

    `g` is 1/μ for `|μ| ≥ FLOOR`, so that an existing node would get its own encoding, and amplifies nothing
    more than 1/FLOOR times. The eigenvalue of a new node is the mean of its neighbours'; without any both are
    0. `vectors` and `values` are [N, P], `degree` [N] counts the neighbours of each old node without
    self-loops, `targets` [M, e] are the distinct neighbours of each new one; returns [M, P] twice.
    """
    new, width = targets.shape
    if width == 0:
        return vectors.new_zeros(new, vectors.shape[1]), values.new_zeros(new, vectors.shape[1])
    gain = values / (values * values).clamp(min=FLOOR * FLOOR)
    flow = vectors * gain * degree.clamp(min=1).to(vectors.dtype).rsqrt()[:, None]
    return flow[targets].sum(dim=1) / float(width) ** 0.5, values[targets].mean(dim=1)


_PER_NODE = (*_NODE_FIELDS, "positional", "positional_values", "batch")


@typed
@dataclass(frozen=True, eq=False)
class Graph:
    """An immutable graph: edges sorted by (destination, source), features, labels and masks.

    Edits (`inject`, `inject_edges`, `remove`, `add_self_loops`) return a new graph and the `EdgeMap` of
    the edges that are in both; values on edges of two graphs can only be compared through that map or the
    keys of the edges. Isolated nodes are kept. All fields but `adjacency` and `name` may be None.

    Attributes:
        y: [N] int64 labels, -1 where unknown.
        train_mask: [N] bool; likewise `val_mask`, `test_mask`.
        positional: [N, P] positional encodings.
        positional_values: [N, P] eigenvalue of each entry of `positional`, needed to extend it.
        edge_truth: [E] bool, the edges of the true explanation.
        edge_weight: [E], with gradients. fgai's attention adds its logarithm to the score (see
            `fgai.ops.weighted_softmax`), so it must be at least 0 there. Edges that edits add have 1.
        edge_attr: [E] or [E, D], what models with edge features read. Edges that edits add have 0.
        batch: [N] int64, the graph each node belongs to in a batch of small graphs.
        graph_y: [G] int64, one label per small graph.
        links: pairs of nodes to predict links for; the edges are then for message passing alone.
        merged: [2, D], the duplicate edges that were dropped.
        entry_values: [M, D] in [0, 1]: values of the last M nodes in the first layer of a model with limits,
            in place of those of their features; 0 and 1 are the ends of its ranges. Further injections drop
            them.
        peers: (first, stop): the nodes first..stop-1, e.g. those of one type, whose range of features
            injected nodes keep to; None for all nodes.
        node_names: names of the nodes in their file, by number; injected nodes have none.
        class_names: likewise of the classes.
        name: for messages and records.
    """

    adjacency: Adjacency
    features: Features | None = None
    y: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    positional: Tensor | None = None
    positional_values: Tensor | None = None
    edge_truth: Tensor | None = None
    edge_weight: Tensor | None = None
    edge_attr: Tensor | None = None
    batch: Tensor | None = None
    graph_y: Tensor | None = None
    links: Links | None = None
    merged: Tensor | None = None
    entry_values: Tensor | None = None
    peers: tuple[int, int] | None = None
    node_names: tuple[str, ...] | None = None
    class_names: tuple[str, ...] | None = None
    name: str = "graph"

    def __repr__(self) -> str:
        sizes = f"nodes={self.num_nodes}, edges={self.num_edges}, features={self.num_features}"
        return f"Graph({self.name!r}, {sizes}, classes={self.num_classes})"

    @classmethod
    def from_edges(
        cls,
        edge_index: Tensor,
        num_nodes: int,
        features: Any = None,
        *,
        undirected: bool = False,
        edge_truth: Tensor | None = None,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
        name: str = "graph",
        **fields: Tensor | None,
    ) -> Graph:
        """Build a graph from an edge list, after checking everything.

        `edge_index` is [2, E]; duplicates are merged with a warning. `features` are [N, F]: a tensor,
        `Features`, a scipy sparse matrix, or None. `undirected` adds the reverse of every edge, with its
        values, and does not warn. An edge is true if `edge_truth` [E] of any of its duplicates is;
        `edge_attr` [E] or [E, D] and `edge_weight` [E] of duplicates must agree. `fields` are other
        attributes of a graph, e.g. `y` and `train_mask`.

        Raises:
            InputError: empty graph, edges out of range, features or values of edges that are not finite,
                wrong lengths, fewer than two classes, or duplicates with different values.
        """
        if num_nodes < 1:
            raise InputError(f"a graph must have at least one node, got num_nodes={num_nodes}")
        edges = checks.edge_index(edge_index, num_nodes)
        num_columns = edges.shape[1]
        if edge_truth is not None and edge_truth.shape != (num_columns,):
            raise InputError(f"`edge_truth` must have shape [{num_columns}], got {tuple(edge_truth.shape)}")
        pairs = (("edge_attr", edge_attr), ("edge_weight", edge_weight))
        values = {key: _check_values(one, key, num_columns) for key, one in pairs if one is not None}
        if undirected:
            edges = torch.cat([edges, edges.flip(0)], dim=1)
            edge_truth = None if edge_truth is None else torch.cat([edge_truth, edge_truth])
            values = {key: torch.cat([one, one]) for key, one in values.items()}
        unique, inverse, counts = torch.unique(
            edge_keys(edges[0], edges[1]), return_inverse=True, return_counts=True
        )
        values = {key: _merge_values(one, key, inverse, unique.numel()) for key, one in values.items()}
        merged = None
        if not undirected and unique.numel() < num_columns:
            merged = torch.stack(key_ends(torch.repeat_interleave(unique, counts - 1)))
            warn(FgaiWarning(f"{merged.shape[1]} duplicate edges of {name!r} were merged"))
        adjacency = Adjacency.from_sorted(*key_ends(unique), num_nodes)
        if edge_truth is not None:
            edge_truth = torch.zeros_like(unique).index_add(0, inverse, edge_truth.long()) > 0
        others: dict[str, Any] = {"edge_truth": edge_truth, "merged": merged, **values, **fields}
        graph = cls(adjacency, as_features(features), name=name, **others)
        graph._validate()
        return graph

    @classmethod
    def from_data(cls, data: Data, name: str = "graph") -> Graph:
        """Build a graph from a homogeneous PyG `Data`, or from a `Batch` of small graphs with a `y` each.

        `InputError` for typed edges, a dataset, heterogeneous data, and where `from_edges` raises one.

        Example:
            >>> from torch_geometric.data import Batch, Data
            >>> one = Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([1]))
            >>> other = one.clone().update({"y": torch.tensor([0])})
            >>> both = Graph.from_data(Batch.from_data_list([one, other]))
            >>> both.batch.tolist(), both.graph_y.tolist()
            ([0, 0, 1, 1], [1, 0])
        """
        arguments, batch = arguments_from_data(data), getattr(data, "batch", None)
        y = arguments["y"]
        if isinstance(batch, Tensor) and isinstance(y, Tensor) and not y.is_floating_point():
            is_batch = y.shape != batch.shape and torch.unique(batch).tolist() == list(range(y.numel()))
            arguments |= {"y": None, "batch": batch.long(), "graph_y": y.flatten().long()} if is_batch else {}
        return cls.from_edges(**arguments, name=str(getattr(data, "name", name)))

    def to_data(self) -> Data:
        """Return a PyG `Data` with dense features."""
        from torch_geometric.data import Data

        x = None if self.features is None else self.features.to_dense()
        names = ("y", "train_mask", "val_mask", "test_mask", "batch", *FILL)
        present = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Data(x=x, edge_index=self.edge_index, num_nodes=self.num_nodes, **present)

    def _validate(self) -> None:
        n = self.num_nodes
        if self.features is not None:
            if self.features.num_rows != n:
                raise InputError(f"`features` must have {n} rows, one per node, got {self.features.num_rows}")
            self.features.check()
            checks.finite(self.features.stored, "features")
        for name in _PER_NODE:
            value, is_mask = getattr(self, name), name.endswith("_mask")
            if value is None:
                continue
            hint = _mask_remedy(name, value) if is_mask else ""
            if value.shape[0] != n:
                raise InputError(f"`{name}` must have one entry per node ({n}), got {value.shape[0]}{hint}")
            if is_mask and (value.dtype != torch.bool or value.dim() != 1):
                got = f"{value.dtype} {tuple(value.shape)}{hint}"
                raise InputError(f"`{name}` must be a boolean vector, got {got}")
        if self.y is not None:
            if self.y.dim() != 1:
                got = f"{tuple(self.y.shape)}; train on one column at a time"
                raise InputError(f"`y` must hold one class number per node, shape [{n}], got {got}")
            if self.y.dtype != torch.long:
                got = f"{self.y.dtype}; use `y.long()`"
                raise InputError(f"`y` must hold class numbers (torch.long), got {got}")
            if int(self.y.min()) < -1:
                raise InputError(f"`y` must be a class number or -1 for unknown, got {int(self.y.min())}")
            if self.num_classes < 2:
                raise InputError(f"`y` must hold at least two classes, got {self.num_classes}")

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return self.adjacency.num_nodes

    @property
    def num_edges(self) -> int:
        """Number of edges, E."""
        return self.adjacency.num_edges

    @property
    def num_features(self) -> int:
        """Number of features per node, F; 0 without features."""
        return 0 if self.features is None else self.features.num_columns

    @cached_property
    def num_classes(self) -> int:
        """Number of classes of nodes or small graphs; 2 for links."""
        if self.links is not None:
            return 2
        labels = self.y if self.graph_y is None else self.graph_y
        return 0 if labels is None else int(labels.max()) + 1

    @cached_property
    def num_graphs(self) -> int:
        """Number of small graphs in the batch; 1 for a single graph."""
        return 1 if self.batch is None else int(self.batch.max()) + 1

    @property
    def device(self) -> torch.device:
        """Device of the graph."""
        return self.adjacency.device

    @property
    def edge_index(self) -> Tensor:
        """[2, E]: sources and destinations in the graph's order."""
        return torch.stack([self.adjacency.source, self.adjacency.destination])

    @property
    def keys(self) -> Tensor:
        """[E] int64, sorted: `destination · 2³² + source` of each edge."""
        return self.adjacency.keys

    @cached_property
    def has_loops(self) -> bool:
        """Whether every node has a self-loop."""
        return int((self.adjacency.source == self.adjacency.destination).sum()) == self.num_nodes

    def node_index(self, node: str) -> int:
        """Return the index of a node from its name, or from digits if nodes have no names."""
        if self.node_names is not None and node in self.node_names:
            return self.node_names.index(node)
        if self.node_names is None and node.isdecimal() and int(node) < self.num_nodes:
            return int(node)
        close = difflib.get_close_matches(node, self.node_names or (), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        numbers = f"; its nodes are 0 to {self.num_nodes - 1}" if self.node_names is None else hint
        raise InputError(f"{self.name!r} has no node {node!r}{numbers}")

    def replace(self, **fields: Any) -> Graph:
        """Return a copy with some fields replaced; tensors are shared."""
        other = dataclasses.replace(self, **fields)
        for name, field in (("has_loops", "adjacency"), ("num_graphs", "batch")):
            if field not in fields and name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def to(self, device: torch.device | str) -> Graph:
        """Return the graph on `device`; the same object if it is there."""
        parts: dict[str, Any] = {
            f.name: value
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor | Adjacency | Features | Links)
        }
        target = checks.device(device)
        if all(part.device == target for part in parts.values()):
            return self
        return dataclasses.replace(self, **{name: part.to(target) for name, part in parts.items()})

    def derived(self, name: str, make: Callable[[Graph], Graph]) -> Graph:
        """Return `make(self)`, cached under `name`; `make` must read nothing but the graph.

        It is computed every time if the graph has edge weights, or edge attributes that need gradients.
        """
        attributes = self.edge_attr
        if self.edge_weight is not None or (attributes is not None and attributes.requires_grad):
            return make(self)
        return cached_on(self, ("derived", name), lambda: make(self))

    def inject(self, targets: Tensor, features: Tensor | None = None) -> tuple[Graph, EdgeMap]:
        """Add new nodes, each joined to some existing ones by edges in both directions.

        `targets` [M, e] int64 are the existing nodes each new one is joined to, distinct per row; gradients
        flow to `features` [M, F], zeros if None. Returns the new graph, whose first N nodes are the old ones,
        and the map of the old edges. New nodes get no label, are in no mask, have a self-loop if every node
        has one, and positional encodings from the neighbours (see `extend_encoding`); those of old nodes
        stay.

        `InputError` if `targets` has a number of no node, or one twice in a row, or `features` do not fit.
        """
        targets = targets.to(self.device)
        check_targets(targets, self.adjacency)
        return self._inject(targets, features)

    def _inject(self, targets: Tensor, features: Tensor | None) -> tuple[Graph, EdgeMap]:
        count, device = len(targets), self.device
        adjacency, positions = attach(self.adjacency, targets, self.has_loops)
        edge_map = EdgeMap(self._positions, positions, self.num_edges, adjacency.num_edges)
        changes: dict[str, Any] = {"adjacency": adjacency, "entry_values": None, **self._padded_fields(count)}
        if self.features is not None:
            if features is None:
                features = torch.zeros(count, self.num_features, dtype=self.features.dtype, device=device)
            if features.shape[0] != count:
                raise InputError(f"`features` must have {count} rows, one per node, got {features.shape[0]}")
            changes["features"] = self.features.append(features)
        if self.batch is not None:
            changes["batch"] = torch.cat([self.batch, self.batch[targets[:, 0]]])
        changes |= self._mapped_edge_fields(edge_map)
        if self.positional is not None and self.positional_values is not None:
            degree = self.adjacency.degree - int(self.has_loops)
            rows, values = extend_encoding(self.positional, self.positional_values, degree, targets)
            changes["positional"] = torch.cat([self.positional, rows])
            changes["positional_values"] = torch.cat([self.positional_values, values])
        graph = self.replace(**changes)
        graph.__dict__.update(has_loops=self.has_loops, num_graphs=self.num_graphs)
        return graph, edge_map

    def _padded_fields(self, count: int) -> dict[str, Tensor]:
        def make() -> dict[str, Tensor]:
            padded = {}
            for name in _NODE_FIELDS:
                values = getattr(self, name)
                if values is not None:
                    fill = values.new_full((count,), -1 if name == "y" else 0)
                    padded[name] = torch.cat([values, fill])
            return padded

        return cached_on(self, ("padded", count), make)

    @cached_property
    def _positions(self) -> Tensor:
        return torch.arange(self.num_edges, device=self.device)

    def inject_edges(self, edge_index: Tensor) -> tuple[Graph, EdgeMap]:
        """Add edges [2, K] between existing nodes; existing edges stay as they are."""
        edges = checks.edge_index(edge_index.to(self.device), self.num_nodes)
        keys = torch.unique(edge_keys(edges[0], edges[1]))
        is_new = torch.ones_like(keys, dtype=torch.bool)
        is_new[match_edges(keys, self.keys)[0]] = False
        new_edges = torch.stack(key_ends(keys[is_new]))
        adjacency, positions = self.adjacency.merge(new_edges, self.num_nodes)
        edge_map = EdgeMap(self._positions, positions, self.num_edges, adjacency.num_edges)
        return self.replace(adjacency=adjacency, **self._mapped_edge_fields(edge_map)), edge_map

    def add_self_loops(self) -> tuple[Graph, EdgeMap]:
        """Add a self-loop to every node that has none."""
        nodes = torch.arange(self.num_nodes, device=self.device)
        graph, edge_map = self.inject_edges(torch.stack([nodes, nodes]))
        graph.__dict__["has_loops"] = True
        return graph, edge_map

    def remove(self, positions: Tensor) -> tuple[Graph, EdgeMap]:
        """Remove the edges at `positions` [R] (or a boolean mask [E]); nodes stay."""
        keep = torch.ones(self.num_edges, dtype=torch.bool, device=self.device)
        keep[checks.positions(positions, self.num_edges)] = False
        before = keep.nonzero().flatten()
        source, destination = self.edge_index[:, before]
        adjacency = Adjacency.from_sorted(source, destination, self.num_nodes)
        edge_map = EdgeMap(before, self._positions[: before.numel()], self.num_edges, before.numel())
        fields = self._mapped_edge_fields(edge_map)
        return self.replace(adjacency=adjacency, merged=None, **fields), edge_map

    def _mapped_edge_fields(self, edge_map: EdgeMap) -> dict[str, Any]:
        fields = {}
        for name, fill in FILL.items():
            values = getattr(self, name)
            if values is not None:
                empty = values.new_full((edge_map.num_after, *values.shape[1:]), fill)
                fields[name] = empty.index_copy(0, edge_map.after, values[edge_map.before])
        return fields


def _mask_remedy(name: str, mask: Tensor) -> str:
    if mask.dim() == 2:
        return f"; choose one split, `{name}[:, 0]`"
    if mask.dtype != torch.bool:
        return "; for indices use `torch_geometric.utils.index_to_mask(index, num_nodes)`"
    return ""
