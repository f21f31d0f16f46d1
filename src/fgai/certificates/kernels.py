"""Row loops of the certificates: dual norms over the edges into each node, in float64.

A perturbation δ of a node's attention moves a linear quantity by `Σ_j δ_j z_j`. Over a ball of radius R the
most it can move is `R · ‖(z_j)_j‖_dual`: the dual of l1 is the maximum over neighbours, of l2 the Euclidean
norm, of linf the sum. Everything here computes such norms, for all nodes at once, without an edges × classes
tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai.compiled import compiled
from fgai.topk import NORMS

# Blocks of rows per thread: several, so that a block of hubs does not keep the others waiting.
_SHARE = 8


def channel_norms(rowptr: Tensor, index: Tensor, values: Tensor, norm: str) -> Tensor:
    """The dual norm over the edges into each node, channel by channel.

        out[i, h, c] = ‖(values[index[e], h, c])_{e into i}‖_dual

    Args:
        rowptr: [N+1].
        index: [E] int64, the row of `values` each edge reads.
        values: [M, H, C].
        norm: of the perturbation.

    Returns:
        float64 [N, H, C], 0 for a node without edges.
    """
    flat = _array(values.double().flatten(1))
    out = np.zeros((rowptr.numel() - 1, flat.shape[1]))
    _over_rows(_channel_norms, rowptr, _array(index), flat, NORMS.index(norm), out)
    return torch.from_numpy(out).view(-1, *values.shape[1:])


def class_norms(
    rowptr: Tensor, index: Tensor, values: Tensor, top: Tensor, norm: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What one unit of radius can do to the logits of each node, every head perturbed at once.

        margin[i, c] = Σ_h ‖(z_ehc - z_eh,top(i))_e‖_dual          how fast class c can gain on the top class
        range[i]     = 2 max_c Σ_h ‖(z_ehc - mid_eh)_e‖_dual       how fast any class can gain on another
        total[i]     = Σ_h max_e ‖z_eh‖_1  (l1)  or  Σ_h Σ_c ‖(z_ehc)_e‖_dual  (l2, linf)

    `mid_eh` lies half way between the largest and the smallest class of z_eh; with l1 and one head `range` is
    `max_e (max_c z_ec - min_c z_ec)`. `margin` is attained, `range` and `total` never fall short.

    Args:
        rowptr: [N+1].
        index: [E] int64, the row of `values` each edge reads.
        values: [M, H, C], z: heads already weighted as the read-out weighs them.
        top: [N] int64, the predicted class.
        norm: of the perturbation, the same for every head.

    Returns:
        float64 (margin [N, C], range [N], total [N]); 0 for a node without edges.
    """
    nodes, classes = rowptr.numel() - 1, values.shape[2]
    margin, spread, total = np.zeros((nodes, classes)), np.zeros(nodes), np.zeros(nodes)
    given = _array(index), _array(values.double()), _array(top), NORMS.index(norm)
    _over_rows(_class_norms, rowptr, *given, margin, spread, total)
    return torch.from_numpy(margin), torch.from_numpy(spread), torch.from_numpy(total)


