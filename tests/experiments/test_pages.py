"""Pages show what the records give, and both stay small enough to read."""

from __future__ import annotations

import re
from pathlib import Path

from experiments import Store
from experiments.document import fill
from experiments.results import _metrics

ROOT = Path(__file__).parent.parent.parent


def test_what_the_top_5_lost_is_read_in_the_ledger_by_rule() -> None:
    """Records hold which search found what where, so rows are compared at one rule's endpoints."""
    rows = [{"member": "sign", "endpoints": rule} for rule in ("random", "cover", "cover", "defects")]
    evaluation = {
        "metrics": {},
        "ledgers": {"explanation": {"members": rows, "damages": [0.1, 0.2, 0.3, 0.4, 0.6]}},
    }
    found = _metrics(evaluation, "lost.explanation.cover")
    assert found == {"lost": {"explanation": {"random": 0.2, "cover": 0.4, "defects": 0.6, "chosen": 0.6}}}


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


def test_the_readme_and_the_records_are_small_enough_to_read() -> None:
    text = (ROOT / "README.md").read_text()
    table = re.search(r"<!-- table: overview -->.*?<!-- end -->", text, re.DOTALL)
    assert table is not None
    columns = max(line.count("|") - 1 for line in table[0].splitlines() if line.startswith("|"))
    assert len(text.split()) <= 900 and columns <= 7
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 15e6
    claims = (ROOT / "results" / "claims.jsonl").read_text().splitlines()
    assert max(map(len, claims)) < 3000 and sum(map(len, claims)) / len(claims) < 1300
