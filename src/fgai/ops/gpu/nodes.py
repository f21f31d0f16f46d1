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
from fgai.ops.gpu.attend_parts import factor, inside, narrow, one, wide

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


# Numbers in a tile of nodes × heads × channels, and programs that share the nodes in the backward pass.
TILE = 2048
PROGRAMS = 1024


@triton.jit
def _halves(values, left_weight, right_weight, left, right, N, H: tl.constexpr, C: tl.constexpr,
            BH: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    live = n < N
    v = wide(values, n, h, c, live, H, C)
    at, good = n[:, None] * H + h[None, :], live[:, None] & (h[None, :] < H)
    tl.store(left + at, tl.sum(v * one(left_weight, 0, h, c, H, C)[None, :, :], axis=2), mask=good)
    tl.store(right + at, tl.sum(v * one(right_weight, 0, h, c, H, C)[None, :, :], axis=2), mask=good)


@triton.jit
def _halves_back(values, left_weight, right_weight, d_left, d_right, d_values, shares, N, blocks, step,
                 H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
                 BN: tl.constexpr):  # fmt: skip
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    inner, fits = h[:, None] * C + c[None, :], inside(h, c, H, C)
    kind: tl.constexpr = values.dtype.element_ty
    share_left, share_right = tl.zeros([BH, BC], dtype=kind), tl.zeros([BH, BC], dtype=kind)
    left, right = one(left_weight, 0, h, c, H, C), one(right_weight, 0, h, c, H, C)
    for block in range(tl.program_id(0), blocks, step):
        n = (block * BN + tl.arange(0, BN)).to(tl.int64)
        live = n < N
        v = wide(values, n, h, c, live, H, C)
        dl, dr = narrow(d_left, n, h, live, H), narrow(d_right, n, h, live, H)
        flow = dl[:, :, None] * left[None, :, :] + dr[:, :, None] * right[None, :, :]
        where = n[:, None, None] * (H * C) + inner[None, :, :]
        tl.store(d_values + where, flow, mask=live[:, None, None] & fits[None, :, :])
        share_left += tl.sum(dl[:, :, None] * v, axis=0)
        share_right += tl.sum(dr[:, :, None] * v, axis=0)
    at = shares + tl.program_id(0).to(tl.int64) * (2 * H * C) + inner
    tl.store(at, share_left, mask=fits)
    tl.store(at + H * C, share_right, mask=fits)


class _NodeScores(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, left_weight: Tensor, right_weight: Tensor) -> tuple[Tensor, Tensor]:
        values, left_weight, right_weight = (t.contiguous() for t in (values, left_weight, right_weight))
        count, heads, channels = values.shape
        high, wide_ = triton.next_power_of_2(heads), triton.next_power_of_2(channels)
        rows = max(1, TILE // (high * wide_))
        ctx.sizes = {"H": heads, "C": channels, "BH": high, "BC": wide_, "BN": rows}
        ctx.save_for_backward(values, left_weight, right_weight)
        left, right = (values.new_empty(count, heads) for _ in range(2))
        if count:
            _halves[(-(-count // rows),)](values, left_weight, right_weight, left, right, count, **ctx.sizes)
        return left, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, left_weight, right_weight = ctx.saved_tensors
        d_left, d_right = (g.contiguous() for g in gradients)
        count, d_values = len(values), torch.empty_like(values)
        blocks = -(-count // ctx.sizes["BN"])
        step = min(blocks, PROGRAMS)
        shares = values.new_empty(step, 2, *left_weight.shape)
        if count:
            _halves_back[(step,)](
                values, left_weight, right_weight, d_left, d_right, d_values, shares, count, blocks, step,
                **ctx.sizes,
            )  # fmt: skip
        d_weights = shares.sum(0)
        return d_values, d_weights[0], d_weights[1]


def node_scores(values: Tensor, left_weight: Tensor, right_weight: Tensor) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.node_scores`; both halves in one pass over the nodes."""
    result: tuple[Tensor, Tensor] = _NodeScores.apply(values, left_weight, right_weight)
    return result


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
        seed = torch.full((1,), seed, device=given.device)  # no copy from the host: it could not be captured
    result: Tensor = _Dropout.apply(given, p, seed)
    return result
