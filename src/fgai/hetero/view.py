"""`HeteroView`: a `HeteroData` as one `Graph`, so that every function of fgai can use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch_geometric.data import HeteroData

from fgai import checks
from fgai.attention.interface import EdgeType
from fgai.datasets.own import MASKS
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.fields import VALUES
from fgai.hetero.model import HeteroCall, HeteroLayout, HeteroModel
from fgai.sparse import edge_keys, key_ends
from fgai.typed import typed


@typed
class HeteroView:
    """A heterogeneous graph as one graph of all its nodes, and models of it as models of that graph.

    Every function of fgai takes `view.wrap(model)` and `view.graph`. Nodes are numbered type by type
    (`view.number`), features are padded with zeros to the widest type, and labels and masks are those of the
    target, so that its nodes alone are trained on, attacked and scored. A missing mask holds all of them.

    Args:
        data: with `x` and `edge_index` for every type. Types may have no edges.
        target: type of the nodes that are classified; None takes the destination of `edge_type`, or the one
            type with labels. If no type has labels, or several, there are no predictions.
        edge_type: of the edges that attacks add, from new nodes to nodes of the target; None for no attacks.
        name: for messages and records.

    Raises:
        InputError: a type without features, an unknown type, edges to missing nodes, duplicate edges of one
            type, values on edges, no labels on the target, or an edge type with another destination.

    Example:
        >>> import torch
        >>> from torch_geometric.data import HeteroData
        >>> data = HeteroData()
        >>> data["author"].x, data["paper"].x = torch.ones(2, 3), torch.ones(3, 5)
        >>> data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
        >>> view = HeteroView(data)
        >>> view.graph.edge_index.tolist(), view.number("paper", 2)
        ([[1, 0], [2, 4]], 4)
    """

    def __init__(
        self,
        data: HeteroData,
        target: str | None = None,
        edge_type: EdgeType | None = None,
        *,
        name: str = "graph",
    ) -> None:
        counts, widths = _check_features(data)
        _check_edges(data, counts)
        injected = None if edge_type is None else _check_edge_type(edge_type, data.edge_types)
        self.data = data
        self.layout = HeteroLayout(
            counts=counts,
            widths=widths,
            edge_types=tuple(data.edge_types),
            target=_find_target(data, target, injected),
            injected=injected,
        )
        self.graph = self._graph(name)

    def __repr__(self) -> str:
        sizes = f"nodes={dict(self.layout.counts)}, edge_types={len(self.layout.edge_types)}"
        return f"HeteroView({self.graph.name!r}, {sizes}, target={self.layout.target!r})"

    def wrap(self, model: nn.Module, call: HeteroCall | None = None) -> HeteroModel:
        """Return a model of the view's graph, for `make_faithful` and others, with the original as `.model`.

        `call` is a function `(model, HeteroData) → logits` of the target nodes, or a dictionary with those,
        that uses these arguments alone; None calls the model as `model(x_dict, edge_index_dict)`.
        `InputError` for nothing to call, one of fgai's own models, or one that is wrapped already.
        """
        return HeteroModel(model, self.layout, call)

    def number(self, node_type: str, node: int) -> int:
        """Return the number of a node in the graph; `InputError` if there is no such type or node."""
        counts = self.layout.counts
        if node_type not in counts:
            raise InputError(f"there is no type of nodes {node_type!r}; there are {', '.join(counts)}")
        return self.layout.offsets[node_type] + checks.whole(node, "node", 0, counts[node_type] - 1)

    def _graph(self, name: str) -> Graph:
        layout, data = self.layout, self.data
        width = max(layout.widths.values())
        features = torch.cat([pad(data[kind].x, (0, width - own)) for kind, own in layout.widths.items()])
        keys = [edge_keys(*layout.ends(kind, *data[kind].edge_index)) for kind in layout.edge_types]
        distinct = torch.unique(torch.cat(keys))
        types = torch.zeros(len(distinct), len(keys), dtype=torch.bool, device=features.device)
        for column, own in enumerate(keys):
            types[torch.searchsorted(distinct, own), column] = True
        edges, fields = torch.stack(key_ends(distinct)), self._labels()
        graph = Graph.from_edges(edges, layout.num_nodes, features, edge_attr=types, name=name, **fields)
        peers = None if layout.injected is None else layout._range(layout.injected[0])
        return graph.replace(peers=peers)

    def _labels(self) -> dict[str, Any]:
        """Labels and masks of the target as those of all nodes."""
        layout, target = self.layout, self.layout.target
        if target is None:
            return {}
        store: Any = self.data[target]
        fields = {}
        for name, fill in (("y", -1), *((mask, False) for mask in MASKS)):
            own = store.get(name)
            values = torch.full((layout.num_nodes,), fill, device=store.x.device)
            rows = slice(*layout._range(target))
            values[rows] = True if own is None else _check_labels(own, layout.counts[target], target, name)
            fields[name] = values
        return fields


def _find_target(data: HeteroData, target: str | None, injected: EdgeType | None) -> str | None:
    """Return the type that is classified, checked to have labels; None if it is ambiguous."""
    labelled = [name for name in data.node_types if data[name].get("y") is not None]
    if target is None:
        if injected is None:
            return labelled[0] if len(labelled) == 1 else None
        target = injected[2]
    checks.one_of(target, "target", data.node_types)
    if injected is not None and injected[2] != target:
        text = f"new edges must end at nodes of the target {target!r}, and {injected} ends at {injected[2]!r}"
        raise InputError(f"{text}; use another `edge_type`")
    if target not in labelled:
        raise InputError(f"`data[{target!r}].y` is missing: the nodes of the target need labels")
    return target


def _check_features(data: HeteroData) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of nodes and of features of every type, after checking the features."""
    if not data.node_types or not data.edge_types:
        raise InputError("`data` must have types of nodes and of edges; it is empty")
    ends = {name for kind in data.edge_types for name in (kind[0], kind[2])}
    for name in [*data.node_types, *sorted(ends - set(data.node_types))]:
        x = data[name].get("x") if name in data.node_types else None
        dense = isinstance(x, Tensor) and x.layout == torch.strided
        if x is None or not dense or x.dim() != 2 or not x.is_floating_point():
            got = "nothing" if x is None else type(x).__name__
            text = f"`data[{name!r}].x` must be a dense tensor [nodes, features] of floating-point numbers"
            raise InputError(f"{text}, got {got}; nodes without features need some, e.g. `torch.eye`")
        if not x.numel():
            raise InputError(f"`data[{name!r}].x` has shape {tuple(x.shape)}; leave out types without nodes")
        checks.finite(x, f"data[{name!r}].x")
    kinds = {(data[name].x.dtype, data[name].x.device) for name in data.node_types}
    if len(kinds) > 1:
        got = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(f"features of all types must be of one dtype and on one device, got {got}")
    counts = {name: int(data[name].x.shape[0]) for name in data.node_types}
    return counts, {name: int(data[name].x.shape[1]) for name in data.node_types}


