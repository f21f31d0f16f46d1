"""Docstrings as the reference shows them: what stands under `Example:` is code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

HEADING = re.compile(r"^Example:$", re.MULTILINE)


class ExamplesAreCode(Extension):
    """Makes `Example:`, as fgai writes it, the section of examples that mkdocstrings knows by `Examples:`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the heading; called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub("Examples:", obj.docstring.value)
