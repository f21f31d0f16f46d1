"""Fine-tuning of a trained model with limits, shared by `make_faithful` and `harden`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fgai.attention import add_limits
from fgai.errors import DivergenceError
from fgai.training.loop import fit
from fgai.training.recipes import Recipe
from fgai.training.resume import copy_model, history_of, set_history
from fgai.training.settings import _FineTuningSettings
from fgai.training.stability import MIN_EPOCHS, StabilityReport, _StabilityCheck

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=_FineTuningSettings)
T = TypeVar("T", bound=Any)
SEED_STEP = 7_001
"""Difference between the seeds of two attempts."""


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
    """Train a copy of a model, and once more if training diverges or the check fails, see `retry`.

    `source` is prepared for the model; `identity` is what else the training depends on, for the fingerprint
    of its checkpoint; `options` are arguments of `fit`. A second attempt has its own seed, folder and name.
    """

    def attempt(settings: S, count: int) -> M:
        recipe, trained = recipe_for(settings), copy_model(model)
        own_seed = seed + SEED_STEP * (count - 1)
        folder, run = checkpoint, recipe.name
        if count > 1:
            folder, run = checkpoint and Path(checkpoint) / f"attempt-{count}", f"{run}-{count}"
        own_identity = recipe.name, settings, *identity, own_seed
        source.check_processes(model, *own_identity)
        fingerprint = source.fingerprint(model, *own_identity, weights=True) if checkpoint else ""
        if settings.limits:
            add_limits(trained)
        own_options: dict[str, Any] = {"checkpoint": folder, "run": run, "fingerprint": fingerprint}
        history = fit(trained, recipe, settings.train_config, seed=own_seed, **own_options, **options)
        if settings.limits:
            source.set_ranges(trained, settings.clip_share, settings.shrink)
        set_history(trained, history)
        return trained

    stability = None
    if check and settings.epochs >= MIN_EPOCHS:
        stability = _StabilityCheck(model, source.graph, seed, settings.box, settings.must_match_vanilla)
    return retry(attempt, stability, settings)


def retry(train: Callable[[T, int], M], check: Callable[[M], StabilityReport] | None, settings: T) -> M:
    """Train a model, and once more if training diverges or the check fails; return the better model.

    Args:
        train: (settings, number of the attempt from 1) → model with its history.
        check: attacks a model; None accepts the first model.
        settings: of the first attempt, with the methods `slower()` and `tightened(report)`.

    Raises:
        DivergenceError: both attempts diverged.
    """
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
