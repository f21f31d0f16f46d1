"""Read-outs through ReLUs (the graph transformer's last block): exact to first order, the rest bounded.

With m the aggregated values of a node, its logits are

    p1 = G m + g,    p2 = P m + B relu(p1) + q,    y = A relu(p2) + a.

Let M1, M2 mark the units that are on at the clean attention. A perturbation moves a pre-activation p by Δ,
and

    relu(p + Δ) = relu(p) + M Δ + ε,    0 <= ε <= (|Δ| - |p|)_+,

because a unit adds something only once it has crossed zero. So `y` moves by a linear part, whose worst case
over the ball is exact, and by the ε of the units within reach, which intervals bound. Below the radius at
which the first unit can cross zero the certificate is that of a linear read-out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import Observation
from fgai.bounds.steps import batch_norm_map
from fgai.certificates.integrity import _layer_values, find_alteration
from fgai.certificates.kernels import channel_norms, class_norms
from fgai.certificates.layer import (
    _BOUNDS,
    SMALLEST,
    Prediction,
    _crossing_radius,
    _probability_change,
    _top_and_margins,
)
from fgai.models import AttentionLayer, body_of
from fgai.tasks import get_task

_AGAIN = 1e-3  # difference between float32 and float64 logits, relative to what is summed
_BLOCK = 1 << 15  # edges per block: about 100 MB
_HALVINGS = 12  # of the interval of the class radius
_FARTHEST = 2.0  # largest distance of two attention vectors, in any of the norms


class _ReluReadOut(NamedTuple):
    """The maps of the module's formula, float64 on the CPU, and the clean pre-activations.

    `m` is `Σ_e w_eh v_eh` of all heads side by side; v are the `values` [N, H, C] at `source` [E].
    """

    values: Tensor
    source: Tensor
    G: Tensor
    P: Tensor
    B: Tensor
    A: Tensor
    p1: Tensor
    p2: Tensor


class _Rates(NamedTuple):
    """Effect of one unit of radius to first order: on p1, p2, class margins, differences and all logits."""

    first: Tensor
    second: Tensor
    margin: Tensor
    spread: Tensor
    total: Tensor


def _relu_prediction(model: Any, observation: Observation, radius: float, norm: str) -> Prediction | None:
    """Bound nodes of a graph transformer by its last layer's attention; None for other models."""
    read_out = _relu_read_out(model, observation)
    if read_out is None:
        return None
    rowptr, logits = observation.attention.last.rowptr.cpu(), observation.logits
    top, margins = _top_and_margins(logits)
    rates = _first_order(read_out, rowptr, top, norm)
    size = torch.full((rowptr.numel() - 1,), radius, dtype=torch.float64)
    low, high = _remainder(read_out, rates, size)
    positive, negative = read_out.A.clamp(min=0).T, (-read_out.A).clamp(min=0).T
    rise, fall = high @ positive + low @ negative, low @ positive + high @ negative
    spread = radius * rates.spread + rise.amax(1) + fall.amax(1)
    class_radius = _class_radius(read_out, rates, top, margins, rowptr)
    moved = (radius * rates.total + torch.maximum(rise, fall).sum(1)) / 2
    reason = "linear part of the read-out, plus what ReLUs within reach can add"
    return Prediction(class_radius, moved, _probability_change(logits, spread), *_BOUNDS, reason)


def _relu_read_out(model: Any, observation: Observation) -> _ReluReadOut | None:
    """Return the read-out of a graph transformer's last attention layer; None for other models."""
    if body_of(model) != "blocks" or not get_task(model.task).row_per_node or not observation.runs:
        return None
    if find_alteration(model) is not None:
        return None
    run = observation.runs[-1]
    parts: Any = copy.deepcopy(nn.ModuleList([model.blocks[-1], model.head]))
    block, head = parts.requires_grad_(False).cpu().double()
    norms, maps = (block.norm_attention, block.norm_feed), (block.output, block.wide, block.narrow)
    if not all(isinstance(norm, nn.BatchNorm1d) and norm.running_var is not None for norm in norms):
        return None  # layer normalisation is not piecewise linear
    if [type(part) for part in (*maps, *head)] != [nn.Linear] * 4 + [nn.ReLU, nn.Linear]:
        return None
    layer, values = run.layer, _layer_values(run, observation.attention.last)
    assert isinstance(layer, AttentionLayer) and run.output is not None
    if isinstance(values, str):
        return None
    scales, shifts = zip(*(batch_norm_map(norm) for norm in norms), strict=True)
    out_w, wide_w, narrow_w, head_w, last_w = (one.weight for one in (*maps, head[0], head[2]))
    out_b, wide_b, narrow_b, head_b, last_b = (_bias(one) for one in (*maps, head[0], head[2]))
    state = run.inputs[0].cpu().double() + run.output.cpu().double() @ out_w.T + out_b
    state = state * scales[0] + shifts[0]
    p1 = state @ wide_w.T + wide_b
    fed = (state + p1.relu() @ narrow_w.T + narrow_b) * scales[1] + shifts[1]
    p2 = fed @ head_w.T + head_b
    size = p2.relu() @ last_w.abs().T + last_b.abs()
    apart = (p2.relu() @ last_w.T + last_b - observation.logits.cpu().double()).abs()
    if not bool((apart <= _AGAIN * size.amax(1, keepdim=True)).all()):
        return None
    mix = scales[0][:, None] * out_w
    shape = (-1, layer.heads, layer.channels)
    return _ReluReadOut(
        values=values,
        source=observation.attention.last.source.cpu(),
        G=(wide_w @ mix).view(shape),
        P=(head_w @ (scales[1][:, None] * mix)).view(shape),
        B=head_w @ (scales[1][:, None] * narrow_w),
        A=last_w,
        p1=p1,
        p2=p2,
    )


