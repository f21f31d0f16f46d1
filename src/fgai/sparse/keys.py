"""One integer per edge: its identity, which survives every edit of the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.typed import typed

_LOW = 0xFFFFFFFF


@typed
def edge_keys(source: Tensor, destination: Tensor) -> Tensor:
    """Return one integer per edge, `destination · 2³² + source`, ordered as the edges are.

    The key does not depend on the number of nodes, so it survives every edit of the graph.
    """
    if source.shape != destination.shape or source.is_floating_point() or destination.is_floating_point():
        got = f"{tuple(source.shape)} and {tuple(destination.shape)}"
        raise InputError(f"`source` and `destination` must be integers, one of each per edge, got {got}")
    return (destination.long() << 32) | source.long()


@typed
def key_ends(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return source and destination of every key: the inverse of `edge_keys`.

    Example:
        >>> import torch
        >>> source, destination = key_ends(edge_keys(torch.tensor([7]), torch.tensor([2])))
        >>> source.tolist(), destination.tolist()
        ([7], [2])
    """
    if keys.dtype != torch.int64:
        raise InputError(f"`keys` must be int64, as `edge_keys` gives them, got {keys.dtype}")
    return keys & _LOW, keys >> 32


@typed
def edge_name(key: int) -> str:
    """Return "source → destination" for one edge key, for messages."""
    checks.whole(key, "key")
    return f"{key & _LOW} → {key >> 32}"
