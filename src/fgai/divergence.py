"""Differentiable total variation between predictions and between attentions."""

from __future__ import annotations

from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.ops.segments import check_rows, row_sum
from fgai.typed import typed

SPACES = ("logits", "probabilities")


@typed
def tvd(y: Tensor, y_other: Tensor, on: str = "logits") -> Tensor:
    """Return the total variation between the predictions of each node, `1/2 sum_c |y_ic - y'_ic|`, [...].

    On "logits" [..., C] it depends on their scale; on "probabilities", their softmax, it is in [0, 1]. Other
    shapes raise `InputError`.
    """
    same_shape(y, y_other)
    if checks.one_of(on, "on", SPACES) == "probabilities":
        y, y_other = y.softmax(-1), y_other.softmax(-1)
    return (y - y_other).abs().sum(-1) / 2


@typed
def row_tvd(w: Tensor, w_other: Tensor, rowptr: Tensor) -> Tensor:
    """Return the total variation between two attentions at every node, `1/2 sum_j |w_ij - w'_ij|`.

    Both are [E] or [E, H] on the same edges; the result is [N] or [N, H], 0 for a node without edges.

    Example:
        >>> import torch
        >>> row_tvd(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), torch.tensor([0, 2, 2])).tolist()
        [0.25, 0.0]
    """
    same_shape(w, w_other)
    check_rows(w, rowptr, "w")
    return row_sum((w - w_other).abs(), rowptr) / 2


@typed
def same_shape(a: Tensor, b: Tensor) -> None:
    """Raise `InputError` unless both are floating-point tensors of one shape."""
    if not a.is_floating_point() or not b.is_floating_point() or not a.dim():
        raise InputError(f"both arguments must be floating-point tensors, got {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        got = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise InputError(f"both arguments must have the same shape, got {got}; match nodes or edges first")
