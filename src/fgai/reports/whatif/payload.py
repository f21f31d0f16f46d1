"""Models and graphs as plain values that a browser computes with, see `assets/recompute.js`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attention import Limits, prepared
from fgai.graph import Graph
from fgai.graph.saved import typical_features
from fgai.models.base import AttentionModel, body_of
from fgai.models.layer import AttentionLayer
from fgai.sparse import SparseRows
from fgai.sparse.adjacency import pointers

LARGEST = 4_000_000  # characters of packed numbers on a page


def in_browser(model: nn.Module, graph: Graph) -> bool:
    """Whether the script of the page can compute this model: a GAT or GATv2 on a graph that is not large."""
    if not isinstance(model, AttentionModel) or body_of(model) != "layers" or not model.is_rowwise:
        return False
    if graph.features is None or graph.edge_weight is not None or graph.edge_attr is not None:
        return False
    layers = list(getattr(model, "convs", ()))
    size = graph.num_edges * int(_index_kind(graph.num_nodes)[1]) + min(_sizes(graph).values())
    return (
        size * 4 // 3 <= LARGEST  # as base64
        and next(model.parameters()).dtype == torch.float32
        and all(isinstance(layer, AttentionLayer) and layer.score != "dot" for layer in layers)
        and prepared(model, graph).has_loops
    )


def as_base64(values: Tensor | np.ndarray[Any, Any], kind: str) -> dict[str, str]:
    """Return little-endian numbers of a kind (`f4`, `u1`, `u2`, `u4`) in base64."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    data = np.ascontiguousarray(array.astype(f"<{kind}")).tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}


def model_values(model: nn.Module) -> list[dict[str, Any]]:
    """Return the layers of a model that is computed `in_browser`."""
    return [_layer(layer) for layer in model.convs]  # type: ignore[union-attr]


def _layer(layer: AttentionLayer) -> dict[str, Any]:
    values: dict[str, Any] = {
        **{name: getattr(layer, name) for name in ("score", "heads", "channels", "concat", "slope")},
        "width": layer.heads * layer.channels if layer.concat else layer.channels,
        "value": _tensors(layer.value, "weight", "bias"),
        **_tensors(layer, "bias"),
        "norm": layer.input_norm and _tensors(layer.input_norm, "scale", "shift"),
        "limits": None,
    }
    if layer.limits is not None:
        limits = ((name, one) for name, one in layer.limits.items() if isinstance(one, Limits))
        values["limits"] = {name: _tensors(one, "low", "high", "radius") for name, one in limits}
    if layer.score == "dynamic":
        values["right"] = _tensors(layer.right, "weight", "bias")
        return values | {"weight": as_base64(layer.score_weight, "f4")}
    vectors = {"source": layer.source_weight, "destination": layer.destination_weight}
    return values | {name: as_base64(vector, "f4") for name, vector in vectors.items()}


def _tensors(module: nn.Module, *names: str) -> dict[str, Any]:
    """Attributes of a module in base64."""
    values = {name: getattr(module, name) for name in names}
    return {name: None if value is None else as_base64(value, "f4") for name, value in values.items()}


def graph_values(graph: Graph) -> dict[str, Any]:
    """Return the edges without self-loops, the features and the mean features of every class."""
    source, destination = graph.adjacency.source.cpu().numpy(), graph.adjacency.destination.cpu().numpy()
    kept = source != destination
    rowptr = np.searchsorted(destination[kept], np.arange(graph.num_nodes + 1))
    rows = torch.zeros(graph.num_classes, graph.num_features)
    for label in typical_classes(graph):
        rows[label] = typical_features(graph, label)[0]
    return {
        "nodes": graph.num_nodes,
        "rowptr": as_base64(rowptr, "u4"),
        "source": as_base64(source[kept], _index_kind(graph.num_nodes)),
        "features": _features(graph),
        "typical": as_base64(rows, "f4"),
    }


def typical_classes(graph: Graph) -> list[int]:
    """Return the classes that `typical_features` knows."""
    if graph.y is None or graph.features is None:
        return []
    labels = graph.y if graph.train_mask is None else graph.y[graph.train_mask]
    return [label for label in torch.unique(labels).tolist() if label >= 0]


def _index_kind(count: int) -> str:
    return "u2" if count <= 2**16 else "u4"


def _entries(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """Row pointers, columns and values of the features that are not zero."""
    assert graph.features is not None
    base = graph.features.base
    if isinstance(base, SparseRows):
        return base.indptr, base.indices, base.values
    rows, columns = base.nonzero(as_tuple=True)
    return pointers(rows, len(base)), columns, base[rows, columns]


def _sizes(graph: Graph) -> dict[str, int]:
    """Bytes of the features as one bit per entry, as non-zeros, and as all entries."""
    _, columns, values = _entries(graph)
    nodes, width, ones = graph.num_nodes, graph.num_features, bool((values == 1).all())
    entry = int(_index_kind(width)[1]) + (0 if ones else 4)
    sizes = {"sparse": len(columns) * entry + 4 * nodes, "dense": 4 * nodes * width}
    return sizes | ({"bits": nodes * -(-width // 8)} if ones else {})


def _features(graph: Graph) -> dict[str, Any]:
    """The features in the form that takes the fewest bytes."""
    assert graph.features is not None
    sizes, width, nodes = _sizes(graph), graph.num_features, graph.num_nodes
    form = min(sizes, key=lambda name: sizes[name])
    out: dict[str, Any] = {"kind": form, "columns": width}
    if form == "dense":
        return out | {"values": as_base64(graph.features.to_dense(), "f4")}
    rowptr, columns, values = _entries(graph)
    if form == "bits":
        marks = np.zeros((nodes, width), dtype=bool)
        rows = np.repeat(np.arange(nodes), np.diff(rowptr.cpu().numpy()))
        marks[rows, columns.cpu().numpy()] = True
        bits = np.packbits(marks, axis=1, bitorder="little")  # [N, ⌈F / 8⌉], the lowest bit first
        return out | {"bits": as_base64(bits, "u1")}
    return out | {
        "rowptr": as_base64(rowptr, "u4"),
        "indices": as_base64(columns, _index_kind(width)),
        "values": None if "bits" in sizes else as_base64(values, "f4"),
    }
