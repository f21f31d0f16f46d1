"""The threshold of the l1 projection on the GPU: one program per row and head, nothing is sorted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

TILE = 128  # edges read together


@triton.jit
def _threshold(size, rowptr, limit, found, H, B: tl.constexpr):
    """θ = (sum − R) / count over the entries above θ, until no more fall below it; see `balls`."""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = tl.load(rowptr + i), tl.load(rowptr + i + 1)
    bound = tl.load(limit + i)
    theta, answer = tl.full([], -1.0, dtype=tl.float64), tl.full([], 0.0, dtype=tl.float64)
    count, going = tl.full([], 0, dtype=tl.int32), tl.full([], 1, dtype=tl.int32)
    while going > 0:
        sums, many = tl.zeros([B], dtype=tl.float64), tl.zeros([B], dtype=tl.int32)
        for start in range(first, last, B):
            e = start + tl.arange(0, B)
            v = tl.load(size + e * H + h, mask=e < last, other=-2.0).to(tl.float64)
            over = v > theta
            over = over & (e < last)
            sums += tl.where(over, v, 0.0)
            many += over.to(tl.int32)
        total, above = tl.sum(sums, axis=0), tl.sum(many, axis=0)
        ended = (above == 0) | ((above >= count) & (count > 0)) | ((count == 0) & (total <= bound))
        going = tl.where(ended, 0, 1)
        theta = tl.where(ended, theta, (total - bound) / tl.maximum(above, 1))
        answer = tl.where(ended, answer, theta)
        count = tl.where(ended, count, above)
    tl.store(found + i * H + h, answer)


def threshold(size: Tensor, rowptr: Tensor, limit: Tensor) -> Tensor:
    """θ of every row [N] or [N, H], float64, from absolute values [E] or [E, H] and radii `limit` [N]."""
    size, rows = size.contiguous(), rowptr.numel() - 1
    heads = 1 if size.dim() == 1 else size.shape[1]
    found = torch.zeros(rows, *size.shape[1:], dtype=torch.float64, device=size.device)
    if rows and heads:
        _threshold[(rows, heads)](size, rowptr.long(), limit.double().contiguous(), found, heads, B=TILE)
    return found
