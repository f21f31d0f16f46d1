"""Kernels compiled by numba and cached on disk; damaged files are compiled again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from fgai.errors import FgaiWarning, warn

REBUILT: list[str] = []  # kernels that this process compiled again, since their cached code was damaged
_DAMAGED = "stored code of the kernels is damaged and compiled again, which takes a while; see `fgai doctor`"


class _Store:
    """numba's cache of one kernel; code that cannot be read (a killed process, a full disk) is missing."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        try:
            return self._store.load_overload(signature, target)
        except Exception as error:  # damaged bytes raise anything when unpickled
            if not REBUILT:
                warn(FgaiWarning(f"{_DAMAGED} ({type(error).__name__})"))
            REBUILT.append(self._name)
            self._store.flush()
            return None


def compiled(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a function by `njit` on first use, without the interpreter's lock, and cache it on disk."""
    if function is None:
        return lambda inner: compiled(inner, **options)
    kernel = njit(**{"cache": True, "nogil": True, **options})(function)
    if hasattr(kernel, "_cache"):  # not with NUMBA_DISABLE_JIT, which leaves the function as it is
        kernel._cache = _Store(kernel._cache, f"{function.__module__}.{function.__qualname__}")
    return kernel
