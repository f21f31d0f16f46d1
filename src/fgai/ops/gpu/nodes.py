"""What the GPU computes node by node: the two halves of the additive score, and dropout."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.draws import odds
from fgai.ops.gpu.attend_parts import factor

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


def node_scores(values: Tensor, left_weight: Tensor, right_weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.node_scores`; one product with a block-diagonal matrix [H·C, 2 H]."""
    heads, channels = left_weight.shape
    same = torch.eye(heads, dtype=values.dtype, device=values.device)[:, None, :]
    both = torch.cat([left_weight[:, :, None] * same, right_weight[:, :, None] * same], 2)
    out = values.flatten(1) @ both.reshape(heads * channels, 2 * heads)
    return out[:, :heads], out[:, heads:]


@triton.jit
def _drop(given, out, seed, count, LIMIT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kind: tl.constexpr = given.dtype.element_ty
    numbers = tl.load(given + at, mask=at < count, other=0.0)
    tl.store(out + at, numbers * factor(at, tl.load(seed), LIMIT, SCALE, kind), mask=at < count)


def _dropped(given: Tensor, p: float, seed: Tensor) -> Tensor:
    given = given.contiguous()
    out, count = torch.empty_like(given), given.numel()
    limit, scale = odds(p)
    if count:
        _drop[(-(-count // 1024),)](given, out, seed, count, LIMIT=limit, SCALE=scale, BLOCK=1024)
    return out


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, p: float, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        return _dropped(given, p, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(gradients[0], ctx.p, ctx.saved_tensors[0]), None, None


def dropout(given: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """See `fgai.ops.reference.dropout`."""
    if not isinstance(seed, Tensor):
        seed = torch.tensor([seed], device=given.device)
    result: Tensor = _Dropout.apply(given, p, seed)
    return result
