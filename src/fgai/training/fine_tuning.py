"""Fine-tuning of a trained model behind limits: the part that `make_faithful` and `harden` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fgai.attention import add_limits
from fgai.training.loop import Recipe, fit
from fgai.training.resume import copied, set_history
from fgai.training.retry import _StabilityCheck, retry
from fgai.training.settings import _FineTuning

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=_FineTuning)
SEED_STEP = 7_001
"""Difference between the seeds of two attempts."""


def _fine_tune(
    model: M,
    source: Any,
    recipe_for: Callable[[S], Recipe],
    settings: S,
    check: _StabilityCheck | None,
    *about: object,
    seed: int,
    checkpoint: Path | str | None,
    **options: Any,
) -> M:
    """Train a copy of a model, and once more if training diverges or the check fails, see `retry`.

    `source` is ready for the model; `about` is what else the training depends on, for the fingerprint of its
    checkpoint. A second attempt has its own seed, folder and name.
    """

    def attempt(settings: S, count: int) -> M:
        recipe, faithful = recipe_for(settings), copied(model)
        own_seed = seed + SEED_STEP * (count - 1)
        folder, run = checkpoint, recipe.name
        if count > 1:
            folder, run = checkpoint and Path(checkpoint) / f"attempt-{count}", f"{run}-{count}"
        parts = recipe.name, settings, *about, own_seed
        source.agree(model, *parts)
        label = source.label(model, *parts, weights=True) if checkpoint else ""
        if settings.limits:
            add_limits(faithful)
        names: dict[str, Any] = {"seed": own_seed, "checkpoint": folder, "run": run, "fingerprint": label}
        history = fit(faithful, recipe, settings.train, **names, **options)
        if settings.limits:
            source.set_ranges(faithful, settings.clip_share, settings.shrink)
        set_history(faithful, history)
        return faithful

    return retry(attempt, check, settings)
