"""One integer per edge: its identity, which survives every edit of the graph."""

from __future__ import annotations

from torch import Tensor

_LOW = 0xFFFFFFFF


def edge_keys(source: Tensor, destination: Tensor) -> Tensor:
    """Return one integer per edge, `destination · 2³² + source`, ordered as the edges are.

    The key does not depend on the number of nodes, so it survives every edit of the graph.
    """
    return (destination.long() << 32) | source.long()


def key_ends(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return source and destination of every key: the inverse of `edge_keys`.

    Example:
        >>> import torch
        >>> source, destination = key_ends(edge_keys(torch.tensor([7]), torch.tensor([2])))
        >>> source.tolist(), destination.tolist()
        ([7], [2])
    """
    return keys & _LOW, keys >> 32


def edge_name(key: int) -> str:
    """Return "source → destination" for one edge key, for messages."""
    return f"{key & _LOW} → {key >> 32}"