def _check_edges(data: HeteroData, counts: dict[str, int]) -> None:
    for kind in data.edge_types:
        edges = data[kind].get("edge_index")
        if not isinstance(edges, Tensor) or edges.dim() != 2 or len(edges) != 2 or edges.dtype != torch.long:
            raise InputError(f"`data[{kind}].edge_index` must be a tensor [2, edges] of torch.long")
        for what, end, name in (("sources", edges[0], kind[0]), ("destinations", edges[1], kind[2])):
            if end.numel() and not 0 <= int(end.min()) <= int(end.max()) < counts[name]:
                text = f"{what} of `data[{kind}].edge_index` must be in 0..{counts[name] - 1}, numbers of"
                raise InputError(f"{text} {name!r} nodes, got {int(end.min())}..{int(end.max())}")
        repeated = edges.shape[1] - torch.unique(edges, dim=1).shape[1]
        if repeated:
            raise InputError(f"`data[{kind}]` has {repeated} duplicate edges; use `data = data.coalesce()`")
        for name in VALUES:
            if data[kind].get(name) is not None:
                text = f"`data[{kind}].{name}` would be ignored: of typed edges fgai reads `edge_index`"
                raise InputError(f"{text}; use a model without it, and `del data[{kind}].{name}`")


def _check_labels(values: Any, count: int, target: str, name: str) -> Tensor:
    dtype = torch.long if name == "y" else torch.bool
    if not isinstance(values, Tensor) or values.shape != (count,) or values.dtype != dtype:
        got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"`data[{target!r}].{name}` must be {dtype} of shape [{count}], got {got}")
    return values


def _check_edge_type(edge_type: Any, types: Sequence[EdgeType]) -> EdgeType:
    words = isinstance(edge_type, list | tuple) and all(isinstance(word, str) for word in edge_type)
    if not words or tuple(edge_type) not in types:
        options = ", ".join(map(str, types))
        raise InputError(f"`edge_type` must be one of {options}, got {edge_type!r:.80}")
    start, relation, end = edge_type
    return start, relation, end
