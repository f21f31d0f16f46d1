"""The page of cards in a real browser: sorting, themes, and nothing that a name could do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fgai.reports.cards import Listing, card, write_page
from support.report_cases import EVIL, comparison

pytestmark = pytest.mark.browser


def test_headings_sort_and_names_do_nothing(tmp_path: Path, visit: Callable[..., Any]) -> None:
    first = card(comparison(), name="GAT")

    def entry(name: str, value: float | None) -> Any:
        numbers = {**first.numbers, "g_tvd.rel": {**first.numbers["g_tvd.rel"], "value": value}}
        return dataclasses.replace(first, name=name, numbers=numbers)

    cards = {f"{name}.json": entry(name, value) for name, value in (("b", 0.5), ("a", None), ("c", 0.25))}
    cards["x.json"] = dataclasses.replace(entry(EVIL, 4.0), limits=[EVIL])
    opened = visit(write_page(Listing(cards=cards, unusable={EVIL: EVIL}), tmp_path / "page.html"))

    def order(heading: str) -> list[str]:
        opened.page.get_by_role("button", name=heading).first.click()
        return list(opened.page.locator(".board tbody th").all_inner_texts())

    assert order("g-TVD rel") == ["c", "b", EVIL, "a"]  # lower is better, what is not known stands last
    assert order("g-TVD rel") == [EVIL, "b", "c", "a"]
    assert order("model")[1:] == ["a", "b", "c"]
    opened.page.get_by_role("link", name="b", exact=True).click()
    opened.page.wait_for_selector(
        "details#card-b[open]"
    )  # once the browser has told the page of the new address
    opened.page.locator("#theme").click()
    assert opened.page.locator("html").get_attribute("data-theme") == "dark"
    assert opened.page.title() == "Explanation cards"
    opened.check()
