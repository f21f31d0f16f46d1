"""The graph that a training reads: `_WholeGraph` in memory, or mini-batches from `fgai.large`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fgai.attention import call_model, evaluating, prepared
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.tasks import check_logits, task_of
from fgai.training.limiting import set_ranges
from fgai.training.recipes import epoch_generator
from fgai.training.resume import training_fingerprint


class _WholeGraph:
    """A graph in memory, trained on as one batch.

    `fgai.large` has a source of mini-batches with the same methods, and three that return its recipes:
    `vanilla()`, `faithful(model, settings, terms)` and `harden(model, settings)`.

    Attributes:
        node_graph: all nodes with labels and masks; of a stored graph without edges and features.
        graph: prepared for the model.
    """

    def __init__(self, graph: Graph) -> None:
        self.node_graph = self.graph = graph

    def prepare(self, model: nn.Module, *sizes: object) -> None:
        """Prepare the graph for a model, whose logits must fit it; `sizes` of mini-batches are ignored."""
        self.graph = prepared(model, task_of(self.node_graph).view(self.node_graph, "fit"))
        with evaluating(model), torch.no_grad():
            check_logits(call_model(model, self.graph), self.graph)

    def draw_links(self, seed: int) -> None:
        """Draw the pairs without a link once, not every epoch; nothing for tasks without links."""
        self.graph = task_of(self.graph).epoch(self.graph, epoch_generator(seed, -3))

    def check_processes(self, model: nn.Module, *identity: object) -> None:
        """Check that all processes train in the same way; several processes need mini-batches, see `fit`."""

    def fingerprint(self, model: nn.Module, *identity: object, weights: bool = False) -> str:
        """See `training_fingerprint`."""
        return training_fingerprint(model, self.graph, *identity, weights=weights)

    def set_ranges(self, model: nn.Module, clip_share: float, shrink: float) -> None:
        """Set the ranges of a model's limits from all nodes."""
        set_ranges(model, self.graph, clip_share, shrink)


def _open_source(
    data: Any,
    seed: int,
    batch_size: int | None,
    fan_out: int | Sequence[int] | None,
    epoch_size: int | None = None,
) -> AbstractContextManager[Any]:
    """Open the graph of a training: a `_WholeGraph`, or with `batch_size` its mini-batches.

    The seed decides which neighbours are drawn, and the split if a stored graph has none.
    """
    if batch_size is not None:
        stored: AbstractContextManager[Any] = import_module("fgai.large.training").stored_source(data, seed)
        return stored
    return nullcontext(_WholeGraph(_as_whole_graph(data, fan_out, epoch_size)))


def _as_whole_graph(data: Any, fan_out: int | Sequence[int] | None, epoch_size: int | None = None) -> Graph:
    """Return a graph that is trained on as a whole."""
    for name, size in (("fan_out", fan_out), ("epoch_size", epoch_size)):
        if size is not None:
            raise InputError(f"`{name}` is for mini-batches: give `batch_size`, too")
    return as_graph(data)
