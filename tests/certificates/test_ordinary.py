"""Thirty ordinary PyG models keep their class certificates; the four that end otherwise are named."""

from __future__ import annotations

import warnings

import pytest
import torch

from fgai.certificates import certify_attention
from fgai.errors import ReliabilityWarning
from support.ordinary_cases import NOT_LINEAR, ORDINARY, ordinary


def test_there_are_thirty() -> None:
    assert len(ORDINARY) == 30 and len(NOT_LINEAR) == 4


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in ORDINARY),
        *(
            pytest.param(name, torch.float32, marks=[pytest.mark.slow] * (number % 3 > 0))
            for number, name in enumerate(ORDINARY)
        ),
    ],
)
def test_linear_read_outs_are_certified(name: str, dtype: torch.dtype) -> None:
    model, graph = ordinary(name)
    if dtype == torch.float32:
        assert graph.features is not None
        values = None if graph.edge_attr is None else graph.edge_attr.float()
        model = model.float()
        graph = graph.replace(features=graph.features.to("cpu", dtype), edge_attr=values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)
        last = certify_attention(model, graph, radius=0.02).layer().prediction
    if name in NOT_LINEAR:
        assert last.class_status == "unknown" and f"`{NOT_LINEAR[name]}`" in last.reason
    else:
        assert last.class_status == "exact"
