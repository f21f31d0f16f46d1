"""Norm balls around the attention of every node: size, projection, random points, steepest steps.

A perturbation `delta` is [E], or [E, H] with every head in a ball of its own; the ball of node i holds the
entries `rowptr[i]:rowptr[i+1]` and has radius R (one number, or one per node, [N]). Norms: "l1", "l2" and
"linf". A PGD step is `project(delta + steepest(gradient, rowptr, step_size, norm), rowptr, radius, norm)`.
Nothing here is differentiated: adversaries use it between gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.compiled import compiled
from fgai.errors import InputError
from fgai.ops.segments import check_rows, prepare_values, row_index, row_max, row_sum
from fgai.topk import NORMS

Radius = float | Tensor


def _norms(delta: Tensor, rowptr: Tensor, norm: str = "l1") -> Tensor:
    """The norm of every row, [N] or [N, H]; 0 for an empty row."""
    size = delta.detach().abs()
    if norm == "l1":
        return row_sum(size, rowptr)
    largest = row_max(size, rowptr).clamp(min=0)
    if norm == "linf":
        return largest
    # Divided by the largest entry first, so that squares neither overflow nor vanish.
    unit = torch.where(largest > 0, largest, 1.0)
    scaled = size / unit.index_select(0, row_index(rowptr, delta.shape[0]))
    return unit * row_sum(scaled.square(), rowptr).sqrt()


@torch.no_grad()
def project(delta: Tensor, rowptr: Tensor, radius: Radius, norm: str = "l1") -> Tensor:
    """Return the nearest point (Euclidean) of every row's ball; rows inside their ball stay as they are.

        l1    soft threshold: sign(x) max(|x| - θ, 0), θ such that the row's norm is R
        l2    x min(1, R / ||x||_2)
        linf  x clipped to [-R, R]

    Args:
        delta: [E] or [E, H].
        rowptr: [N+1].
        radius: R >= 0, a number or [N].
        norm: "l1", "l2" or "linf".

    Raises:
        InputError: a radius is negative or has another length, or the norm is unknown.

    Example:
        >>> project(torch.tensor([3.0, -1.0, 0.5]), torch.tensor([0, 2, 3]), 1.0, "l1").tolist()
        [1.0, 0.0, 0.5]
    """
    checks.one_of(norm, "norm", NORMS)
    check_rows(delta, rowptr, "delta")
    limit = _per_row(radius, delta, rowptr)
    row = row_index(rowptr, delta.shape[0])
    if norm == "linf":
        bound = limit.index_select(0, row)
        return torch.minimum(torch.maximum(delta, -bound), bound)
    out = delta
    if norm == "l1":
        threshold = _l1_threshold(delta, rowptr, limit).index_select(0, row)
        out = delta - torch.minimum(torch.maximum(delta, -threshold), threshold)
    # For l2 this is the projection; for l1 it removes the last rounding above R.
    size = _norms(out, rowptr, norm)
    shrink = torch.where(size > limit, limit / torch.where(size > 0, size, 1.0), 1.0)
    return out * shrink.index_select(0, row)


@torch.no_grad()
def random_point(
    rowptr: Tensor,
    num_edges: int,
    radius: Radius,
    norm: str = "l1",
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return a point [E] drawn uniformly from every row's ball, on the device of `rowptr`.

    l1: signed exponentials divided by their sum and one exponential more; l2: a normal direction at distance
    R u^(1/d), u uniform; linf: uniform in [-R, R].

    Arguments as in `project`.

    Example:
        >>> rowptr = torch.tensor([0, 3, 5])
        >>> point = random_point(rowptr, 5, 0.1, "linf", generator=torch.Generator().manual_seed(1))
        >>> bool((point.abs() <= 0.1).all())
        True
    """
    checks.one_of(norm, "norm", NORMS)

    def uniform(size: int) -> Tensor:
        return 1 - _drawn("rand", size, generator).to(rowptr.device)  # In (0, 1], so the logarithm is finite.

    sign = torch.where(uniform(num_edges) > 0.5, 1.0, -1.0).double()
    limit = _per_row(radius, sign, rowptr)
    row = row_index(rowptr, num_edges)
    if norm == "linf":
        return (sign * uniform(num_edges) * limit[row]).to(dtype)
    if norm == "l1":
        part = -uniform(num_edges).log()
        rest = -uniform(rowptr.numel() - 1).log()
        point = sign * part * (limit / (row_sum(part, rowptr) + rest))[row]
    else:
        direction = _drawn("randn", num_edges, generator).to(rowptr.device)
        distance = uniform(rowptr.numel() - 1) ** (1 / rowptr.diff().clamp(min=1))
        size = _norms(direction, rowptr, "l2")
        point = direction * (limit * distance / torch.where(size > 0, size, 1.0))[row]
    # Once more after rounding to `dtype`.
    return project(point.to(dtype), rowptr, radius, norm)


