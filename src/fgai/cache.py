"""Values kept with the object they were derived from.

A class keeps what it derives of itself with `functools.cached_property`. Where another module derives
something of an object (the kernels' plan of an adjacency, say), it is kept with `cached_on`: it lives and
goes with the object, and a copy of the object begins without it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class _Kept(dict[Hashable, Any]):
    """What is kept with one object; copied and pickled empty."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def cached_on(owner: Any, key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make` gave when it was first called for this object and key.

    Args:
        owner: any object that takes attributes: a frozen dataclass or a tensor, too.
        key: names the value; begin it with the name of the module that keeps it.
        make: called without arguments, once.

    Example:
        >>> class Graph: ...
        >>> graph = Graph()
        >>> cached_on(graph, "degrees", lambda: [1, 2]) is cached_on(graph, "degrees", lambda: [1, 2])
        True
    """
    attributes = owner.__dict__
    kept: dict[Hashable, Any] | None = attributes.get("_kept")
    if kept is None:
        kept = attributes["_kept"] = _Kept()
    if key not in kept:
        kept[key] = make()
    found: T = kept[key]
    return found
