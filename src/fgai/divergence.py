"""Distances between predictions and between attentions: total variation, Kullback-Leibler, Jensen-Shannon.

Three forms of each: over the last axis (`tvd`, `kl`, `jsd`), over the edges into every node (`row_tvd`,
`row_kl`, `row_jsd`), and one number for a graph (`graph_tvd`, `graph_tvd_rel`, `graph_jsd`). All are
differentiable, exactly 0 for equal arguments, and 0 log 0 counts as 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.ops.segments import check_rows, row_sum
from fgai.typed import typed

SPACES = ("logits", "probabilities")


@typed
def tvd(y: Tensor, y_other: Tensor, on: str = "logits") -> Tensor:
    """Total variation between the predictions of each node.

        D_i = 1/2 sum_c |y_ic - y'_ic|

    On logits it is not scale-free (logits times 0.01 look stable); on probabilities it lies in [0, 1].

    Args:
        y: [..., C], logits.
        y_other: [..., C], logits.
        on: "logits" takes them as they are, "probabilities" takes their softmax.

    Returns:
        [...].

    Raises:
        InputError: if the shapes differ or `on` is unknown.

    Example:
        >>> tvd(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 1.0]])).tolist()
        [0.75]
    """
    _same_shape(y, y_other)
    if checks.one_of(on, "on", SPACES) == "probabilities":
        y, y_other = y.softmax(-1), y_other.softmax(-1)
    return (y - y_other).abs().sum(-1) / 2


@typed
def kl(p: Tensor, q: Tensor) -> Tensor:
    """Kullback-Leibler divergence over the last axis, `sum_c p_c log(p_c / q_c)`.

    Infinite where q is 0 and p is not.

    Args:
        p: [..., C], non-negative.
        q: [..., C], non-negative.

    Returns:
        [...], in nats.

    Example:
        >>> kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])).item()  # log 2
        0.6931471824645996
    """
    _same_shape(p, q)
    return _kl_terms(p, q).sum(-1)


@typed
def jsd(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence over the last axis, `1/2 (KL(p‖m) + KL(q‖m))` with `m = (p + q) / 2`.

    Args:
        p: [..., C], non-negative.
        q: [..., C], non-negative.

    Returns:
        [...], in nats; at most log 2 for distributions.

    Example:
        >>> jsd(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item()  # log 2
        0.6931471824645996
    """
    _same_shape(p, q)
    return _jsd_terms(p, q).sum(-1) / 2


@typed
def row_tvd(w: Tensor, w_other: Tensor, rowptr: Tensor) -> Tensor:
    """Total variation between two attentions at every node, `1/2 sum_j |w_ij - w'_ij|`.

    Args:
        w: [E] or [E, H].
        w_other: the same edges.
        rowptr: [N+1].

    Returns:
        [N] or [N, H]; 0 for a node without edges.

    Example:
        >>> w, v = torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.25, 0.75, 1.0])
        >>> row_tvd(w, v, torch.tensor([0, 2, 3])).tolist()
        [0.25, 0.0]
    """
    _same_shape(w, w_other)
    check_rows(w, rowptr, "w")
    return row_sum((w - w_other).abs(), rowptr) / 2


@typed
def row_kl(w: Tensor, w_other: Tensor, rowptr: Tensor) -> Tensor:
    """Kullback-Leibler divergence at every node, `sum_j w_ij log(w_ij / w'_ij)`; arguments as `row_tvd`."""
    _same_shape(w, w_other)
    check_rows(w, rowptr, "w")
    return row_sum(_kl_terms(w, w_other), rowptr)


@typed
def row_jsd(w: Tensor, w_other: Tensor, rowptr: Tensor) -> Tensor:
    """Jensen-Shannon divergence at every node, in nats; arguments as `row_tvd`."""
    _same_shape(w, w_other)
    check_rows(w, rowptr, "w")
    return row_sum(_jsd_terms(w, w_other), rowptr) / 2


@typed
def graph_tvd(y: Tensor, y_other: Tensor, on: str = "logits") -> Tensor:
    """Mean total variation over nodes, `1/(2|N|) sum_i sum_c |y_ic - y'_ic|`.

    Args:
        y: [N, C], logits.
        y_other: [N, C], logits.
        on: "logits" or "probabilities".

    Returns:
        A scalar; 0 for a graph without nodes.

    Example:
        >>> graph_tvd(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), torch.tensor([[0.5, 1.0], [2.0, 2.0]])).item()
        0.375
    """
    per_node = tvd(y, y_other, on)
    return per_node.sum() / max(1, per_node.numel())


