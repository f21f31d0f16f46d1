"""Colours of all pages: text and bars can be told from what lies behind them, in light and in dark."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

ASSETS = files("fgai.reports")
CSS = ASSETS.joinpath("assets", "style.css").read_text(encoding="utf-8")
WHAT_IF = ASSETS.joinpath("whatif", "assets", "whatif.css").read_text(encoding="utf-8")
BEHIND = ("paper", "card", "faint", "notice")
TEXT = ("ink", "soft", "link", "new", "wrong", "kept")
BARS = ("m0", "m1", "m2", "m3", "m4", "m5", "m6")


def colours(selector: str) -> dict[str, str]:
    found = re.search(re.escape(selector) + r" \{(.*?)\}", CSS, re.DOTALL)
    assert found is not None
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", found[1]))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'])
def test_contrast_is_that_of_wcag_aa(selector: str) -> None:
    known = colours(selector)
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for names, least in ((TEXT, 4.5), ((*BARS, "edge"), 3.0)):
        ratios = {(a, b): contrast(known[a], known[b]) for a in names for b in BEHIND}
        assert {pair: ratio for pair, ratio in ratios.items() if ratio < least} == {}


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_of_the_what_if_part(dark: bool) -> None:
    pattern = r"(?:--w-|\.whatif \.)(\w+)(?:: | \{ background: )light-dark\((#\w{6}), (#\w{6})\)"
    known = {name: pair[dark] for name, *pair in re.findall(pattern, WHAT_IF)}
    behind = [known["card"], known["faint"]]
    for names, least in ((("ink", "soft", "new", "link"), 4.5), (("m0", "m1", "m2", "m3", "edge"), 3.0)):
        ratios = {name: min(contrast(known[name], colour) for colour in behind) for name in names}
        assert {name: ratio for name, ratio in ratios.items() if ratio < least} == {}
