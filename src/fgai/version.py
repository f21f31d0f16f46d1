"""The version of fgai, and facts that records keep about how they were made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__version__ = "0.2.0"
_FACTS: ContextVar[Mapping[str, str] | None] = ContextVar("facts", default=None)


def versions() -> dict[str, str]:
    """Return the versions of fgai and torch, as every record keeps them."""
    import torch  # `import fgai` reads this file, and is not to wait for torch

    return {"fgai": __version__, "torch": torch.__version__}


@contextmanager
def adding_facts(**facts: str) -> Iterator[None]:
    """Add facts, e.g. the command line, to every record made in the block; an outer block wins."""
    token = _FACTS.set({**facts, **current_facts()})
    try:
        yield
    finally:
        _FACTS.reset(token)


def current_facts() -> Mapping[str, str]:
    """Return the facts that the blocks of `adding_facts` around this call add."""
    return _FACTS.get() or {}
