"""`fgai.limit`, which adds limits to a trained model, and `count_clipped`, which counts what they clip."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fgai.attention import (
    add_limits,
    call_model,
    clipped_share,
    counting,
    evaluating,
    limits_of,
    measuring,
    model_name,
    prepared,
)
from fgai.attention.interface import originals
from fgai.checks import positions
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.training.recipes import labelled_rows
from fgai.training.resume import copy_model
from fgai.training.settings import _check_shares
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)
CLIP_SHARES = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0)  # tried by `clip_share="auto"`
ALLOWED_LOSS = 0.002  # accuracy on validation rows that `clip_share="auto"` may cost


@typed
@dataclass(frozen=True)
class ClipCount:
    """How many of `total` numbers on a graph lie outside a model's limits."""

    count: int
    total: int
    reference_share: float = 0.0  # share clipped on the graph that the limits were measured on

    @property
    def share(self) -> float:
        """Share of the numbers that were clipped."""
        return self.count / self.total if self.total else 0.0


@typed
@with_gradients
def limit(
    model: M, data: Any, clip_share: float | str = 0.02, *, shrink: float = 0.4, nodes: Tensor | None = None
) -> M:
    """Return a copy of a trained model whose attention layers clip values outside the usual range on `data`.

    The values and both inputs of the score (source, destination) are limited to those on the graph: each
    channel to a range, each vector to a largest norm. An injected node then contributes no more than an
    ordinary node could. With the defaults the model keeps about .77 to .96 of its top 5 neighbours and .2 to
    .8 of its sharpness; `make_faithful` restores them. With `clip_share=0, shrink=0` the model is unchanged
    on that graph, and attacks are limited less. The copy is in eval mode; `count_clipped(model, data)` counts
    what it clips.

    Args:
        model: trained; fgai's, or any PyG model built from GATConv, GATv2Conv, TransformerConv or
            SuperGATConv (see `fgai.attention.register_limits`). Limits it has are measured again.
        data: the graph it was trained for, a `Graph` or PyG `Data`.
        clip_share: share of the nodes left out at either end of each range, below 0.5; `auto` takes the
            largest that costs at most 0.002 of the accuracy on validation rows.
        shrink: share of the nodes, those of largest norm, that are shrunk to the norm of the rest, below 1.
        nodes: bool [N] or indices of the nodes whose ranges count, e.g. training nodes; all by default.

    Raises:
        AttentionError: the model has no attention, or a layer that cannot be limited.
        InputError: a share that is too large, no nodes to measure, or values that are not finite.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5)
        >>> count_clipped(fgai.limit(model, data, 0.0, shrink=0.0), data).count
        0
    """
    if isinstance(clip_share, str) and clip_share != "auto":
        raise InputError(f"`clip_share` must be a number or 'auto', got {clip_share!r}")
    _check_shares(0.0 if isinstance(clip_share, str) else clip_share, shrink)
    graph = as_graph(data)
    (model,) = originals(model)
    limited = copy_model(model)
    add_limits(limited)
    limited.eval()
    graph = prepared(limited, task_of(graph).view(graph, "fit"))
    if graph.num_nodes == 0:
        raise InputError(f"{graph.name!r} has no nodes to take ranges from")
    rows = None
    if nodes is not None:
        rows = positions(nodes, graph.num_nodes, "nodes").flatten()
        rows = (rows.nonzero().flatten() if rows.dtype == torch.bool else rows).to(graph.device)
        if not rows.numel():
            raise InputError("`nodes` is empty: there is nothing to take ranges from")
    if isinstance(clip_share, str):
        clip_share = _largest_clip_share(limited, graph, shrink, rows)
    set_ranges(limited, graph, clip_share, shrink, rows)
    if not all(bool(end.isfinite().all()) for each in limits_of(limited) for end in (each.low, each.high)):
        raise InputError("the model's values on this graph are not finite, so they have no range")
    return limited


def _range_pass(
    model: nn.Module, clip_share: float, shrink: float, nodes: Tensor | None = None, *, sampled: bool = False
) -> AbstractContextManager[Any]:
    """Context in which forward passes set the ranges of limits; `sampled` estimates them from some nodes."""
    if not limits_of(model):
        return nullcontext()
    return measuring(model, clip_share, nodes, shrink=shrink, sampled=sampled)


def set_ranges(
    model: nn.Module, graph: Graph, clip_share: float, shrink: float, nodes: Tensor | None = None
) -> Tensor:
    """Set the ranges of a model's limits from a graph that was prepared for it; return the logits."""
    with evaluating(model), torch.no_grad(), _range_pass(model, clip_share, shrink, nodes):
        return call_model(model, graph)


@typed
@with_gradients
def count_clipped(model: nn.Module, data: Any) -> ClipCount:
    """Count the numbers that a model's limits clip on a graph; `InputError` for a model without limits."""
    if not limits_of(model):
        raise InputError(f"this {model_name(model)} has no limits; `fgai.limit` adds them")
    graph = prepared(model, as_graph(data))
    with evaluating(model), torch.no_grad(), counting(model) as count:
        call_model(model, graph)
    return ClipCount(count[0], count[1], clipped_share(model))


def _largest_clip_share(model: nn.Module, graph: Graph, shrink: float, nodes: Tensor | None) -> float:
    rows, labels = labelled_rows(graph, "val_mask")

    def accuracy(share: float) -> float:
        logits = set_ranges(model, graph, share, shrink, nodes)[rows]
        return float((logits.argmax(1) == labels).double().mean())

    *shares, zero = CLIP_SHARES
    lowest = accuracy(zero) - ALLOWED_LOSS
    return next((share for share in shares if accuracy(share) >= lowest), zero)
