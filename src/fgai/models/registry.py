"""Models by name: what training, checkpoints, the command line and the experiments read."""

from __future__ import annotations

from typing import Any, TypeVar

from fgai.errors import InputError
from fgai.models.base import AttentionModel
from fgai.typed import typed

K = TypeVar("K", bound=type[AttentionModel])

MODELS: dict[str, type[AttentionModel]] = {}
"""Networks by class name."""


@typed
def register_model(kind: K) -> K:
    """Make a network known by the name of its class; a decorator.

    From then on it is built, trained, defended, saved and loaded by name, like fgai's own. Its constructor
    takes `in_channels`, `out_channels` and keyword arguments and keeps them in `config`; `_sizes` chooses
    those that depend on the data.

    Args:
        kind: a subclass of `AttentionModel`. The same class defined once more replaces the earlier one.

    Raises:
        InputError: it is no such class, or another one has its name.

    Example:
        >>> from fgai.models import GAT
        >>> @register_model
        ... class WideGAT(GAT):
        ...     @classmethod
        ...     def _sizes(cls, graph, task):
        ...         return {**super()._sizes(graph, task), "hidden_channels": 32}
        >>> MODELS.pop("WideGAT") is WideGAT
        True
    """
    register(kind, kind.__name__ if isinstance(kind, type) else "", MODELS)
    return kind


def register(kind: type[AttentionModel], name: str, known: dict[str, Any]) -> None:
    """Enter a model class into a table under a name; see `register_model`."""
    if not isinstance(kind, type) or not issubclass(kind, AttentionModel):
        raise InputError(f"`kind` must be a subclass of `fgai.models.AttentionModel`, got {kind!r}")
    other = known.get(name, kind)
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise InputError(f"{name!r} is {other.__module__}.{other.__qualname__} already; choose another name")
    known[name] = kind
