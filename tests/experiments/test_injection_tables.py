"""The tables of certificates against injection, from synthetic records."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import Store, read_grid
from experiments.sheet import Sheet
from experiments.tables import TABLES
from fgai.records import Table
from support import bench_cases as cases


def test_certificates_against_injection(tmp_path: Path) -> None:
    """Nothing is known without limits; what features alone give stands beside, what attacks leave below."""
    found, attacked = TABLES["injection"](cases.fill(Store(tmp_path), read_grid("injection")))
    assert isinstance(found, Table) and isinstance(attacked, Sheet)
    rows = {tuple(row[:3]): row[3:] for row in found.rows}
    shares = ["50.0 ± 0.0", "25.0 ± 0.0", "16.7 ± 0.0", "10.0 ± 0.0"]
    shares += ["70.0 ± 0.0", "35.0 ± 0.0", "23.3 ± 0.0", "14.0 ± 0.0"]
    beside = ["40.0 ± 0.0 / 60.0 ± 0.0", "60.0 ± 0.0", "5"]
    expected = ["0.900 ± 0.000", "0.25 / 0.5", *shares, *beside]
    assert list(rows["GAT", "cora", "vanilla + limits"]) == expected
    assert list(rows["GAT", "cora", "vanilla"])[2:11] == [None] * 8 + ["– / –"]
    (photo, physics) = attacked.sections["GAT"]
    assert photo.labels == ("amazon-photo", "FGAI, certified") and physics.labels[0] == "coauthor-physics"
    means = [None if one.estimate is None else one.estimate.mean for one in photo.entries]
    assert means == pytest.approx([0.92, 0.5, 0.51, 0.5, 0.95])


def test_budgets_and_votes_stand_beside_the_model_without_edges(tmp_path: Path) -> None:
    """Cells that are not run have a row of dashes."""
    store = Store(tmp_path)
    chosen = [cell for cell in read_grid("collective") if (cell.model, cell.dataset) == ("GAT", "cora")]
    cases.fill(store, [*chosen, *(cell for cell in read_grid("alone") if cell.dataset == "cora")])
    votes = [cell for cell in read_grid("voting") if (cell.model, cell.dataset) == ("GATv2", "citeseer")]
    cases.fill(store, votes[:1])
    (found,) = TABLES["collective"](store)
    assert isinstance(found, Table)
    rows = {tuple(row[:3]): row[3:] for row in found.rows}
    shares = ["95.0 ± 0.0", "75.0 ± 0.0", "0.0 ± 0.0", "86.0 ± 0.0", "70.0 ± 0.0", "10.0 ± 0.0"]
    assert list(rows["GAT", "cora", "vanilla + limits"]) == ["0.900 ± 0.000", *shares, "80.0", "2"]
    assert list(rows["GATv2", "citeseer", "FGAI-certified"]) == [None] * 8 + ["0"]
    assert any("4 of 32 cells are run" in note for note in found.notes)
    (voted,) = TABLES["voting"](store)
    assert isinstance(voted, Table)
    held = [row for row in voted.rows if row[:2] == ["GATv2", "citeseer"]]
    assert [row[4:6] for row in held] == [["20", "0"], ["20", "0.5"], ["100", "0"], ["100", "0.5"]]
    assert held[1][6:8] == ["85.0 ± 0.0", "42.5 ± 0.0"] and held[1][-3:] == ["50.0 ± 0.0", None, "1"]
    missing = [row for row in voted.rows if row[:2] == ["GAT", "cora"]]
    assert len(missing) == 1 and missing[0][3:-2] == [None] * 8 and missing[0][-2:] == ["80.0", "0"]
