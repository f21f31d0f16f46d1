"""Dropout by position: whether a number stays depends on its position and one seed, on every device alike.

No mask is stored, forward and backward draw the same, and the result depends neither on the number of threads
nor on the kernel that computes it. The draw is a 32-bit hash of the position, mixed twice with the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> int | Tensor:
    """Draw a seed of 62 bits from torch's generator.

    On the GPU it is a tensor [1] made there: nothing waits for it, and a captured CUDA graph draws a new one
    each time it is replayed. On the CPU it is a number.
    """
    if device.type == "cuda":
        return torch.randint(1 << 62, (1,), device=device, generator=generator)
    return int(torch.randint(1 << 62, (), generator=generator))


def odds(p: float) -> tuple[int, float]:
    """Return (limit, scale) for a rate `p` in [0, 1): draws below limit go, the rest are scaled."""
    return min(round(p * 2**32), _LOW), 1.0 / (1.0 - p)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def factors(shape: torch.Size, p: float, seed: int | Tensor, like: Tensor) -> Tensor:
    """Return what each number of a tensor of this `shape` is multiplied with: 0 or 1 / (1 - p)."""
    limit, scale = odds(p)
    position = torch.arange(shape.numel(), device=like.device)
    low, high = seed & _LOW, seed >> 32
    x = _mix((position + low) & _LOW)
    # The low half counts twice: alone in the sum, neighbouring seeds would draw the same, one position apart.
    x = _mix(x ^ high ^ (((low + (position >> 32)) * 0x9E3779B9) & _LOW))
    return ((x >= limit).to(like.dtype) * scale).view(shape)
