"""`fgai.train`: from an untrained attention model to the best weights on validation nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from fgai.alone import with_gradients
from fgai.attention import call_model, duplicate, evaluating, model_name, prepared, unwrapped
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.models import AttentionModel, Defended, as_graph
from fgai.tasks import check_logits, task_of
from fgai.trackers import Tracker
from fgai.training.build import setting_names, untrained
from fgai.training.defended import Regularised
from fgai.training.history import History
from fgai.training.loop import TRAIN_FIELDS, Recipe, TrainConfig, fit
from fgai.training.presets import preset_named
from fgai.training.recipes import Vanilla
from fgai.training.resume import run_label
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)


@overload
def train(
    model: M,
    data: Any,
    *,
    seed: int = 0,
    preset: str | None = "auto",
    config: TrainConfig | None = None,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    recipe: Recipe | None = None,
    **settings: Any,
) -> M: ...


@overload
def train(
    model: str,
    data: Any,
    *,
    seed: int = 0,
    preset: str | None = "auto",
    config: TrainConfig | None = None,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    recipe: Recipe | None = None,
    **settings: Any,
) -> AttentionModel: ...


@typed
@with_gradients
def train(
    model: nn.Module | str,
    data: Any,
    *,
    seed: int = 0,
    preset: str | None = "auto",
    config: TrainConfig | None = None,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    recipe: Recipe | None = None,
    tracker: Tracker | None = None,
    **settings: Any,
) -> nn.Module:
    """Train a copy of `model` on the labelled nodes, links or graphs of `data` and return it in eval mode.

    The given model is untouched. The result carries its `history` (loss terms, scores, seconds).

    A preset holds what was chosen on validation nodes: how to train (epochs, learning rate, ...), and for
    some datasets how to build the model (dropout, layers, ...). A model that exists is trained by the
    former; the latter needs the model's name, so that it is built here. `fgai.train("GAT", data, seed=3)` is
    what `fgai train --model GAT --seed 3` does. What is given by name wins over `config`, and `config` over
    the preset.

    Args:
        model: one of fgai's models, any PyG model called as `model(x, edge_index)`, or the name of one to
            build: `GAT`, `GATv2`, `GT` or `GCN`.
        data: a `Graph` or PyG `Data` with `y`, `train_mask` and `val_mask`; with `links` from
            `fgai.datasets.link_split`; or a batch of small graphs.
        seed: of dropout, and of the weights of a model built here; the same seed gives the same weights on
            the CPU.
        preset: `auto` for that of the data, the name of a dataset for what was chosen there, or None for
            the defaults of `TrainConfig` and of the model.
        config: epochs, learning rate and so on, instead of the preset's.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        recipe: what to minimise; when None cross-entropy, and what a defence adds to it.
        tracker: told of every epoch, see `fgai.trackers`.
        **settings: single settings: fields of `TrainConfig`, e.g. `epochs=100`; for a model built here its
            arguments, too, e.g. `dropout=0.3`.

    Returns:
        The trained model, in eval mode, with the weights of the best validation epoch.

    Raises:
        InputError: a setting, a preset or a model that is not known; no labels or no masks; outputs that do
            not fit the labels.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> len(model.history.terms)
        3
    """
    given = as_graph(data)
    task = task_of(given)
    name = model if isinstance(model, str) else preset_class(model)
    method = "vanilla" if recipe is None else recipe.name
    chosen = preset_named(preset, method, name, given.name, task.name)
    if isinstance(model, str):
        for setting in settings:
            one_of(setting, "settings", setting_names("vanilla", model))
        merged = {**chosen, **settings}
        arguments = {name: value for name, value in merged.items() if name not in TRAIN_FIELDS}
        settings = {name: value for name, value in settings.items() if name in TRAIN_FIELDS}
        model = untrained(model, given, seed=seed, **arguments).to(given.device)
    fields = {name: value for name, value in chosen.items() if name in TRAIN_FIELDS}
    config = (config or TrainConfig(**fields)).replace(**settings)
    trained, graph = copied(model), prepared(model, task.view(given, "fit"))
    with evaluating(model), torch.no_grad():
        check_logits(call_model(model, graph), graph)
    recipe = recipe or (Regularised if isinstance(model, Defended) else Vanilla)(graph)
    label = run_label(model, graph, recipe.name, config, seed) if checkpoint else ""
    history = fit(
        trained,
        recipe,
        config,
        seed=seed,
        progress=progress,
        checkpoint=checkpoint,
        fingerprint=label,
        tracker=tracker,
    )
    set_history(trained, history)
    return trained


def preset_class(model: nn.Module) -> str:
    """Return the class whose presets a model takes: its own, or that of the model inside another."""
    return type(model.model if isinstance(model, Defended) else unwrapped(model)).__name__


def copied(model: M) -> M:
    """Return an independent copy of a model; its history is not carried over."""
    other = duplicate(model)
    if hasattr(other, "history"):
        del other.history
    return other


def set_history(model: nn.Module, history: History) -> None:
    """Attach the history as a plain attribute, outside the module's parameters."""
    object.__setattr__(model, "history", history)


@typed
def history_of(model: nn.Module) -> History:
    """Return the history of a model that was trained here.

    Raises:
        InputError: if it was not.
    """
    history = getattr(model, "history", None)
    if not isinstance(history, History):
        raise InputError(f"this {model_name(model)} has no history; it was not trained by fgai")
    return history