def _first_order(read_out: _ReluReadOut, rowptr: Tensor, top: Tensor, norm: str) -> _Rates:
    """The read-out linearised at every node: effective values per edge, then dual norms."""
    ahead = torch.einsum("nhc,khc->nhk", read_out.values, read_out.G)
    skip = torch.einsum("nhc,khc->nhk", read_out.values, read_out.P)
    on1, on2 = (read_out.p1 > 0).double(), (read_out.p2 > 0).double()
    nodes = rowptr.numel() - 1
    second = torch.zeros_like(read_out.p2)
    margin, spread, total = second.new_zeros(nodes, len(read_out.A)), *second.new_zeros(2, nodes)
    for start, stop in _blocks(rowptr):
        edges = slice(int(rowptr[start]), int(rowptr[stop]))
        pointers, source = rowptr[start : stop + 1] - rowptr[start], read_out.source[edges]
        rows = torch.repeat_interleave(torch.arange(start, stop), pointers.diff())
        own = torch.arange(source.numel())
        moved = skip[source] + (ahead[source] * on1[rows][:, None]) @ read_out.B.T
        second[start:stop] = channel_norms(pointers, own, moved, norm).sum(1)
        effective = (moved * on2[rows][:, None]) @ read_out.A.T
        margin[start:stop], spread[start:stop], total[start:stop] = class_norms(
            pointers, own, effective, top[start:stop], norm
        )
    first = channel_norms(rowptr, read_out.source, ahead, norm).sum(1)
    return _Rates(first, second, margin, spread, total)


def _remainder(read_out: _ReluReadOut, rates: _Rates, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high [N, K2]: relu(p2) lies in [−low, high] around its linear part, at radii [N]."""
    size = radius[:, None]
    excess1 = (size * rates.first - read_out.p1.abs()).clamp(min=0)
    up, down = excess1 @ read_out.B.clamp(min=0).T, excess1 @ (-read_out.B).clamp(min=0).T
    on = read_out.p2 > 0
    reach = size * rates.second + torch.where(on, down, up)
    excess2 = (reach - read_out.p2.abs()).clamp(min=0)
    return torch.where(on, down, 0.0), torch.where(on, up, 0.0) + excess2


def _class_radius(
    read_out: _ReluReadOut, rates: _Rates, top: Tensor, margins: Tensor, rowptr: Tensor
) -> Tensor:
    """Return the largest radius, up to bisection, at which no class reaches the top one."""
    limit = _crossing_radius(margins, rates.margin).clamp(max=_FARTHEST)
    low, high = torch.zeros_like(limit), limit.clone()
    tried = high
    for _ in range(_HALVINGS + 1):
        lost = tried[:, None] * rates.margin + _margin_remainder(read_out, rates, top, tried)
        safe = (margins - lost).amin(1) > 0
        low, high = torch.where(safe, tried, low), torch.where(safe, high, tried)
        tried = (low + high) / 2
    ahead = margins.amin(1) > 0
    low = torch.where(ahead, low.clamp(min=SMALLEST), 0.0)  # at radius 0 nothing moves
    return torch.where(rowptr.diff() > 0, low, torch.where(ahead, torch.inf, 0.0))


def _margin_remainder(read_out: _ReluReadOut, rates: _Rates, top: Tensor, radius: Tensor) -> Tensor:
    """Bound how much class c can gain on the top class beyond first order [N, C], at radii [N]."""
    low, high = _remainder(read_out, rates, radius)
    out = torch.zeros_like(rates.margin)
    for winner in torch.unique(top).tolist():
        rows = top == winner
        ahead = read_out.A[winner] - read_out.A
        out[rows] = low[rows] @ ahead.clamp(min=0).T + high[rows] @ (-ahead).clamp(min=0).T
    return out


def _blocks(rowptr: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about `_BLOCK` edges each."""
    start, nodes = 0, rowptr.numel() - 1
    while start < nodes:
        stop = int(torch.searchsorted(rowptr, rowptr[start] + _BLOCK, right=True)) - 1
        stop = min(max(stop, start + 1), nodes)
        yield start, stop
        start = stop


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
