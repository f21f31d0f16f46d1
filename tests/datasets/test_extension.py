"""Datasets from outside the package: registered, and then found by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import fgai
from fgai.datasets import Source, info, names, register_dataset
from fgai.datasets.readers import RawGraph
from fgai.errors import DataError, InputError
from fgai.graph import Graph
from support.cli_cases import here
from support.dataset_cases import about, unregister
from support.graph_cases import small_data
from support.task_cases import batch_of_graphs


@pytest.fixture
def mine() -> Iterator[Graph]:
    graph = small_data(seed=4, nodes=50)
    register_dataset(about(graph, "mine"), Source(make=lambda: graph))
    yield graph
    unregister("mine")


def test_a_graph_made_in_python_is_loaded_by_name(mine: Graph) -> None:
    found = fgai.load_dataset("mine", seed=1)
    assert found.name == "mine" and torch.equal(found.edge_index, mine.edge_index)
    assert found.train_mask is not None and int(found.train_mask.sum()) == 5
    other = fgai.load_dataset("mine", seed=2)
    assert other.train_mask is not None and not torch.equal(other.train_mask, found.train_mask)
    assert fgai.load_dataset("mine", task="link").links is not None


def test_the_command_line_finds_it(mine: Graph, tmp_path: Path) -> None:
    listed = json.loads(here("data", "list", "--json", cwd=tmp_path).stdout)["datasets"]
    assert listed[-1]["name"] == "mine" and listed[-1]["where"] == "built in"
    small = ("--set", "hidden_channels=2", "--set", "heads=2", "--epochs", 1, "--json")
    done = here("train", "--data", "mine", *small, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["dataset"] == "mine"
    done = here("attack", "vanilla-gat-mine.safetensors", "--threat", "edges", "--json", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr


def test_a_published_split_is_kept() -> None:
    graph = small_data(seed=4)
    register_dataset(about(graph, "mine", splits=("public", "random")), Source(make=lambda: graph))
    try:
        kept, drawn = fgai.load_dataset("mine"), fgai.load_dataset("mine", split="random")
    finally:
        unregister("mine")
    for name in ("train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(kept, name), getattr(graph, name))
    assert not torch.equal(drawn.test_mask, graph.test_mask)  # type: ignore[arg-type]


def test_small_graphs_are_split_whole() -> None:
    graph = batch_of_graphs()
    register_dataset(
        about(graph, "molecules", task="graph", splits=("folds",)), Source(make=lambda: batch_of_graphs())
    )
    try:
        found = fgai.load_dataset("molecules", seed=3)
        with pytest.raises(InputError, match="for graph tasks"):
            fgai.load_dataset("molecules", task="link")
    finally:
        unregister("molecules")
    assert found.batch is not None and found.test_mask is not None
    shares = torch.zeros(30).index_add(0, found.batch, found.test_mask.float())
    sizes = torch.bincount(found.batch).float()
    assert int((shares == sizes).sum()) == 3 and int((shares == 0).sum()) == 27


def test_files_are_read_by_a_reader_of_ones_own(tmp_path: Path) -> None:
    graph = small_data(seed=4)
    (tmp_path / "mine.npz").write_bytes(b"")

    def read(files: Sequence[Path]) -> RawGraph:
        assert files[0].name == "mine.npz"
        assert graph.y is not None
        features = np.eye(graph.num_nodes, dtype=np.float32)
        return RawGraph(
            edges=graph.edge_index.numpy(), num_nodes=graph.num_nodes, features=features, y=graph.y.numpy()
        )

    told = about(graph, "mine", num_features=graph.num_nodes, files=(("mine.npz",),))
    register_dataset(told, Source(reader=read))
    try:
        assert fgai.load_dataset("mine", root=tmp_path).num_edges == graph.num_edges
    finally:
        unregister("mine")


def test_wrong_registrations_are_refused(mine: Graph) -> None:
    known = names()
    with pytest.raises(InputError, match="already"):
        register_dataset(about(mine, "cora"), Source(make=lambda: mine))
    with pytest.raises(InputError, match="`make` or `reader`"):
        register_dataset(about(mine, "nothing"), Source())
    with pytest.raises(InputError, match="task"):
        register_dataset(about(mine, "nothing", task="nodes"), Source(make=lambda: mine))
    assert names() == known


def test_a_graph_of_other_sizes_is_foreign() -> None:
    graph = small_data()
    register_dataset(about(graph, "mine", num_edges=3), Source(make=lambda: graph))
    try:
        with pytest.raises(DataError, match="num_edges"):
            fgai.load_dataset("mine")
    finally:
        unregister("mine")
    with pytest.raises(DataError, match="no dataset 'mine'"):
        info("mine")


def test_a_graph_without_labels_cannot_be_split() -> None:
    graph = small_data().replace(y=None)
    register_dataset(about(graph, "mine"), Source(make=lambda: graph))
    try:
        with pytest.raises(DataError, match="no labels"):
            fgai.load_dataset("mine")
    finally:
        unregister("mine")
