"""Values derived from an object and kept with it; copies of the object begin without them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class _Cache(dict[Hashable, Any]):
    """The values kept with one object; copied and pickled empty."""

    def __reduce__(self) -> tuple[type[_Cache], tuple[()]]:
        return _Cache, ()


def cached_on(owner: Any, key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make`, called once, returned for this object and key, which begins with its module's name.

    Example:
        >>> class Graph: ...
        >>> graph = Graph()
        >>> cached_on(graph, "degrees", lambda: [1, 2]) is cached_on(graph, "degrees", lambda: [1, 2])
        True
    """
    cache: dict[Hashable, T] = owner.__dict__.setdefault("_fgai_cache", _Cache())
    if key not in cache:
        cache[key] = make()
    return cache[key]
