"""One door to the operations: picks the kernel for the device, or the plain PyTorch reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from fgai.checks import one_of
from fgai.ops import cpu, reference
from fgai.ops.adjacency import Adjacency
from fgai.ops.features import Features, SparseRows

BACKENDS = ("auto", "reference", "numba")
_backend: ContextVar[str] = ContextVar("fgai_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside the block: `auto` (default), `reference` or `numba`.

    Example:
        >>> with use_backend("reference"):
        ...     pass
    """
    token = _backend.set(one_of(name, "name", BACKENDS))
    try:
        yield
    finally:
        _backend.reset(token)


def _numba(tensor: Tensor) -> bool:
    if _backend.get() == "reference" or tensor.device.type != "cpu":
        return False
    return tensor.dtype in (torch.float32, torch.float64)


def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax of `scores` [E, H] over the incoming edges of each node → [E, H]."""
    return (cpu if _numba(scores) else reference).edge_softmax(scores, adjacency)


def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """`out[i] = Σ_{j→i} attention[j→i] · values[j]`: [E, H] and [N, H, C] → [N, H, C]."""
    return (cpu if _numba(values) else reference).aggregate(attention, values, adjacency)


def score_additive(left: Tensor, right: Tensor, adjacency: Adjacency, slope: float = 0.2) -> Tensor:
    """GAT's score, `leaky_relu(left[source] + right[destination])`: [N, H] twice → [E, H]."""
    return (cpu if _numba(left) else reference).score_additive(left, right, adjacency, slope)


def score_dynamic(
    left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float = 0.2
) -> Tensor:
    """GATv2's score, `Σ_c weight · leaky_relu(left[source] + right[destination])`: [N, H, C] → [E, H]."""
    return (cpu if _numba(left) else reference).score_dynamic(left, right, weight, adjacency, slope)


def score_dot(query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
    """The transformer's score, `⟨query[destination], key[source]⟩ / √C`: [N, H, C] → [E, H]."""
    return (cpu if _numba(query) else reference).score_dot(query, key, adjacency)


def project(features: Features, weight: Tensor) -> Tensor:
    """Node features times `weight` [F, D] → [N, D]; sparse rows stay sparse, gradients reach dense parts."""
    base = features.base
    if not isinstance(base, SparseRows):
        out = base @ weight
    elif _numba(weight):
        out = cpu.project_sparse(base, weight)
    else:
        out = _project_sparse_torch(base, weight)
    if features.rows is not None and features.delta is not None:
        out = out.index_add(0, features.rows, features.delta @ weight)
    if features.appended is not None:
        out = torch.cat([out, features.appended @ weight])
    return out


def _project_sparse_torch(rows: SparseRows, weight: Tensor) -> Tensor:
    return reference.project_sparse(rows.indptr, rows.indices, rows.values, weight)
