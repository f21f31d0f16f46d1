"""Templates, scripts and styles that pages are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return a page with every `{{name}}` of the template replaced by its part."""
    return re.sub(r"\{\{(.*?)\}\}", lambda slot: parts[slot[1].strip()], template)


def asset(name: str, folder: str = ".") -> str:
    """Return a file among the assets of this package, or of its `cards` or `whatif`, as text."""
    return (files("fgai.reports") / folder / "assets" / name).read_text(encoding="utf-8")


def whatif_script() -> str:
    """Return the script of the what-if page, an ES module: `mount`, and `default.render` for notebooks."""
    return asset("elements.js") + asset("recompute.js", "whatif") + asset("whatif.js", "whatif")
