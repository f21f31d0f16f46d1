"""Laplacian encodings of a graph, computed for each connected component and cached."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from fgai.datasets.loader import _undirected_keys, user_cache
from fgai.errors import FgaiError, InputError
from fgai.files import read_arrays, write_atomic
from fgai.graph import Graph
from fgai.graph.fingerprint import edge_fingerprint

GAP = 1e-7  # eigenvalues closer than this count as equal
TIE = 1e-4  # rows whose squared norm is within this relative distance of the largest count as equal
DENSE = 512  # components of up to this many nodes are solved by a dense solver
MAX_EXTRA = 64  # most eigenvectors computed beyond the requested ones to complete an eigenspace
TOLERANCE = 1e-11
RESTARTS = 500  # the arXiv graph needs about 40
ROUNDS = 8  # most searches for eigenvectors that Lanczos missed
_SHIFT = 3.0  # subtracted from eigenvalues of known vectors; all lie in [-1, 1]
VERSION = 1  # part of every cache key: raise it when the encodings change
ON_DISK = 4096  # graphs of at least this many nodes are also cached on disk
IN_MEMORY = 16  # most graphs cached in memory

Floats = NDArray[np.float64]


def _groups(values: Floats) -> list[tuple[int, int]]:
    """Return (start, stop) of each group of equal eigenvalues, up to `GAP`, in a decreasing vector."""
    cuts = np.flatnonzero(values[:-1] - values[1:] > GAP) + 1
    edges = [0, *cuts.tolist(), values.size]
    return [(a, b) for a, b in pairwise(edges) if b > a]


def _canonical_basis(space: Floats) -> Floats:
    """Return the canonical orthogonal basis of a subspace, each vector scaled to 1 at its pivot.

    With Π the projector on the space, u₁ = Π e_i, where i = argmax ‖Π e_i‖ (ties: the smallest index), and so
    on in the part of the space orthogonal to u₁. Nodes that an automorphism of the graph swaps are ties.
    """
    rest = space.copy()
    out = np.empty_like(space)
    for column in range(space.shape[1]):
        reach = np.einsum("nm,nm->n", rest, rest)
        pivot = int(np.flatnonzero(reach >= reach.max() * (1.0 - TIE))[0])
        direction = rest[pivot] / np.sqrt(reach[pivot])
        vector = rest @ direction
        out[:, column] = vector / vector[pivot]
        rest -= np.outer(vector, direction)
    return out


def _component_encodings(adjacency: sp.csr_matrix, size: int, seed: int) -> tuple[Floats, Floats]:
    """Return the encodings [n, size] of one connected component and their eigenvalues [size].

    These are eigenvectors of `D^{-1/2} A D^{-1/2}` by decreasing eigenvalue, without the trivial one √d.
    Those of equal eigenvalues are replaced by the canonical basis of their space. Columns are zero where the
    component has no more eigenvectors, and from a space on that `MAX_EXTRA` further eigenvectors do not
    complete (the leaves of a large star). `adjacency` is symmetric, 0/1, without loops.
    """
    n = adjacency.shape[0]
    root = np.sqrt(np.asarray(adjacency.sum(axis=1), dtype=np.float64).ravel())
    scale = sp.diags(1.0 / root)
    matrix = sp.csr_matrix(scale @ adjacency @ scale)
    trivial = root / np.linalg.norm(root)
    limit = min(size + MAX_EXTRA, n - 1)
    count = min(size + 2, limit)
    solve: Callable[[sp.csr_matrix, Floats, int, int], tuple[Floats, Floats]] = _lanczos
    if n <= DENSE or limit > n // 2:
        solve, count = _dense, limit
    while True:
        values, vectors = solve(matrix, trivial, min(count + 1, n - 1), seed)
        spans = [span for span in _groups(values) if span[0] < size]
        complete = spans[-1][1] < values.size or values.size == n - 1
        if complete or count >= limit:
            break
        count = min(2 * count, limit)
    if not complete:
        spans.pop()
    out, mu = np.zeros((n, size)), np.zeros(size)
    for start, stop in spans:
        end = min(stop, size)
        out[:, start:end] = _canonical_basis(vectors[:, start:stop])[:, : end - start]
        mu[start:end] = values[start:stop].mean()
    return out, mu


def _dense(matrix: sp.csr_matrix, trivial: Floats, count: int, seed: int) -> tuple[Floats, Floats]:
    """Return the `count` largest eigenvalues and their vectors by a dense solver, without the trivial one."""
    values, vectors = np.linalg.eigh(matrix.toarray() - _SHIFT * np.outer(trivial, trivial))
    return values[::-1][:count], vectors[:, ::-1][:, :count]


def _lanczos(matrix: sp.csr_matrix, trivial: Floats, count: int, seed: int) -> tuple[Floats, Floats]:
    """The same by Lanczos, repeated because it can miss vectors of equal eigenvalues (regular trees)."""
    draw = np.random.Generator(np.random.PCG64(seed))
    null_space = trivial[:, None]
    values, vectors = _search(matrix, null_space, count, TOLERANCE, draw)
    for _ in range(ROUNDS):
        rough, _ = _search(matrix, np.hstack([null_space, vectors]), 1, 1e-3, draw)
        if rough[0] <= values[-1] + GAP:
            break
        more, extra = _search(matrix, np.hstack([null_space, vectors]), count, TOLERANCE, draw)
        values, vectors = np.concatenate([values, more]), np.hstack([vectors, extra])
        order = np.argsort(-values, kind="stable")[:count]
        values, vectors = values[order], vectors[:, order]
    return values, vectors


def _search(
    matrix: sp.csr_matrix, known: Floats, count: int, tolerance: float, draw: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return the `count` largest eigenvalues and their vectors, orthogonal to the columns of `known`."""
    n = matrix.shape[0]

    def apply(x: Floats) -> Floats:
        x = x.ravel()
        return np.asarray(matrix @ x - _SHIFT * (known @ (known.T @ x)))

    start = draw.random(n) - 0.5
    start -= known @ (known.T @ start)
    operator = LinearOperator((n, n), matvec=apply, dtype=np.float64)
    width = min(n - 1, max(40, 2 * count + 20))
    try:
        values, vectors = eigsh(
            operator, k=count, which="LA", tol=tolerance, ncv=width, v0=start, maxiter=RESTARTS
        )
    except ArpackNoConvergence as error:
        text = f"the Laplacian encodings of a component of {n} nodes did not converge (a very long path or"
        raise InputError(f"{text} mesh?); use `encodings=0`, or a GAT or GATv2") from error
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]


