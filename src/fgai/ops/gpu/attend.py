"""Fused attention on the GPU; the attention is a second result on request.

Forward (score → softmax → dropout → aggregate), a program loops once over the incoming edges of a piece of a
row, with a running maximum m and sum l,

    m' = max(m, s_e),  l' = l exp(m - m') + Σ exp(s_e - m'),  o' = o exp(m - m') + Σ exp(s_e - m') keep_e v_j,

and stores lse = m + log l per node. The attention exp(s_e - lse_i) is written only on request.

Backward, the attention is computed again. Over outgoing edges, with d = ∂out and δ_i = ⟨d_i, o_i⟩ +
Σ_e a_e ∂a_e,

    ∂v_j = Σ keep_e a_e d_i,     ∂s_e = a_e (keep_e ⟨d_i, v_j⟩ + ∂a_e - δ_i),

then over incoming edges the gradient at the destinations. No atomics: each sum is computed by one program, in
edge order. If few nodes need gradients (`active_rows`), `_sources` visits the edges out of them only, and
`_part_destinations_kernel` those into them, which computes ∂s again. A bias [H, C] is added to the result in
place and subtracted again where δ needs o: one array less is kept.

Arguments of the kernels: row, first, last, slot are the pieces of rows (`fgai.ops.gpu.plan.Work`); `near`
of the destinations and `far` of the sources are [N, H] for the additive score, else [N, H, C]; `weight` [H,
C] is read for the dynamic score only; values, out and their gradients are [N, H, C], lse and delta [N, H],
attention and d_scores [E, H]; `*_parts` hold the results of the pieces of a split row, by slot. H and C are
the true sizes; a program computes BH heads (those of `program_id(1)`) of BC channels, powers of two, as
Triton's tiles must be, and BE edges at a time. SCORE is 0 additive, 1 dynamic, 2 dot.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.gpu.plan import (
    _add_parts,
    _factor,
    _head_tile,
    _heads,
    _inside,
    _leaky,
    _load_heads,
    _load_row,
    _load_rows,
    _row_scores,
    _row_tile,
    _seed_tensor,
    _wide,
    _zeros_after,
    incoming,
    outgoing,
)
from fgai.ops.reference import ADDITIVE, DOT, DYNAMIC, Options, Score, _limit_and_scale
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import active_rows

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

ALL, MEAN = 1, 2  # return the attention of every head, or the mean over the heads; 0 for none
PROGRAMS = 4096  # number of programs for a gradient that is summed over all rows


def _sizes(heads: int, channels: int, score: int, backward: bool = True) -> dict[str, int]:
    """Sizes measured on an H200: four edges at a time, eight where the row is of middle size.

    One warp computes a tile, unless rows are very wide: several would wait for each other in every step. The
    dynamic score, the longest computation, loads one step ahead. Where whole rows of every edge are scored,
    programs take about 128 numbers of a row, except in the backward pass of the dynamic score.
    """
    row, group = heads * channels, heads
    if row > 128 and score != ADDITIVE and not (backward and score == DYNAMIC):
        group = max(1, min(heads, 128 // channels))
    edges = 8 if group == heads > 1 and 128 <= row <= 256 else 4
    sizes = _row_tile(group, channels, edges, 32, 256)
    warps = max(1, min(8, sizes["BE"] * sizes["BH"] * sizes["BC"] // 4096))
    stages = 2 if score == DYNAMIC and row > 128 else 1
    return {**sizes, "H": heads, "STAGES": stages, "num_warps": warps}


def _grid(programs: int, sizes: dict[str, int]) -> tuple[int, int]:
    """Programs of each group of heads, group after group, so that less has to fit into the cache at once."""
    return programs, -(-sizes["H"] // sizes["BH"])


def _whole_rows(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name not in ("BE", "STAGES")}


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, near: Tensor, far: Tensor, weight: Tensor, values: Tensor, bias: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor]:
        adjacency, score, slope, p, seed, written, ctx.one = options
        near, far, weight, values = (t.contiguous() for t in (near, far, weight, values))
        heads, channels = values.shape[1:]
        limit, scale = _limit_and_scale(p)
        ctx.numbers = {"SLOPE": slope, "RATE": channels**-0.5, "SCORE": score}
        ctx.draws = {"LIMIT": limit, "SCALE": scale, "DROP": p > 0}
        ctx.adjacency, ctx.written = adjacency, written
        with_edges = active_rows(adjacency).with_edges
        work, sizes = incoming(adjacency, with_edges), _sizes(heads, channels, score, False)
        # The type in which sums are computed, and kept between kernels.
        wide = partial(values.new_empty, dtype=torch.promote_types(values.dtype, torch.float32))
        out, lse = _zeros_after(values, with_edges), wide(len(values), heads)
        attention = wide(adjacency.num_edges if written else 0, heads)
        tops, totals, parts = (wide(work.slots, heads, *more) for more in ((), (), (channels,)))
        if len(work.row):
            _forward[_grid(len(work.row), sizes)](
                *work.pieces, work.node, near, far, weight, values, out, lse, attention, tops, totals, parts,
                seed, **ctx.draws, **ctx.numbers, **sizes, WRITE=written > 0,
                SAME=far.data_ptr() == values.data_ptr() and score != ADDITIVE,
            )  # fmt: skip
        if work.slots:
            _join[_grid(len(work.split_row), sizes)](
                work.split_row, work.split_slot, tops, totals, parts, out, lse, **_whole_rows(sizes)
            )
        mean = wide(len(attention) if written == MEAN else 0, 1)
        keep = written == ALL or score != ADDITIVE
        if attention.numel():
            flat, count = _head_tile(heads, 1024), len(attention)
            _normalise[(-(-count // flat["BE"]),)](
                adjacency.index32.destination, lse, attention, mean, count,
                **flat, num_warps=4, KEEP=keep, MEAN=written == MEAN,
            )  # fmt: skip
        if not keep:
            attention = attention.new_empty(0, heads)  # the backward pass recomputes it
        if bias.numel():
            out += bias
        ctx.save_for_backward(near, far, weight, values, bias, out, lse, attention, seed)
        ctx.set_materialize_grads(False)
        return out, (mean if written == MEAN else attention).to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        near, far, weight, values, bias, out, lse, attention, seed = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # if no later pass reads them, each is freed after its last use here
        heads, channels = values.shape[1:]
        d_out = torch.zeros_like(out) if gradients[0] is None else gradients[0].contiguous()
        d_attention = attention if gradients[1] is None else gradients[1].contiguous()
        mode = 0 if gradients[1] is None or not d_attention.numel() else ctx.written
        # If few nodes need gradients, ∂s is computed twice; else the first pass stores it for the second.
        few = not (mode or ctx.draws["DROP"] or ctx.needs_input_grad[2])
        with_grad, with_edges = active_rows(ctx.adjacency)
        with_grad = with_grad if few else len(values)
        few = few and with_grad < len(values)
        work = outgoing(ctx.adjacency, with_grad)
        sizes = _sizes(heads, channels, ctx.numbers["SCORE"])
        d_far = _zeros_after(far, with_grad)
        d_values = d_far[:0] if ctx.one else _zeros_after(values, with_grad)
        delta = torch.empty_like(lse)
        d_scores = lse.new_empty(ctx.adjacency.num_edges, heads)
        value_parts, far_parts = (lse.new_empty(work.slots, *t.shape[1:]) for t in (d_values, far))
        if len(work.row):
            index = ctx.adjacency.index32
            _deltas[_grid(max(1, with_edges), sizes)](
                index.rowptr, index.source, near, far, lse, out, bias, d_out, attention, d_attention, delta,
                SLOPE=ctx.numbers["SLOPE"], **_whole_rows(sizes), FEW=32, BW=max(32, 1024 // sizes["BH"]),
                RECOMPUTE=not attention.numel(), GRADIENT=mode, BIAS=bias.numel() > 0,
            )  # fmt: skip
            _sources[_grid(len(work.row), sizes)](
                *work.pieces, work.edge, work.node, near, far, weight, values, d_out, lse, delta, d_attention,
                d_values, d_far, value_parts, far_parts, d_scores, seed,
                **ctx.draws, **ctx.numbers, **sizes, GRADIENT=mode, ONE=ctx.one,
            )  # fmt: skip
        if not ctx.one:
            _add_parts(work, value_parts, d_values)
        _add_parts(work, far_parts, d_far)
        if few:
            d_near, d_weight = _part_destinations(ctx, near, far, weight, values, d_out, lse, delta), None
        else:
            if ctx.numbers["SCORE"] == DOT:
                near = values = far[:0]  # not read below: their memory is free for the gradient
            d_near, d_weight = _destinations(ctx, near, far, weight, d_scores, channels)
        d_bias = d_out.sum(0) if ctx.needs_input_grad[4] else None
        return (d_near, d_far, d_weight, None if ctx.one else d_values, d_bias, *(None for _ in range(7)))


def _destinations(
    ctx: Any, near: Tensor, far: Tensor, weight: Tensor, d_scores: Tensor, channels: int
) -> tuple[Tensor, Tensor | None]:
    work, heads, score = incoming(ctx.adjacency), d_scores.shape[1], ctx.numbers["SCORE"]
    count = len(work.row)
    step = min(count, PROGRAMS) if score == DYNAMIC else count
    d_near, near_parts = torch.empty_like(far), d_scores.new_empty(work.slots, *far.shape[1:])
    shares = d_scores.new_empty(step if score == DYNAMIC else 0, heads, channels)
    sizes = _sizes(heads, channels, score)
    if score == ADDITIVE:
        sizes |= {**_head_tile(heads, 256), "STAGES": 1, "num_warps": 1}
    if count:
        _destinations_kernel[_grid(step, sizes)](
            *work.pieces, work.node, near, far, weight, d_scores, d_near, near_parts, shares, count, step,
            **ctx.numbers, **sizes,
        )  # fmt: skip
    _add_parts(work, near_parts, d_near)
    return d_near, shares.sum(0).to(weight.dtype) if score == DYNAMIC else None


def _part_destinations(ctx: Any, near: Tensor, *tensors: Tensor) -> Tensor:
    """The gradient at the destinations that need it; zeros at the others."""
    with_grad = active_rows(ctx.adjacency).with_grad
    work, d_near = incoming(ctx.adjacency, with_grad), _zeros_after(near, with_grad)
    far, values, lse = tensors[0], tensors[2], tensors[4]
    parts = lse.new_empty(work.slots, *near.shape[1:])
    if len(work.row):
        heads, channels = values.shape[1:]
        sizes = _sizes(heads, channels, ctx.numbers["SCORE"])
        _part_destinations_kernel[_grid(len(work.row), sizes)](
            *work.pieces, work.node, near, *tensors, d_near, parts, **ctx.numbers, **sizes,
            SAME=far.data_ptr() == values.data_ptr() and ctx.numbers["SCORE"] != ADDITIVE,
        )  # fmt: skip
    _add_parts(work, parts, d_near)
    return d_near


def attend(score: Score, values: Tensor, adjacency: Adjacency, options: Options) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend`; unless `written`, the attention comes back empty."""
    (kind, near, far, weight, slope), (p, seed, written, averaged, bias) = score, options
    weight, bias = (values.new_empty(0) if t is None else t for t in (weight, bias))
    attention = (MEAN if averaged else ALL) if written else 0
    rest = adjacency, kind, slope, p, _seed_tensor(values, seed), attention, far is values
    return _Attend.apply(near, far, weight, values, bias, *rest)  # type: ignore[no-any-return]


