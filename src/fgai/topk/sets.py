"""Top-k sets over the rows of a CSR array, their overlap, and a surrogate of it to train with."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai import checks
from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.ops.backend import _has_numba, has_triton
from fgai.ops.segments import check_row_pointers, check_rows, prepare_values, row_index, row_order, row_sum
from fgai.topk import cpu
from fgai.typed import typed

SCOPES = ("node", "graph")
FEW = 64  # up to this k, finding the k largest one by one is faster than sorting a row
LARGEST_TABLE = 2**28  # entries of a table of nodes × edges or swaps


def _row_kernels(values: Tensor) -> ModuleType | None:
    """The kernels for the device and type of `values`, or None."""
    if values.dim() != 1 or values.dtype not in (torch.float32, torch.float64):
        return None
    if values.is_cuda and has_triton():
        from fgai.topk import gpu

        return gpu
    return cpu if values.device.type == "cpu" and _has_numba() else None


class _WithGradient(Function):
    """A scalar of `values` from a kernel that returns (scalar, gradient, factor of the gradient or None)."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, values: Tensor, *options: Any) -> Tensor:
        scalar, gradient, ctx.factor = kernel(values, *options)
        ctx.save_for_backward(gradient)
        return scalar  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradients[0] if ctx.factor is None else gradients[0] * ctx.factor
        return None, ctx.saved_tensors[0] * factor, *(None for _ in ctx.needs_input_grad[2:])


_with_gradient = _WithGradient.apply


@typed
def check_k(k: int | None, name: str = "k") -> None:
    """Raise `InputError` unless `k` is None or a whole number of at least 1."""
    if k is None:
        return
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= checks.LARGEST:
        raise InputError(f"`{name}` must be at least 1, got {k!r}; use `{name}=None` to rank all edges")


@typed
def scoped_rows(rowptr: Tensor, num_edges: int, scope: str) -> Tensor:
    """The row pointers to rank within: `rowptr` for scope "node", one row of all edges for "graph"."""
    checks.one_of(scope, "scope", SCOPES)
    checks.whole(num_edges, "num_edges")
    check_row_pointers(rowptr, num_edges)
    if scope == "node":
        return rowptr
    return torch.arange(2, device=rowptr.device) * num_edges


@typed
def ranks_in_rows(values: Tensor, rowptr: Tensor) -> Tensor:
    """The rank of every edge among the edges into its node, int64 [E]: 0 for the largest; ties in edge order.

    Example:
        >>> ranks_in_rows(torch.tensor([0.2, 0.7, 0.1, 0.5, 0.5]), torch.tensor([0, 3, 5])).tolist()
        [1, 0, 2, 0, 1]
    """
    order = row_order(values, rowptr)
    ranks = torch.arange(order.numel(), device=order.device) - rowptr[row_index(rowptr, order.numel())]
    return torch.empty_like(order).scatter_(0, order, ranks)


