"""Edges of one graph found again in another: through the map of an edit, or by their keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fgai.errors import AttentionError, InputError
from fgai.typed import typed


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

    def pair(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of two edge vectors that belong to the edges that stayed.

        Raises:
            AttentionError: if a vector is not as long as its graph has edges.
        """
        if old.shape[0] != self.num_before or new.shape[0] != self.num_after:
            raise AttentionError(
                f"expected one value per edge ({self.num_before} before, {self.num_after} after),"
                f" got {old.shape[0]} and {new.shape[0]}; were they computed on other graphs?"
            )
        return old[self.before], new[self.after]


@typed
def match_edges(keys_a: Tensor, keys_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions (ia, ib) of the edges that two sorted key vectors share, in key order.

    Raises:
        AttentionError: if a vector is not strictly increasing (parallel edges have no single partner).
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
