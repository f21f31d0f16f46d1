"""Shared by metrics: checks of their arguments, means over nodes, top-k overlap, attentions for null rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fgai import checks, topk
from fgai.errors import InputError
from fgai.ops.segments import check_row_pointers, check_rows, row_index
from fgai.typed import typed


def _check_attention(w: Tensor, rowptr: Tensor, name: str = "w") -> None:
    """Raise unless `w` is one finite number per edge of the rows."""
    if w.dim() != 1:
        raise InputError(f"`{name}` must be [num_edges], got {tuple(w.shape)}; average the heads first")
    if w.dtype == torch.bool or w.is_complex():
        raise InputError(f"`{name}` must hold numbers, got {w.dtype}; use `.float()`")
    check_rows(w, rowptr, name)
    checks.finite(w, name)


def _check_attentions(w: Tensor, w_other: Tensor, rowptr: Tensor) -> None:
    if w.shape != w_other.shape:
        got = f"{tuple(w.shape)} and {tuple(w_other.shape)}"
        raise InputError(f"`w` and `w_other` must be on the same edges, got {got}; match the edges first")
    _check_attention(w, rowptr)
    _check_attention(w_other, rowptr, "w_other")


def _check_edge_mask(mask: Tensor, w: Tensor, name: str) -> None:
    checks.mask(mask, w.shape, name)
    if mask.device != w.device:
        raise InputError(f"`{name}` must be on {w.device}, as the attention is, got {mask.device}")


def _check_labels(labels: Tensor, shape: tuple[int, ...], name: str = "target") -> None:
    checks.dense(labels, name)
    if labels.shape != shape:
        got = f"{tuple(shape)} and {tuple(labels.shape)}"
        raise InputError(f"`prediction` and `{name}` must cover the same nodes, got {got}")
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"`{name}` must hold class numbers (torch.long), got {labels.dtype}")


def _classes_of(prediction: Tensor) -> Tensor:
    """Class indices [N], from logits or probabilities [N, C] (largest, first on ties) or as they are."""
    checks.dense(prediction, "prediction")
    if prediction.dim() == 2 and prediction.shape[1]:
        return checks.finite(prediction, "prediction").argmax(1)
    if prediction.dim() != 1 or prediction.is_floating_point():
        got = f"{prediction.dtype} {tuple(prediction.shape)}"
        raise InputError(f"`prediction` must be logits [N, C] or class indices [N], got {got}")
    return prediction.long()


def _matched_classes(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    one, two = _classes_of(before), _classes_of(after)
    if one.shape != two.shape:
        got = f"{tuple(one.shape)} and {tuple(two.shape)}"
        raise InputError(f"`before` and `after` must cover the same nodes, got {got}")
    return one, two


@typed
def mean_over(per_node: Tensor, nodes: Tensor | None = None) -> float:
    """Mean of the entries of [N] that are not NaN, of all nodes or of some; NaN if there is none."""
    if per_node.dim() != 1 or not per_node.is_floating_point():
        got = f"{per_node.dtype} {tuple(per_node.shape)}"
        raise InputError(f"`per_node` must hold one floating-point number per node, got {got}")
    chosen = per_node if nodes is None else per_node[checks.positions(nodes, len(per_node), "nodes")]
    return float(torch.nanmean(chosen)) if chosen.numel() else float("nan")


@typed
def mean_of_defined(values: Iterable[float]) -> float:
    """Mean of the values that are not NaN, e.g. over layers; NaN if there is none."""
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")


@typed
def overlap_per_node(w: Tensor, w_other: Tensor, rowptr: Tensor, k: int = 5) -> Tensor:
    """Top-k overlap `V_k = |T_k ∩ T'_k| / k` of nodes with more than k neighbours, float64 [N]; else NaN."""
    _check_attentions(w, w_other, rowptr)
    checks.whole(k, "k", 1)
    shared = topk.overlap(topk.topk_mask(w, rowptr, k), topk.topk_mask(w_other, rowptr, k), rowptr)
    return torch.where(rowptr.diff() > k, shared, float("nan"))


@typed
def uniform_attention(rowptr: Tensor, num_edges: int) -> Tensor:
    """Uniform attention, 1/degree on every edge, float64 [E]; over the whole graph it ranks by degree."""
    check_row_pointers(rowptr, checks.whole(num_edges, "num_edges"))
    return (1 / rowptr.diff().clamp(min=1).double())[row_index(rowptr, num_edges)]


@typed
def random_ranking(num_edges: int, seed: int) -> Tensor:
    """A random ranking: independent uniform scores, float64 [E] on the CPU; they do not sum to one."""
    checks.memory(checks.whole(num_edges, "num_edges"), 8, "num_edges")
    generator = torch.Generator().manual_seed(checks.seed(seed))
    return torch.rand(num_edges, generator=generator, dtype=torch.float64)
