"""One integer per edge, its identity, which survives every edit of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import AttentionError, InputError
from fgai.typed import typed

_LOW = 0xFFFFFFFF


@typed
def edge_keys(source: Tensor, destination: Tensor) -> Tensor:
    """One integer per edge, `destination · 2³² + source`, whatever the number of nodes."""
    if source.shape != destination.shape or source.is_floating_point() or destination.is_floating_point():
        got = f"{tuple(source.shape)} and {tuple(destination.shape)}"
        raise InputError(f"`source` and `destination` must be integers, one of each per edge, got {got}")
    return (destination.long() << 32) | source.long()


@typed
def key_ends(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Source and destination of every key: the inverse of `edge_keys`.

    Example:
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


@typed
@dataclass(frozen=True)
class EdgeMap:
    """Which edges of a graph stayed after an edit, and where they are now.

    Attributes:
        before: [K] int64, positions in the old graph.
        after: [K] int64, positions of the same edges in the new graph.
        num_before: edges of the old graph.
        num_after: edges of the new graph.
    """

    before: Tensor
    after: Tensor
    num_before: int
    num_after: int


@typed
def match_edges(keys_a: Tensor, keys_b: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (ia, ib) of the edges that two sorted key vectors share, in key order.

    Raises:
        AttentionError: a vector is not strictly increasing (parallel edges have no single partner).
        InputError: something else than keys, int64 [E].
    """
    for name, keys in (("keys_a", keys_a), ("keys_b", keys_b)):
        if keys.dim() != 1 or keys.dtype != torch.long:
            raise InputError(f"`{name}` must be int64 [E], got {keys.dtype} {list(keys.shape)}")
        if keys.numel() > 1 and not bool((keys[1:] > keys[:-1]).all()):
            raise AttentionError("edges can only be matched when sorted and free of duplicates; use `Graph`")
    if keys_b.numel() == 0 or keys_a.numel() == 0:
        empty = torch.zeros(0, dtype=torch.long, device=keys_a.device)
        return empty, empty
    spot = torch.searchsorted(keys_b, keys_a).clamp(max=keys_b.numel() - 1)
    ia = (keys_b[spot] == keys_a).nonzero().flatten()
    return ia, spot[ia]
