"""The table of certificates against injection, from synthetic records."""

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
