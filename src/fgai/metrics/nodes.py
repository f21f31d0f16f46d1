"""Means over nodes: which nodes count, and what becomes of none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.typed import typed


@typed
def mean_over(per_node: Tensor, nodes: Tensor | None = None) -> float:
    """Mean of the entries that are not NaN, among `nodes` if given; NaN if there is none.

    Args:
        per_node: [N], NaN where a node does not count.
        nodes: bool [N] or indices; None for all.

    Example:
        >>> mean_over(torch.tensor([0.5, float("nan"), 1.0]))
        0.75
    """
    if per_node.dim() != 1 or not per_node.is_floating_point():
        got = f"{per_node.dtype} {tuple(per_node.shape)}"
        raise InputError(f"`per_node` must hold one floating-point number per node, got {got}")
    chosen = per_node if nodes is None else per_node[checks.positions(nodes, len(per_node), "nodes")]
    return float(torch.nanmean(chosen)) if chosen.numel() else float("nan")


@typed
def mean_of_defined(values: Iterable[float]) -> float:
    """Mean of the values that are not NaN, e.g. over layers; NaN if there is none.

    Example:
        >>> mean_of_defined([0.5, float("nan"), 1.0])
        0.75
    """
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")
