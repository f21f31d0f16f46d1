"""What a training reads, a graph or mini-batches; and fine-tuning with limits and one retry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fgai.attention import add_limits, call_model, evaluating, prepared
from fgai.errors import DivergenceError, InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.tasks import check_logits, task_of
from fgai.training.limiting import set_ranges
from fgai.training.loop import fit
from fgai.training.recipes import Recipe, epoch_generator
from fgai.training.resume import copy_model, history_of, set_history, training_fingerprint
from fgai.training.settings import _FineTuningSettings
from fgai.training.stability import MIN_EPOCHS, StabilityReport, _StabilityCheck

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=_FineTuningSettings)
T = TypeVar("T", bound=Any)
SEED_STEP = 7_001  # difference between the seeds of two attempts


class _WholeGraph:
    """A source of training data: a graph in memory, trained on as one batch.

    The source of mini-batches in `fgai.large` has the same methods, and `vanilla()`, `faithful(model,
    settings, terms)` and `harden(model, settings)`, which return recipes. Its `node_graph` has no edges
    and all-zero features.
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
        return training_fingerprint(model, self.graph, *identity, weights=weights)

    def set_ranges(self, model: nn.Module, clip_share: float, shrink: float) -> None:
        set_ranges(model, self.graph, clip_share, shrink)


def _open_source(
    data: Any, seed: int, batch_size: int | None, fan_out: Any, epoch_size: int | None = None
) -> AbstractContextManager[Any]:
    """Return the source of a training; `seed` draws neighbours, and the split of a stored graph."""
    if batch_size is not None:
        stored: AbstractContextManager[Any] = import_module("fgai.large.training").stored_source(data, seed)
        return stored
    return nullcontext(_WholeGraph(_as_whole_graph(data, fan_out, epoch_size)))


def _as_whole_graph(data: Any, fan_out: Any, epoch_size: int | None = None) -> Graph:
    for name, size in (("fan_out", fan_out), ("epoch_size", epoch_size)):
        if size is not None:
            raise InputError(f"`{name}` is for mini-batches: give `batch_size`, too")
    return as_graph(data)


def _fine_tune(
    model: M,
    source: Any,
    recipe_for: Callable[[S], Recipe],
    settings: S,
    *identity: object,
    check: bool,
    seed: int,
    checkpoint: Path | str | None,
    **options: Any,
) -> M:
    """Train a copy of a model, see `retry`; `identity` enters the fingerprint, `options` go to `fit`."""

    def attempt(settings: S, count: int) -> M:
        recipe, trained = recipe_for(settings), copy_model(model)
        own_seed = seed + SEED_STEP * (count - 1)
        folder, run = checkpoint, recipe.name
        if count > 1:
            folder, run = checkpoint and Path(checkpoint) / f"attempt-{count}", f"{run}-{count}"
        full_identity = recipe.name, settings, *identity, own_seed
        source.check_processes(model, *full_identity)
        fingerprint = source.fingerprint(model, *full_identity, weights=True) if checkpoint else ""
        if settings.limits:
            add_limits(trained)
        checkpoint_options: dict[str, Any] = {"checkpoint": folder, "run": run, "fingerprint": fingerprint}
        history = fit(trained, recipe, settings.train_config, seed=own_seed, **checkpoint_options, **options)
        if settings.limits:
            source.set_ranges(trained, *settings.shares)
        set_history(trained, history)
        return trained

    stability = None
    if check and settings.epochs >= MIN_EPOCHS:
        stability = _StabilityCheck(model, source.graph, seed, settings.box, settings.must_match_vanilla)
    return retry(attempt, stability, settings)


def retry(train: Callable[[T, int], M], check: Callable[[M], StabilityReport] | None, settings: T) -> M:
    """Train a model, once more if training diverges or the check fails; return the better model."""
    try:
        model, count = train(settings, 1), 1
    except DivergenceError:
        model, count = train(settings.slower(), 2), 2
    history_of(model).attempts = count
    if check is None:
        return model
    report = check(model)
    if not report.passed and count == 1:
        history_of(model).attempts = 2
        with suppress(DivergenceError):
            second = train(settings.tightened(report), 2)
            history_of(second).attempts = 2
            if (second_report := check(second)).is_better_than(report):
                model, report = second, second_report
    report.warn()
    return model
