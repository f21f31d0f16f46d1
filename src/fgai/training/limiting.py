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
    clipped_share,
    counting,
    evaluating,
    limits_of,
    measuring,
    model_name,
    prepared,
)
from fgai.checks import positions
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.training.recipes import labelled
from fgai.training.settings import Tightness
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
    """How much of what nodes say on a graph lies outside a model's limits, clipped or softened.

    Attributes:
        count: numbers that were clipped.
        total: numbers seen.
        usual: share that was clipped on the graph the limits were measured on.
    """

    count: int
    total: int
    usual: float = 0.0

    @property
    def share(self) -> float:
        """Of all numbers, those clipped."""
        return self.count / self.total if self.total else 0.0


@typed
@with_gradients
def limit(
    model: M, data: Any, cut: float | str = 0.0, *, soften: float = 0.0, nodes: Tensor | None = None
) -> M:
    """Return a copy of a trained model in which no node can say what none has said on `data`.

    In every attention layer the values and both sides of the score are limited to what was seen on the graph:
    channel by channel to a range, and as a whole to the loudness of the loudest node. One forward pass, no
    training. With `cut=0`, `soften=0` and all nodes nothing changes on that graph, not a bit: outputs,
    attention and explanations are the model's own. On an attacked graph, new nodes are heard with a voice
    some honest node could have had, no louder.

    Args:
        model: trained; fgai's, or any PyG model built from GATConv, GATv2Conv, TransformerConv or
            SuperGATConv (see `fgai.attention.register_limits`). Limits it has are measured anew.
        data: what it was made for, a `Graph` or PyG `Data`.
        cut: share of the nodes left out at either end of each range, below 0.5: ranges get tighter, and a few
            honest nodes are clipped. `auto` takes the largest that costs at most 0.002 of the accuracy on
            validation rows.
        soften: share of the nodes, the loudest, that are drawn to the loudness of the rest, below 1: what
            they say keeps its direction.
        nodes: bool [N] or indices of the nodes whose ranges count, e.g. the training nodes of an inductive
            model; all by default.

    Returns:
        A model of the same class, in eval mode. `clipped(model, data)` tells what it clips on a graph.

    Raises:
        AttentionError: the model has no attention, or a layer that cannot be limited.
        InputError: a share that is too large, no nodes to measure, or values that are not finite.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5)
        >>> clipped(fgai.limit(model, data), data).count
        0
    """
    if isinstance(cut, str) and cut != "auto":
        raise InputError(f"`cut` must be a number or 'auto', got {cut!r}")
    tightness = Tightness(0.0 if isinstance(cut, str) else cut, soften)
    given = as_graph(data)
    limited = copied(model)
    add_limits(limited)
    limited.eval()
    graph = prepared(limited, task_of(given).view(given, "fit"))
    rows = _checked(nodes, graph)
    if isinstance(cut, str):
        tightness = _tightest(limited, graph, soften, rows)
    _measured(limited, graph, tightness, rows)
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
        raise InputError(f"this {model_name(model)} has no limits; `fgai.limit` adds them")
    graph = prepared(model, as_graph(data))
    with evaluating(model), torch.no_grad(), counting(model) as count:
        call_model(model, graph)
    return Clipped(count[0], count[1], clipped_share(model))


def _checked(nodes: Tensor | None, graph: Graph) -> Tensor | None:
    """Return the nodes whose ranges count as indices, all of them as None."""
    if graph.num_nodes == 0:
        raise InputError(f"{graph.name!r} has no nodes to take ranges from")
    if nodes is None:
        return None
    rows = positions(nodes, graph.num_nodes, "nodes").flatten()
    rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    if not rows.numel():
        raise InputError("`nodes` is empty: there is nothing to take ranges from")
    return rows.to(graph.device)


def _measured(model: nn.Module, graph: Graph, tightness: Tightness, nodes: Tensor | None) -> Tensor:
    """Take the ranges and return the logits of the same pass, what lies outside clipped."""
    taken = measuring(model, tightness.cut, nodes, soften=tightness.soften)
    with evaluating(model), torch.no_grad(), taken:
        logits = call_model(model, graph)
    if not all(
        bool(limits.low.isfinite().all() & limits.high.isfinite().all()) for limits in limits_of(model)
    ):
        raise InputError("the model's values on this graph are not finite, so they have no range")
    return logits


def _tightest(model: nn.Module, graph: Graph, soften: float, nodes: Tensor | None) -> Tightness:
    """Return the largest cut that costs next to nothing on validation rows."""
    rows, labels = labelled(graph, "val_mask")

    def accuracy(tightness: Tightness) -> float:
        logits = _measured(model, graph, tightness, nodes)[rows]
        return float((logits.argmax(1) == labels).double().mean())

    tried = [Tightness(cut, soften) for cut in CUTS]
    whole = accuracy(tried[-1])
    return next((one for one in tried[:-1] if accuracy(one) >= whole - ALLOWED_LOSS), tried[-1])
