"""Eigenvector encodings of new nodes from those of their neighbours, without another eigensolve."""

from __future__ import annotations

from torch import Tensor

FLOOR = 0.1


def extend_encoding(
    vectors: Tensor, values: Tensor, degree: Tensor, targets: Tensor, floor: float = FLOOR
) -> tuple[Tensor, Tensor]:
    """Extend Laplacian encodings to new nodes (Nyström).

    An eigenvector `v` of the normalised adjacency with eigenvalue `μ` satisfies at every node u

        v_u = 1/μ · Σ_{j ∈ N(u)} v_j / √(d_u d_j).

    Read as a definition for a new node it gives

        v_u = Σ_{j ∈ N(u)} g(μ_j) · v_j / √(d_u d_j),      g(μ) = μ / max(μ², floor²),

    with the eigenvalue kept per node, because components have different spectra and a new node may join
    several. `g` is 1/μ for `|μ| ≥ floor`, so that the rule repeats the encoding of a node that was there all
    along; below, it falls continuously to 0 at μ = 0, where neighbours always sum to 0 and say nothing, so
    nothing is amplified more than 1/floor times. The new node's own eigenvalue is the mean of its
    neighbours', so that further nodes can be attached to it.

    Nodes without neighbours get zeros. Padding (eigenvalue 0) stays 0.

    Args:
        vectors: [N, P] encodings.
        values: [N, P] eigenvalue μ of each entry.
        degree: [N] neighbours of each node before the new ones came, self-loops not counted.
        targets: [M, e] distinct neighbours of each new node.
        floor: below which size of μ its inverse is damped.

    Returns:
        [M, P] encodings and [M, P] eigenvalues of the new nodes.

    Example:
        >>> from torch import tensor
        >>> pair, values = tensor([[1.0], [-1.0]]), tensor([[-1.0], [-1.0]])
        >>> extend_encoding(pair, values, degree=tensor([1, 1]), targets=tensor([[0]]))[0]
        tensor([[-1.]])
    """
    new, width = targets.shape
    if width == 0:
        zeros = vectors.new_zeros(new, vectors.shape[1])
        return zeros, values.new_zeros(zeros.shape)
    gain = values / (values * values).clamp(min=floor * floor)
    scale = degree.clamp(min=1).to(vectors.dtype).rsqrt()
    flow = vectors * gain * scale[:, None]
    return flow[targets].sum(dim=1) / float(width) ** 0.5, values[targets].mean(dim=1)
