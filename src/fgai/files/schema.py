"""Check plain values from a file against type annotations."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from fgai.errors import CheckpointError

Schema = Mapping[str, Any]
"""Names and the annotations of their values: `str`, `float`, `list[int]`, a `TypedDict`, …"""


def check(value: Any, kind: Any, where: str) -> None:
    """Raise `CheckpointError`, which names the innermost wrong value, unless `value` is of an annotated type.

    A `kind` is `Any`, `None`, `bool`, `int`, `float`, `str`, `Literal`, `list`, `tuple`, `dict`, a
    `TypedDict`, or a union of these. A `float` may be a whole number, a `tuple` is a list in a file; a bool
    is no number. A `TypedDict` must have every key that is not `NotRequired`, and no others.

    Example:
        >>> check({"epoch": 3}, dict[str, int], "the state")
        >>> check({"epoch": "3"}, dict[str, int], "the state")
        Traceback (most recent call last):
        fgai.errors.CheckpointError: epoch of the state must be a whole number, got '3'
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        _expect(isinstance(value, Mapping), value, "an object", where)
        # With `from __future__ import annotations` Python counts all keys as required.
        hints = get_type_hints(kind, include_extras=True)
        required = [name for name in kind.__required_keys__ if get_origin(hints[name]) is not NotRequired]
        check_items(value, get_type_hints(kind), where, required=required)
    elif origin in (Union, types.UnionType):
        _check_union(value, inner, where)
    elif origin is Literal:
        _expect(value in inner, value, f"one of {', '.join(map(str, inner))}", where)
    elif origin is dict:
        _expect(isinstance(value, Mapping), value, "an object", where)
        for name, item in value.items():
            check(item, inner[1], f"{name} of {where}")
    elif origin in (list, tuple):
        _expect(isinstance(value, list | tuple), value, "a list", where)
        kinds = inner
        if origin is list or inner[1:] == (Ellipsis,):
            kinds = (inner[0],) * len(value)
        _expect(len(value) == len(kinds), value, f"a list of {len(kinds)}", where)
        for item, item_kind in zip(value, kinds, strict=True):
            check(item, item_kind, f"an entry of {where}")
    elif kind is not Any:
        kind = type(None) if kind is None else kind
        right = isinstance(value, (int, float) if kind is float else kind)
        _expect(right and (kind is bool or not isinstance(value, bool)), value, _WORDS[kind], where)


def check_items(values: Mapping[str, Any], kinds: Schema, where: str, *, required: Iterable[str]) -> None:
    """Raise `CheckpointError` unless `values` has the required names, no others, and the types of `kinds`."""
    if missing := [name for name in required if name not in values]:
        raise CheckpointError(f"{where} is incomplete: it lacks {', '.join(sorted(missing))}")
    if unknown := [str(name) for name in values if name not in kinds]:
        raise CheckpointError(
            f"{where} holds {', '.join(unknown)[:200]}, unknown to this fgai; if a newer one wrote it, update"
        )
    for name, value in values.items():
        check(value, kinds[name], f"{name} of {where}")


def _check_union(value: Any, kinds: tuple[Any, ...], where: str) -> None:
    if value is None and type(None) in kinds:
        return
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with suppress(CheckpointError):
            check(value, kind, where)
            return
    check(value, last, where)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def _expect(good: bool, value: Any, expected: str, where: str) -> None:
    if not good:
        text = repr(value)
        excerpt = text if len(text) < 80 else f"{text[:77]}..."
        raise CheckpointError(f"{where} must be {expected}, got {excerpt}")
