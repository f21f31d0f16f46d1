"""Points of a ball: random ones, and the steepest step."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks
from fgai.attacks.balls.projection import Radius, norms, per_row, project
from fgai.ops.capture import Hashed
from fgai.ops.segments import check_rows, row_index, row_max, row_sum
from fgai.topk import NORMS


@torch.no_grad()
def random_point(
    rowptr: Tensor,
    num_edges: int,
    radius: Radius,
    norm: str = "l1",
    *,
    generator: torch.Generator | Hashed,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A point drawn uniformly from every row's ball.

    l1: signed exponentials divided by their sum and one exponential more; l2: a normal direction at distance
    R u^(1/d), u uniform; linf: uniform in [-R, R].

    Args:
        rowptr: [N+1].
        num_edges: E.
        radius: R >= 0, a number or [N].
        norm: "l1", "l2" or "linf".
        generator: a CPU generator gives the same point on every device; one on the device draws without a
            transfer; `Hashed` does both.
        dtype: of the result.

    Returns:
        [E], on the device of `rowptr`.

    Example:
        >>> rowptr = torch.tensor([0, 3, 5])
        >>> point = random_point(rowptr, 5, 0.1, "l1", generator=torch.Generator().manual_seed(1))
        >>> bool((norms(point, rowptr, "l1") <= 0.1).all())
        True
    """
    checks.one_of(norm, "norm", NORMS)

    def uniform(size: int) -> Tensor:
        return 1 - _drawn("rand", size, generator).to(rowptr.device)  # In (0, 1], so the logarithm is finite.

    sign = torch.where(uniform(num_edges) > 0.5, 1.0, -1.0).double()
    limit = per_row(radius, sign, rowptr)
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
        size = norms(direction, rowptr, "l2")
        point = direction * (limit * distance / torch.where(size > 0, size, 1.0))[row]
    # Once more after rounding to `dtype`.
    return project(point.to(dtype), rowptr, radius, norm)


def _drawn(kind: str, size: int, generator: torch.Generator | Hashed) -> Tensor:
    if isinstance(generator, Hashed):
        return generator.rand(size) if kind == "rand" else generator.randn(size)
    draw = torch.rand if kind == "rand" else torch.randn
    return draw(size, generator=generator, dtype=torch.float64, device=generator.device)


@torch.no_grad()
def steepest(gradient: Tensor, rowptr: Tensor, step_size: Radius, norm: str = "l1") -> Tensor:
    """The step of given size along which a linear function rises most.

        argmax <gradient, step> over ||step|| <= step_size

        l1    all of it on the entry with the largest |gradient| (the first of several)
        l2    along the gradient
        linf  the sign of every entry

    With `step_size` equal to the radius it is the maximiser of a linear function over the ball. Rows whose
    gradient is zero do not move.

    Args:
        gradient: [E] or [E, H].
        rowptr: [N+1].
        step_size: a number or [N].
        norm: "l1", "l2" or "linf".

    Returns:
        Like `gradient`.

    Example:
        >>> steepest(torch.tensor([1.0, -3.0, 0.0]), torch.tensor([0, 2, 3]), 0.5, "l1").tolist()
        [0.0, -0.5, 0.0]
    """
    checks.one_of(norm, "norm", NORMS)
    check_rows(gradient, rowptr, "gradient")
    size = per_row(step_size, gradient, rowptr, "step_size")
    row = row_index(rowptr, gradient.shape[0])
    if norm == "linf":
        return gradient.sign() * size.index_select(0, row)
    if norm == "l2":
        # Scaled by the largest entry first: dividing by the norm of a tiny gradient would overflow.
        largest = norms(gradient, rowptr, "linf")
        gradient = gradient / torch.where(largest > 0, largest, 1.0).index_select(0, row)
        length = norms(gradient, rowptr, "l2").clamp(min=1)
        return gradient * (size / length).index_select(0, row)
    chosen = _first_largest(gradient.abs(), rowptr, row)
    return torch.where(chosen, gradient.sign() * size.index_select(0, row), 0.0)


def _first_largest(values: Tensor, rowptr: Tensor, row: Tensor) -> Tensor:
    """Mask of the first largest entry of every row, like `values`."""
    top = values == row_max(values, rowptr).index_select(0, row)
    seen = top.long().cumsum(0)
    before = torch.cat([torch.zeros_like(seen[:1]), seen]).index_select(0, rowptr[:-1].index_select(0, row))
    return top & (seen - before == 1)
