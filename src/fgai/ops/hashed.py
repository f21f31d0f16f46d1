"""Random numbers that are a function of a seed on the device: alike everywhere, and new in every replay."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

STEP = -7046029254386353131
"""Between the states of neighbouring numbers: 2⁶⁴ over the golden ratio, made odd, as a signed word."""
ROUNDS = ((30, -4658895280553007687), (27, -7723592293110705685))
"""SplitMix64: xor with the word shifted right by so much, then multiply."""


class Hashed:
    """A stream of random numbers in place of a `torch.Generator`.

    A generator on the CPU draws the same numbers for every device but has to send them there; one on the
    device draws others, and its place in a captured step is shared with dropout. Here number n of the stream
    is a hash of seed and n, computed where the seed is.

    Args:
        seed: one int64 on the device where numbers are wanted; may change from replay to replay.

    Example:
        >>> Hashed(torch.tensor(1)).rand(2).shape
        torch.Size([2])
    """

    def __init__(self, seed: Tensor) -> None:
        self.seed, self.drawn = seed, 0

    def rand(self, size: int) -> Tensor:
        """Return the next numbers, uniform in [0, 1), float64."""
        first, self.drawn = self.drawn + 1, self.drawn + size
        places = torch.arange(first, first + size, device=self.seed.device)
        word = _mixed(_mixed(self.seed) + places * STEP)
        return _shifted(word, 11).double() * 2.0**-53

    def randn(self, size: int) -> Tensor:
        """Return the next numbers, normal, float64."""
        radius = (-2 * torch.log1p(-self.rand(size))).sqrt()
        return radius * torch.cos(2 * pi * self.rand(size))


def _mixed(word: Tensor) -> Tensor:
    for by, factor in ROUNDS:
        word = (word ^ _shifted(word, by)) * factor
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left."""
    return (word >> by) & ((1 << (64 - by)) - 1)
