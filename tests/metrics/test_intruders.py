"""What injected nodes take, against slow loops; ties, k above the degree, and no injected nodes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fgai.metrics as fm
from fgai.errors import InputError
from support.csr_rows import rows, split


def slow(w: Tensor, injected: Tensor, rowptr: Tensor, k: int, count: int) -> tuple[float, float, float]:
    """Nodes, places and mass of the first `count` nodes, one by one."""
    nodes, places, mass = [], [], []
    for values, new in list(zip(split(w, rowptr), split(injected, rowptr), strict=True))[:count]:
        if not bool(new.any()):
            continue
        top = sorted(range(len(values)), key=lambda e: (-float(values[e]), e))[:k]
        taken = sum(bool(new[e]) for e in top)
        nodes.append(float(taken > 0))
        places.append(taken / len(top))
        mass.append(sum(float(v) for v, n in zip(values, new, strict=True) if n))
    means = [sum(found) / len(found) if found else math.nan for found in (nodes, places, mass)]
    return means[0], means[1], means[2]


@given(rows(), st.integers(1, 9), st.integers(0, 2**16), st.integers(1, 6))
def test_equal_to_a_loop(given_rows: tuple[Tensor, Tensor], k: int, seed: int, count: int) -> None:
    w, rowptr = given_rows
    injected = torch.rand(len(w), generator=torch.Generator().manual_seed(seed)) < 0.4
    counted = torch.arange(rowptr.numel() - 1) < count
    found = (
        fm.intruder_nodes(w, injected, rowptr, k, nodes=counted),
        fm.intruder_places(w, injected, rowptr, k, nodes=counted),
        fm.intruder_mass(w, injected, rowptr, nodes=counted),
    )
    assert found == pytest.approx(slow(w, injected, rowptr, k, count), nan_ok=True)


def test_without_injected_nodes_nothing_is_defined() -> None:
    w, none, rowptr = torch.tensor([0.5, 0.5]), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2])
    assert math.isnan(fm.intruder_nodes(w, none, rowptr))
    assert math.isnan(fm.intruder_places(w, none, rowptr))
    assert math.isnan(fm.intruder_mass(w, none, rowptr))


def test_ties_go_by_edge_order() -> None:
    w, rowptr = torch.full((3,), 1 / 3), torch.tensor([0, 3])
    last, first = torch.tensor([False, False, True]), torch.tensor([True, False, False])
    assert fm.intruder_nodes(w, last, rowptr, k=2) == 0.0
    assert fm.intruder_nodes(w, first, rowptr, k=2) == 1.0


def test_edges_must_match() -> None:
    with pytest.raises(InputError, match="`injected` must be a boolean mask"):
        fm.intruder_mass(torch.ones(3), torch.ones(3), torch.tensor([0, 3]))
