"""The table the README shows: vanilla and FGAI in one line, and what chance would get beside every share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments import Store, read_grid
from experiments.document import fill
from experiments.results import _metrics
from experiments.tables import render
from support import bench_cases as cases

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    cells = [c for c in read_grid("node") if (c.model, c.dataset) == ("GAT", "amazon-photo")]
    text = render("headline", cases.fill(Store(tmp_path_factory.mktemp("results")), cells))
    titles, _, values, *_ = (row.split(" | ") for row in text.splitlines() if row.startswith("|"))
    return dict(zip(titles, values, strict=False))


def test_explanations_are_compared_at_the_same_endpoints(line: dict[str, str]) -> None:
    assert line["similarity"] == "0.950" and line["top 5 lost, `cover`"] == "0.348 → 0.048"


def test_what_the_top_5_lost_is_read_in_the_ledger_by_rule() -> None:
    """Records hold which search found what where, so rows are compared at one rule's endpoints."""
    rows = [{"member": "sign", "endpoints": rule} for rule in ("random", "cover", "cover", "defects")]
    evaluation = {
        "metrics": {},
        "ledgers": {"explanation": {"members": rows, "damages": [0.1, 0.2, 0.3, 0.4, 0.6]}},
    }
    found = _metrics(evaluation, "lost.explanation.cover")
    assert found == {"lost": {"explanation": {"random": 0.2, "cover": 0.4, "defects": 0.6, "chosen": 0.6}}}


def test_predictions_under_every_search(line: dict[str, str]) -> None:
    assert (line["clean F1"], line["`ensemble`"]) == ("0.920 → 0.920", "0.420 → 0.920")
    assert line["`ensemble-strong`"] == "0.390 → 0.890" and line["certified, t = 1; FGAI-certified"] == "–; –"


def test_pages_show_the_records_there_are() -> None:
    """What stands between marks is what the records of this repository give, on every page."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marked = {page: text for page in pages if "<!-- table: " in (text := page.read_text())}
    made = (ROOT / "Makefile").read_text()
    store = Store(ROOT / "results")
    assert len(marked) >= 4
    for page, text in marked.items():
        name = str(page.relative_to(ROOT))
        assert name in made or name.startswith("docs/results/"), f"`make results` leaves {name} out"
        assert fill(text, store) == text, f"{name} is not what `make results` writes"


def test_the_readme_gives_no_result_by_hand() -> None:
    """Shares and scores of the results stand in generated tables alone, so none outlives its records."""
    section = (ROOT / "README.md").read_text().split("\n## Results\n")[1].split("\n## ")[0]
    prose = re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", r"[\1]", section, flags=re.DOTALL)
    assert "[overview]" in prose and not re.findall(r"(?<![\w.])\d?\.\d+", prose)
