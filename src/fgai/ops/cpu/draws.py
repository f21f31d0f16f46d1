"""Dropout by position (see `fgai.ops.reference`) on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import hash_factors
from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import array
from fgai.ops.cpu.rows import kernel, piece
from fgai.ops.reference import odds

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_CHUNK = 1 << 14


@piece
def _mix(x):
    """Scramble 32 bits; every input bit flips every output bit with probability close to ½."""
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@piece
def factor(position, seed, limit, scale):
    """0 or `scale`: what the number at `position` is multiplied with; `limit` = p · 2³².

    Both outcomes are at hand, so the compiler selects instead of branching: a coin toss cannot be predicted.
    """
    low = np.uint32(seed)
    x = _mix(np.uint32(np.uint32(position) + low))
    spread = np.uint32(np.uint32(low + np.uint32(position >> 32)) * np.uint32(0x9E3779B9))
    x = _mix(np.uint32(x ^ np.uint32(seed >> 32) ^ spread))
    return scale if x >= limit else scale - scale


@piece
def factors(position, seed, limit, scale):
    """`factor` for eight positions in a row, as lanes."""
    return hash_factors(position, seed, limit, scale)


@kernel
def _drop_block(b, given, seed, limit, scale, out):
    for k in range(b * _CHUNK, min((b + 1) * _CHUNK, len(given))):
        out[k] = given[k] * factor(k, seed, limit, scale)


@kernel
def _drop(threads, given, seed, limit, scale, out):
    run_blocks(_drop_block, threads, (len(given) + _CHUNK - 1) // _CHUNK, (given, seed, limit, scale, out))


def _dropped(given: Any, seed: int, p: float) -> Tensor:
    out = np.empty_like(given)
    limit, scale = odds(p)
    threads = threads_for(given.size // _CHUNK + 1)
    _drop(threads, given.reshape(-1), seed, np.uint32(limit), given.dtype.type(scale), out.reshape(-1))
    return from_numpy(out)


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, p: float, seed: int) -> Tensor:
        ctx.options = seed, p
        return _dropped(array(given), seed, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(array(gradients[0]), *ctx.options), None, None


def dropout(given: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Set each number to 0 with probability `p` and scale the rest by 1 / (1 - p); no mask is stored."""
    result: Tensor = _Dropout.apply(given, p, int(seed))
    return result