def _drawn(kind: str, size: int, generator: torch.Generator) -> Tensor:
    numbers: Tensor = getattr(torch, kind)(size, generator=generator, dtype=torch.float64)
    return numbers


@torch.no_grad()
def steepest(gradient: Tensor, rowptr: Tensor, step_size: Radius, norm: str = "l1") -> Tensor:
    """Return the step of given size along which a linear function rises most; like `gradient`.

        argmax <gradient, step> over ||step|| <= step_size

        l1    all of it on the entry with the largest |gradient| (the first of several)
        l2    along the gradient
        linf  the sign of every entry

    Rows whose gradient is zero do not move. Arguments as in `project`, the step size for the radius.

    Example:
        >>> steepest(torch.tensor([1.0, -3.0, 0.0]), torch.tensor([0, 2, 3]), 0.5, "l1").tolist()
        [0.0, -0.5, 0.0]
    """
    checks.one_of(norm, "norm", NORMS)
    check_rows(gradient, rowptr, "gradient")
    size = _per_row(step_size, gradient, rowptr, "step_size")
    row = row_index(rowptr, gradient.shape[0])
    if norm == "linf":
        return gradient.sign() * size.index_select(0, row)
    if norm == "l2":
        # Scaled by the largest entry first: dividing by the norm of a tiny gradient would overflow.
        largest = _norms(gradient, rowptr, "linf")
        gradient = gradient / torch.where(largest > 0, largest, 1.0).index_select(0, row)
        length = _norms(gradient, rowptr, "l2").clamp(min=1)
        return gradient * (size / length).index_select(0, row)
    top = gradient.abs() == row_max(gradient.abs(), rowptr).index_select(0, row)
    seen = top.long().cumsum(0)
    before = torch.cat([torch.zeros_like(seen[:1]), seen]).index_select(0, rowptr[:-1].index_select(0, row))
    first = top & (seen - before == 1)
    return torch.where(first, gradient.sign() * size.index_select(0, row), 0.0)


def _per_row(radius: Radius, like: Tensor, rowptr: Tensor, name: str = "radius") -> Tensor:
    """The radius per row, [N] or [N, 1] to broadcast over heads, in the type of `like`."""
    num_rows = rowptr.numel() - 1
    if isinstance(radius, Tensor) and radius.dim() > 0:
        if radius.shape != (num_rows,):
            got = tuple(radius.shape)
            raise InputError(f"`{name}` must be one number or one per node, [{num_rows}], got {got}")
        limit = radius.to(like)
        if limit.device.type == "cpu" and bool((limit < 0).any()):
            raise InputError(f"`{name}` must not be negative, got {float(limit.min())}")
    else:
        limit = like.new_full((num_rows,), checks.at_least(float(radius), name, 0))
    return limit[:, None] if like.dim() > 1 else limit


def _l1_threshold(delta: Tensor, rowptr: Tensor, limit: Tensor) -> Tensor:
    """θ of the l1 projection, [N] or [N, H]; 0 for rows inside their ball."""
    if delta.dim() > 1:
        columns = [_l1_threshold(column, rowptr, limit[:, 0]) for column in delta.unbind(1)]
        return torch.stack(columns, dim=1) if columns else delta.new_zeros((rowptr.numel() - 1, 0))
    thresholds = np.zeros(rowptr.numel() - 1)
    size, pointers, radius = (t.numpy() for t in (prepare_values(delta.abs()), rowptr, limit.double()))
    _threshold_rows(size, pointers, radius, thresholds)
    return torch.from_numpy(thresholds).to(delta)


@compiled
def _threshold_rows(size: np.ndarray, rowptr: np.ndarray, limit: np.ndarray, threshold: np.ndarray) -> None:
    # Start from the whole row and drop what θ = (sum - R) / count excludes until nothing more goes: the same
    # θ as by sorting, in a few passes. θ never falls, so the set never grows; `>=` guards that in rounding.
    for i in range(rowptr.shape[0] - 1):
        count, theta = 0, -1.0
        while True:
            total, above = 0.0, 0
            for e in range(rowptr[i], rowptr[i + 1]):
                if size[e] > theta:
                    total += size[e]
                    above += 1
            if above == 0 or above >= count > 0 or (count == 0 and total <= limit[i]):
                break
            count, theta = above, (total - limit[i]) / above
            threshold[i] = theta
