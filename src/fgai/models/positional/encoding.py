"""Laplacian encodings of a whole graph: component by component, cached."""

from __future__ import annotations

import io
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fgai import checks
from fgai.datasets.paths import user_cache
from fgai.errors import FgaiError, InputError
from fgai.files import read_arrays, write_atomic
from fgai.graph import Graph
from fgai.graph.fingerprint import edge_fingerprint
from fgai.models.positional.eigen import leading
from fgai.sparse import Adjacency, edge_keys

VERSION = 1  # part of every key: raise it when the encodings change
ON_DISK = 4096  # graphs of at least this many nodes are also kept on disk
IN_MEMORY = 16


class Encoding(NamedTuple):
    """Encodings and what is needed to extend them.

    Attributes:
        vectors: [N, P] float32, entries in [-1, 1].
        values: [N, P] float32, the eigenvalue μ of each entry's eigenvector of the normalised adjacency.
    """

    vectors: Tensor
    values: Tensor


_memory: OrderedDict[str, Encoding] = OrderedDict()


def laplacian_encoding(
    edges: Adjacency | Tensor,
    num_nodes: int | None = None,
    size: int = 8,
    *,
    seed: int = 0,
    cache: bool = True,
) -> Encoding:
    """Return the first non-trivial eigenvectors of the normalised Laplacian, per connected component.

    For each component with normalised adjacency `Â = D^{-1/2} A D^{-1/2}`, the `size` eigenvectors with the
    largest eigenvalues μ, √d (μ = 1) left out: those of `I - Â` with the smallest 1 - μ. Every component has
    its own: column p is the component's p-th eigenvector, with its own eigenvalue, so a node's encoding
    depends on its component alone. Each vector is +1 at its largest entry; inside repeated eigenvalues the
    basis is that of `fgai.models.positional.canonical`. So the result depends neither on the start vector
    of Lanczos nor on the solver.

    Edges count in both directions, once, without loops. Isolated nodes, and columns a component is too small
    to have, are 0 (eigenvalue 0). Components up to 512 nodes are solved densely, others by Lanczos.

    Args:
        edges: an adjacency, or [2, E] sources and destinations.
        num_nodes: N, needed with an edge list.
        size: P, encodings per node.
        seed: draws the start vector.
        cache: keep the result in memory and, from 4096 nodes on, in the user's cache folder.

    Raises:
        InputError: for bad edges or sizes, or if Lanczos does not converge.

    Example:
        >>> laplacian_encoding(torch.tensor([[0], [1]]), 3, size=2).vectors  # a pair and a lonely node
        tensor([[ 1.,  0.],
                [-1.,  0.],
                [ 0.,  0.]])
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InputError(f"`size` must be a whole number of at least 0, got {size!r}")
    if isinstance(edges, Adjacency):
        index, nodes = torch.stack([edges.source, edges.destination]), edges.num_nodes
    else:
        if num_nodes is None:
            raise InputError("`num_nodes` is needed with an edge list")
        index, nodes = checks.edge_index(edges, num_nodes), num_nodes
    keys = _symmetric(index.cpu())
    if not cache:
        return _solve(keys, nodes, size, seed)
    name = f"{edge_fingerprint(keys, nodes)}-{size}-{VERSION}"
    found = _memory.get(name)
    if found is None:
        found = _through_disk(name, keys, nodes, size, seed)
        _memory[name] = found
        while len(_memory) > IN_MEMORY:
            _memory.popitem(last=False)
    _memory.move_to_end(name)
    return found


def with_encoding(graph: Graph, size: int) -> Graph:
    """Return the graph with `size` Laplacian encodings per node.

    A graph that has that many already is returned as it is: after an injection its encodings were extended
    from the neighbours, and must not be solved for again.

    Args:
        graph: the graph.
        size: encodings per node; 0 leaves the graph alone.
    """
    if size == 0 or (graph.positional is not None and graph.positional.shape[1] == size):
        return graph

    def encoded(given: Graph) -> Graph:
        vectors, values = laplacian_encoding(given.adjacency, size=size)
        return given.replace(positional=vectors.to(given.device), positional_values=values.to(given.device))

    return graph.derived(f"{size} encodings", encoded)


def _symmetric(index: Tensor) -> NDArray[np.int64]:
    """Sorted keys of both directions of every edge, each once, without loops."""
    index = index[:, index[0] != index[1]]
    both = torch.cat([edge_keys(index[0], index[1]), edge_keys(index[1], index[0])])
    return np.asarray(torch.unique(both).numpy(), dtype=np.int64)


def _solve(keys: NDArray[np.int64], num_nodes: int, size: int, seed: int) -> Encoding:
    row, column = keys >> 32, keys & 0xFFFFFFFF
    adjacency = sp.csr_matrix((np.ones(keys.size), (row, column)), shape=(num_nodes, num_nodes))
    vectors = np.zeros((num_nodes, size), dtype=np.float32)
    values = np.zeros((num_nodes, size), dtype=np.float32)
    count, label = connected_components(adjacency, directed=False)
    order = np.argsort(label, kind="stable")
    bounds = np.searchsorted(label[order], np.arange(count + 1))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if stop - start < 2 or size == 0:
            continue
        nodes = order[start:stop]
        part = adjacency if count == 1 else adjacency[nodes][:, nodes]
        vectors[nodes], values[nodes] = leading(part, size, seed)
    return Encoding(torch.from_numpy(vectors), torch.from_numpy(values))


def _through_disk(name: str, keys: NDArray[np.int64], num_nodes: int, size: int, seed: int) -> Encoding:
    if num_nodes < ON_DISK or size == 0:
        return _solve(keys, num_nodes, size, seed)
    path = user_cache() / "positional" / f"{name}.npz"
    found = _read(path, (num_nodes, size))
    if found is None:
        found = _solve(keys, num_nodes, size, seed)
        buffer = io.BytesIO()
        np.savez(buffer, vectors=found.vectors.numpy(), values=found.values.numpy())
        with suppress(FgaiError):  # a cache that cannot be written costs time, nothing else
            write_atomic(path, buffer.getvalue())
    return found


def _read(path: Path, shape: tuple[int, int]) -> Encoding | None:
    """Return the cached encodings, or None if the file is missing, damaged or something else."""
    try:
        parts = list(read_arrays(path, ("vectors", "values")).values())
    except Exception:  # whatever is wrong with it, it can be made again
        return None
    if any(part.shape != shape or part.dtype != np.float32 or not np.isfinite(part).all() for part in parts):
        return None
    return Encoding(torch.from_numpy(parts[0]), torch.from_numpy(parts[1]))
