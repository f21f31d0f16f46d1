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
from fgai.models.layer import AttentionLayer, Projection
from fgai.sparse import SparseRows
from fgai.sparse.adjacency import pointers

LARGEST = 4_000_000
"""Characters of packed numbers that a page carries at most."""


def in_browser(model: nn.Module, graph: Graph) -> bool:
    """Whether the script on the page computes this model: a GAT on a plain graph that is not large."""
    if not isinstance(model, AttentionModel) or body_of(model) != "layers" or not model.is_rowwise:
        return False
    layers = list(getattr(model, "convs", ()))
    plain = graph.features is not None and graph.edge_weight is None and graph.edge_attr is None
    return (
        plain
        and packed_size(graph) <= LARGEST
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
    inner, dynamic = layer.heads * layer.channels, layer.score == "dynamic"
    norm = layer.input_norm
    values: dict[str, Any] = {
        "score": layer.score,
        "heads": layer.heads,
        "channels": layer.channels,
        "concat": layer.concat,
        "width": inner if layer.concat else layer.channels,
        "slope": layer.slope,
        "value": _projection(layer.value),
        "bias": None if layer.bias is None else as_base64(layer.bias, "f4"),
        "norm": None
        if norm is None
        else {"scale": as_base64(norm.scale, "f4"), "shift": as_base64(norm.shift, "f4")},
        "limits": None
        if layer.limits is None
        else {n: _limits(m) for n, m in layer.limits.items() if isinstance(m, Limits)},
    }
    if dynamic:
        return values | {"right": _projection(layer.right), "weight": as_base64(layer.score_weight, "f4")}
    ends = {"source": layer.source_weight, "destination": layer.destination_weight}
    return values | {name: as_base64(weight, "f4") for name, weight in ends.items()}


def _projection(projection: Projection) -> dict[str, Any]:
    bias = projection.bias
    return {
        "weight": as_base64(projection.weight, "f4"),
        "bias": None if bias is None else as_base64(bias, "f4"),
    }


def _limits(limits: Limits) -> dict[str, Any]:
    return {name: as_base64(getattr(limits, name), "f4") for name in ("low", "high", "radius")}


def graph_values(graph: Graph) -> dict[str, Any]:
    """Return the edges without self-loops, the features and the mean features of every class."""
    source, destination = graph.adjacency.source.cpu().numpy(), graph.adjacency.destination.cpu().numpy()
    kept = source != destination
    rowptr = np.searchsorted(destination[kept], np.arange(graph.num_nodes + 1))
    typical = [typical_features(graph, label) for label in typical_classes(graph)]
    rows = torch.zeros(graph.num_classes, graph.num_features)
    for label, row in zip(typical_classes(graph), typical, strict=True):
        rows[label] = row[0]
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


def packed_size(graph: Graph) -> int:
    """Return about how many characters edges and features take, without packing them."""
    edges = graph.num_edges * int(_index_kind(graph.num_nodes)[1])
    return (edges + min(_sizes(graph).values())) * 4 // 3


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
    sizes, width = _sizes(graph), graph.num_features
    form = min(sizes, key=lambda name: sizes[name])
    out: dict[str, Any] = {"kind": form, "columns": width}
    if form == "dense":
        return out | {"values": as_base64(graph.features.to_dense(), "f4")}
    rowptr, columns, values = _entries(graph)
    if form == "bits":
        return out | {"bits": as_base64(_bits(rowptr, columns, graph.num_nodes, width), "u1")}
    stored = None if "bits" in sizes else as_base64(values, "f4")
    return out | {
        "rowptr": as_base64(rowptr, "u4"),
        "indices": as_base64(columns, _index_kind(width)),
        "values": stored,
    }


def _bits(rowptr: Tensor, columns: Tensor, nodes: int, width: int) -> np.ndarray[Any, Any]:
    """[N, ⌈F / 8⌉], the lowest bit first."""
    marks = np.zeros((nodes, width), dtype=bool)
    rows = np.repeat(np.arange(nodes), np.diff(rowptr.cpu().numpy()))
    marks[rows, columns.cpu().numpy()] = True
    return np.packbits(marks, axis=1, bitorder="little")
