"""Top-k sets over the rows of a CSR array, their overlap, and a surrogate of it to train with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.compiled import compiled
from fgai.errors import InputError
from fgai.ops.backend import has_triton
from fgai.ops.segments import check_row_pointers, check_rows, row_index, row_order, row_sum, sortable
from fgai.sparse.valid import check_starts
from fgai.typed import typed

SCOPES = ("node", "graph")
FORMS = ("tv", "paper")
# Selecting few leaders of a row by insertion (or, on a GPU, one after the other) beats sorting the row.
FEW = 64
# The most entries of a table, nodes times edges or swaps.
LARGEST_TABLE = 2**28


class Cut(NamedTuple):
    """Where the top-k of every row ends."""

    level: Tensor  # [N] the smallest value in the set; −inf where the whole row is in it
    spot: Tensor  # [N] int32, the last position with that value; 2³¹ − 1 where the whole row is in the set


def _on_gpu(values: Tensor) -> bool:
    return values.is_cuda and values.dim() == 1 and has_triton()


@typed
def check_k(k: int | None, name: str = "k") -> None:
    """Raise `InputError` unless `k` is None or a whole number of at least 1."""
    if k is None:
        return
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= checks.LARGEST:
        raise InputError(f"`{name}` must be at least 1, got {k!r}; use `{name}=None` to rank all edges")


@typed
def scoped_rows(rowptr: Tensor, num_edges: int, scope: str) -> Tensor:
    """The row pointers `scope` ranks within: `rowptr` itself, or one row of all edges."""
    checks.one_of(scope, "scope", SCOPES)
    checks.whole(num_edges, "num_edges")
    check_row_pointers(rowptr, num_edges)
    if scope == "node":
        return rowptr
    return torch.arange(2, device=rowptr.device) * num_edges


@typed
def ranks_in_rows(values: Tensor, rowptr: Tensor) -> Tensor:
    """The rank of every edge among the edges into its node: 0 for the largest value; ties in edge order.

    Args:
        values: [E].
        rowptr: [N+1].

    Returns:
        int64 [E].

    Example:
        >>> ranks_in_rows(torch.tensor([0.2, 0.7, 0.1, 0.5, 0.5]), torch.tensor([0, 3, 5])).tolist()
        [1, 0, 2, 0, 1]
    """
    order = row_order(values, rowptr)
    ranks = torch.arange(order.numel(), device=order.device) - rowptr[row_index(rowptr, order.numel())]
    return torch.empty_like(order).scatter_(0, order, ranks)


@typed
def leaders(values: Tensor, rowptr: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest edges of every row, in descending order.

    Args:
        values: [E].
        rowptr: [N+1].
        count: how many to list, at least 1.

    Returns:
        int64 [N, count], -1 where a row has fewer edges.

    Example:
        >>> leaders(torch.tensor([0.2, 0.7, 0.1, 1.0]), torch.tensor([0, 3, 4]), 2).tolist()
        [[1, 0], [3, -1]]
    """
    check_rows(values, rowptr)
    checks.whole(count, "count", 1)
    if (rowptr.numel() - 1) * count > LARGEST_TABLE:
        raise InputError(f"{count} leaders at {rowptr.numel() - 1} nodes are too many; use a smaller `count`")
    if values.device.type == "cpu" and count <= FEW and values.dim() == 1:
        positions = np.full((rowptr.numel() - 1, count), -1, dtype=np.int64)
        _lead_rows(sortable(values).numpy(), rowptr.numpy(), positions)
        return torch.from_numpy(positions)
    if _on_gpu(values) and count <= FEW:
        from fgai.topk.gpu import pick_leaders

        return pick_leaders(sortable(values), rowptr, count)
    places = rowptr[:-1, None] + torch.arange(count, device=rowptr.device)
    order = row_order(values, rowptr)
    if order.numel() == 0:
        return torch.full_like(places, -1)
    inside = places < rowptr[1:, None]
    return torch.where(inside, order[places.clamp(max=order.numel() - 1)], -1)


