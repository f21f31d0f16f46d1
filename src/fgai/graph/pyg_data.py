"""What a `Graph` takes from a PyG `Data`, and what it refuses because it would be lost."""

from __future__ import annotations

import sys
from typing import Any

from fgai.errors import InputError
from fgai.graph.edge_values import FILL

NODE_FIELDS = ("y", "train_mask", "val_mask", "test_mask")


def arguments_from_data(data: Any) -> dict[str, Any]:
    """Return the arguments of `Graph.from_edges` for a PyG `Data`.

    Raises:
        InputError: a dataset instead of one of its graphs, heterogeneous data, no edges, or edges of several
            types, which fgai would drop.
    """
    kind = type(data).__name__
    if _is_dataset(data):
        raise InputError(f"`data` must be one graph, got the dataset {kind}; give its graph: `dataset[0]`")
    if not hasattr(data, "edge_index") or kind == "HeteroData":
        hint = "; see `fgai.hetero.HeteroView`" if kind == "HeteroData" else ""
        raise InputError(f"expected a homogeneous PyG `Data` with `edge_index`, got {kind}{hint}")
    if data.edge_index is None:
        raise InputError("`data.edge_index` is missing; transposed `adj_t` is not read, convert it first")
    refuse_edge_types(data)
    fields = {name: getattr(data, name, None) for name in (*NODE_FIELDS, *FILL)}
    labels = fields["y"]
    if labels is not None and labels.dim() == 2 and labels.shape[1] == 1:
        fields["y"] = labels.flatten()
    return {
        "edge_index": data.edge_index,
        "num_nodes": int(data.num_nodes or 0),
        "features": getattr(data, "x", None),
        **fields,
    }


def refuse_edge_types(data: Any) -> None:
    """Raise if the edges of `data` have types, which would be dropped without a word.

    Raises:
        InputError: they have; says what to do.
    """
    if getattr(data, "edge_type", None) is not None:
        raise InputError(
            "`data.edge_type` would be lost: of edges fgai reads `edge_attr` and `edge_weight`. Put the types"
            " into `data.edge_attr`, see `fgai.wrap`, and set `data.edge_type = None`"
        )


def _is_dataset(data: Any) -> bool:
    # Importing PyG takes seconds; where nobody has, nobody can hold one of its datasets.
    pyg = sys.modules.get("torch_geometric.data")
    return pyg is not None and isinstance(data, pyg.Dataset)
