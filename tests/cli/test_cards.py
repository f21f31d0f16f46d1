"""`fgai card`, `fgai check` and `fgai cards`: files, bars and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fgai.reports.cards import Card
from support.cli_cases import here, refused
from support.report_cases import certificates, comparison


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a comparison, a certificate, and the cards made of them by the command."""
    folder = tmp_path_factory.mktemp("cards")
    comparison().save(folder / "both.json")
    certificates()["GAT"].save(folder / "proof.json")
    for words in (
        ("both.json", "proof.json", "--name", "GAT", "-o", "cards/gat"),
        ("both.json", "--name", "FGAI"),
    ):
        done = here("card", *words, cwd=folder)
        assert done.exit_code == 0, done.stderr
    (folder / "card.json").rename(folder / "cards" / "fgai.json")
    return folder


def test_card_writes_both_files(folder: Path) -> None:
    found = Card.load(folder / "cards" / "gat.json")
    assert found.name == "GAT" and "certificate.share" in found.numbers
    assert (folder / "cards" / "gat.md").read_text(encoding="utf-8") == found.to_markdown()
    assert (folder / "card.md").is_file()


def test_check_passes_or_fails_by_its_exit_code(folder: Path) -> None:
    value = Card.load(folder / "cards" / "gat.json").numbers["f1.clean"]["value"]
    met = here("check", "cards/gat.json", "--min", f"f1.clean={value!r}", "--json", cwd=folder)
    assert met.exit_code == 0 and json.loads(met.stdout)["passed"] is True
    words = ("--min", "f1=1.5", "--max", "overlap=1")
    missed = here("check", "cards/gat.json", *words, "--json", cwd=folder)
    said = json.loads(missed.stdout)
    assert missed.exit_code == 1 and said["passed"] is False
    assert [bar["met"] for bar in said["bars"]] == [False, False, True]
    shown = here("check", "cards/gat.json", *words, cwd=folder)
    assert shown.exit_code == 1 and "MISSED" in shown.stdout and "2 of 3 bars missed" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "at least one bar"),
        (("--min", "f1"), "`--min` takes NAME=NUMBER"),
        (("--max", "f1=much"), "`--max` takes NAME=NUMBER"),
        (("--min", "f1=0", "--min", "f1=1"), "each name once"),
        (("--min", "f1=nan"), "must be a finite number"),
        (("--min", "beauty=1"), "no quantity 'beauty'"),
    ],
)
def test_bars_that_cannot_be_are_bad_input(folder: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused("check", "cards/gat.json", *words, cwd=folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "card", "schema": 7}', '{"kind": "evaluation"}'])
def test_unusable_cards_are_bad_input(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "card.json").write_text(text)
    assert "card.json" in refused("check", "card.json", "--min", "f1=0", cwd=tmp_path)


def test_cards_lists_a_folder_and_names_what_it_leaves_out(folder: Path) -> None:
    (folder / "cards" / "half.json").write_text("{")
    done = here("cards", "cards", "-o", "page.html", "--json", cwd=folder)
    said = json.loads(done.stdout)
    assert done.exit_code == 0 and list(said["cards"]) == ["fgai.json", "gat.json"]
    assert list(said["unusable"]) == ["half.json"] and "left out half.json" in done.stderr
    assert "<table" in (folder / "page.html").read_text(encoding="utf-8")
