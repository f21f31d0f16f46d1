"""`fgai.limit`: limits for a trained model, and what they clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fgai.alone import with_gradients
from fgai.attention import (
    add_limits,
    call_model,
    counting,
    evaluating,
    limits_of,
    measuring,
    prepared,
)
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.training.recipes import labelled
from fgai.training.train import copied
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)
CUTS = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0)
"""Tried by `cut="auto"`, the largest first."""
ALLOWED_LOSS = 0.002
"""Accuracy on validation rows that `cut="auto"` may cost."""


@typed
@dataclass(frozen=True)
class Clipped:
    """How much of what nodes say on a graph lies outside a model's limits.

    Attributes:
        count: numbers that were clipped.
        total: numbers seen.
    """

    count: int
    total: int

    @property
    def share(self) -> float:
        """Of all numbers, those clipped."""
        return self.count / self.total if self.total else 0.0


@typed
@with_gradients
def limit(model: M, data: Any, cut: float | str = 0.0, *, nodes: Tensor | None = None) -> M:
    """Return a copy of a trained model in which no node can say what none has said on `data`.

    In every attention layer the values and both sides of the score are limited, channel by channel, to the
    range seen on the graph. One forward pass, no training. With `cut=0` and all nodes nothing changes on that
    graph, not a bit: outputs, attention and explanations are the model's own. On an attacked graph, new nodes
    are heard with a voice some honest node could have had, no louder.

    Args:
        model: trained; fgai's, or any PyG model built from GATConv, GATv2Conv, TransformerConv or
            SuperGATConv (see `fgai.attention.register_limits`). Limits it has are measured anew.
        data: what it was made for, a `Graph` or PyG `Data`.
        cut: share of the nodes left out at either end of each range, below 0.5: ranges get tighter, and a few
            honest nodes are clipped. `auto` takes the largest that costs at most 0.002 of the accuracy on
            validation rows.
        nodes: bool [N] or indices of the nodes whose ranges count, e.g. the training nodes of an inductive
            model; all by default.

    Returns:
        A model of the same class, in eval mode. `clipped(model, data)` tells what it clips on a graph.

    Raises:
        AttentionError: the model has no attention, or a layer that cannot be limited.
        InputError: a cut of 0.5 or more, no nodes to measure, or values that are not finite.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5)
        >>> clipped(fgai.limit(model, data), data).count
        0
    """
    if isinstance(cut, str) and cut != "auto":
        raise InputError(f"`cut` must be a number or 'auto', got {cut!r}")
    if not isinstance(cut, str) and not 0.0 <= cut < 0.5:
        raise InputError(f"`cut` must be at least 0 and below 0.5, got {cut}")
    given = as_graph(data)
    limited = copied(model)
    add_limits(limited)
    limited.eval()
    graph = prepared(limited, task_of(given).view(given, "fit"))
    rows = _checked(nodes, graph)
    if isinstance(cut, str):
        cut = _largest_cut(limited, graph, rows)
    _measured(limited, graph, cut, rows)
    return limited


@typed
@with_gradients
def clipped(model: nn.Module, data: Any) -> Clipped:
    """Return how much a model's limits clip on a graph: nothing on its own, unless some was cut off.

    Args:
        model: with limits.
        data: a `Graph` or PyG `Data`.

    Raises:
        InputError: the model has no limits.
    """
    if not limits_of(model):
        raise InputError(f"this {type(model).__name__} has no limits; `fgai.limit` adds them")
    graph = prepared(model, as_graph(data))
    with evaluating(model), torch.no_grad(), counting(model) as count:
        call_model(model, graph)
    return Clipped(*count)


def _checked(nodes: Tensor | None, graph: Graph) -> Tensor | None:
    """Return the nodes whose ranges count as indices, all of them as None."""
    if graph.num_nodes == 0:
        raise InputError(f"{graph.name!r} has no nodes to take ranges from")
    if nodes is None:
        return None
    if nodes.dtype == torch.bool:
        if nodes.shape != (graph.num_nodes,):
            raise InputError(f"`nodes` must have {graph.num_nodes} entries, got {tuple(nodes.shape)}")
        nodes = nodes.nonzero().flatten()
    if not nodes.numel():
        raise InputError("`nodes` is empty: there is nothing to take ranges from")
    if int(nodes.min()) < 0 or int(nodes.max()) >= graph.num_nodes:
        raise InputError(f"`nodes` must lie between 0 and {graph.num_nodes - 1}")
    return nodes.to(graph.device)


def _measured(model: nn.Module, graph: Graph, cut: float, nodes: Tensor | None) -> Tensor:
    """Take the ranges and return the logits of the same pass, what lies outside clipped."""
    with evaluating(model), torch.no_grad(), measuring(model, cut, nodes):
        logits = call_model(model, graph)
    if not all(
        bool(limits.low.isfinite().all() & limits.high.isfinite().all()) for limits in limits_of(model)
    ):
        raise InputError("the model's values on this graph are not finite, so they have no range")
    return logits


def _largest_cut(model: nn.Module, graph: Graph, nodes: Tensor | None) -> float:
    rows, labels = labelled(graph, "val_mask")

    def accuracy(cut: float) -> float:
        logits = _measured(model, graph, cut, nodes)[rows]
        return float((logits.argmax(1) == labels).double().mean())

    whole = accuracy(0.0)
    return next(cut for cut in CUTS if cut == 0.0 or accuracy(cut) >= whole - ALLOWED_LOSS)
