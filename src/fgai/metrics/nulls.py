"""Attentions that say nothing, for the null rows of explanation tables."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.ops.segments import check_row_pointers, row_index
from fgai.typed import typed


@typed
def uniform_attention(rowptr: Tensor, num_edges: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform attention, 1/degree on every edge, [E].

    Within a node all edges tie; over the whole graph it ranks edges by the degree of their destination.

    Example:
        >>> uniform_attention(torch.tensor([0, 2, 2, 3]), 3).tolist()
        [0.5, 0.5, 1.0]
    """
    check_row_pointers(rowptr, checks.whole(num_edges, "num_edges"))
    _check_dtype(dtype)
    degree = rowptr.diff().clamp(min=1).to(dtype)
    return (1 / degree).index_select(0, row_index(rowptr, num_edges))


@typed
def random_ranking(
    num_edges: int, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """A random ranking: independent uniform scores, [E], the same on every device for one seed.

    The scores do not sum to one over a node: normalising them would rank by degree in graph scope. Use them
    where only the order counts.

    Example:
        >>> torch.equal(random_ranking(5, seed=3), random_ranking(5, seed=3))
        True
    """
    checks.memory(checks.whole(num_edges, "num_edges"), 8, "num_edges")
    _check_dtype(dtype)
    checks.device(device)
    generator = torch.Generator().manual_seed(checks.seed(seed))
    drawn = torch.rand(num_edges, generator=generator, dtype=torch.float64)
    return drawn.to(device=device, dtype=dtype)


def _check_dtype(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise InputError(f"`dtype` must be a floating-point type, got {dtype}")
