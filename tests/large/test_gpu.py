"""Stored graphs in the memory of a device: the numbers of passes from disk, and only where there is room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fgai
from fgai.attention import add_limits, limits_of
from fgai.graph import Graph
from fgai.large import StoredGraph, observe_store, source, write_store
from fgai.large.source import _GpuGraph, _StoredSource
from fgai.large.streaming import _measure_store
from support.graph_cases import small_data

MODELS: dict[str, Any] = {
    "GAT": {"hidden_channels": 4, "heads": 3, "num_layers": 3},
    "GATv2": {"hidden_channels": 4, "heads": 3},
    "GT": {"hidden_channels": 8, "heads": (4, 2), "encodings": 0},
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model_of(name: str, width: int = 5) -> Any:
    torch.manual_seed(0)
    return getattr(fgai, name)(width, 3, **MODELS[name]).eval()


def compare(name: str, stored: StoredGraph, folder: Path, device: str = "cpu") -> None:
    """Assert that a pass on a device writes what one from disk does, ranks and ranges included."""
    model = model_of(name, stored.num_features)
    wanted = observe_store(model, stored, folder / "disk", heads="mean", ranked=True)
    there = _GpuGraph(model.to(device), stored, folder)
    found = there.observe(model, folder / "device", ranked=True)
    assert (found.model, found.graph, found.layers) == (wanted.model, wanted.graph, wanted.layers)
    arrays = [(found.logits, wanted.logits), *zip(found.rows(), wanted.rows(), strict=True)]
    for layer in range(len(found.layers)):
        arrays.append((found.attention(layer), wanted.attention(layer)))
        arrays.append((found.scores(layer), wanted.scores(layer)))
    for mine, theirs in arrays:
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_writes_what_one_from_disk_does(name: str, tmp_path: Path) -> None:
    graph = small_data(nodes=70, width=5)
    compare(name, write_store(graph, tmp_path / "graph"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device", "disk", "graph"]


def test_sparse_features_and_edge_weights_are_read(tmp_path: Path) -> None:
    graph = fgai.load_dataset("planted")
    weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(1))
    given = Graph(graph.adjacency, graph.features, edge_weight=weight, name="weighted")
    stored = write_store(given, tmp_path / "graph")
    assert stored.array("x") is None  # sparse
    compare("GAT", stored, tmp_path)


@pytest.mark.parametrize(("clip_share", "shrink"), [(0.0, 0.0), (0.05, 0.3)])
@pytest.mark.parametrize("name", MODELS)
def test_ranges_are_those_from_disk(name: str, clip_share: float, shrink: float, tmp_path: Path) -> None:
    stored = write_store(small_data(nodes=70, width=5), tmp_path / "graph")
    one, two = model_of(name), model_of(name)
    add_limits(one), add_limits(two)
    _measure_store(one, stored, clip_share=clip_share, shrink=shrink)
    _GpuGraph(two, stored, tmp_path).measure(two, clip_share, shrink)
    for mine, theirs in zip(limits_of(two), limits_of(one), strict=True):
        for part in ("low", "high", "radius"):
            torch.testing.assert_close(getattr(mine, part), getattr(theirs, part), atol=1e-5, rtol=1e-5)


def test_a_model_without_limits_has_none_to_measure(tmp_path: Path) -> None:
    stored, model = write_store(small_data(nodes=70, width=5), tmp_path / "graph"), model_of("GAT")
    _GpuGraph(model, stored, tmp_path).measure(model, 0.0, 0.0)
    assert not limits_of(model)


def test_it_serves_models_that_read_the_same_edges(tmp_path: Path) -> None:
    stored = write_store(small_data(nodes=70, width=5), tmp_path / "graph")
    there = _GpuGraph(model_of("GAT"), stored, tmp_path)
    assert there.matches(model_of("GATv2")) and not there.matches(model_of("GT"))  # GT reads no self-loops


class TestRoom:
    def test_a_model_on_the_cpu_reads_from_disk(self, tmp_path: Path) -> None:
        stored = write_store(small_data(nodes=70, width=5), tmp_path / "graph")
        assert not _GpuGraph.fits(model_of("GAT"), stored)

    def test_what_is_needed_grows_with_nodes_and_edges(self, tmp_path: Path) -> None:
        small, large = (
            write_store(small_data(nodes=count, width=5), tmp_path / str(count)) for count in (70, 700)
        )
        need = [source._needed_bytes(model_of("GAT"), stored) for stored in (small, large)]
        assert need[0] > 4 * 5 * 70 + 8 * small.num_edges and need[1] > 5 * need[0]

    def test_numbers_beyond_32_bits_stay_on_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = write_store(small_data(nodes=70, width=5), tmp_path / "graph")
        assert source._has_small_tensors(model_of("GAT"), stored)
        monkeypatch.setattr(stored, "num_edges", 2**30)
        assert not source._has_small_tensors(model_of("GAT"), stored)

    def test_training_takes_it_once_where_it_fits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored, model = write_store(small_data(nodes=70, width=5), tmp_path / "graph"), model_of("GAT")
        add_limits(model)
        built: list[_GpuGraph] = []
        load = _GpuGraph.__init__
        monkeypatch.setattr(_GpuGraph, "fits", staticmethod(lambda *_: True))
        monkeypatch.setattr(
            _GpuGraph, "__init__", lambda self, *given: built.append(self) or load(self, *given)
        )
        whole = _StoredSource(stored, tmp_path, 0)
        whole.set_ranges(model, 0.0, 0.0)
        found = whole.observe(model)
        assert len(built) == 1 and len(found.layers) == 3
        whole.observe(model_of("GT"))
        assert len(built) == 2

    def test_a_device_that_is_full_after_all_is_left_for_the_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored, model = write_store(small_data(nodes=70, width=5), tmp_path / "graph"), model_of("GAT")
        add_limits(model)
        tried = list[str]()

        def full(name: str) -> Any:
            def run(*_: Any, **__: Any) -> None:
                tried.append(name)
                raise torch.OutOfMemoryError("full")

            return run

        monkeypatch.setattr(_GpuGraph, "fits", staticmethod(lambda *_: True))
        for name in ("observe", "measure"):
            monkeypatch.setattr(_GpuGraph, name, full(name))
        whole = _StoredSource(stored, tmp_path, 0)
        assert len(whole.observe(model).layers) == 3
        whole.set_ranges(model, 0.0, 0.0)
        assert tried == ["observe"] and all(bool(limits.high.isfinite().all()) for limits in limits_of(model))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    stored = write_store(small_data(nodes=700, width=5), tmp_path / "graph")
    assert _GpuGraph.fits(model_of(name).cuda(), stored)
    compare(name, stored, tmp_path, "cuda")
