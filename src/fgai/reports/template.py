"""Templates and other files that pages are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return a page with every `{{name}}` of the template replaced by its part."""
    return re.sub(r"\{\{(.*?)\}\}", lambda slot: parts[slot[1].strip()], template)


def asset(name: str, package: str = "fgai.reports") -> str:
    """Return a file of a package's assets as text."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")
