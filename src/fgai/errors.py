"""The error and warning tree: everything fgai raises on purpose is an `FgaiError`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

__all__ = [
    "AttentionError", "BudgetError", "CheckpointError", "DataError", "DivergenceError", "FgaiError",
    "FgaiWarning", "InputError", "MissingExtraError", "RanksError", "ReliabilityWarning",
]  # fmt: skip

_INTERNAL = {"fgai", "contextlib", "functools", "numba", "torch", "torch_geometric"}
"""Packages whose frames may lie between the caller's line and a warning."""


class FgaiError(Exception):
    """Base of every error raised on purpose; the message says what was wrong and what to do."""


class InputError(FgaiError, ValueError):
    """An argument, a graph or a tensor does not satisfy what the function requires."""


class DataError(FgaiError):
    """A dataset is unknown, missing, truncated, of another format or unsafe to read."""


class CheckpointError(FgaiError):
    """A saved model or record cannot be read, or belongs to something else."""


class AttentionError(FgaiError):
    """Attention cannot be recorded, or two attentions on different edges were compared."""


class BudgetError(FgaiError, ValueError):
    """An attack budget is impossible, or an attack overspent it."""


class DivergenceError(FgaiError):
    """Training produced a value that is not finite; names the term that did."""


class RanksError(FgaiError):
    """Processes that train together have different settings, or one of them failed or was lost."""


class MissingExtraError(FgaiError, ImportError):
    """An optional dependency is not installed; the message holds the install line."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs `{package}`, which is not installed; run: pip install 'fgai[{extra}]'")


class FgaiWarning(UserWarning):
    """Base of every warning fgai gives."""


class ReliabilityWarning(FgaiWarning):
    """A number may not mean what it seems to; docs/reliability.md explains it under the heading `code`."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(f"[{code}] {message}")


_COLLECTED: ContextVar[list[Warning] | None] = ContextVar("collected warnings", default=None)


@contextmanager
def collect_warnings() -> Iterator[list[Warning]]:
    """Collect fgai's warnings of this thread inside the block instead of showing them; blocks may be nested.

    `warnings.catch_warnings` would change the filters of all threads. Repeat the warnings with `warn`.
    """
    notes: list[Warning] = []
    token = _COLLECTED.set(notes)
    try:
        yield notes
    finally:
        _COLLECTED.reset(token)


def warn(warning: Warning) -> None:
    """Give a warning at the caller's line: the innermost one outside fgai and the packages it calls."""
    notes = _COLLECTED.get()
    if notes is not None:
        notes.append(warning)
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL:
        frame = frame.f_back
    warnings.warn_explicit(
        warning,
        type(warning),
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


EXTRAS = {
    "anywidget": "notebook",
    "traitlets": "notebook",
    "captum": "explainers",
    "plotly": "report",
    "huggingface_hub": "hub",
    "pyarrow": "parquet",
}
"""Package → the extra of fgai that installs it."""


def extra(module: str) -> Any:
    """Import a module of an optional package; raise `MissingExtraError` if it is not installed."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(package, EXTRAS[package]) from error
