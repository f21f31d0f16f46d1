"""Fused attention on the GPU, with the attention as second result when it is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.draws import odds
from fgai.ops.gpu import attend_backward, attend_forward, attend_moving
from fgai.ops.gpu.attend_parts import add_pieces
from fgai.ops.gpu.plan import Work, incoming, outgoing, room
from fgai.ops.reach import reach_of
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-call"

ADDITIVE, DYNAMIC, DOT = 0, 1, 2
# What is written of the attention: every head's, or their mean (nothing: 0).
ALL, MEAN = 1, 2
# Numbers in a tile of edges × heads × channels, and how many of them one warp holds.
TILE, WARP = 512, 512
# Programs that share the rows when a gradient has to be summed over all of them.
PROGRAMS = 4096


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _sizes(heads: int, channels: int) -> dict[str, int]:
    """Return the compile-time sizes of tiles [BE, BH, BC]."""
    high, wide = _power(heads), _power(channels)
    block = max(4, min(32, TILE // (high * wide)))
    warps = max(1, min(8, block * high * wide // WARP))
    return {"H": heads, "C": channels, "BH": high, "BC": wide, "BE": block, "num_warps": warps}


def _narrow(heads: int) -> dict[str, int]:
    """Return the compile-time sizes of tiles [BE, BH]."""
    high = _power(heads)
    return {"H": heads, "BH": high, "BE": max(16, 256 // high), "num_warps": 1}


def _add(work: Work, parts: Tensor, out: Tensor) -> None:
    """Sum the parts that the pieces of split rows left into their rows of `out`."""
    if work.slots:
        width = parts.numel() // work.slots
        block = min(256, _power(width))
        grid = (len(work.split_row), -(-width // block))
        add_pieces[grid](work.split_row, work.split_slot, parts, out, width, BD=block, num_warps=1)


class _Attend(Function):
    """near, far, weight: right, left, - (additive); right, left, weight (dynamic); query, key, - (dot)."""

    @staticmethod
    def forward(
        ctx: Any,
        near: Tensor,
        far: Tensor,
        weight: Tensor,
        values: Tensor,
        adjacency: Adjacency,
        score: int,
        slope: float,
        p: float,
        seed: Tensor,
        written: int,
    ) -> tuple[Tensor, Tensor]:
        near, far, weight, values = (t.contiguous() for t in (near, far, weight, values))
        heads, channels = values.shape[1:]
        limit, scale = odds(p)
        ctx.numbers = {"SLOPE": slope, "RATE": channels**-0.5, "SCORE": score}
        ctx.draws = {"LIMIT": limit, "SCALE": scale, "DROP": p > 0}
        ctx.adjacency, ctx.written = adjacency, written
        filled = reach_of(adjacency).filled
        work, sizes = incoming(adjacency, filled), _sizes(heads, channels)
        out, lse = room(values, filled), values.new_empty(len(values), heads)
        attention = values.new_empty(adjacency.num_edges if written else 0, heads)
        tops, totals = (values.new_empty(work.slots, heads) for _ in range(2))
        parts = values.new_empty(work.slots, heads, channels)
        if len(work.row):
            attend_forward.forward[(len(work.row),)](
                *work.pieces, work.node, near, far, weight, values, out, lse, attention, tops, totals, parts,
                seed, **ctx.draws, **ctx.numbers, **sizes, WRITE=written > 0,
            )  # fmt: skip
        if work.slots:
            shape = {k: v for k, v in sizes.items() if k != "BE"}
            attend_forward.join[(len(work.split_row),)](
                work.split_row, work.split_slot, tops, totals, parts, out, lse, **shape
            )
        mean = values.new_empty(len(attention) if written == MEAN else 0, 1)
        keep = written == ALL or score != ADDITIVE
        if attention.numel():
            flat, count = _narrow(heads), len(attention)
            flat["BE"] = max(16, 1024 // flat["BH"])
            attend_forward.normalise[(-(-count // flat["BE"]),)](
                adjacency.index32.destination, lse, attention, mean, count,
                **{**flat, "num_warps": 4}, KEEP=keep, MEAN=written == MEAN,
            )  # fmt: skip
        if not keep:
            attention = attention.new_empty(0, heads)  # the backward pass finds it again
        ctx.save_for_backward(near, far, weight, values, out, lse, attention, seed)
        ctx.set_materialize_grads(False)
        return out, mean if written == MEAN else attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        near, far, weight, values, out, lse, attention, seed = ctx.saved_tensors
        heads, channels = values.shape[1:]
        d_out = torch.zeros_like(out) if gradients[0] is None else gradients[0].contiguous()
        d_attention = attention if gradients[1] is None else gradients[1].contiguous()
        given = 0 if gradients[1] is None or not d_attention.numel() else ctx.written
        # What few nodes need is found edge by edge; else what every edge passes on is kept between passes.
        few = not (given or ctx.draws["DROP"] or ctx.needs_input_grad[2])
        moving, filled = reach_of(ctx.adjacency)
        moving = moving if few else len(values)
        few = few and moving < len(values)
        work, sizes = outgoing(ctx.adjacency, moving), _sizes(heads, channels)
        delta, d_values, d_far = torch.empty_like(lse), room(values, moving), room(far, moving)
        d_scores = values.new_empty(ctx.adjacency.num_edges, heads)
        value_parts = values.new_empty(work.slots, *values.shape[1:])
        far_parts = far.new_empty(work.slots, *far.shape[1:])
        if len(work.row):
            shape = {k: v for k, v in sizes.items() if k != "BE"}
            index = ctx.adjacency.index32
            attend_backward.middles[(max(1, filled),)](
                index.rowptr, index.source, near, far, lse, out, d_out, attention, d_attention, delta,
                SLOPE=ctx.numbers["SLOPE"], **shape, FEW=32, BW=max(32, 1024 // sizes["BH"]),
                AGAIN=not attention.numel(), GIVEN=given,
            )  # fmt: skip
            attend_backward.sources[(len(work.row),)](
                *work.pieces, work.edge, work.node, near, far, weight, values, d_out, lse, delta, d_attention,
                d_values, d_far, value_parts, far_parts, d_scores, seed,
                **ctx.draws, **ctx.numbers, **sizes, GIVEN=given,
            )  # fmt: skip
        _add(work, value_parts, d_values)
        _add(work, far_parts, d_far)
        if few:
            d_near, d_weight = _movers(ctx, near, far, weight, values, d_out, lse, delta), None
        else:
            d_near, d_weight = _destinations(ctx, near, far, weight, d_scores, channels)
        return (d_near, d_far, d_weight, d_values, *(None for _ in range(6)))


def _destinations(
    ctx: Any, near: Tensor, far: Tensor, weight: Tensor, d_scores: Tensor, channels: int
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient at the destinations, and of the weight of the dynamic score."""
    work, heads, score = incoming(ctx.adjacency), d_scores.shape[1], ctx.numbers["SCORE"]
    count = len(work.row)
    step = min(count, PROGRAMS) if score == DYNAMIC else count
    d_near, near_parts = torch.empty_like(near), near.new_empty(work.slots, *near.shape[1:])
    shares = near.new_empty(step if score == DYNAMIC else 0, heads, channels)
    sizes = {**_sizes(heads, channels), **_narrow(heads)} if score == ADDITIVE else _sizes(heads, channels)
    if count:
        attend_backward.destinations[(step,)](
            *work.pieces, work.node, near, far, weight, d_scores, d_near, near_parts, shares, count, step,
            **ctx.numbers, **sizes,
        )  # fmt: skip
    _add(work, near_parts, d_near)
    return d_near, shares.sum(0) if score == DYNAMIC else None


