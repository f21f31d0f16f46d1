"""Clipping rows to a range per channel, on the CPU: one pass, which also tells what it moved."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import array
from fgai.ops.cpu.rows import kernel

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_ROWS = 256


@kernel
def _clip_block(b, nodes, width, x, low, high, out, inside, noted, moved):
    count = 0
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        at = n * width
        for k in range(width):
            given = x[at + k]
            said = given if given >= low[k] else low[k]  # NaN is not, so it becomes the lower end
            said = high[k] if said > high[k] else said
            out[at + k] = said
            same = said == given
            count += not same
            if noted:
                inside[at + k] = same
    moved[b] = count


@kernel
def _clip(threads, nodes, width, x, low, high, out, inside, noted, moved):
    arguments = (nodes, width, x, low, high, out, inside, noted, moved)
    run_blocks(_clip_block, threads, (nodes + _ROWS - 1) // _ROWS, arguments)


@kernel
def _mask_block(b, count, size, gradient, inside, out):
    for k in range(b * size, min((b + 1) * size, count)):
        out[k] = gradient[k] if inside[k] else 0.0


@kernel
def _mask(threads, count, size, gradient, inside, out):
    run_blocks(_mask_block, threads, (count + size - 1) // size, (count, size, gradient, inside, out))


def clip_rows(
    x: Tensor, low: Tensor, high: Tensor, out: Tensor, *, noted: bool = False
) -> tuple[Tensor | None, int]:
    """Write `x` [N, ...] with every row moved into `[low, high]` [...] to `out`, which may be `x` itself.

    Returns:
        Where numbers were inside, [N, ...] bool, if that is to be `noted`; and how many were not.
    """
    rows, blocks = x.shape[0], -(-x.shape[0] // _ROWS)
    moved = np.zeros(max(1, blocks), np.int64)
    inside = torch.empty(x.shape if noted else (1,), dtype=torch.bool)
    flat = [part.detach().numpy().reshape(-1) for part in (x, low, high, out, inside)]
    _clip(threads_for(blocks), rows, low.numel(), *flat, noted, moved)
    return inside if noted else None, int(moved.sum())


def masked(gradient: Tensor, inside: Tensor) -> Tensor:
    """Return `gradient` where `inside`, 0 elsewhere."""
    given, size = array(gradient).reshape(-1), 16_384
    out = torch.empty(gradient.shape, dtype=gradient.dtype)
    count = given.size
    _mask(
        threads_for(-(-count // size)),
        count,
        size,
        given,
        inside.numpy().reshape(-1),
        out.numpy().reshape(-1),
    )
    return out
