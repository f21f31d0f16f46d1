"""The page of cards: grouped by what is comparable, text only, one file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fgai.errors import InputError
from fgai.reports.cards import Card, card, read_cards, write_page
from support.report_cases import EVIL, comparison


def folder_of(tmp_path: Path, **cards: Card) -> Path:
    folder = tmp_path / "cards"
    for name, entry in cards.items():
        entry.save(folder / f"{name}.json")
    return folder


@pytest.fixture
def gat() -> Card:
    return card(comparison(), name="GAT")


@pytest.fixture
def better(gat: Card) -> Card:
    numbers = {**gat.numbers, "f1.attacked": {**gat.numbers["f1.attacked"], "value": 0.999}}
    return dataclasses.replace(gat, name="better", numbers=numbers)


def page_of(folder: Path) -> str:
    return write_page(read_cards(folder), folder / "page.html").read_text(encoding="utf-8")


def test_the_best_under_attack_stands_first_and_chance_below(tmp_path: Path, gat: Card, better: Card) -> None:
    text = page_of(folder_of(tmp_path, a=gat, z=better))
    body = re.search(r"<tbody>(.*?)</tbody>(.*?)</table>", text, re.S)
    assert body is not None and body[1].index(">better<") < body[1].index(">GAT<")
    assert 'data-value="0.999"' in body[1] and ">chance<" in body[2]
    assert text.count("<table") == 1


def test_only_what_was_measured_alike_shares_a_table(tmp_path: Path, gat: Card) -> None:
    other = dataclasses.replace(gat, data={**gat.data, "fingerprint": "other"})
    again = dataclasses.replace(gat, protocol={**gat.protocol, "seed": 5})
    assert page_of(folder_of(tmp_path, a=gat, b=other, c=again)).count("<table") == 3


def test_names_are_text(tmp_path: Path, gat: Card) -> None:
    number = {**gat.numbers["f1.clean"], "title": EVIL}
    evil = dataclasses.replace(
        gat,
        name=EVIL,
        limits=[EVIL],
        model={"class": EVIL},
        data={**gat.data, "name": EVIL},
        threat={**gat.threat, "words": f'"{EVIL}'},
        numbers={**gat.numbers, EVIL: number},
    )
    folder = folder_of(tmp_path, evil=evil)
    evil.save(folder / '<img src=x onerror="a">.json')
    (folder / "<b>.json").write_text("{")
    text = page_of(folder)
    assert EVIL not in text and "&lt;script&gt;" in text
    assert "<img" not in text and "<b>" not in text
    assert text.count("<script>") == 1


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path, gat: Card) -> None:
    text = page_of(folder_of(tmp_path, gat=gat))
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text) and "{{" not in text


def test_unusable_files_are_named_and_the_rest_is_listed(tmp_path: Path, gat: Card) -> None:
    folder = folder_of(tmp_path, gat=gat)
    (folder / "half.json").write_text(gat.to_json()[:100])
    (folder / "newer.json").write_text(json.dumps({**gat.to_dict(), "schema": 9}))
    found = read_cards(folder)
    assert list(found.cards) == ["gat.json"] and list(found.unusable) == ["half.json", "newer.json"]
    assert "written by a newer fgai" in page_of(folder)


def test_without_cards_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no card in"):
        read_cards(tmp_path)
    with pytest.raises(InputError, match="must be a folder of cards"):
        read_cards(tmp_path / "nowhere")
