"""What metrics are given: attentions on one graph's edges, predictions of the same nodes; nothing is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.ops.segments import check_rows


def check_attention(w: Tensor, rowptr: Tensor, name: str = "w") -> None:
    """Raise unless `w` is one finite number per edge of the rows."""
    if w.dim() != 1:
        raise InputError(f"`{name}` must be [num_edges], got {tuple(w.shape)}; average the heads first")
    if w.dtype == torch.bool or w.is_complex():
        raise InputError(f"`{name}` must hold numbers, got {w.dtype}; use `.float()`")
    check_rows(w, rowptr, name)
    checks.finite(w, name)


def check_attentions(w: Tensor, w_other: Tensor, rowptr: Tensor) -> None:
    """Raise unless both are one finite number per edge of the rows."""
    if w.shape != w_other.shape or w.dim() != 1:
        raise InputError(
            f"`w` and `w_other` must be [num_edges] on the same edges, got {tuple(w.shape)} and"
            f" {tuple(w_other.shape)}; match the edges and average the heads first"
        )
    check_attention(w, rowptr)
    check_attention(w_other, rowptr, "w_other")


def check_edge_mask(mask: Tensor, w: Tensor, name: str) -> None:
    """Raise unless `mask` is boolean, one entry per entry of `w`."""
    checks.mask(mask, w.shape, name)
    if mask.device != w.device:
        raise InputError(f"`{name}` must be on {w.device}, as the attention is, got {mask.device}")


def check_labels(labels: Tensor, shape: tuple[int, ...], name: str = "target") -> None:
    """Raise unless `labels` holds class numbers of this shape."""
    checks.dense(labels, name)
    if labels.shape != shape:
        got = f"{tuple(shape)} and {tuple(labels.shape)}"
        raise InputError(f"`prediction` and `{name}` must cover the same nodes, got {got}")
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"`{name}` must hold class numbers (torch.long), got {labels.dtype}")
