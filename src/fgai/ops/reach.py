"""What a pass over part of a graph has to find: kernels that know it leave out the rest."""

from __future__ import annotations

from typing import NamedTuple

from fgai.cache import cached_on
from fgai.sparse import Adjacency


class Reach(NamedTuple):
    """Which nodes of an adjacency matter.

    Attributes:
        moving: gradients are asked for of the nodes before this one alone; those of others may be zeros.
        filled: nodes from this one on have no incoming edges.
    """

    moving: int
    filled: int


def set_reach(adjacency: Adjacency, moving: int, filled: int) -> None:
    """Say once which nodes of an adjacency matter, see `Reach`; copies of it do not know."""
    cached_on(adjacency, "ops reach", lambda: Reach(moving, filled))


def reach_of(adjacency: Adjacency) -> Reach:
    """Return what was said of an adjacency; all of its nodes matter where nothing was."""
    return cached_on(adjacency, "ops reach", lambda: Reach(adjacency.num_nodes, adjacency.num_nodes))
