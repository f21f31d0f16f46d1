"""Values that a module derives from an object of another one and keeps with it; copies begin without them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class _Kept(dict[Hashable, Any]):
    """What is kept with one object; copied and pickled empty."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def cached_on(owner: Any, key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` returned when it was first called for this object and key.

    Args:
        owner: any object with attributes, also a frozen dataclass or a tensor.
        key: begins with the name of the module that keeps the value.
        make: called without arguments, once.

    Example:
        >>> class Graph: ...
        >>> graph = Graph()
        >>> cached_on(graph, "degrees", lambda: [1, 2]) is cached_on(graph, "degrees", lambda: [1, 2])
        True
    """
    kept: dict[Hashable, T] = owner.__dict__.setdefault("_kept", _Kept())
    if key not in kept:
        kept[key] = make()
    return kept[key]