def row_extent(rowptr: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """`max_e values[index[e]] - min_e values[index[e]]` over the edges into each node; [M, D] → [N, D].

    0 for a node without edges.
    """
    out = np.zeros((rowptr.numel() - 1, values.shape[1]))
    _over_rows(_row_extent, rowptr, _array(index), _array(values.double()), out)
    return torch.from_numpy(out)


def row_largest(rowptr: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """`max_e values[index[e]]` over the edges into each node, [M, H] → [N, H]; values must not be negative.

    0 for a node without edges.
    """
    out = np.zeros((rowptr.numel() - 1, values.shape[1]))
    _over_rows(_row_largest, rowptr, _array(index), _array(values.double()), out)
    return torch.from_numpy(out)


def margin_extent(rowptr: Tensor, index: Tensor, values: Tensor, top: Tensor) -> Tensor:
    """How far apart the neighbours of a node are in their lead of the top class over each class.

        out[i, h, c] = max_e g_e - min_e g_e,    g_e = values[index[e], h, top(i)] - values[index[e], h, c]

    Args:
        rowptr: [N+1].
        index: [E] int64, the row of `values` each edge reads.
        values: [M, H, C].
        top: [N] int64.

    Returns:
        float64 [N, H, C], 0 for a node without edges.
    """
    out = np.zeros((rowptr.numel() - 1, *values.shape[1:]))
    _over_rows(_margin_extent, rowptr, _array(index), _array(values.double()), _array(top), out)
    return torch.from_numpy(out)


def mixed_margins(
    rowptr: Tensor, index: Tensor, weight: Tensor, radius: Tensor, growth: Tensor, change: Tensor, top: Tensor
) -> Tensor:
    """Most that moving values and weights adds to the lead of any class over the top one, head by head.

        out[i, h, c] = u_c + u_top,
        u_c = min(growth Σ_e w_e r_ec,  Σ_e w_e r_ec + change (max_e r_ec - min_e r_ec))

    Args:
        rowptr: [N+1].
        index: [E] int64, the row of `radius` each edge reads.
        weight: [E, H], w.
        radius: [M, H, C], r, how far each value may move.
        growth: [N, H], the factor by which a weight may grow.
        change: [N, H], how far the weights may move in total variation.
        top: [N] int64, or -1 for a node to leave out.

    Returns:
        float64 [N, H, C]; 0 for a node without edges or left out.
    """
    out = np.zeros((rowptr.numel() - 1, *radius.shape[1:]))
    given = index, weight.double(), radius.double(), growth.double(), change.double(), top
    _over_rows(_mixed_margins, rowptr, *(_array(tensor) for tensor in given), out)
    return torch.from_numpy(out)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().numpy()


def _over_rows(kernel: Callable[..., None], rowptr: Tensor, *given: Any) -> None:
    """Run `kernel(start, stop, rowptr, *given)` on blocks of rows with about as many edges each."""
    threads, pointers = torch.get_num_threads(), _array(rowptr)
    marks = np.linspace(0, pointers[-1], threads * _SHARE + 1)[1:-1]
    bounds = np.unique([0, *np.searchsorted(pointers, marks), len(pointers) - 1])
    with ThreadPoolExecutor(threads) as pool:
        blocks = [pool.submit(kernel, a, b, pointers, *given) for a, b in pairwise(bounds)]
    for block in blocks:
        block.result()


# The kernels release the interpreter, so plain threads run them side by side.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@compiled
def _collect(row, centre, norm, into):
    """Add one edge to the running dual norms of `row - centre`; l2 collects squares."""
    if norm == 0:
        for c in range(row.shape[0]):
            size = abs(row[c] - centre)
            into[c] = size if size > into[c] else into[c]
    elif norm == 1:
        for c in range(row.shape[0]):
            into[c] += (row[c] - centre) * (row[c] - centre)
    else:
        for c in range(row.shape[0]):
            into[c] += abs(row[c] - centre)


@compiled
def _channel_norms(start, stop, rowptr, index, values, norm, out):
    for i in range(start, stop):
        for e in range(rowptr[i], rowptr[i + 1]):
            _collect(values[index[e]], 0.0, norm, out[i])
        if norm == 1:
            out[i] = np.sqrt(out[i])


@compiled
def _row_largest(start, stop, rowptr, index, values, out):
    # Few columns, so a slice per edge would cost more than the comparisons.
    for i in range(start, stop):
        for e in range(rowptr[i], rowptr[i + 1]):
            j = index[e]
            for h in range(values.shape[1]):
                out[i, h] = max(out[i, h], values[j, h])


@compiled
def _class_norms(start, stop, rowptr, index, values, top, norm, margin, spread, total):
    heads, classes = values.shape[1], values.shape[2]
    for i in range(start, stop):
        to_middle = np.zeros(classes)
        for h in range(heads):
            to_top, to_mid, to_zero = np.zeros(classes), np.zeros(classes), np.zeros(classes)
            largest = 0.0
            for e in range(rowptr[i], rowptr[i + 1]):
                row = values[index[e], h]
                _collect(row, row[top[i]], norm, to_top)
                _collect(row, (row.max() + row.min()) / 2, norm, to_mid)
                if norm == 0:
                    largest = max(largest, np.abs(row).sum())
                else:
                    _collect(row, 0.0, norm, to_zero)
            if norm == 1:
                to_top, to_mid, to_zero = np.sqrt(to_top), np.sqrt(to_mid), np.sqrt(to_zero)
            margin[i] += to_top
            to_middle += to_mid
            total[i] += largest + to_zero.sum()
        spread[i] = 2 * to_middle.max()


@compiled
def _widen(row, shift, sign, lowest, highest):
    """Let two running bounds take in `shift + sign · row`."""
    for c in range(row.shape[0]):
        value = shift + sign * row[c]
        lowest[c] = value if value < lowest[c] else lowest[c]
        highest[c] = value if value > highest[c] else highest[c]


@compiled
def _row_extent(start, stop, rowptr, index, values, out):
    channels = values.shape[1]
    for i in range(start, stop):
        if rowptr[i] == rowptr[i + 1]:
            continue
        lowest, highest = np.full(channels, np.inf), np.full(channels, -np.inf)
        for e in range(rowptr[i], rowptr[i + 1]):
            _widen(values[index[e]], 0.0, 1.0, lowest, highest)
        out[i] = highest - lowest


@compiled
def _margin_extent(start, stop, rowptr, index, values, top, out):
    heads, classes = values.shape[1], values.shape[2]
    for i in range(start, stop):
        if rowptr[i] == rowptr[i + 1]:
            continue
        for h in range(heads):
            lowest, highest = np.full(classes, np.inf), np.full(classes, -np.inf)
            for e in range(rowptr[i], rowptr[i + 1]):
                row = values[index[e], h]
                _widen(row, row[top[i]], -1.0, lowest, highest)
            out[i, h] = highest - lowest


@compiled
def _mixed_margins(start, stop, rowptr, index, weight, radius, growth, change, top, out):
    heads, classes = radius.shape[1], radius.shape[2]
    for i in range(start, stop):
        if rowptr[i] == rowptr[i + 1] or top[i] < 0:
            continue
        for h in range(heads):
            mixed, lowest, highest = np.zeros(classes), np.full(classes, np.inf), np.zeros(classes)
            for e in range(rowptr[i], rowptr[i + 1]):
                row, share = radius[index[e], h], weight[e, h]
                for c in range(classes):
                    mixed[c] += share * row[c]
                _widen(row, 0.0, 1.0, lowest, highest)
            for c in range(classes):
                mixed[c] = min(growth[i, h] * mixed[c], mixed[c] + change[i, h] * (highest[c] - lowest[c]))
            out[i, h] = mixed + mixed[top[i]]
