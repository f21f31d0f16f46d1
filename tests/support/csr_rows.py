"""Rows for the tests: hypothesis strategies and slow loops over a CSR array."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

# Eighths make ties likely; the floats are everything else a caller may hold.
TIED = st.integers(-8, 8).map(lambda n: n / 8)
PLAIN = st.floats(-3, 3, allow_subnormal=False)


def pointer(degrees: list[int]) -> Tensor:
    """Row pointers of rows with these lengths."""
    return torch.tensor([0, *degrees]).cumsum(0)


def split(values: Tensor, rowptr: Tensor) -> list[Tensor]:
    """The rows as separate tensors."""
    return [values[a:b] for a, b in zip(rowptr[:-1].tolist(), rowptr[1:].tolist(), strict=True)]


@st.composite
def rows(draw: st.DrawFn, max_degree: int = 8, columns: int = 1) -> tuple[Tensor, ...]:
    """`columns` float64 arrays on common rows, then the row pointers; some rows are empty."""
    degrees = draw(st.lists(st.integers(0, max_degree), min_size=1, max_size=6))
    number = draw(st.sampled_from([TIED, PLAIN]))
    size = sum(degrees)
    arrays = [draw(st.lists(number, min_size=size, max_size=size)) for _ in range(columns)]
    return (*(torch.tensor(a, dtype=torch.float64) for a in arrays), pointer(degrees))


def attention(degrees: list[int], seed: int, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    """Random softmax attention on rows of these lengths, float64, and the row pointers."""
    rowptr = pointer(degrees)
    generator = torch.Generator().manual_seed(seed)
    scores = sharp * torch.randn(int(rowptr[-1]), generator=generator, dtype=torch.float64)
    return torch.cat([row.softmax(0) for row in split(scores, rowptr)]), rowptr
