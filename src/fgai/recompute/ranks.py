"""What neighbours are ranked by after a change: only edges with a changed end are scored again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fgai.attention import SplitLayer
from fgai.ops.reach import set_reach
from fgai.recompute.patch import Patch, Sides
from fgai.sparse import Adjacency


class Ranks(NamedTuple):
    """The scores of a patch's edges, mean over the heads.

    Attributes:
        still: [E'] before the change; 0 for edges that are new.
        moved: [M] edges of the patch whose score may be another: new ones, and those with a changed end.
        adjacency: these edges alone, among all nodes of the patch.
    """

    still: Tensor
    moved: Tensor
    adjacency: Adjacency

    @classmethod
    def of(cls, patch: Patch, clean: Tensor) -> Ranks:
        """Find the edges to score again.

        Args:
            patch: whole.
            clean: [E] what neighbours are ranked by in the clean graph.
        """
        new = patch.positions < 0
        return cls._with(patch, clean[patch.positions.clamp(min=0)].masked_fill(new, 0.0))

    @classmethod
    def _with(cls, patch: Patch, still: Tensor) -> Ranks:
        edges = patch.adjacency
        ends = torch.minimum(edges.source, edges.destination)
        moved = ((ends < patch.changed) | (patch.positions < 0)).nonzero().flatten()
        some = Adjacency.from_sorted(edges.source[moved], edges.destination[moved], edges.num_nodes)
        set_reach(some, moving=patch.changed, filled=patch.touched)
        return cls(still, moved, some)

    def repeated(self, copies: Patch, places: Tensor) -> Ranks:
        """Return the same for copies of the patch, whose edges stand at `places` [copies, E']."""
        still = self.still.new_empty(places.numel())
        still[places] = self.still
        return self._with(copies, still)

    def __call__(self, layer: SplitLayer, joined: Sides) -> Tensor:
        """Return the scores [E'] from what all nodes of the patch say; gradients come from moved edges."""
        found = layer.mean_scores(*joined[:2], self.adjacency)
        return self.still.index_copy(0, self.moved, found)