@typed
def topk_mask(values: Tensor, rowptr: Tensor, k: int | None, scope: str = "node") -> Tensor:
    """The top-k set T_k as a mask over edges.

    Args:
        values: [E].
        rowptr: [N+1].
        k: size of the set; None, or anything above the degree, takes all edges.
        scope: "node" (k per neighbourhood) or "graph" (k over all edges).

    Returns:
        bool [E], with min(k, degree) edges set in every row (scope "node").

    Raises:
        InputError: k is below 1, the scope is unknown or the rows do not fit the values.

    Example:
        >>> topk_mask(torch.tensor([0.2, 0.7, 0.1, 1.0]), torch.tensor([0, 3, 4]), 2).tolist()
        [True, True, False, True]
    """
    check_k(k)
    check_rows(values, rowptr)
    rows = scoped_rows(rowptr, values.shape[0], scope)
    if k is None or k >= values.shape[0]:
        return torch.ones(values.shape[0], dtype=torch.bool, device=values.device)
    if values.device.type == "cpu" and k <= FEW:
        mask = torch.zeros(values.shape[0], dtype=torch.bool)
        _mark(leaders(values, rows, k).numpy(), mask.numpy())
        return mask
    if scope == "node" and _on_gpu(values) and k <= FEW:
        from fgai.topk.gpu import pick_mask

        return pick_mask(sortable(values), rows, k)
    if scope == "graph" and values.device.type != "cpu":
        # One row needs no sort by row. Adding 0.0 makes -0.0 the same number as 0.0.
        first = torch.sort(sortable(values) + 0.0, descending=True, stable=True).indices[:k]
        return torch.zeros_like(values, dtype=torch.bool).index_fill(0, first, True)
    return ranks_in_rows(values, rows) < k


@typed
def frozen_topk(values: Tensor, rowptr: Tensor, k: int | None, scope: str = "node") -> Tensor | Cut:
    """The top-k sets of a fixed reference, in the form `topk_l1` reads fastest; arguments as in `topk_mask`.

    Returns:
        A mask as from `topk_mask`; on a GPU, where reading a mask takes longer than finding the set, its cut.
    """
    check_k(k)
    exact = values.dtype in (torch.float32, torch.float64)
    if scope == "node" and k is not None and k <= FEW and exact and _on_gpu(values):
        from fgai.topk.gpu import find_cut

        return Cut(*find_cut(values, rowptr, k))
    return topk_mask(values, rowptr, k, scope)


@typed
def overlap(mask_a: Tensor, mask_b: Tensor, rowptr: Tensor) -> Tensor:
    """Overlap of two top-k sets at every node.

        V_k(i) = |T_k(i) ∩ T'_k(i)| / min(k, degree(i))

    The denominator is the size of the first set. A row in which the first set is empty counts as 1.

    Args:
        mask_a: bool [E], T_k.
        mask_b: bool [E], T'_k on the same edges.
        rowptr: [N+1]; `scoped_rows(rowptr, E, "graph")` gives the one overlap of graph-wide sets.

    Returns:
        float64 [N], in [0, 1].

    Raises:
        InputError: the masks cover different edges.

    Example:
        >>> a, b = torch.tensor([True, True, False]), torch.tensor([True, False, True])
        >>> overlap(a, b, torch.tensor([0, 3])).tolist()
        [0.5]
    """
    if mask_a.shape != mask_b.shape:
        raise InputError(
            f"`mask_a` and `mask_b` must cover the same edges, got {tuple(mask_a.shape)} and"
            f" {tuple(mask_b.shape)}; match the edges first"
        )
    check_rows(mask_a, rowptr, "mask_a")
    for name, mask in (("mask_a", mask_a), ("mask_b", mask_b)):
        checks.mask(mask, mask_a.shape, name)
    size = row_sum(mask_a, rowptr).double()
    shared = row_sum(mask_a & mask_b, rowptr).double()
    return torch.where(size > 0, shared / size.clamp(min=1), 1.0)


@compiled
def _lead_rows(values: np.ndarray, rowptr: np.ndarray, positions: np.ndarray) -> None:
    rows, count = positions.shape
    best = np.empty(count, values.dtype)
    for i in range(rows):
        filled = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            value = values[e]
            if filled < count:
                filled += 1
            elif not value > best[count - 1]:
                continue
            slot = filled - 1
            # Strictly larger only: an equal value that came earlier stays ahead.
            while slot > 0 and value > best[slot - 1]:
                best[slot] = best[slot - 1]
                positions[i, slot] = positions[i, slot - 1]
                slot -= 1
            best[slot] = value
            positions[i, slot] = e


@compiled
def _mark(positions: np.ndarray, mask: np.ndarray) -> None:
    for i in range(positions.shape[0]):
        for e in positions[i]:
            if e < 0:
                break
            mask[e] = True


