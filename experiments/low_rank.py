"""The nearest matrix of low rank to the edges of a graph, for GNN-SVD and Pro-GNN."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import ArpackError, eigsh, svds
from torch import Tensor

from fgai.checks import at_least
from fgai.errors import InputError
from fgai.ops import score_dot
from fgai.sparse import Adjacency

DENSE = 256
"""Graphs up to this size are decomposed densely."""
TOLERANCE = 1e-7
"""Relative accuracy of the singular values: that of float32."""
_MOST = 8
_KNOWN: OrderedDict[tuple[int, int, bytes], Tensor] = OrderedDict()
_BY_EDGES: WeakKeyDictionary[Adjacency, dict[Any, Any]] = WeakKeyDictionary()


def once_for_edges(adjacency: Adjacency, name: Any, make: Callable[[], Any]) -> Any:
    """Return `make()`, computed once for these edges, so an attack on features alone does not wait."""
    known = _BY_EDGES.setdefault(adjacency, {})
    return known[name] if name in known else known.setdefault(name, make())


def low_rank(adjacency: Adjacency, rank: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Truncated singular value decomposition of the adjacency without self-loops, as two factors.

    With `A[i, j]` the weight of the edge j → i, the product `left @ right.T` is the nearest matrix of rank r
    in the Frobenius norm. It is never formed: Lanczos iterations need the sparse matrix and about 2r vectors.

    Args:
        adjacency: the edges.
        rank: r, at least 1; a graph with fewer nodes gets as many.
        weight: [E] or None for ones.

    Returns:
        left [N, r] and right [N, r], float32, on the adjacency's device.

    Raises:
        InputError: if the iterations do not converge.
    """
    at_least(rank, "rank", 1)
    n = adjacency.num_nodes
    source, destination = (t.cpu().numpy() for t in (adjacency.source, adjacency.destination))
    values = np.ones(source.size) if weight is None else weight.detach().double().cpu().numpy()
    keep = source != destination
    matrix = sp.csr_matrix((values[keep], (destination[keep], source[keep])), shape=(n, n))
    count = min(rank, n)
    start = np.random.default_rng(0).standard_normal(n)
    try:
        if n <= DENSE or count > n // 2:
            u, s, vt = np.linalg.svd(matrix.toarray())
        elif abs(matrix - matrix.T).max() < 1e-12:
            eigenvalues, u = eigsh(matrix, count, which="LM", v0=start, tol=TOLERANCE)
            s, vt = np.abs(eigenvalues), (u * np.sign(eigenvalues)).T
        else:
            u, s, vt = svds(matrix, count, v0=start, tol=TOLERANCE)
    except ArpackError as error:
        raise InputError(f"the adjacency could not be decomposed to rank {rank}: {error}") from error
    order = np.argsort(-s)[:count]
    factors = (u[:, order] * np.sqrt(s[order]), vt[order].T * np.sqrt(s[order]))
    left, right = (torch.from_numpy(np.ascontiguousarray(f, dtype=np.float32)) for f in factors)
    return left.to(adjacency.device), right.to(adjacency.device)


def reconstruct(adjacency: Adjacency, rank: int, weight: Tensor | None = None) -> Tensor:
    """Entries of the rank-r approximation on the edges, [E]; see `low_rank`. No gradient flows.

    Without weights the last results are kept by the edges: an attack that changes features only decomposes
    once.
    """
    if weight is not None:
        return _entries(adjacency, rank, weight)
    entries: Tensor = once_for_edges(adjacency, rank, lambda: _known(adjacency, rank))
    return entries


def _known(adjacency: Adjacency, rank: int) -> Tensor:
    digest = hashlib.blake2b(adjacency.keys.cpu().numpy().tobytes(), digest_size=16).digest()
    key = (rank, adjacency.num_nodes, digest)
    if key not in _KNOWN:
        _KNOWN[key] = _entries(adjacency, rank, None).cpu()
    _KNOWN.move_to_end(key)
    while len(_KNOWN) > _MOST:
        _KNOWN.popitem(last=False)
    return _KNOWN[key].to(adjacency.device)


def _entries(adjacency: Adjacency, rank: int, weight: Tensor | None) -> Tensor:
    left, right = low_rank(adjacency, rank, weight)
    scale: float = left.shape[1] ** 0.5
    with torch.no_grad():
        return score_dot(left[:, None, :], right[:, None, :], adjacency).squeeze(1) * scale
