"""Optimisers of a search: how a point moves along its gradient.

All state lives in tensors that stay in place, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

FIRST, SECOND, TINY = 0.9, 0.999, 1e-8


class Optimiser(Protocol):
    """Moves points uphill, each by itself."""

    def move(self, gradient: Tensor) -> Tensor:
        """Return the steps [B, M, F] to add to the points."""


class Sign:
    """Steps of one size in every coordinate, in the direction of the gradient's sign.

    Args:
        like: the points [B, M, F].
        rate: [B, 1, 1] the size.
    """

    def __init__(self, like: Tensor, rate: Tensor) -> None:
        self.rate = rate

    def move(self, gradient: Tensor) -> Tensor:
        """Return `rate · sign(gradient)`."""
        return self.rate * gradient.sign()


class Adam:
    """Adam, uphill.

    Args:
        like: the points [B, M, F].
        rate: [B, 1, 1] the learning rate.
    """

    def __init__(self, like: Tensor, rate: Tensor) -> None:
        self.rate = rate
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.turn = like.new_zeros(())

    def move(self, gradient: Tensor) -> Tensor:
        """Return Adam's step and remember the gradient's moments."""
        self.turn.add_(1)
        self.first.mul_(FIRST).add_(gradient, alpha=1 - FIRST)
        self.second.mul_(SECOND).addcmul_(gradient, gradient, value=1 - SECOND)
        mean = self.first / (1 - FIRST**self.turn)
        spread = (self.second / (1 - SECOND**self.turn)).sqrt()
        return self.rate * mean / (spread + TINY)


class Momentum:
    """Signed steps along a running mean of gradients, each divided by its own l1 norm (MI-FGSM).

    Args:
        like: the points [B, M, F].
        rate: [B, 1, 1] the size.
    """

    def __init__(self, like: Tensor, rate: Tensor) -> None:
        self.rate, self.mean = rate, torch.zeros_like(like)

    def move(self, gradient: Tensor) -> Tensor:
        """Return the step and remember the direction."""
        self.mean.mul_(FIRST).add_(gradient / gradient.abs().mean((-2, -1), keepdim=True).clamp(min=1e-30))
        return self.rate * self.mean.sign()


class Beside:
    """Points side by side, each moved by its own optimiser.

    Args:
        parts: how many points each moves, in their order.
    """

    def __init__(self, parts: Sequence[tuple[int, Optimiser]]) -> None:
        self.sizes, self.optimisers = [size for size, _ in parts], [one for _, one in parts]

    def move(self, gradient: Tensor) -> Tensor:
        """Return the steps of all."""
        parts = zip(self.optimisers, torch.split(gradient, self.sizes), strict=True)
        return torch.cat([optimiser.move(part) for optimiser, part in parts])


OPTIMISERS: dict[str, type[Sign] | type[Adam] | type[Momentum]] = {
    "sign": Sign,
    "adam": Adam,
    "momentum": Momentum,
}
