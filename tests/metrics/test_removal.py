"""Removal of edges, its slopes, and fidelity against loops, numpy and PyG."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fgai.metrics as fm
from fgai.errors import InputError
from fgai.metrics import removal
from support.csr_rows import attention, rows

DEGREES = [7, 0, 2, 9, 1, 6, 4]


@given(rows(), st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), st.booleans(), st.sampled_from(["node", "graph"]))
def test_removed_edges_equal_a_loop(
    case: tuple[Tensor, Tensor], fraction: float, largest: bool, scope: str
) -> None:
    values, rowptr = case
    keep = torch.arange(len(values)) % 3 == 1
    got = removal._edges_to_remove(values, rowptr, fraction, largest=largest, scope=scope, keep=keep)
    expected = []
    bounds = (
        zip(rowptr[:-1].tolist(), rowptr[1:].tolist(), strict=True) if scope == "node" else [(0, len(values))]
    )
    for start, stop in bounds:
        free = [e for e in range(start, stop) if not keep[e]]
        free.sort(key=lambda e: (-values[e] if largest else values[e], e))
        expected += free[: math.floor(fraction * len(free) + 0.5 + 1e-9)]
    assert got.tolist() == sorted(expected)


def test_removals_are_nested_and_uniform_attention_loses_the_same_edges_either_way() -> None:
    w, rowptr = attention(DEGREES, 8)
    for scope in ("node", "graph"):
        sets = [
            set(removal._edges_to_remove(w, rowptr, r, largest=True, scope=scope).tolist())
            for r in fm.FRACTIONS
        ]
        assert all(a <= b for a, b in itertools.pairwise(sets))
        assert not sets[0]
    flat = fm.uniform_attention(rowptr, len(w))
    top, bottom = (removal._edges_to_remove(flat, rowptr, 0.5, largest=side) for side in (True, False))
    assert torch.equal(top, bottom)


def test_slopes_equal_numpy() -> None:
    shares = [1.0, 0.93, 0.95, 0.8, 0.61, 0.6]
    expected = np.polyfit(fm.FRACTIONS, shares, 1)[0]
    assert fm.f_slope_plus(shares) == pytest.approx(expected)
    assert fm.f_slope_minus(shares) == pytest.approx(expected)
    assert fm.f_slope_plus([1, 1, 1, 0, 0, 0]) == pytest.approx(fm.METRICS["f_slope_plus"].low)
    assert fm.f_slope_plus([3.0, 1.0, 2.0], [1.0, 2.0, 4.0]) == pytest.approx(
        np.polyfit([1, 2, 4], [3, 1, 2], 1)[0]
    )


def test_fidelity_equals_pyg() -> None:
    from torch_geometric.explain import DummyExplainer, Explainer
    from torch_geometric.explain.metric import characterization_score, fidelity
    from torch_geometric.nn import GCNConv

    torch.manual_seed(1)
    layer = GCNConv(5, 3, add_self_loops=False)
    x = torch.randn(50, 5)
    edge_index = torch.randint(0, 50, (2, 140))
    explainer = Explainer(
        layer,
        algorithm=DummyExplainer(),
        explanation_type="model",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )
    explanation = explainer(x, edge_index)
    # A hard mask with a third of the edges: both fidelities are then far from 0, and they differ.
    mask = explanation.edge_mask = (explanation.edge_mask > 0.67).float()
    with torch.no_grad():
        whole = layer(x, edge_index)
    only = explainer.get_masked_prediction(x, edge_index, None, mask)
    without = explainer.get_masked_prediction(x, edge_index, None, 1 - mask)
    plus, minus = fm.fidelity_plus(whole, without), fm.fidelity_minus(whole, only)
    assert plus > 0
    assert minus > 0
    assert plus != minus
    assert (plus, minus) == pytest.approx(fidelity(explainer, explanation))
    score = characterization_score(torch.tensor(0.7), torch.tensor(0.2), 0.5, 0.5)
    assert fm.characterization(0.7, 0.2) == pytest.approx(float(score))
    assert fm.characterization(0.0, 0.3) == fm.characterization(0.4, 1.0) == 0.0


def test_a_slope_through_what_is_undefined_is_undefined() -> None:
    """No node is right without an attack: shares of none of them."""
    assert math.isnan(fm.f_slope_plus([math.nan, math.nan], [0.0, 0.5]))
    assert math.isnan(fm.f_slope_plus([1.0, 0.9, math.nan, 0.7, 0.6, 0.5]))
    with pytest.raises(InputError, match="`shares`"):
        fm.f_slope_plus([math.inf, 1.0], [0.0, 0.5])
