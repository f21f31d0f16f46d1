"""Ranges of limits from a stored graph: those of a pass in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fgai
from fgai.attention import add_limits, call_model, evaluating, limits_of, measuring, prepared
from fgai.errors import AttentionError, DataError, InputError
from fgai.graph import Graph
from fgai.large import blocks, observe_store, write_store
from fgai.large.streaming import _exact_pass, _measure_store
from support.graph_cases import small_data
from support.store_cases import loaded_attention, slow

MODELS: dict[str, Any] = {
    "GAT": {"hidden_channels": 4, "heads": 3, "num_layers": 3},
    "GATv2": {"hidden_channels": 4, "heads": 3},
    "GT": {"hidden_channels": 8, "heads": (4, 2), "encodings": 0},
}


def limited(name: str) -> Any:
    torch.manual_seed(0)
    model = getattr(fgai, name)(5, 3, **MODELS[name]).eval()
    add_limits(model)
    return model


def in_memory(model: Any, graph: Graph, clip_share: float, shrink: float, sampled: bool) -> None:
    taken = measuring(model, clip_share, shrink=shrink, sampled=sampled)
    with evaluating(model), torch.no_grad(), taken:
        call_model(model, prepared(model, graph))


@pytest.mark.many
@pytest.mark.parametrize(("clip_share", "shrink"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2), (0.05, 0.3)])
@pytest.mark.parametrize(
    ("name", "sampled"),
    [*((name, False) for name in MODELS), ("GAT", True), *slow(("GATv2", True), ("GT", True))],
)
def test_are_those_of_a_pass_in_memory(
    name: str,
    clip_share: float,
    shrink: float,
    sampled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "NUMBERS", 40)  # blocks of a few rows, channels one by one
    monkeypatch.setattr(blocks, "SAMPLE", 30)
    monkeypatch.setattr("fgai.attention.limits.SAMPLE", 30)
    graph = small_data(nodes=70, width=5)
    stored = write_store(graph, tmp_path / "graph")
    one, two = limited(name), limited(name)
    in_memory(one, graph, clip_share, shrink, sampled)
    _measure_store(
        two, stored, clip_share=clip_share, shrink=shrink, sampled=sampled, folder=tmp_path, block_edges=50
    )
    for mine, theirs in zip(limits_of(two), limits_of(one), strict=True):
        for part in ("low", "high", "radius"):
            torch.testing.assert_close(getattr(mine, part), getattr(theirs, part), atol=1e-5, rtol=1e-5)
        assert abs(float(mine.usual) - float(theirs.usual)) < 0.02
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]  # nothing stays behind


def test_limits_that_were_tight_are_measured_anew(tmp_path: Path) -> None:
    graph = small_data(nodes=70, width=5)
    stored, model = write_store(graph, tmp_path / "graph"), limited("GAT")
    for limits in limits_of(model):
        limits.low.fill_(-1e-3), limits.high.fill_(1e-3)
    _measure_store(model, stored)
    fresh = limited("GAT")
    _measure_store(fresh, stored)
    for mine, theirs in zip(limits_of(model), limits_of(fresh), strict=True):
        torch.testing.assert_close(mine.high, theirs.high)


def test_edges_are_found_by_their_ends(tmp_path: Path) -> None:
    graph = small_data(nodes=70, width=5)
    stored, model = write_store(graph, tmp_path / "graph"), limited("GAT")
    found = observe_store(model, stored, tmp_path / "seen", heads="mean")
    whole = loaded_attention(found).last
    order = torch.randperm(whole.num_edges)
    ends = (part[order].numpy() for part in (whole.source, whole.destination))
    assert torch.equal(torch.from_numpy(found.positions(*ends)), order)
    there = set(zip(*graph.edge_index.tolist(), strict=True)) | {(3, 3)}
    absent = next(s for s in range(70) if (s, 3) not in there)
    with pytest.raises(DataError, match=f"no edge {absent} → 3"):
        found.positions(torch.tensor([absent]).numpy(), torch.tensor([3]).numpy())


def test_models_that_see_the_whole_are_refused(tmp_path: Path) -> None:
    stored = write_store(small_data(nodes=70, width=5), tmp_path / "graph")
    _exact_pass(limited("GATv2"), stored)
    with pytest.raises(InputError, match="encodings=0"):
        _exact_pass(fgai.GT(5, 3, encodings=4), stored)
    with pytest.raises(AttentionError, match="no attention layer"):
        _exact_pass(torch.nn.Linear(5, 3), stored)
