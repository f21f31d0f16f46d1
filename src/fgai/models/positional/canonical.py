"""One basis out of the many an eigenspace has, whatever a solver returned."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

GAP = 1e-7  # eigenvalues closer than this count as equal
TIE = 1e-4  # rows whose squared length is this close to the longest (relatively) count as equally long

Floats = NDArray[np.float64]


def groups(values: Floats) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of equal eigenvalues in a decreasing vector.

    Neighbours no further apart than `GAP` are equal.
    """
    cuts = np.flatnonzero(values[:-1] - values[1:] > GAP) + 1
    edges = [0, *cuts.tolist(), values.size]
    return [(a, b) for a, b in pairwise(edges) if b > a]


def canonical_basis(space: Floats) -> Floats:
    """Return the canonical orthogonal basis of a subspace, each vector scaled to 1 at its pivot.

    With Π = V Vᵀ the projector on the space, which does not depend on the basis V:

        i₁ = the node where Π reaches furthest, argmax_i ‖Π e_i‖ (ties: the smallest index),
        u₁ = Π e_{i₁} scaled to 1 at i₁, and so on in the part of the space orthogonal to u₁.

    No entry of a vector is larger than at its pivot, so entries lie in [-1, 1]. For a single vector this is
    the rule "the largest entry is +1". Where nodes tie, the choice depends on their order, as it must: an
    automorphism of the graph swaps them.

    Args:
        space: [N, m] an orthonormal basis, columns.

    Returns:
        [N, m], orthogonal columns.
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
