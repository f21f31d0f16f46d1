"""Values on edges: from the order in which they are given to the graph's own, and through every edit.

An edge keeps its value as long as it is there. Edges that an edit adds have none of their own: they get what
`FILL` says, whoever adds them. A layer that adds self-loops itself (PyG's `fill_value`) fills them itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.sparse import EdgeMap

FILL = {"edge_truth": 0, "edge_attr": 0, "edge_weight": 1}
"""Fields per edge, and the value of edges that edits add: no explanation, attributes 0, weight 1."""
VALUES = ("edge_attr", "edge_weight")
"""What models may read of an edge beside its ends."""


def check_values(values: Any, name: str, num_edges: int) -> Tensor:
    """Return values on edges if there is one finite row for each edge, else raise.

    Args:
        values: `edge_attr` [E] or [E, D], or `edge_weight` [E].
        name: which of them.
        num_edges: E.

    Raises:
        InputError: another shape, no tensor, or numbers that are not finite.
    """
    if not isinstance(values, Tensor) or values.is_sparse:
        raise InputError(f"`{name}` must be a dense tensor, got {type(values).__name__}")
    most = 2 if name == "edge_attr" else 1
    if not 1 <= values.dim() <= most or values.shape[0] != num_edges:
        wanted = f"[{num_edges}]" + (f" or [{num_edges}, D]" if most == 2 else "")
        raise InputError(
            f"`{name}` must have one entry per column of `edge_index`, shape {wanted},"
            f" got {tuple(values.shape)}"
        )
    return checks.finite(values, name)


def merge_values(values: Tensor, name: str, inverse: Tensor, num_edges: int) -> Tensor:
    """Return one value for each distinct edge, in the order of their keys.

    Args:
        values: [E, ...] as given.
        name: for messages.
        inverse: [E] which of the distinct edges each one is.
        num_edges: distinct edges.

    Raises:
        InputError: an edge comes twice with different values: which of them counts, or their sum or their
            mean, only the model's author can tell.
    """
    places = torch.arange(len(inverse), device=inverse.device)
    first = torch.zeros(num_edges, dtype=torch.long, device=inverse.device)
    first = first.scatter_reduce(0, inverse, places, "amin", include_self=False)
    merged = values[first]
    differs = values != merged[inverse]
    differs = differs.any(1) if differs.dim() == 2 else differs
    if bool(differs.any()):
        raise InputError(
            f"{int(differs.sum())} edges come again with another `{name}`, and there is one edge between two"
            " nodes here; merge them as the model should read them, e.g. `torch_geometric.utils.coalesce("
            f'edge_index, {name}, reduce="mean")`'
        )
    return merged


def carry_values(values: Tensor | None, edge_map: EdgeMap, fill: float) -> Tensor | None:
    """Return values [E, ...] on the edges after an edit: old edges keep theirs, new ones get `fill`."""
    if values is None:
        return None
    empty = values.new_full((edge_map.num_after, *values.shape[1:]), fill)
    return empty.index_copy(0, edge_map.after, values[edge_map.before])