LOWEST = tl.constexpr(-1e30)  # maximum over pieces that are all empty: finite, because ∞ − ∞ is NaN


@triton.jit
def _load_piece(row, first, last, slot, p):
    i = tl.load(row + p).to(tl.int64)
    return i, tl.load(first + p), tl.load(last + p), tl.load(slot + p).to(tl.int64)


@triton.jit
def _load_side(pointer, node, h, c, H: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr):
    """A node's side of the score, [BH] or [BH, BC]."""
    if SCORE == 0:
        side = _wide(tl.load(pointer + node * H + h, mask=h < H, other=0.0))
    else:
        side = _load_row(pointer, node, h, c, H, C)
    return side


@triton.jit
def _scores(
    pointer, node, mine, w, h, c, live, SLOPE: tl.constexpr, RATE: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """The other side of some edges, [BE, BH] or [BE, BH, BC], and their scores with one node."""
    if SCORE == 0:
        other = _load_heads(pointer, node, h, live, H)
        s = _leaky(other + mine[None, :], SLOPE)
    else:
        other = _load_rows(pointer, node, h, c, live, H, C)
        s = _row_scores(other, mine, w, SLOPE, RATE, SCORE)
    return other, s


@triton.jit
def _store_sums(out, parts, node, part, sums, h, c, H: tl.constexpr, C: tl.constexpr, SCORE: tl.constexpr):
    """Write a node's sums, or those of a piece to its slot."""
    if SCORE == 0:
        at, split, good = node * H + h, part * H + h, h < H
    else:
        inner = h[:, None] * C + c[None, :]
        at, split, good = node * (H * C) + inner, part * (H * C) + inner, _inside(h, c, H, C)
    if part < 0:
        tl.store(out + at, sums, mask=good)
    else:
        tl.store(parts + split, sums, mask=good)


@triton.jit
def _forward(
    row, first, last, slot, source, near, far, weight, values, out, lse, attention, tops, totals, parts, seed,
    LIMIT: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, RATE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
    STAGES: tl.constexpr, SCORE: tl.constexpr, DROP: tl.constexpr, WRITE: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """One piece of a row. `near` belongs to the destination, `far` to the sources."""
    i, low, high, part = _load_piece(row, first, last, slot, tl.program_id(0))
    h, c = _heads(BH), tl.arange(0, BC)
    kind: tl.constexpr = lse.dtype.element_ty
    mine = _load_side(near, i, h, c, H, C, SCORE)
    w = _load_row(weight, 0, h, c, H, C) if SCORE == 1 else mine
    top = tl.full([BH], float("-inf"), dtype=kind)
    total = tl.zeros([BH], dtype=kind)
    sums = tl.zeros([BH, BC], dtype=kind)
    for start in tl.range(low, high, BE, num_stages=STAGES):
        e = start + tl.arange(0, BE)
        live = e < high
        j = tl.load(source + e, mask=live, other=0).to(tl.int64)
        other, s = _scores(far, j, mine, w, h, c, live, SLOPE, RATE, H, C, SCORE)
        s = tl.where(live[:, None], s, float("-inf"))
        at = e.to(tl.int64)[:, None] * H + h[None, :]
        if WRITE:
            tl.store(attention + at, s, mask=live[:, None] & (h[None, :] < H))
        higher = tl.maximum(top, tl.max(s, axis=0))
        shrink = tl.exp(top - higher)
        a = tl.exp(s - higher[None, :])
        total = total * shrink + tl.sum(a, axis=0)
        if DROP:
            a = a * _factor(at, tl.load(seed), LIMIT, SCALE, kind)
        v = other if SAME else _load_rows(values, j, h, c, live, H, C)
        sums = sums * shrink[:, None] + tl.sum(a[:, :, None] * v, axis=0)
        top = higher
    good = _inside(h, c, H, C)
    if part < 0:
        some = high > low
        result = tl.where(some, sums / total[:, None], 0.0)
        tl.store(out + i * (H * C) + h[:, None] * C + c[None, :], result, mask=good)
        tl.store(lse + i * H + h, tl.where(some, top + tl.log(total), 0.0), mask=h < H)
    else:
        tl.store(parts + part * (H * C) + h[:, None] * C + c[None, :], sums, mask=good)
        tl.store(tops + part * H + h, top, mask=h < H)
        tl.store(totals + part * H + h, total, mask=h < H)


@triton.jit
def _join(
    split_row, split_slot, tops, totals, parts, out, lse,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of one row, in order: rescale their sums to the common maximum."""
    r = tl.program_id(0)
    i = tl.load(split_row + r).to(tl.int64)
    h, c = _heads(BH), tl.arange(0, BC)
    kind: tl.constexpr = lse.dtype.element_ty
    top = tl.full([BH], float("-inf"), dtype=kind)
    total = tl.zeros([BH], dtype=kind)
    sums = tl.zeros([BH, BC], dtype=kind)
    begin, end = tl.load(split_slot + r).to(tl.int64), tl.load(split_slot + r + 1).to(tl.int64)
    for part in range(begin, end):
        level = tl.load(tops + part * H + h, mask=h < H, other=0.0)
        higher = tl.maximum(tl.maximum(top, level), LOWEST)
        shrink, share = tl.exp(top - higher), tl.exp(level - higher)
        total = total * shrink + share * tl.load(totals + part * H + h, mask=h < H, other=1.0)
        sums = sums * shrink[:, None] + share[:, None] * _load_row(parts, part, h, c, H, C)
        top = higher
    where = out + i * (H * C) + h[:, None] * C + c[None, :]
    some = total > 0
    tl.store(where, tl.where(some[:, None], sums / total[:, None], 0.0), mask=_inside(h, c, H, C))
    tl.store(lse + i * H + h, tl.where(some, top + tl.log(total), 0.0), mask=h < H)


@triton.jit
def _normalise(
    destination, lse, attention, mean, count, H: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
    KEEP: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Turn the scores of some edges, left in `attention`, into attention, and into its mean over heads."""
    e = (tl.program_id(0) * BE + tl.arange(0, BE)).to(tl.int64)
    h = tl.arange(0, BH)
    live = e < count
    good = live[:, None] & (h[None, :] < H)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    at = attention + e[:, None] * H + h[None, :]
    weight = tl.exp(tl.load(at, mask=good, other=0.0) - _load_heads(lse, i, h, live, H))
    weight = tl.where(good, weight, 0.0)
    if KEEP:
        tl.store(at, weight, mask=good)
    if MEAN:
        tl.store(mean + e, tl.sum(weight, axis=1) / H, mask=live)


@triton.jit
def _part_destinations_kernel(
    row, first, last, slot, source, near, far, weight, values, d_out, lse, delta, d_near, near_parts,
    SLOPE: tl.constexpr, RATE: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr, SCORE: tl.constexpr,
    SAME: tl.constexpr,
):  # fmt: skip
    """∂near over a piece of a destination's edges."""
    i, low, high, part = _load_piece(row, first, last, slot, tl.program_id(0))
    h, c = _heads(BH), tl.arange(0, BC)
    kind: tl.constexpr = lse.dtype.element_ty
    d = _load_row(d_out, i, h, c, H, C)
    level = tl.load(lse + i * H + h, mask=h < H, other=0.0)
    middle = tl.load(delta + i * H + h, mask=h < H, other=0.0)
    mine = _load_side(near, i, h, c, H, C, SCORE)
    sums = tl.zeros([BH], dtype=kind) if SCORE == 0 else tl.zeros([BH, BC], dtype=kind)
    w = _load_row(weight, 0, h, c, H, C) if SCORE == 1 else mine
    for start in tl.range(low, high, BE, num_stages=STAGES):
        e = start + tl.arange(0, BE)
        live = e < high
        j = tl.load(source + e, mask=live, other=0).to(tl.int64)
        other, s = _scores(far, j, mine, w, h, c, live, SLOPE, RATE, H, C, SCORE)
        a = tl.where(live[:, None] & (h[None, :] < H), tl.exp(s - level[None, :]), 0.0)
        v = other if SAME else _load_rows(values, j, h, c, live, H, C)
        g = tl.sum(d[None, :, :] * v, axis=2)
        ds = a * (g - middle[None, :])
        if SCORE == 0:
            sums += tl.sum(tl.where(other + mine[None, :] > 0, ds, ds * SLOPE), axis=0)
        elif SCORE == 1:
            t = tl.where(other + mine[None, :, :] > 0, ds[:, :, None], (ds * SLOPE)[:, :, None])
            sums += tl.sum(t * w[None, :, :], axis=0)
        else:
            sums += tl.sum((ds * RATE)[:, :, None] * other, axis=0)
    _store_sums(d_near, near_parts, i, part, sums, h, c, H, C, SCORE)


@triton.jit
def _attention_term(
    start, high, i, source, near, far, lse, attention, d_attention, h, SLOPE: tl.constexpr, H: tl.constexpr,
    B: tl.constexpr, RECOMPUTE: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Σ_e a_e ∂a_e over B edges of node i from `start` on; a_e is not read where ∂a_e is 0."""
    e = (start + tl.arange(0, B)).to(tl.int64)
    live = e < high
    if GRADIENT == 2:
        share = _wide(tl.load(d_attention + e, mask=live, other=0.0)) / H
        live = live & (share != 0)
    if RECOMPUTE:
        j = tl.load(source + e, mask=live, other=0).to(tl.int64)
        mine = _wide(tl.load(near + i * H + h, mask=h < H, other=0.0))
        level = tl.load(lse + i * H + h, mask=h < H, other=0.0)
        s = _leaky(_load_heads(far, j, h, live, H) + mine[None, :], SLOPE)
        a = tl.where(live[:, None], tl.exp(s - level[None, :]), 0.0)
    else:
        a = _load_heads(attention, e, h, live, H)
    if GRADIENT == 2:
        total = tl.sum(a * share[:, None], axis=0)
    else:
        total = tl.sum(a * _load_heads(d_attention, e, h, live, H), axis=0)
    return total


@triton.jit
def _deltas(
    pointer, source, near, far, lse, out, bias, d_out, attention, d_attention, result, SLOPE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, FEW: tl.constexpr,
    BW: tl.constexpr, RECOMPUTE: tl.constexpr, GRADIENT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """δ_i; its second term only when GRADIENT, over FEW edges at a time in short rows and BW in long ones.

    GRADIENT is 1 for a gradient of every head's attention, 2 for one of their mean. RECOMPUTE computes the
    attention, which was not stored, from the additive score.
    """
    i = tl.program_id(0).to(tl.int64)
    h, c = _heads(BH), tl.arange(0, BC)
    o = _load_row(out, i, h, c, H, C)
    if BIAS:
        o -= _load_row(bias, 0, h, c, H, C)
    delta = tl.sum(o * _load_row(d_out, i, h, c, H, C), axis=1)
    if GRADIENT:
        low, high = tl.load(pointer + i), tl.load(pointer + i + 1)
        if high - low > FEW:
            for start in range(low, high, BW):
                delta += _attention_term(
                    start, high, i, source, near, far, lse, attention, d_attention, h, SLOPE, H, BW,
                    RECOMPUTE, GRADIENT,
                )  # fmt: skip
        else:
            delta += _attention_term(
                low, high, i, source, near, far, lse, attention, d_attention, h, SLOPE, H, FEW, RECOMPUTE,
                GRADIENT,
            )  # fmt: skip
    tl.store(result + i * H + h, delta, mask=h < H)


@triton.jit
def _sources(
    row, first, last, slot, edge, target, near, far, weight, values, d_out, lse, delta, d_attention,
    d_values, d_far, value_parts, far_parts, d_scores, seed,
    LIMIT: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, RATE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
    STAGES: tl.constexpr, SCORE: tl.constexpr, DROP: tl.constexpr, GRADIENT: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """∂values and ∂far (their sum if ONE) over a piece of a source's edges; ∂s before the leaky relu."""
    j, low, high, part = _load_piece(row, first, last, slot, tl.program_id(0))
    h, c = _heads(BH), tl.arange(0, BC)
    kind: tl.constexpr = lse.dtype.element_ty
    v = _load_row(values, j, h, c, H, C)
    sums = tl.zeros([BH, BC], dtype=kind)
    mine = _load_side(far, j, h, c, H, C, SCORE)
    passed = tl.zeros([BH], dtype=kind) if SCORE == 0 else tl.zeros([BH, BC], dtype=kind)
    w = _load_row(weight, 0, h, c, H, C) if SCORE == 1 else mine
    for start in tl.range(low, high, BE, num_stages=STAGES):
        k = start + tl.arange(0, BE)
        live = k < high
        e = tl.load(edge + k, mask=live, other=0).to(tl.int64)
        i = tl.load(target + k, mask=live, other=0).to(tl.int64)
        other, s = _scores(near, i, mine, w, h, c, live, SLOPE, RATE, H, C, SCORE)
        good = live[:, None] & (h[None, :] < H)
        a = tl.where(good, tl.exp(s - _load_heads(lse, i, h, live, H)), 0.0)
        d = _load_rows(d_out, i, h, c, live, H, C)
        g = tl.sum(d * v[None, :, :], axis=2)
        used = a
        at = e[:, None] * H + h[None, :]
        if DROP:
            kept = _factor(at, tl.load(seed), LIMIT, SCALE, kind)
            g = g * kept
            used = a * kept
        if GRADIENT == 1:
            g += _load_heads(d_attention, e, h, live, H)
        elif GRADIENT == 2:
            g += (_wide(tl.load(d_attention + e, mask=live, other=0.0)) / H)[:, None]
        sums += tl.sum(used[:, :, None] * d, axis=0)
        ds = a * (g - _load_heads(delta, i, h, live, H))
        if SCORE == 0:
            ds = tl.where(other + mine[None, :] > 0, ds, ds * SLOPE)
            passed += tl.sum(ds, axis=0)
        elif SCORE == 1:
            t = ds[:, :, None] * w[None, :, :]
            passed += tl.sum(tl.where(other + mine[None, :, :] > 0, t, t * SLOPE), axis=0)
        else:
            passed += tl.sum((ds * RATE)[:, :, None] * other, axis=0)
        tl.store(d_scores + at, ds, mask=good)
    if ONE:
        passed += sums
    else:
        _store_sums(d_values, value_parts, j, part, sums, h, c, H, C, 1)
    _store_sums(d_far, far_parts, j, part, passed, h, c, H, C, SCORE)


@triton.jit
def _destinations_kernel(
    row, first, last, slot, source, near, far, weight, d_scores, d_near, near_parts, shares, pieces, step,
    SLOPE: tl.constexpr, RATE: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, STAGES: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """∂near over every `step`-th piece; for the dynamic score this program's share of ∂weight in `shares`."""
    h, c = _heads(BH), tl.arange(0, BC)
    kind: tl.constexpr = d_scores.dtype.element_ty
    if SCORE == 1:
        w = _load_row(weight, 0, h, c, H, C)
        share = tl.zeros([BH, BC], dtype=kind)
    for q in range(tl.program_id(0), pieces, step):
        i, low, high, part = _load_piece(row, first, last, slot, q)
        sums = tl.zeros([BH], dtype=kind) if SCORE == 0 else tl.zeros([BH, BC], dtype=kind)
        if SCORE == 1:
            mine = _load_row(near, i, h, c, H, C)
        for start in tl.range(low, high, BE, num_stages=STAGES):
            e = start + tl.arange(0, BE)
            live = e < high
            ds = _load_heads(d_scores, e.to(tl.int64), h, live, H)
            if SCORE == 0:
                sums += tl.sum(ds, axis=0)
            else:
                j = tl.load(source + e, mask=live, other=0).to(tl.int64)
                other = _load_rows(far, j, h, c, live, H, C)
                if SCORE == 1:
                    z = other + mine[None, :, :]
                    t = tl.where(z > 0, ds[:, :, None], (ds * SLOPE)[:, :, None])
                    sums += tl.sum(t * w[None, :, :], axis=0)
                    share += tl.sum(t * z, axis=0)
                else:
                    sums += tl.sum((ds * RATE)[:, :, None] * other, axis=0)
        _store_sums(d_near, near_parts, i, part, sums, h, c, H, C, SCORE)
    if SCORE == 1:
        where = shares + tl.program_id(0).to(tl.int64) * (H * C) + h[:, None] * C + c[None, :]
        tl.store(where, share, mask=_inside(h, c, H, C))
