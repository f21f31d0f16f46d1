"""Passes over stored graphs: the numbers of a pass in memory, in memory that does not grow with the graph."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import fgai
from fgai.attention import AttentionMap, observe, prepared, record
from fgai.errors import AttentionError, DataError, FgaiError, InputError
from fgai.graph import Graph
from fgai.large import (
    StoredGraph,
    StoredObservation,
    observe_store,
    write_store,
)
from fgai.large.streaming import _measure_store
from support.cli_cases import processes
from support.graph_cases import build, edge_sets, small_data
from support.store_cases import loaded_attention, slow

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GAT": ("GAT", {"hidden_channels": 4, "heads": 3}),
    "GAT, normed, deep": ("GAT", {"hidden_channels": 3, "heads": 2, "norm": "layer", "num_layers": 3}),
    "GAT, one layer": ("GAT", {"num_layers": 1}),
    "GATv2": ("GATv2", {"hidden_channels": 4, "heads": 3}),
    "GT": ("GT", {"hidden_channels": 8, "heads": (4, 2), "encodings": 0}),
}


def made(name: str, width: int) -> nn.Module:
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(fgai, kind)(width, 3, **sizes).eval()


def close(one: Any, two: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.from_numpy(np.array(one)), two, atol=atol, rtol=0)


def same(
    found: StoredObservation, model: nn.Module, graph: Graph, heads: str = "each", atol: float = 1e-5
) -> None:
    """Assert that logits, states, edges and attention are those of a pass in memory."""
    seen = observe(model, prepared(model, graph), heads=heads, inputs=heads == "each")
    close(found.logits, seen.logits, atol)
    attention = loaded_attention(found)
    assert found.layers == [layer.name for layer in seen.attention.layers]
    for mine, theirs in zip(attention.layers, seen.attention.layers, strict=True):
        mine.require_same_edges(theirs)
        torch.testing.assert_close(mine.values, theirs.values, atol=atol, rtol=0)
        if mine.scores is not None and theirs.scores is not None:
            torch.testing.assert_close(mine.scores, theirs.scores, atol=atol, rtol=0)
    if isinstance(model, fgai.GAT) and seen.runs:
        for number in range(1, len(seen.runs)):
            close(found.states(number - 1), seen.runs[number].inputs[0], atol)


@pytest.mark.many
@pytest.mark.parametrize("block_edges", [7, 1 << 18, *slow((1,))])
@pytest.mark.parametrize("name", MODELS)
def test_is_the_pass_in_memory(name: str, block_edges: int, tmp_path: Path) -> None:
    graph = small_data(nodes=70, width=5)
    model = made(name, 5)
    stored = write_store(graph, tmp_path / "graph")
    found = observe_store(model, stored, tmp_path / "seen", block_edges=block_edges, ranked=True)
    same(found, model, graph)
    same(StoredObservation(str(tmp_path / "seen")), model, graph)
    assert found.graph == stored.fingerprint and found.model == type(model).__name__
    kept = {"rowptr", "source", "logits", *(f"{what}.{n}" for n in range(len(found.layers))
            for what in ("state", "attention", "scores"))}  # fmt: skip
    assert {path.stem for path in (tmp_path / "seen").glob("*.npy")} == kept  # and nothing in between


@pytest.mark.many
@pytest.mark.parametrize("block_edges", [5, 1000])
@pytest.mark.parametrize("name", ["GAT", "GATv2", "GT"])
def test_weights_and_averaged_heads(name: str, block_edges: int, tmp_path: Path) -> None:
    graph = small_data(nodes=70, width=5)
    weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(1))
    weight[::9] = 0.0
    model = made(name, 5)
    for number, given_graph in enumerate((graph, graph.replace(edge_weight=weight))):
        stored = write_store(given_graph, tmp_path / f"graph{number}")
        path = tmp_path / f"seen{number}"
        options = {"block_edges": block_edges, "heads": "mean", "ranked": True}
        found = observe_store(model, stored, path, **options)
        assert found.attention(0).shape[1] == 1
        same(found, model, given_graph, heads="mean")


def test_sparse_features_and_limits(tmp_path: Path) -> None:
    graph = fgai.load_dataset("planted")
    model = fgai.limit(fgai.GAT.for_data(graph).eval(), graph, 0.0, shrink=0.0)
    stored = write_store(graph, tmp_path / "graph")
    same(observe_store(model, stored, tmp_path / "seen", block_edges=999), model, graph)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(edge_sets())
def test_any_graph(case: tuple[int, list[tuple[int, int]]]) -> None:
    """Loops, isolated nodes, no edges, one node."""
    graph = build(*case)
    with tempfile.TemporaryDirectory() as place:
        stored = write_store(graph, Path(place) / "graph")
        for name in ("GAT", "GT"):
            model = made(name, 3)
            found = observe_store(model, stored, Path(place) / name, block_edges=3)
            same(found, model, graph, atol=1e-3)  # scores of some hundred: both passes round


class TestRefused:
    @pytest.fixture
    def stored(self, tmp_path: Path) -> StoredGraph:
        return write_store(small_data(width=5), tmp_path / "graph")

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (fgai.GT(5, 3, hidden_channels=8), "GT with `encodings=0`"),
            (fgai.GCN(5, 3), "cannot be computed row by row"),
            (nn.Linear(5, 3), "has no attention layer fgai knows"),
            (fgai.GAT(6, 3), "reads 6 features per node, 'small' has 5"),
            (fgai.GAT(5, 3, task="link"), "is not for nodes"),
        ],
    )
    def test_models(self, model: nn.Module, words: str, stored: StoredGraph, tmp_path: Path) -> None:
        with pytest.raises((InputError, AttentionError), match=words):
            observe_store(model, stored, tmp_path / "seen")
        assert not (tmp_path / "seen").exists()

    def test_tapped_models(self, stored: StoredGraph, tmp_path: Path) -> None:
        model = made("GAT", 5)
        with record(model), pytest.raises(InputError, match="it has hooks"):
            observe_store(model, stored, tmp_path / "seen")

    def test_graphs(self, tmp_path: Path) -> None:
        graph = small_data(width=5)
        cases = {
            "bare": (graph.replace(features=None), "has no node features"),
            "typed": (graph.replace(edge_attr=torch.ones(graph.num_edges)), "does not read `edge_attr`"),
            "minus": (graph.replace(edge_weight=-torch.ones(graph.num_edges)), "must be at least 0"),
        }
        for name, (given_graph, words) in cases.items():
            stored = write_store(given_graph, tmp_path / name)
            with pytest.raises(InputError, match=words):
                observe_store(made("GAT", 5), stored, tmp_path / "seen")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(cases)

    def test_options(self, stored: StoredGraph, tmp_path: Path) -> None:
        model = made("GAT", 5)
        with pytest.raises(InputError, match="`block_edges` must be at least 1"):
            observe_store(model, stored, tmp_path / "seen", block_edges=0)
        with pytest.raises(InputError, match="`heads` must be one of"):
            observe_store(model, stored, tmp_path / "seen", heads="some")
        with pytest.raises(DataError, match="exists already"):
            observe_store(model, stored, tmp_path / "graph")

    def test_a_full_disk_leaves_nothing(self, stored: StoredGraph, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(FgaiError, match="File too large; nothing was left there"):
                observe_store(made("GAT", 5), stored, tmp_path / "seen")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["graph"]

    @pytest.mark.parametrize(
        ("name", "change", "words"),
        [
            ("rowptr", lambda a: np.put(a, 3, 2**40), "point outside"),
            ("rowptr", lambda a: np.put(a, 3, -1), "point outside"),
            ("rowptr", lambda a: np.put(a, 3, a[4]), "checksum"),
            ("source", lambda a: np.put(a, 3, 10**9), "point outside"),
            ("attention.1", lambda a: np.put(a, 0, 0.5), "checksum"),
            ("scores.0", lambda a: np.put(a, 0, 0.5), "checksum"),
        ],
    )
    def test_damaged_arrays(
        self, stored: StoredGraph, tmp_path: Path, name: str, change: Any, words: str
    ) -> None:
        observe_store(made("GAT", 5), stored, tmp_path / "seen", ranked=True)
        array = np.load(tmp_path / "seen" / f"{name}.npy")
        change(array)
        np.save(tmp_path / "seen" / f"{name}.npy", array)
        found = StoredObservation(tmp_path / "seen")
        with pytest.raises(DataError, match=words):
            found.verify()
        if name in ("rowptr", "source"):
            with pytest.raises(DataError, match=words):
                found.positions(np.array([0]), np.array([0]))

    def test_damaged_logits_are_found_by_verify(self, stored: StoredGraph, tmp_path: Path) -> None:
        found = observe_store(made("GAT", 5), stored, tmp_path / "seen")
        found.verify()
        logits = np.load(tmp_path / "seen" / "logits.npy")
        np.save(tmp_path / "seen" / "logits.npy", logits + 1)
        with pytest.raises(DataError, match=r"logits\.npy is damaged: it does not fit its checksum"):
            StoredObservation(tmp_path / "seen").verify()
        with pytest.raises(InputError, match="`destination` must name nodes"):
            found.positions(np.array([0]), np.array([10**9]))

    def test_a_damaged_graph_is_refused(self, stored: StoredGraph, tmp_path: Path) -> None:
        features = np.load(stored.path / "x.npy")
        np.save(stored.path / "x.npy", features + 1)
        for run in (lambda: observe_store(made("GAT", 5), stored, tmp_path / "seen"),
                    lambda: _measure_store(made("GAT", 5), stored)):  # fmt: skip
            with pytest.raises(DataError, match=r"x\.npy is damaged: it does not fit its checksum"):
                run()

    def test_damaged_results(self, stored: StoredGraph, tmp_path: Path) -> None:
        found = observe_store(made("GAT", 5), stored, tmp_path / "seen")
        with pytest.raises(DataError, match=r"has no attention.7; its layers are convs.0, convs.1"):
            found.attention(7)
        (tmp_path / "seen" / "logits.npy").write_bytes(b"")
        with pytest.raises(DataError, match="damaged or missing"):
            _ = found.logits
        (tmp_path / "seen" / "observation.json").write_text("{}")
        with pytest.raises(DataError, match="is damaged"):
            StoredObservation(tmp_path / "seen")
        with pytest.raises(DataError, match="holds no observation"):
            StoredObservation(tmp_path)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    stored = write_store(small_data(width=5), tmp_path / "graph")
    model = made("GAT", 5).train()
    found = observe_store(model, stored, tmp_path / "seen")
    assert model.training and isinstance(loaded_attention(found), AttentionMap)
    same(found, model.eval(), small_data(width=5))


LIMITED = """
import resource, sys, torch, fgai
from fgai.attention import observe
from fgai.large import StoredGraph
from fgai.large import observe_store
model = fgai.GAT(8, 3, hidden_channels=16, heads=8).eval()
observe(model, model.prepare(StoredGraph("small").load()))
observe_store(model, StoredGraph("small"), f"warm {sys.argv[1]}", block_edges=4096)
status = lambda name: int([line.split()[1] for line in open("/proc/self/status") if line.startswith(name)][0])
limit = (status("VmData") << 10) + (24 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if sys.argv[1] == "stored":
    observe_store(model, StoredGraph("large"), "seen", block_edges=4096)
else:
    observe(model, model.prepare(StoredGraph("large").load()))
print("done")
"""


def test_memory_does_not_grow_with_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 MB to spare a pass in memory fails on a graph whose stored one passes."""
    monkeypatch.chdir(tmp_path)
    random = torch.Generator().manual_seed(0)
    for name, nodes in (("small", 2_000), ("large", 30_000)):
        ends = (torch.rand(2, 12 * nodes, generator=random) ** 2 * nodes).long()
        keys = torch.unique(ends[1] * nodes + ends[0])
        edges = torch.stack([keys % nodes, keys // nodes])
        write_store(Graph.from_edges(edges, nodes, torch.randn(nodes, 8, generator=random)), name)
    done = [processes().run("-c", LIMITED, way, cwd=tmp_path) for way in ("stored", "memory")]
    assert done[0].out == "done\n", done[0].err
    assert done[1].code and "memory" in done[1].err.lower()
    assert StoredObservation("seen").attention(0).shape[1] == 8
