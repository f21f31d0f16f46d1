"""`Tap`, what is called on a layer's attention, and `Adapter`, what puts it into a layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from fgai.sparse import Adjacency

EdgeType = tuple[str, str, str]
"""Type of the source, name of the relation, type of the destination; as in PyG's `HeteroData`."""
NodeCount = int | tuple[int, int]
"""Nodes, or sources and destinations where these are numbered apart."""
Scores = Callable[[], Tensor]
"""Computes scores [E, H] when somebody wants them."""


class Tap(Protocol):
    """What an adapter calls, once per run of its layer, on the attention before dropout."""

    def __call__(
        self,
        attention: Tensor,
        source: Tensor,
        destination: Tensor,
        num_nodes: NodeCount,
        *,
        adjacency: Adjacency | None = None,
        scores: Scores | None = None,
        edge_type: EdgeType | None = None,
    ) -> Tensor:
        """Record `attention` and return the attention the layer must go on with.

        Args:
            attention: [E, H], after the softmax and before dropout; not detached.
            source: [E] int64, the node each message comes from.
            destination: [E] int64, the node it goes to. Any order, parallel edges allowed.
            num_nodes: N, the same for sources and destinations; both counts where they are numbered apart, as
                on edges between nodes of two types.
            adjacency: pass it where the edges are those of an `Adjacency`, in its order; saves sorting.
            scores: gives [E, H] before the softmax, where it can be known: neighbours are ranked by it.
            edge_type: of these edges, by a layer that calls the tap once for each type.

        Returns:
            [E, H] in the order given.
        """


Adapter = Callable[[Any, Tap], AbstractContextManager[None]]
"""(layer, tap) → context manager; inside it the layer calls `tap`, after it the layer is as before."""
