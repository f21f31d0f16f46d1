"""Sizes that are foretold are those of the files and tensors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.large import StoredGraph, convert, graph_size, sort
from fgai.large.write import _Work
from support.store_cases import array_bytes

NODES, EDGES, WIDTH = 70, 431, 5


@pytest.fixture
def peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes on disk at the end of each stage of a conversion, before anything is removed."""
    monkeypatch.chdir(tmp_path)
    seen, remove = [], _Work._remove_but

    def watched(self: _Work, kept: Any) -> None:
        seen.append(array_bytes(self.folder))
        remove(self, kept)

    monkeypatch.setattr(_Work, "_remove_but", watched)
    return seen


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_of_a_graph(labels: bool, weights: bool, peak: list[int]) -> None:
    keys = np.random.default_rng(0).permutation(NODES * NODES)[:EDGES]
    heading = ["source,destination,weight" if weights else "source,destination"]
    rows = [f"{key // NODES},{key % NODES}{',0.5' if weights else ''}" for key in keys]
    Path("e.csv").write_text("\n".join(heading + rows))
    np.save("x.npy", np.ones((NODES, WIDTH), np.float32))
    np.save("y.npy", np.arange(NODES) % 3)
    stored = convert("e.csv", "stored", features="x.npy", labels="y.npy" if labels else None)
    size = graph_size(NODES, EDGES, WIDTH, labels=labels, weights=weights)
    manifest = (stored.path / "graph.json").stat().st_size
    assert array_bytes(stored.path) - manifest == size.disk
    assert max(peak[:-1]) == size.conversion_disk
    assert loaded(stored) == size.memory


def loaded(stored: StoredGraph) -> int:
    graph = stored.load()
    tensors = [getattr(graph.adjacency, field.name) for field in fields(graph.adjacency)]
    tensors += [graph.features.base, graph.y, graph.edge_weight]
    return sum(part.nbytes for part in tensors if isinstance(part, Tensor))


def test_memory_of_a_conversion_is_16_bytes_per_node_and_a_block() -> None:
    one, two = (graph_size(nodes, 10**9).conversion_memory for nodes in (10**6, 2 * 10**6))
    assert two - one == 16 * 10**6
    assert graph_size(10**6, 10).conversion_memory == one
    assert one - 16 * 10**6 > 8 * 4 * sort.BLOCK  # keys, order, rows and sources of a block


def test_bad_numbers() -> None:
    for bad in ((0, 5), (5, -1), (2**40, 5), (5, 5, -1)):
        with pytest.raises(InputError, match="`num_"):
            graph_size(*bad)
    assert torch.iinfo(torch.int64).max > graph_size(2 * 10**9, 10**12, 10**4).disk