class _Encoding(NamedTuple):
    """Encodings `vectors` [N, P] in [-1, 1] and the eigenvalue of each entry, `values` [N, P]; float32."""

    vectors: Tensor
    values: Tensor


_memory: dict[str, _Encoding] = {}


def _laplacian_encoding(edges: Tensor, num_nodes: int, size: int) -> _Encoding:
    """Return the encodings of a graph, `_component_encodings` of each component.

    Edges [2, E] are made symmetric; duplicates and loops are dropped. Isolated nodes have zeros. Results are
    cached in memory and, from `ON_DISK` nodes on, in the user's cache folder.
    """
    keys = _undirected_keys(edges.cpu()).numpy()
    name = f"{edge_fingerprint(keys, num_nodes)}-{size}-{VERSION}"
    encoding = _memory.pop(name, None)
    if encoding is None and num_nodes < ON_DISK:
        encoding = _solve(keys, num_nodes, size)
    elif encoding is None:
        path = user_cache() / "positional" / f"{name}.npz"
        encoding = _read(path, (num_nodes, size))
        if encoding is None:
            encoding = _solve(keys, num_nodes, size)
            buffer = io.BytesIO()
            np.savez(buffer, vectors=encoding.vectors.numpy(), values=encoding.values.numpy())
            with suppress(FgaiError):  # a cache that cannot be written costs time, nothing else
                write_atomic(path, buffer.getvalue())
    _memory[name] = encoding  # last in the dict, so dropped last
    if len(_memory) > IN_MEMORY:
        del _memory[next(iter(_memory))]
    return encoding


def _with_encoding(graph: Graph, size: int) -> Graph:
    """Return the graph with `size` Laplacian encodings per node."""
    # An injection extends the encodings from the neighbours; they must not be computed again.
    if size == 0 or (graph.positional is not None and graph.positional.shape[1] == size):
        return graph

    def encoded(plain: Graph) -> Graph:
        vectors, values = _laplacian_encoding(plain.edge_index, plain.num_nodes, size)
        return plain.replace(positional=vectors.to(plain.device), positional_values=values.to(plain.device))

    return graph.derived(f"{size} encodings", encoded)


def _solve(keys: NDArray[np.int64], num_nodes: int, size: int, seed: int = 0) -> _Encoding:
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
        vectors[nodes], values[nodes] = _component_encodings(part, size, seed)
    return _Encoding(torch.from_numpy(vectors), torch.from_numpy(values))


def _read(path: Path, shape: tuple[int, int]) -> _Encoding | None:
    """Return the cached encodings, or None if the file is missing or damaged."""
    with suppress(Exception):  # whatever is wrong, it is computed again
        parts = read_arrays(path, ("vectors", "values")).values()
        if all(
            part.shape == shape and part.dtype == np.float32 and np.isfinite(part).all() for part in parts
        ):
            return _Encoding(*(torch.from_numpy(part) for part in parts))
    return None
