"""The surrogate of top-k overlap that training can differentiate."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.ops.segments import check_rows, row_index
from fgai.sparse.valid import check_starts
from fgai.topk.cut import Cut
from fgai.topk.sets import FEW, SCOPES, check_k, on_gpu, topk_mask
from fgai.typed import typed

FORMS = ("tv", "paper")


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

    Form "tv" is summed over edges and divided by the number of nodes with at least one incoming edge, in both
    scopes: with k at or above every degree it *is* the mean total variation of the two attentions, and its
    size does not depend on k. Form "paper" is averaged over the same nodes in scope "node"; in scope "graph"
    there is one set and nothing to average. The sets themselves are constants for the gradient.

    Args:
        w: [E], the reference attention.
        w_tilde: [E], the attention being trained, on the same edges (more with `grown`).
        rowptr: [N+1].
        k: size of the sets, None for all edges (form "tv" only).
        scope: "node" or "graph".
        form: "tv" or "paper".
        known: T_k(w) where it is already known, as for a frozen reference: see `frozen_topk`.
        factor: what the result is multiplied by; saves a step of its own in training.
        grown: [≥ N+1], where the rows of `w_tilde` begin, if further edges stand behind those of `w` in each,
            as after `Graph.inject`; `w` must then need no gradient. Matches the edges without a copy.

    Returns:
        A scalar, 0 for a graph without edges.

    Raises:
        InputError: if the shapes differ, an option is unknown, or form "paper" gets no k.

    Example:
        >>> import torch
        >>> w, v = torch.tensor([0.75, 0.25, 1.0]), torch.tensor([0.25, 0.75, 1.0])
        >>> topk_l1(w, v, torch.tensor([0, 2, 3]), k=None).item()
        0.25
    """
    checks.one_of(form, "form", FORMS)
    checks.one_of(scope, "scope", SCOPES)
    checks.number(factor, "factor")
    check_k(k)
    if w.shape != w_tilde.shape and grown is None:
        raise InputError(
            f"`w` and `w_tilde` must be on the same edges, got {tuple(w.shape)} and {tuple(w_tilde.shape)};"
            " match the edges first"
        )
    _check_edges(w, w_tilde, rowptr, known, grown)
    if form == "paper" and k is None:
        raise InputError('`k` must be given for form "paper", which divides by it, got None')
    if form == "tv" and scope == "node" and (k is None or k <= FEW) and _fits(w, w_tilde):
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


def _fits(w: Tensor, w_tilde: Tensor) -> bool:
    """Whether one kernel over the rows can do it all."""
    here = on_gpu(w_tilde) or (w_tilde.device.type == "cpu" and w_tilde.dim() == 1)
    return here and w.dtype == w_tilde.dtype and w.dtype in (torch.float32, torch.float64)


def _check_edges(
    w: Tensor, w_tilde: Tensor, rowptr: Tensor, known: Tensor | Cut | None, grown: Tensor | None
) -> None:
    """Raise unless every row of `w` lies in its arrays, and in those of `w_tilde` where `grown` says."""
    check_rows(w, rowptr, "w")
    if isinstance(known, Tensor) and (known.dtype != torch.bool or known.shape != w.shape):
        got = f"{known.dtype} {tuple(known.shape)}"
        raise InputError(f"`known` must be the mask of the top-k of `w`, bool {tuple(w.shape)}, got {got}")
    if grown is None:
        check_rows(w_tilde, rowptr, "w_tilde")
        return
    if w.dim() != 1 or w_tilde.dim() != 1:
        raise InputError("with `grown`, `w` and `w_tilde` must have one number per edge, heads averaged")
    check_starts(grown, rowptr, len(w_tilde), "grown")
