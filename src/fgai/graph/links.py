"""`Links`: pairs of nodes to be told apart into links and others, with their parts of the split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.typed import typed

PARTS = ("train", "val", "test")


@typed
@dataclass(frozen=True, eq=False)
class Links:
    """Pairs of nodes a link predictor scores.

    Attributes:
        pairs: [2, L] int64, each pair once, in either order.
        y: [L] int64, 1 for a link, 0 for a pair that is none, -1 where nobody says.
        part: [L] int64, 0 for training, 1 for validation, 2 for test.

    Example:
        >>> links = Links(torch.tensor([[0, 1], [2, 3]]), torch.tensor([1, 0]), torch.tensor([0, 2]))
        >>> links.rows("test").tolist(), len(links)
        ([1], 2)
    """

    pairs: Tensor
    y: Tensor
    part: Tensor

    def __post_init__(self) -> None:
        if self.pairs.dim() != 2 or self.pairs.shape[0] != 2:
            raise InputError(f"`pairs` must have shape [2, links], got {tuple(self.pairs.shape)}")
        count = self.pairs.shape[1]
        for name in ("y", "part"):
            if getattr(self, name).shape != (count,):
                got = tuple(getattr(self, name).shape)
                raise InputError(f"`{name}` must have one entry per pair ({count}), got {got}")
        for name in ("pairs", "y", "part"):
            if getattr(self, name).is_floating_point():
                raise InputError(f"`{name}` must hold integers, got {getattr(self, name).dtype}")

    def __len__(self) -> int:
        return int(self.pairs.shape[1])

    def rows(self, targets: str) -> Tensor:
        """Positions of the pairs of a part: `train`, `val`, `test`, or `fit` for training and validation."""
        if targets == "fit":
            return (self.part < 2).nonzero().flatten()
        return (self.part == PARTS.index(targets)).nonzero().flatten()

    def ends(self, targets: str) -> Tensor:
        """The nodes at the ends of the pairs of a part, each once."""
        ends: Tensor = torch.unique(self.pairs[:, self.rows(targets)])
        return ends

    def take(self, rows: Tensor) -> Links:
        """Return some of the pairs."""
        return Links(self.pairs[:, rows], self.y[rows], self.part[rows])

    def join(self, other: Links) -> Links:
        """Return these pairs and then those of `other`."""
        return Links(
            torch.cat([self.pairs, other.pairs], dim=1),
            torch.cat([self.y, other.y]),
            torch.cat([self.part, other.part]),
        )

    @property
    def device(self) -> torch.device:
        """Where the pairs live."""
        return self.pairs.device

    def to(self, device: torch.device | str) -> Links:
        """Return the pairs on `device`."""
        device = checks.device(device)
        return replace(self, pairs=self.pairs.to(device), y=self.y.to(device), part=self.part.to(device))
