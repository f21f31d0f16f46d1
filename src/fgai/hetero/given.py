"""What is read of a `HeteroData`, and what is refused because it would be lost or cannot be meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from fgai import checks
from fgai.attention.tap import EdgeType
from fgai.errors import InputError
from fgai.graph.edge_values import VALUES


def check_features(data: HeteroData) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of nodes and of features of every type.

    Raises:
        InputError: no types, or features that are missing, empty, not finite or of several kinds of numbers.
    """
    if not data.node_types or not data.edge_types:
        raise InputError("`data` must have types of nodes and of edges; it is empty")
    ends = {name for kind in data.edge_types for name in (kind[0], kind[2])}
    for name in [*data.node_types, *sorted(ends - set(data.node_types))]:
        x = data[name].get("x") if name in data.node_types else None
        if (
            not isinstance(x, Tensor)
            or x.layout != torch.strided
            or x.dim() != 2
            or not x.is_floating_point()
        ):
            raise InputError(
                f"`data[{name!r}].x` must be a dense tensor [nodes, features] of floating-point numbers, got"
                f" {'nothing' if x is None else type(x).__name__}; nodes without features need some, e.g."
                " `torch.eye`"
            )
        if not x.numel():
            raise InputError(f"`data[{name!r}].x` has shape {tuple(x.shape)}; leave out types without nodes")
        checks.finite(x, f"data[{name!r}].x")
    kinds = {(data[name].x.dtype, data[name].x.device) for name in data.node_types}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise InputError(f"features of all types must be of one dtype and on one device, got {found}")
    counts = {name: int(data[name].x.shape[0]) for name in data.node_types}
    return counts, {name: int(data[name].x.shape[1]) for name in data.node_types}


def check_edges(data: HeteroData, counts: dict[str, int]) -> list[EdgeType]:
    """Return the types of edges.

    Raises:
        InputError: a type without `edge_index`, edges that name no nodes, duplicates, or values on edges.
    """
    for kind in data.edge_types:
        edges = data[kind].get("edge_index")
        if not isinstance(edges, Tensor) or edges.dim() != 2 or len(edges) != 2 or edges.dtype != torch.long:
            raise InputError(f"`data[{kind}].edge_index` must be a tensor [2, edges] of torch.long")
        for side, (end, name) in enumerate(((edges[0], kind[0]), (edges[1], kind[2]))):
            if end.numel() and not 0 <= int(end.min()) <= int(end.max()) < counts[name]:
                what = "sources" if side == 0 else "destinations"
                raise InputError(
                    f"{what} of `data[{kind}].edge_index` must be in 0..{counts[name] - 1}, numbers of"
                    f" {name!r} nodes, got {int(end.min())}..{int(end.max())}"
                )
        repeated = edges.shape[1] - torch.unique(edges, dim=1).shape[1]
        if repeated:
            raise InputError(f"`data[{kind}]` has {repeated} duplicate edges; use `data = data.coalesce()`")
        for name in VALUES:
            if data[kind].get(name) is not None:
                raise InputError(
                    f"`data[{kind}].{name}` would be lost: of typed edges fgai reads `edge_index` alone; use"
                    f" a model without it, and `del data[{kind}].{name}`"
                )
    return list(data.edge_types)


def check_labels(values: Any, count: int, target: str, name: str = "y") -> Tensor:
    """Return labels or a mask of the target nodes if there is one for each.

    Raises:
        InputError: of another shape, labels that are not whole, or a mask that is not boolean.
    """
    wanted = torch.long if name == "y" else torch.bool
    if not isinstance(values, Tensor) or values.shape != (count,) or values.dtype != wanted:
        got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"`data[{target!r}].{name}` must be {wanted} of shape [{count}], got {got}")
    return values


def known_type(edge_type: Any, known: Sequence[EdgeType]) -> EdgeType:
    """Return a type of edges if the data has it.

    Raises:
        InputError: it does not; names those it has.
    """
    words = isinstance(edge_type, list | tuple) and all(isinstance(word, str) for word in edge_type)
    if not words or tuple(edge_type) not in known:
        options = ", ".join(map(str, known))
        raise InputError(f"`edge_type` must be one of {options}, got {edge_type!r:.80}")
    start, relation, end = edge_type
    return start, relation, end