@typed
def leaders(values: Tensor, rowptr: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest edges of every row, falling: int64 [N, count], -1 where it has fewer.

    Example:
        >>> leaders(torch.tensor([0.2, 0.7, 0.1, 1.0]), torch.tensor([0, 3, 4]), 2).tolist()
        [[1, 0], [3, -1]]
    """
    check_rows(values, rowptr)
    checks.whole(count, "count", 1)
    if (rowptr.numel() - 1) * count > LARGEST_TABLE:
        raise InputError(f"{count} leaders at {rowptr.numel() - 1} nodes are too many; use a smaller `count`")
    ready = prepare_values(values)
    if count <= FEW and (kernels := _row_kernels(ready)) is not None:
        leading: Tensor = kernels.pick_leaders(ready, rowptr, count)
        return leading
    slots = rowptr[:-1, None] + torch.arange(count, device=rowptr.device)
    order = row_order(values, rowptr)
    if order.numel() == 0:
        return torch.full_like(slots, -1)
    inside = slots < rowptr[1:, None]
    return torch.where(inside, order[slots.clamp(max=order.numel() - 1)], -1)


@typed
def topk_mask(values: Tensor, rowptr: Tensor, k: int | None, scope: str = "node") -> Tensor:
    """The top-k set T_k as a mask [E]: the k largest of every row (scope "node") or of all ("graph").

    `k=None` or more than the degree takes all edges. `InputError` if k is below 1, the scope is unknown or
    the rows do not fit the values.

    Example:
        >>> topk_mask(torch.tensor([0.2, 0.7, 0.1, 1.0]), torch.tensor([0, 3, 4]), 2).tolist()
        [True, True, False, True]
    """
    check_k(k)
    check_rows(values, rowptr)
    rows = scoped_rows(rowptr, values.shape[0], scope)
    if k is None or k >= values.shape[0]:
        return torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
    ready = prepare_values(values)
    kernels = _row_kernels(ready) if k <= FEW else None
    if kernels is cpu:
        leading = cpu.pick_leaders(ready, rows, k)
        return torch.zeros_like(values, dtype=torch.bool).index_fill_(0, leading[leading >= 0], True)
    if kernels is not None and scope == "node":
        mask: Tensor = kernels.pick_mask(ready, rows, k)
        return mask
    if scope == "graph" and values.device.type != "cpu":
        # One row needs no sort by row. Adding 0.0 makes -0.0 the same number as 0.0.
        first = torch.sort(ready + 0.0, descending=True, stable=True).indices[:k]
        return torch.zeros_like(values, dtype=torch.bool).index_fill(0, first, True)
    return ranks_in_rows(values, rows) < k


@typed
def overlap(mask_a: Tensor, mask_b: Tensor, rowptr: Tensor) -> Tensor:
    """Overlap of two top-k sets at every node, float64 [N]; `InputError` if they cover different edges.

        V_k(i) = |T_k(i) ∩ T'_k(i)| / min(k, degree(i))

    The denominator is the size of the first set, `mask_a`; a row in which that is empty counts as 1. Rows
    from `scoped_rows(rowptr, E, "graph")` give the one overlap of graph-wide sets.

    Example:
        >>> a, b = torch.tensor([True, True, False]), torch.tensor([True, False, True])
        >>> overlap(a, b, torch.tensor([0, 3])).tolist()
        [0.5]
    """
    if mask_a.shape != mask_b.shape:
        got = f"{tuple(mask_a.shape)} and {tuple(mask_b.shape)}"
        raise InputError(f"`mask_a` and `mask_b` must cover the same edges, got {got}; match the edges first")
    check_rows(mask_a, rowptr, "mask_a")
    for name, mask in (("mask_a", mask_a), ("mask_b", mask_b)):
        checks.mask(mask, mask_a.shape, name)
    size = row_sum(mask_a, rowptr).double()
    shared = row_sum(mask_a & mask_b, rowptr).double()
    return torch.where(size > 0, shared / size.clamp(min=1), 1.0)


@typed
def topk_l1(
    w: Tensor,
    w_tilde: Tensor,
    rowptr: Tensor,
    k: int | None,
    scope: str = "node",
    *,
    form: str = "tv",
    known: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The l1 distance of two attentions [E] on their two top-k sets.

        form "tv"     L = 1/4    (||w - w~||_1 on T_k(w) + ||w - w~||_1 on T_k(w~))
        form "paper"  L = 1/(2k) (the same sum)

    Form "tv" is divided by the number of nodes with an incoming edge: with k at or above every degree it is
    the mean total variation of the two attentions. Form "paper", which needs a k, is averaged over the same
    nodes in scope "node"; in scope "graph" there is one set and nothing to average. The sets are constants
    for the gradient. `known` is T_k(w) from `topk_mask`, computed by default; `factor` multiplies the result.
    `InputError` if the shapes differ, an option is unknown, or form "paper" gets no k.

    Example:
        >>> w, v = torch.tensor([0.75, 0.25, 1.0]), torch.tensor([0.25, 0.75, 1.0])
        >>> topk_l1(w, v, torch.tensor([0, 2, 3]), k=None).item()
        0.25
    """
    checks.one_of(form, "form", ("tv", "paper"))
    checks.one_of(scope, "scope", SCOPES)
    checks.real_number(factor, "factor")
    check_k(k)
    if w.shape != w_tilde.shape:
        got = f"{tuple(w.shape)} and {tuple(w_tilde.shape)}"
        raise InputError(f"`w` and `w_tilde` must be on the same edges, got {got}; match the edges first")
    check_rows(w, rowptr, "w")
    check_rows(w_tilde, rowptr, "w_tilde")
    if known is not None:
        checks.mask(known, w.shape, "known")
    if form == "paper" and k is None:
        raise InputError('`k` must be given for form "paper", which divides by it, got None')
    if k is None and w.is_floating_point() and w_tilde.is_floating_point():
        return _with_gradient(_total_variation, w_tilde - w, rowptr, factor)  # type: ignore[no-any-return,no-untyped-call]
    first = topk_mask(w, rowptr, k, scope) if known is None else known
    counts = first.to(w_tilde.dtype) + topk_mask(w_tilde, rowptr, k, scope).to(w_tilde.dtype)
    total = factor * (counts * (w - w_tilde).abs()).sum()
    nodes = (rowptr.diff() > 0).sum().clamp(min=1)
    if form == "tv" or k is None:
        return total / (4 * nodes)
    return total / (2 * k) / (nodes if scope == "node" else 1)


def _total_variation(
    difference: Tensor, rowptr: Tensor, factor: float
) -> tuple[Tensor, Tensor, float | Tensor]:
    """Mean total variation of the rows from the difference of two attentions; see `_WithGradient`."""

    def count() -> Tensor:
        return (rowptr.diff() > 0).sum().clamp(min=1)

    # Reading the number of rows would make the host wait for a GPU.
    key, dtype = ("topk rows", difference.dtype), difference.dtype
    rows = cached_on(rowptr, key, lambda: count().to(dtype)) if rowptr.is_cuda else int(count())
    scale = 0.5 * factor / rows
    total = torch.linalg.vector_norm(difference, 1, dtype=torch.float64)
    return (total * scale).to(dtype), difference.sign(), scale
