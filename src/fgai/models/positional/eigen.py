"""The leading non-trivial eigenspaces of one component's normalised adjacency, complete and canonical."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from fgai.errors import InputError
from fgai.models.positional.canonical import GAP, Floats, canonical_basis, groups

DENSE = 512  # components up to this size are solved densely
LARGEST = 64  # dimensions looked for beyond the wanted ones to complete an eigenspace
TOLERANCE = 1e-11
RESTARTS = 500  # the arXiv graph needs about 40
ROUNDS = 8  # at most this many searches for eigenvectors that Lanczos missed
_AWAY = 3.0  # eigenvalues lie in [-1, 1]; a known vector is moved below them

Solver = Callable[[sp.csr_matrix, Floats, int, int], tuple[Floats, Floats]]


def leading(adjacency: sp.csr_matrix, size: int, seed: int) -> tuple[Floats, Floats]:
    """Return the encodings of one connected component and their eigenvalues.

    Of `Â = D^{-1/2} A D^{-1/2}` the trivial eigenvector √d is left out; the others come by decreasing
    eigenvalue μ (increasing Laplacian eigenvalue 1 - μ). Equal eigenvalues (closer than 1e-7) form one space,
    which is found completely and given its canonical basis, also when only part of it is returned. A space
    that still continues 64 dimensions after the wanted ones (the leaves of a large star) has no basis
    worth showing: zeros stand for it and for what follows, and for what a small component does not have.

    Args:
        adjacency: [n, n] symmetric 0/1 matrix of a connected graph without loops, n ≥ 2.
        size: encodings wanted.
        seed: draws the start vector of Lanczos; the result does not depend on it.

    Returns:
        [n, size] vectors and [size] eigenvalues.

    Raises:
        InputError: if Lanczos does not converge.
    """
    n = adjacency.shape[0]
    degree = np.asarray(adjacency.sum(axis=1), dtype=np.float64).ravel()
    root = np.sqrt(degree)
    scale = sp.diags(1.0 / root)
    matrix = sp.csr_matrix(scale @ adjacency @ scale)
    trivial = root / np.linalg.norm(root)
    limit = min(size + LARGEST, n - 1)
    count = min(size + 2, limit)
    solve: Solver = _lanczos
    if n <= DENSE or limit > n // 2:
        solve, count = _dense, limit
    while True:
        values, vectors = solve(matrix, trivial, min(count + 1, n - 1), seed)
        spans = [span for span in groups(values) if span[0] < size]
        whole = spans[-1][1] < values.size or values.size == n - 1
        if whole or count >= limit:
            break
        count = min(2 * count, limit)
    if not whole:
        spans.pop()
    out, mu = np.zeros((n, size)), np.zeros(size)
    for start, stop in spans:
        end = min(stop, size)
        out[:, start:end] = canonical_basis(vectors[:, start:stop])[:, : end - start]
        mu[start:end] = values[start:stop].mean()
    return out, mu


def _dense(matrix: sp.csr_matrix, trivial: Floats, count: int, seed: int) -> tuple[Floats, Floats]:
    """All eigenvectors at once; the trivial one is moved to the end and never counted."""
    values, vectors = np.linalg.eigh(matrix.toarray() - _AWAY * np.outer(trivial, trivial))
    return values[::-1][:count], vectors[:, ::-1][:, :count]


def _lanczos(matrix: sp.csr_matrix, trivial: Floats, count: int, seed: int) -> tuple[Floats, Floats]:
    """Lanczos with implicit restarts, then a search of what it may have missed.

    One start vector meets a repeated eigenvalue in one direction only; the others appear through rounding,
    or not at all (regular trees). So the operator is searched again with the found vectors moved away,
    until it has nothing left above the last of them.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    known = trivial[:, None]
    values, vectors = _search(matrix, known, count, TOLERANCE, draw)
    for _ in range(ROUNDS):
        rough, _ = _search(matrix, np.hstack([known, vectors]), 1, 1e-3, draw)
        if rough[0] <= values[-1] + GAP:
            break
        more, extra = _search(matrix, np.hstack([known, vectors]), count, TOLERANCE, draw)
        values, vectors = np.concatenate([values, more]), np.hstack([vectors, extra])
        order = np.argsort(-values, kind="stable")[:count]
        values, vectors = values[order], vectors[:, order]
    return values, vectors


def _search(
    matrix: sp.csr_matrix, away: Floats, count: int, tolerance: float, draw: np.random.Generator
) -> tuple[Floats, Floats]:
    """The `count` largest eigenvalues, decreasing, and their vectors, orthogonal to the columns of `away`."""
    n = matrix.shape[0]

    def apply(x: Floats) -> Floats:
        x = x.ravel()
        return np.asarray(matrix @ x - _AWAY * (away @ (away.T @ x)))

    start = draw.random(n) - 0.5
    start -= away @ (away.T @ start)
    operator = LinearOperator((n, n), matvec=apply, dtype=np.float64)
    width = min(n - 1, max(40, 2 * count + 20))
    try:
        values, vectors = eigsh(
            operator, k=count, which="LA", tol=tolerance, ncv=width, v0=start, maxiter=RESTARTS
        )
    except ArpackNoConvergence as error:
        raise InputError(
            f"the Laplacian encodings of a component of {n} nodes did not converge, its eigenvalues lie too"
            " close together (a very long path or mesh?); use a model without encodings"
        ) from error
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]
