"""`BatchSource`: a graph that training reads in mini-batches; `fgai.large` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from fgai.graph import Graph
from fgai.training.loop import Recipe
from fgai.training.settings import FaithfulSettings, HardenSettings
from fgai.training.terms import Term


class BatchSource(Protocol):
    """A graph in mini-batches, and the recipes that train on them."""

    nodes: Graph
    """All nodes with labels and masks, without edges and features."""

    def batched_for(
        self,
        model: nn.Module,
        batch_size: int,
        fan_out: int | Sequence[int] | None,
        epoch_size: int | None = None,
    ) -> None:
        """Check the sizes of batches and the model they are for."""

    def vanilla(self) -> Recipe:
        """Return cross-entropy in mini-batches."""

    def faithful(self, model: nn.Module, settings: FaithfulSettings, terms: Sequence[Term]) -> Any:
        """Return faithful training in mini-batches."""

    def harden(self, model: nn.Module, settings: HardenSettings) -> Recipe:
        """Return adversarial training in mini-batches."""

    def agree(self, model: nn.Module, *settings: object) -> None:
        """Check that all processes train the same model in the same way."""

    def label(self, model: nn.Module, *parts: object, weights: bool = False) -> str:
        """Return the fingerprint of the training, see `run_label`."""

    def set_ranges(self, model: nn.Module, clip_share: float, shrink: float) -> None:
        """Set the ranges of a model's limits from all nodes."""


def open_source(data: Any, seed: int) -> AbstractContextManager[BatchSource]:
    """Open a graph for mini-batches.

    Args:
        data: a stored graph or its folder; a `Graph` or PyG `Data` of nodes.
        seed: of the neighbours drawn, and of the split if the graph has none.

    Raises:
        InputError: links or small graphs, which mini-batches do not keep.
        DataError: the folder holds no stored graph, or a damaged one.
    """
    opened: AbstractContextManager[BatchSource] = import_module("fgai.large.training").stored_source(
        data, seed
    )
    return opened
