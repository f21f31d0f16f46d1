"""Kernels compiled by numba and kept on disk; what cannot be read there any more is compiled again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from fgai.errors import FgaiWarning, warn

REBUILT: list[str] = []
"""Kernels whose stored code was found damaged by this process, and was made anew."""
_DAMAGED = "stored code of the kernels is damaged and compiled again, which takes a while; see `fgai doctor`"


class _Store:
    """numba's store of one kernel, which treats code that cannot be read as code that is not there.

    A process that is killed while it writes, or a full disk, leaves files that numba stops at.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Return the stored code, or None for numba to compile it."""
        try:
            return self._store.load_overload(signature, target)
        except Exception as error:  # whatever damaged bytes make of unpickling
            if not REBUILT:
                warn(FgaiWarning(f"{_DAMAGED} ({type(error).__name__})"))
            REBUILT.append(self._name)
            self._store.flush()
            return None


def compiled(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a function on first use, without the interpreter's lock, and keep the machine code on disk.

    Args:
        function: what to compile; without it, a decorator with these options is returned.
        **options: of numba's `njit`.
    """
    if function is None:
        return lambda given: compiled(given, **options)
    made = njit(**{"cache": True, "nogil": True, **options})(function)
    if hasattr(made, "_cache"):  # not with NUMBA_DISABLE_JIT, which leaves the function as it is
        made._cache = _Store(made._cache, f"{function.__module__}.{function.__qualname__}")
    return made
