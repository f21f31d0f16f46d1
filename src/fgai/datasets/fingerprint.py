"""A short name for the content of a graph, the same on every machine."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fgai.graph import Graph
from fgai.graph.edge_values import VALUES
from fgai.sparse import Features, SparseRows
from fgai.typed import typed


def _bytes(values: Tensor | NDArray[Any], kind: str) -> bytes:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return np.ascontiguousarray(array, dtype=np.dtype(kind)).tobytes()


def _entries(features: Features) -> tuple[NDArray[Any], NDArray[Any]]:
    """Position `row · F + column` and value of every entry that is not zero, in order."""
    base = features.base
    if isinstance(base, SparseRows) and features.appended is None and features.delta is None:
        spot = (base.rows * base.num_columns + base.indices).detach().cpu().numpy()
        spot, inverse = np.unique(spot, return_inverse=True)
        stored = base.values.detach().cpu().numpy().astype(np.float64)
        value = np.bincount(inverse, weights=stored, minlength=spot.size)
    else:
        flat = features.to_dense().detach().cpu().numpy().reshape(-1)
        spot = np.flatnonzero(flat)
        value = flat[spot].astype(np.float64)
    keep = value != 0
    return spot[keep], value[keep]


def edge_fingerprint(keys: Tensor | NDArray[Any], num_nodes: int) -> str:
    """Return a hash of a sorted vector of edge keys and the number of nodes."""
    digest = hashlib.sha256(f"fgai edges 1 {num_nodes}\n".encode())
    digest.update(_bytes(keys, "<i8"))
    return digest.hexdigest()[:32]


@typed
def fingerprint(graph: Graph) -> str:
    """Return a hash of the edges with their values, the features and the labels of a graph.

    The same content gives the same 32 hexadecimal digits on every platform and device, whether the
    features are dense or sparse, float32 or float64. Masks, encodings and the name do not enter: two
    splits of one dataset have one fingerprint.

    Args:
        graph: the graph.

    Example:
        >>> import torch
        >>> pair = Graph.from_edges(torch.tensor([[0, 1], [1, 0]]), 2)
        >>> len(fingerprint(pair)), fingerprint(pair) == fingerprint(pair.replace(name="other"))
        (32, True)
    """
    digest = hashlib.sha256(f"fgai graph 1 {graph.num_nodes} {graph.num_features}\n".encode())
    digest.update(_bytes(graph.keys, "<i8"))
    if graph.features is not None:
        spot, value = _entries(graph.features)
        digest.update(b"\nfeatures" + _bytes(spot, "<i8") + _bytes(value, "<f8"))
    for name in VALUES:
        values = getattr(graph, name)
        if values is not None:
            digest.update(f"\n{name} {list(values.shape)}".encode() + _bytes(values, "<f8"))
    for name in ("y", "batch", "graph_y"):
        labels = getattr(graph, name)
        if labels is not None:
            digest.update(b"\n" + name.encode() + _bytes(labels, "<i8"))
    if graph.links is not None:
        for values in (graph.links.pairs, graph.links.y, graph.links.part):
            digest.update(b"\nlinks" + _bytes(values, "<i8"))
    return digest.hexdigest()[:32]
