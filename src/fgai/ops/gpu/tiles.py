"""Sizes of tiles, and pieces of the kernels on the GPU: loads of tiles, scores, dropout by position."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _wide_sizes(heads: int, channels: int, least: int, most: int, tile: int) -> dict[str, int]:
    """Compile-time sizes of tiles [BE, BH, BC] of about `tile` numbers, `least` to `most` edges each."""
    high, wide = _power(heads), _power(channels)
    block = max(least, min(most, tile // (high * wide)))
    return {"H": heads, "C": channels, "BH": high, "BC": wide, "BE": block}


def _narrow_sizes(heads: int, tile: int) -> dict[str, int]:
    """Compile-time sizes of tiles [BE, BH] of about `tile` numbers."""
    high = _power(heads)
    return {"H": heads, "BH": high, "BE": max(16, tile // high)}


@triton.jit
def _mix(x):
    """Scramble 32 bits as `fgai.ops.reference` does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def factor(position, seed, LIMIT: tl.constexpr, SCALE: tl.constexpr, kind: tl.constexpr):
    """0 or SCALE for every position (int64), see `fgai.ops.reference`."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    x = _mix((position & 0xFFFFFFFF).to(tl.uint32) + low)
    spread = ((position >> 32).to(tl.uint32) + low) * 0x9E3779B9
    return (_mix(x ^ high ^ spread) >= LIMIT).to(kind) * SCALE


@triton.jit
def inside(h, c, H: tl.constexpr, C: tl.constexpr):
    """Which of the [BH, BC] entries exist."""
    return (h[:, None] < H) & (c[None, :] < C)


@triton.jit
def wide(pointer, node, h, c, live, H: tl.constexpr, C: tl.constexpr):
    """Rows [BE, BH, BC] of a [N, H, C] array."""
    where = node[:, None, None] * (H * C) + h[None, :, None] * C + c[None, None, :]
    return tl.load(pointer + where, mask=live[:, None, None] & inside(h, c, H, C)[None, :, :], other=0.0)


@triton.jit
def one(pointer, node, h, c, H: tl.constexpr, C: tl.constexpr):
    """One row [BH, BC] of a [N, H, C] array."""
    return tl.load(pointer + node * (H * C) + h[:, None] * C + c[None, :], mask=inside(h, c, H, C), other=0.0)


@triton.jit
def narrow(pointer, node, h, live, H: tl.constexpr):
    """Rows [BE, BH] of a [N, H] array."""
    return tl.load(pointer + node[:, None] * H + h[None, :], mask=live[:, None] & (h[None, :] < H), other=0.0)


@triton.jit
def _leaky(z, SLOPE: tl.constexpr):
    """Leaky relu."""
    return tl.where(z > 0, z, z * SLOPE)


@triton.jit
def _wide_score(other, mine, weight, SLOPE: tl.constexpr, RATE: tl.constexpr, SCORE: tl.constexpr):
    """The dynamic (1) or dot-product (2) score of tiles [BE, BH, BC] with one row [BH, BC]."""
    if SCORE == 1:
        s = tl.sum(weight[None, :, :] * _leaky(other + mine[None, :, :], SLOPE), axis=2)
    else:
        s = tl.sum(other * mine[None, :, :], axis=2) * RATE
    return s


@triton.jit
def _add_pieces(split_row, split_slot, parts, out, D, BD: tl.constexpr):
    """out[row] = Σ of the parts [slots, D] of each row in several pieces."""
    r = tl.program_id(0)
    row = tl.load(split_row + r).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], dtype=out.dtype.element_ty)
    begin, end = tl.load(split_slot + r).to(tl.int64), tl.load(split_slot + r + 1).to(tl.int64)
    for slot in range(begin, end):
        total += tl.load(parts + slot * D + d, mask=d < D, other=0.0)
    tl.store(out + row * D + d, total, mask=d < D)
