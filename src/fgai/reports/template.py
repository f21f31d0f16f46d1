"""Templates, scripts and styles that pages are made of."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup


def fill(template: str, parts: dict[str, Any]) -> str:
    """Return a page from a Jinja template, which escapes every text that is not marked as safe."""
    return _ENVIRONMENT.from_string(template).render(parts)


def _code(text: object) -> Markup:
    """A text with code between backticks, and options such as --threat, as `<code>`."""
    parts = re.split(r"(`[^`\n]+`|(?<![\w-])--[a-z][a-z-]*)", str(text))
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(part.strip("`")) if at % 2 else part for at, part in enumerate(parts))


_ENVIRONMENT = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
_ENVIRONMENT.filters["code"] = _code


def asset(name: str, folder: str = ".") -> str:
    """Return a file among the assets of this package, or of its `cards` or `whatif`, as text."""
    return (files("fgai.reports") / folder / "assets" / name).read_text(encoding="utf-8")


def whatif_script() -> str:
    """Return the script of the what-if page, an ES module: `mount`, and `default.render` for notebooks."""
    return asset("elements.js") + asset("recompute.js", "whatif") + asset("whatif.js", "whatif")
