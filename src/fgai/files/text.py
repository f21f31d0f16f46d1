"""JSON from a file that may be damaged or hostile."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MOST_DEPTH = 64
"""Levels a file may nest; fgai's own stay below ten."""
LARGEST = 1 << 64
"""Whole numbers are below this: they fit a float, a seed and a tensor's length."""


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return what JSON text holds.

    Args:
        text: of one document.
        finite: refuse NaN and infinities, which are no JSON; Python writes them all the same.

    Raises:
        ValueError: it is no JSON, a key comes twice, it nests too deeply, or a number is beyond reason.

    Example:
        >>> parse_json('{"k": [1, 2.5]}')
        {'k': [1, 2.5]}
        >>> parse_json('{"k": 1, "k": 2}')
        Traceback (most recent call last):
        ValueError: 'k' comes twice
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant if finite else None)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MOST_DEPTH} levels") from None
    _check_numbers(value, finite)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _check_numbers(value: Any, finite: bool) -> None:
    """Look at every value, level by level: recursion would end where the nesting is too deep."""
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                below += item.values()
            elif kind is list:
                below += item
            elif kind is int and abs(item) >= LARGEST:
                raise ValueError(f"a number of {len(str(abs(item)))} digits is beyond reason")
            elif kind is float and finite and not math.isfinite(item):
                raise ValueError("a number is too large for a float")
        if not below:
            return
        level = below
    raise ValueError(f"it nests deeper than {MOST_DEPTH} levels")