@typed
def graph_tvd_rel(y: Tensor, y_other: Tensor) -> Tensor:
    """Change of the logits relative to their spread, which no common factor alters.

        sum_i sum_c |y_ic - y'_ic| / sum_i sum_c |y_ic - mean_c y_i|

    The spread is that of `y`, the prediction before the perturbation. Where it is zero (every node has equal
    logits) the result is 0 if nothing changed and infinite otherwise.

    Args:
        y: [N, C], logits before.
        y_other: [N, C], logits after.

    Returns:
        A scalar.

    Example:
        >>> y = torch.tensor([[1.0, 3.0]])
        >>> graph_tvd_rel(y, torch.tensor([[1.0, 2.0]])).item()
        0.5
    """
    _same_shape(y, y_other)
    change = (y - y_other).abs().sum()
    spread = (y - y.mean(-1, keepdim=True)).abs().sum()
    flat = spread == 0
    ratio = change / torch.where(flat, torch.ones_like(spread), spread)
    return torch.where(flat, torch.where(change == 0, 0.0, float("inf")), ratio)


@typed
def graph_jsd(w: Tensor, w_other: Tensor) -> Tensor:
    """Jensen-Shannon divergence of two attentions over the edges of a graph.

        1/(2|E|) (KL(w‖m) + KL(w'‖m)),   m = (w + w') / 2,   KL(w‖m) = sum_e w_e log(w_e / m_e)

    The sums run over all edges at once; |E| counts the edges compared, which both arguments must hold in the
    same order. Head-wise attention [E, H] is averaged over heads by the caller.

    Args:
        w: [E], non-negative.
        w_other: [E], non-negative, on the same edges.

    Returns:
        A scalar in nats, exactly 0 for equal arguments and for a graph without edges.

    Example:
        >>> w = torch.tensor([0.25, 0.75, 1.0])
        >>> graph_jsd(w, w).item()
        0.0
    """
    _same_shape(w, w_other)
    return _jsd_terms(w, w_other).sum() / (2 * max(1, w.shape[0]))


def _same_shape(a: Tensor, b: Tensor) -> None:
    if not a.is_floating_point() or not b.is_floating_point() or not a.dim():
        raise InputError(f"both arguments must be floating-point tensors, got {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise InputError(
            f"both arguments must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)};"
            " compare the same nodes and match edges by source and destination first"
        )


def _kl_terms(p: Tensor, q: Tensor) -> Tensor:
    """Elementwise p log(p/q), 0 where p is 0, with finite gradients there."""
    positive = p > 0
    ones = torch.ones_like(p)
    safe_p, safe_q = torch.where(positive, p, ones), torch.where(positive, q, ones)
    return torch.where(positive, safe_p * (safe_p.log() - safe_q.log()), torch.zeros_like(p))


def _jsd_terms(p: Tensor, q: Tensor) -> Tensor:
    """Elementwise p log(p/m) + q log(q/m), m = (p+q)/2, to full relative precision.

    With d = (p - q)/(p + q) it is m φ(d), where

        φ(d) = (1+d) log(1+d) + (1-d) log(1-d) = 2 d atanh(d) + log(1 - d²).

    The last form has terms of size 2d² and -d², so nothing cancels for small d; the others subtract terms of
    size d and are left with rounding once |d| is below 1e-4 in float32, where stable attention lives.
    """
    total = p + q
    occupied = total > 0
    zeros = torch.zeros_like(total)
    d = torch.where(occupied, (p - q) / torch.where(occupied, total, 1.0), zeros)
    # Where one side is 0, |d| = 1 and the slope is infinite: take the slope just inside, the value exactly.
    limit = 1 - torch.finfo(d.dtype).eps
    edge = d.abs() > limit
    d = d + (d.clamp(-limit, limit) - d).detach()
    wide = d.abs() > 0.5
    near, far = torch.where(wide, zeros, d), torch.where(wide, d, zeros)
    small = 2 * near * torch.atanh(near) + torch.log1p(-near.square())
    large = (1 + far) * torch.log1p(far) + (1 - far) * torch.log1p(-far)
    phi = torch.where(wide, large, small)
    phi = phi + torch.where(edge, 2 * math.log(2) - phi, zeros).detach()
    return total / 2 * phi
