"""Two seeds of one training: what they share, and what is written down of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fgai
from experiments import Store, read_grid
from experiments.again import ANOTHER, compared
from experiments.run import run_cell
from experiments.tables import render
from support import bench_cases as cases


def test_a_cell_compares_with_the_next_seed(tmp_path: Path) -> None:
    made = run_cell(cases.tiny(kind="again"), Store(tmp_path), cache=tmp_path / "models")
    assert made["status"] == "done", made.get("trace")
    held = made["evaluations"][ANOTHER]["metrics"]
    chance = held["overlap"]["chance"]["all"]
    assert 0 < chance < held["similarity"]["overlap"]["all"] < 1
    assert -1 < held["similarity"]["rank_correlation"]["all"] < 1
    assert len(list((tmp_path / "models").glob("*.safetensors"))) == 2


def test_a_model_is_like_itself() -> None:
    data = fgai.load_dataset("planted")
    model = fgai.train("GAT", data, epochs=2, progress=False)
    held = compared((model, model), data, model)[ANOTHER]["metrics"]
    assert held["similarity"]["overlap"]["layers"] == [1.0, 1.0]
    assert held["similarity"]["rank_correlation"]["all"] == pytest.approx(1.0)


def test_the_table(tmp_path: Path) -> None:
    cells = [cell for cell in read_grid("seeds") if cell.model == "GAT"]
    text = render("seeds", cases.fill(Store(tmp_path), cells))
    line = next(row for row in text.splitlines() if row.startswith("| amazon-photo | FGAI"))
    assert "| **0.700±0.000** | **0.700" in line and "0.600±0.000" in line
    assert "64 of 96 cells are missing" in text
