"""The version of fgai, and facts that records keep about how they were made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__version__ = "0.2.0"
_STATED: ContextVar[Mapping[str, str] | None] = ContextVar("stated", default=None)


def versions() -> dict[str, str]:
    """Return the versions of fgai and torch, as every record keeps them."""
    import torch  # `import fgai` reads this file, and is not to wait for torch

    return {"fgai": __version__, "torch": torch.__version__}


@contextmanager
def stating(**facts: str) -> Iterator[None]:
    """State facts, e.g. the command line, of every record made inside; an outer one goes before an inner."""
    token = _STATED.set({**facts, **stated()})
    try:
        yield
    finally:
        _STATED.reset(token)


def stated() -> Mapping[str, str]:
    """Return the facts that `stating` states here."""
    return _STATED.get() or {}
