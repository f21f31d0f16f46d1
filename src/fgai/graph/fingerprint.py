"""Hashes of the content of a graph, the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fgai.cache import cached_on
from fgai.graph.fields import VALUES
from fgai.graph.graph import Graph
from fgai.sparse import Features, SparseRows
from fgai.typed import typed

Numbers = Tensor | NDArray[Any]


class Piece(NamedTuple):
    """One part of a graph's content: a heading, the dtype its numbers are hashed in, and the numbers."""

    heading: str
    kind: str
    blocks: Iterable[Numbers]


def _digest(heading: str, pieces: Iterable[Piece]) -> str:
    digest = hashlib.sha256(heading.encode())
    for piece in pieces:
        digest.update(piece.heading.encode())
        for block in piece.blocks:
            array = block.detach().cpu().numpy() if isinstance(block, Tensor) else block
            digest.update(np.ascontiguousarray(array, dtype=np.dtype(piece.kind)).tobytes())
    return digest.hexdigest()[:32]


def _entries(features: Features) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return position `row · F + column` and value of every non-zero entry, in increasing order."""
    base = features.base
    if isinstance(base, SparseRows) and features.appended is None and features.delta is None:
        position = (base.rows * base.num_columns + base.indices).detach().cpu().numpy()
        position, inverse = np.unique(position, return_inverse=True)
        stored = base.values.detach().cpu().numpy().astype(np.float64)
        value = np.bincount(inverse, weights=stored, minlength=position.size)
        keep = value != 0
        return position[keep], value[keep]
    flat = features.to_dense().detach().cpu().numpy().reshape(-1)
    position = np.flatnonzero(flat)
    return position, flat[position]


def feature_pieces(read: Callable[[], Iterable[tuple[int, Features]]]) -> tuple[Piece, Piece]:
    """Return positions and values of features; `read()`, called twice, yields (first row, block)."""

    def positions() -> Iterator[Numbers]:
        for first, features in read():
            yield _entries(features)[0] + first * features.num_columns

    def values() -> Iterator[Numbers]:
        for _, features in read():
            yield _entries(features)[1]

    return Piece("\nfeatures", "<i8", positions()), Piece("", "<f8", values())


def edge_fingerprint(keys: Numbers, num_nodes: int) -> str:
    """Return a hash of a sorted vector of edge keys and the number of nodes."""
    return _digest(f"fgai edges 1 {num_nodes}\n", [Piece("", "<i8", [keys])])


def content_fingerprint(num_nodes: int, num_features: int, pieces: Iterable[Piece]) -> str:
    """Return the fingerprint of a graph from its pieces: edge keys, features, values on edges, labels."""
    return _digest(f"fgai graph 1 {num_nodes} {num_features}\n", pieces)


@typed
def fingerprint(graph: Graph) -> str:
    """Return a hash of the edges with their values, the features and the labels of a graph, computed once.

    The same content gives the same 32 hexadecimal digits on every platform and device, whether features are
    dense or sparse, float32 or float64. Masks, encodings and the name do not enter.

    Example:
        >>> import torch
        >>> pair = Graph.from_edges(torch.tensor([[0, 1], [1, 0]]), 2)
        >>> len(fingerprint(pair)), fingerprint(pair) == fingerprint(pair.replace(name="other"))
        (32, True)
    """
    return cached_on(graph, "fingerprint", lambda: _fingerprint(graph))


def _fingerprint(graph: Graph) -> str:
    pieces = [Piece("", "<i8", [graph.keys])]
    if graph.features is not None:
        position, value = _entries(graph.features)
        pieces += [Piece("\nfeatures", "<i8", [position]), Piece("", "<f8", [value])]
    for name in VALUES:
        values = getattr(graph, name)
        pieces += [] if values is None else [Piece(f"\n{name} {list(values.shape)}", "<f8", [values])]
    for name in ("y", "batch", "graph_y"):
        labels = getattr(graph, name)
        pieces += [] if labels is None else [Piece(f"\n{name}", "<i8", [labels])]
    if graph.links is not None:
        ends = (graph.links.pairs, graph.links.y, graph.links.part)
        pieces += [Piece("\nlinks", "<i8", [part]) for part in ends]
    return content_fingerprint(graph.num_nodes, graph.num_features, pieces)
