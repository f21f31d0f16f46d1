"""The cut of a top-k set: the last value in it and where it stands."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Cut(NamedTuple):
    """Where the top-k of every row ends.

    Attributes:
        level: [N] the smallest value in the set; −inf where the whole row is in it.
        spot: [N] int32, the position of the last edge in the set among those of that value; the largest
            number there is where the whole row is in it.
    """

    level: Tensor
    spot: Tensor
