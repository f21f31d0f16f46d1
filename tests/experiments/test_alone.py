"""The rival without edges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fgai
from experiments import alone
from experiments.alone import accuracy_without_edges, without_edges
from experiments.cells import Cell, read_grid
from experiments.run import run_cell
from experiments.store import Store
from fgai.errors import InputError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "TRIALS", alone.TRIALS[:2])


@pytest.mark.parametrize("model", alone.LAYERS)
def test_it_learns_from_features_and_reads_no_edge(model: str) -> None:
    data = fgai.load_dataset("planted")
    found = without_edges(data, model, 0, epochs=30)
    assert found["accuracy"] > 1.2 / data.num_classes and len(found["trials"]) == 2
    bare = data.remove(torch.arange(data.num_edges))[0]
    assert without_edges(bare, model, 0, epochs=30) == found


def test_test_labels_choose_nothing() -> None:
    data = fgai.load_dataset("planted")
    assert data.y is not None and data.test_mask is not None
    other = data.y.clone()
    other[data.test_mask] = 0
    one, two = (without_edges(graph, "linear", 0, epochs=30) for graph in (data, data.replace(y=other)))
    assert one["settings"] == two["settings"] and one["accuracy"] != two["accuracy"]
    with pytest.raises(InputError, match="`model` must be"):
        without_edges(data, "GAT", 0)


def test_a_cell_records_it_and_tables_take_the_better_model(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cells = [c for c in read_grid("alone") if c.dataset == "planted" and c.seed == 0]
    assert len(cells) == 2
    best = 0.0
    for cell in cells:
        record = run_cell(cell, store)
        assert record["status"] == "done", record
        best = max(best, record["alone"]["accuracy"])
    found = accuracy_without_edges(store, "planted")
    assert found is not None and found.mean == pytest.approx(best)
    assert accuracy_without_edges(store, "cora") is None
    assert Cell.from_dict(cells[0].to_dict()) == cells[0]
