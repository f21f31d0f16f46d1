"""`typed`: type checks of arguments at run time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import chain
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

# Classes accepted for an annotated one; whether a number is whole is checked by value.
_NUMBER = (int, float, np.number)
_ACCEPTED: dict[Any, tuple[type, ...]] = {
    bool: (bool, int, np.bool_, type(None)),
    float: _NUMBER,
    int: _NUMBER,
}


class _Kind(NamedTuple):
    classes: tuple[type, ...]  # one of which it is an instance of
    entries: tuple[type, ...]  # classes of the entries of a sequence, or of the values of a mapping
    words: str  # for the message

    def fits(self, value: object) -> bool:
        """Whether `value` is accepted; entries of iterators, which can be read only once, are not checked."""
        if type(value) in self.classes and not self.entries:
            return True
        if not isinstance(value, self.classes) or (isinstance(value, str) and str not in self.classes):
            return False  # a `str` is a sequence of `str`, but is never meant as one
        if Iterable in self.classes and not _iterates(value):
            return False
        if not self.entries or isinstance(value, self.entries):
            return True
        if isinstance(value, np.ndarray | Tensor):
            return int in self.entries and value.ndim == 1
        entries = value.values() if isinstance(value, Mapping) else value
        checked = isinstance(value, Mapping | list | tuple | str)
        return not checked or all(isinstance(entry, self.entries) for entry in entries)  # type: ignore[attr-defined]


def _iterates(value: Any) -> bool:
    """Whether `iter` takes a value; some classes have an `__iter__` that only raises."""
    try:
        iter(value)
    except Exception:
        return False
    return True


def typed(function: F) -> F:
    """Make a function or class raise `TypeError` for an argument of another type than annotated.

    Classes, numbers, strings, unions of them and the entries of sequences and mappings are checked;
    protocols, functions and shapes are not. Costs about a microsecond a call.

    Example:
        >>> @typed
        ... def double(x: Tensor) -> Tensor:
        ...     return 2 * x
        >>> double("2")
        Traceback (most recent call last):
            ...
        TypeError: `x` of `double` must be Tensor, got str
    """
    if isinstance(function, type):
        assert "__init__" in vars(function), "an inherited constructor is checked where it is defined"
        function.__init__ = typed(function.__init__)  # type: ignore[misc]
        return function
    names = list(inspect.signature(function).parameters)
    kinds: dict[str, _Kind] = {}
    called = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if not kinds:
            kinds.update(_annotated(function))
        for name, value in chain(zip(names, args, strict=False), options.items()):
            kind = kinds.get(name)
            if kind is not None and not kind.fits(value):
                raise TypeError(f"`{name}` of `{called}` must be {kind.words}, got {_named(value)}")
        return function(*args, **options)

    return checked  # type: ignore[return-value]


def _named(value: object) -> str:
    entries = {type(entry).__name__ for entry in value} if isinstance(value, list | tuple) else ()
    return f"{type(value).__name__} of {', '.join(sorted(entries))}" if entries else type(value).__name__


def _annotated(function: Callable[..., Any]) -> dict[str, _Kind]:
    """Return the kind of each parameter whose annotation can be checked."""
    kinds = {"": _Kind((), (), "")}  # never empty, so that annotations are read once
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or hint is parameter.empty:
            continue
        try:
            kind = _kind(eval(hint, scope) if isinstance(hint, str) else hint)
        except NameError:  # imported for type checkers only
            continue
        if kind is not None:
            kinds[name] = kind
    return kinds


def _kind(hint: Any) -> _Kind | None:
    """Return the kind of an annotation; None if it cannot be checked."""
    if hint is None or hint is type(None):
        return _Kind((type(None),), (), "None")
    if isinstance(hint, TypeVar):
        return None if hint.__bound__ is None else _kind(hint.__bound__)
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in map(_kind, get_args(hint)) if part is not None]
        if len(parts) < len(get_args(hint)):
            return None
        entries = [entry for part in parts for entry in part.entries]
        plain = [kind for part in parts if not part.entries for kind in part.classes]
        classes = tuple(kind for part in parts for kind in part.classes)
        words = " or ".join(part.words for part in parts)
        return _Kind(classes, (*entries, *plain) if entries else (), words)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Sequence, Iterable, Mapping, dict):
        entry = _kind(arguments[-1])
        name = "a mapping" if origin in (Mapping, dict) else "a sequence"
        words = name if entry is None else f"{name} of {entry.words}"
        classes = (Sequence, np.ndarray, Tensor) if origin is Sequence else (origin,)
        return _Kind(classes, entry.classes if entry else (), words)
    if origin is np.ndarray:
        return _Kind((np.ndarray,), (), "ndarray")
    if hint in _ACCEPTED:
        return _Kind(_ACCEPTED[hint], (), "True or False" if hint is bool else "a number")
    vague = getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False)
    checkable = isinstance(hint, type) and not vague and hint not in (Any, object)
    return _Kind((hint,), (), hint.__name__) if checkable else None