def _movers(ctx: Any, near: Tensor, *given: Tensor) -> Tensor:
    """Return the gradient at the destinations that move; zeros at the others."""
    moving = reach_of(ctx.adjacency).moving
    work, d_near = incoming(ctx.adjacency, moving), room(near, moving)
    parts = near.new_empty(work.slots, *near.shape[1:])
    if len(work.row):
        sizes = _sizes(*given[2].shape[1:])
        attend_moving.destinations[(len(work.row),)](
            *work.pieces, work.node, near, *given, d_near, parts, **ctx.numbers, **sizes
        )
    _add(work, parts, d_near)
    return d_near


def _attend(
    near: Tensor,
    far: Tensor,
    weight: Tensor | None,
    values: Tensor,
    adjacency: Adjacency,
    score: int,
    slope: float,
    p: float,
    seed: int | Tensor,
    written: bool,
    averaged: bool,
) -> tuple[Tensor, Tensor]:
    if not isinstance(seed, Tensor):
        seed = torch.full((1,), seed, device=values.device)  # no copy from the host: it could not be captured
    given = values.new_empty(0) if weight is None else weight
    result: tuple[Tensor, Tensor] = _Attend.apply(
        near,
        far,
        given,
        values,
        adjacency,
        score,
        slope,
        p,
        seed,
        (MEAN if averaged else ALL) if written else 0,
    )
    return result


def attend_additive(
    left: Tensor,
    right: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float,
    p: float,
    seed: int | Tensor,
    written: bool = True,
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend_additive`; unless `written`, the attention comes back empty."""
    return _attend(right, left, None, values, adjacency, ADDITIVE, slope, p, seed, written, averaged)


def attend_dynamic(
    left: Tensor,
    right: Tensor,
    weight: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float,
    p: float,
    seed: int | Tensor,
    written: bool = True,
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend_dynamic`; unless `written`, the attention comes back empty."""
    return _attend(right, left, weight, values, adjacency, DYNAMIC, slope, p, seed, written, averaged)


def attend_dot(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    p: float,
    seed: int | Tensor,
    written: bool = True,
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend_dot`; unless `written`, the attention comes back empty."""
    return _attend(query, key, None, values, adjacency, DOT, 0.0, p, seed, written, averaged)
