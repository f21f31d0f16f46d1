"""The script and the style of the page."""

from __future__ import annotations

from fgai.reports.template import asset

PACKAGE = "fgai.reports.whatif"


def module() -> str:
    """Return the script, an ES module: `mount`, and `default.render` for notebooks."""
    return asset("elements.js") + asset("recompute.js", PACKAGE) + asset("whatif.js", PACKAGE)


def style() -> str:
    """Return the style sheet, for elements inside `.whatif` alone."""
    return asset("whatif.css", PACKAGE)
