"""Limits of a layer that runs more than once in a forward pass (weight tying)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from fgai.attention import limits_of
from fgai.evaluation import evaluate
from fgai.graph import Graph
from fgai.training import count_clipped, harden, limit, load_model, make_faithful, save_model, train
from support.attack_cases import quiet
from support.graph_cases import small_data

SIZE = {"epochs": 4, "nodes": 3, "edges": 3, "clip_share": 0.05, "shrink": 0.1}


class Tied(nn.Module):
    """One GATConv that is applied twice."""

    def __init__(self, features: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(features, 8), nn.Linear(8, classes)
        self.conv = GATConv(8, 4, heads=2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = 4 * torch.relu(self.conv(self.enter(x), edge_index))
        return self.leave(torch.relu(self.conv(h, edge_index)))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def data() -> Graph:
    return small_data(nodes=80)


@pytest.fixture(scope="module")
def model(data: Graph) -> Tied:
    torch.manual_seed(0)
    return train(Tied(), data, epochs=10, progress=False)


def test_limits_change_nothing_on_their_own_graph(model: Tied, data: Graph) -> None:
    limited = limit(model, data, 0.0, shrink=0.0)
    fields = data.features.to_dense(), data.edge_index  # type: ignore[union-attr]
    assert torch.equal(model(*fields), limited(*fields)) and count_clipped(limited, data).count == 0
    assert all(bool(limits.radius.isfinite()) for limits in limits_of(limited))
    loud = 1e4 * fields[0]
    assert not torch.equal(model(loud, fields[1]), limited(loud, fields[1]))


def test_shares_tighten_them(model: Tied, data: Graph) -> None:
    (whole,), (cut,) = (
        limits_of(limit(model, data, 0.0, shrink=0.0)),
        limits_of(limit(model, data, 0.05, shrink=0.1)),
    )
    assert bool((cut.low >= whole.low).all() & (cut.high <= whole.high).all())
    assert float(cut.radius) < 8**0.5  # a corner of the range
    assert 0 < float(cut.usual) < 0.4


def test_faithful_and_hardened_models(model: Tied, data: Graph, tmp_path: Path) -> None:
    with quiet():
        made = (
            make_faithful(model, data, progress=False, **SIZE),
            harden(model, data, progress=False, **SIZE),
        )
        record = evaluate(made[0], data, "standard", vanilla=model, curves=False, nulls=False, nodes=2)
    assert len(record.metrics["overlap"]["prediction"]["layers"]) == 2
    for number, one in enumerate(made):
        (limits,) = limits_of(one)
        assert bool(limits.low.isfinite().all() & limits.high.isfinite().all() & limits.radius.isfinite())
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), one.parameters(), strict=True))
        path = save_model(one, tmp_path / str(number), factory=Tied)
        back = load_model(path, factory=Tied)
        fields = data.features.to_dense(), data.edge_index  # type: ignore[union-attr]
        assert torch.equal(back(5 * fields[0], fields[1]), one(5 * fields[0], fields[1]))