@typed
def topk_l1(
    w: Tensor,
    w_tilde: Tensor,
    rowptr: Tensor,
    k: int | None,
    scope: str = "node",
    *,
    form: str = "tv",
    known: Tensor | Cut | None = None,
    factor: float = 1.0,
    grown: Tensor | None = None,
) -> Tensor:
    """The l1 distance of two attentions on their two top-k sets.

        form "tv"     L = 1/4    (||w - w~||_1 on T_k(w) + ||w - w~||_1 on T_k(w~))
        form "paper"  L = 1/(2k) (the same sum)

    Form "tv" is divided by the number of nodes with an incoming edge: with k at or above every degree it is
    the mean total variation of the two attentions. Form "paper" is averaged over the same nodes in scope
    "node"; in scope "graph" there is one set and nothing to average. The sets are constants for the gradient.

    Args:
        w: [E], the reference attention.
        w_tilde: [E], the attention being trained, on the same edges (more with `grown`).
        rowptr: [N+1].
        k: size of the sets, None for all edges (form "tv" only).
        scope: "node" or "graph".
        form: "tv" or "paper".
        known: T_k(w) from `frozen_topk`, where it is known.
        factor: what the result is multiplied by.
        grown: [≥ N+1], where the rows of `w_tilde` begin, if further edges follow those of `w` in each, as
            after `Graph.inject`; `w` must then need no gradient.

    Returns:
        A scalar, 0 for a graph without edges.

    Raises:
        InputError: the shapes differ, an option is unknown, or form "paper" gets no k.

    Example:
        >>> import torch
        >>> w, v = torch.tensor([0.75, 0.25, 1.0]), torch.tensor([0.25, 0.75, 1.0])
        >>> topk_l1(w, v, torch.tensor([0, 2, 3]), k=None).item()
        0.25
    """
    checks.one_of(form, "form", FORMS)
    checks.one_of(scope, "scope", SCOPES)
    checks.real_number(factor, "factor")
    check_k(k)
    if w.shape != w_tilde.shape and grown is None:
        raise InputError(
            f"`w` and `w_tilde` must be on the same edges, got {tuple(w.shape)} and {tuple(w_tilde.shape)};"
            " match the edges first"
        )
    _check_edges(w, w_tilde, rowptr, known, grown)
    if form == "paper" and k is None:
        raise InputError('`k` must be given for form "paper", which divides by it, got None')
    exact = w.dtype == w_tilde.dtype and w.dtype in (torch.float32, torch.float64)
    here = _on_gpu(w_tilde) or (w_tilde.device.type == "cpu" and w_tilde.dim() == 1)
    if form == "tv" and scope == "node" and (k is None or k <= FEW) and exact and here:
        if w_tilde.is_cuda:
            from fgai.topk.gpu import distance

            # Finding the set again is faster than reading a mask.
            return distance(w, w_tilde, rowptr, k, known if isinstance(known, Cut) else None, factor, grown)
        from fgai.topk import cpu

        mask = known if isinstance(known, Tensor) else None
        return cpu.distance(w, w_tilde, rowptr, k, mask, factor, grown)
    if grown is not None:
        shift = (grown[: rowptr.numel() - 1] - rowptr[:-1]).index_select(0, row_index(rowptr, len(w)))
        w_tilde = w_tilde.index_select(0, torch.arange(len(w), device=w.device) + shift)
    first = known if isinstance(known, Tensor) else topk_mask(w, rowptr, k, scope)
    counts = first.to(w_tilde.dtype) + topk_mask(w_tilde, rowptr, k, scope).to(w_tilde.dtype)
    total = factor * (counts * (w - w_tilde).abs()).sum()
    nodes = (rowptr.diff() > 0).sum().clamp(min=1)
    if form == "tv" or k is None:
        return total / (4 * nodes)
    return total / (2 * k) / (nodes if scope == "node" else 1)


def _check_edges(
    w: Tensor, w_tilde: Tensor, rowptr: Tensor, known: Tensor | Cut | None, grown: Tensor | None
) -> None:
    """Raise unless every row of `w` lies in its arrays, and in those of `w_tilde` at `grown`."""
    check_rows(w, rowptr, "w")
    if isinstance(known, Tensor):
        checks.mask(known, w.shape, "known")
    if grown is None:
        check_rows(w_tilde, rowptr, "w_tilde")
        return
    if w.dim() != 1 or w_tilde.dim() != 1:
        raise InputError("with `grown`, `w` and `w_tilde` must have one number per edge, heads averaged")
    check_starts(grown, rowptr, len(w_tilde), "grown")
