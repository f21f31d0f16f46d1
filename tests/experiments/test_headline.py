"""The table the README shows: vanilla and FGAI in one line, and what chance would get beside every share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments import Store, read_grid
from experiments.tables import render
from support import bench_cases as cases

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cells = [c for c in read_grid("node") if (c.model, c.dataset) == ("GAT", "amazon-photo")]
    text = render("headline", cases.fill(Store(tmp_path_factory.mktemp("results")), cells))
    titles, _, values, *_ = (row.split(" | ") for row in text.splitlines() if row.startswith("|"))
    return dict(zip(titles, values, strict=False))


def test_chance_stands_beside_shares(line: dict[str, str]) -> None:
    assert line["similarity"] == "0.950"
    assert line["top 5 kept (chance)"] == "0.710 → 0.960 (0.300)"
    assert line["top 5 kept, explanation attack (chance)"] == "0.652 → 0.952 (0.300)"


def test_predictions_under_every_search(line: dict[str, str]) -> None:
    assert (line["clean F1"], line["`ensemble`"]) == ("0.920 → 0.920", "0.420 → 0.920")
    assert line["`ensemble-strong`"] == "0.390 → 0.890" and line["certified, t = 1"] == "–"


def test_the_readme_has_it() -> None:
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if row.startswith("| G")]
    assert len(rows) > 10 and all(row.count("(") == row.count(")") == 2 for row in rows)


def test_the_readme_gives_no_result_by_hand() -> None:
    """Shares and scores of the results stand in generated tables alone, so none outlives its records."""
    section = (ROOT / "README.md").read_text().split("\n## Results\n")[1].split("\n## ")[0]
    prose = re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", r"[\1]", section, flags=re.DOTALL)
    assert "[headline]" in prose and not re.findall(r"(?<![\w.])\d?\.\d+", prose)
