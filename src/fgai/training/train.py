"""`fgai.train`: models by name, and from an untrained one to the best weights on validation nodes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fgai import checks
from fgai.alone import seeded, with_gradients
from fgai.attention import unwrapped
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import MODELS, AttentionModel
from fgai.trackers import Tracker
from fgai.training.loop import TRAIN_FIELDS, Recipe, TrainConfig, fit
from fgai.training.recipes import Vanilla
from fgai.training.resume import copied, set_history
from fgai.training.settings import LEARNING_RATES, FaithfulSettings, HardenSettings, check_names
from fgai.training.source import _open_source
from fgai.typed import typed

METHODS = ("vanilla", "ln", "limits", "at", "harden", "fgai", "fgai-certified")
ALONE = ("vanilla", "ln")
"""Methods that train from new weights and need no trained vanilla model."""


@typed
@with_gradients
def untrained(model: str, graph: Graph, *, seed: int = 0, **arguments: Any) -> AttentionModel:
    """Return a new model of the named class whose weights depend on the seed alone.

    Args:
        model: `GAT`, `GATv2`, `GT` or `GCN`.
        graph: gives the sizes and the task.
        seed: of the weights.
        **arguments: of the model.
    """
    model = one_of(model, "model", tuple(MODELS), any_case=True)
    with seeded(checks.seed(seed), torch.device("cpu")):
        return MODELS[model].for_data(graph, **arguments)


@typed
def setting_names(method: str, model: str) -> list[str]:
    """Return the names of the settings that a method takes: of the training and of the model.

    Args:
        method: one of `METHODS`.
        model: class name; one that is not fgai's has no settings of its own.
    """
    if method == "limits":  # nothing is trained
        return ["clip_share", "shrink"]
    if method.startswith("fgai"):
        return sorted(FaithfulSettings.names())
    if method in ("at", "harden"):
        without = {"limits", "clip_share", "shrink"} if method == "at" else set()
        return sorted({*HardenSettings.names()} - without)
    names = set(TRAIN_FIELDS)
    if model in MODELS:
        arguments = inspect.signature(MODELS[model].__init__).parameters.values()
        names |= {each.name for each in arguments if each.kind is each.KEYWORD_ONLY}
    return sorted(names)


@typed
@with_gradients
def train(
    model: nn.Module | str,
    data: Any,
    *,
    seed: int = 0,
    config: TrainConfig | None = None,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    recipe: Recipe | None = None,
    tracker: Tracker | None = None,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
    **settings: Any,
) -> Any:
    """Train a copy of `model` on the labelled nodes, links or graphs of `data` and return it in eval mode.

    Every graph has the same defaults: those of `TrainConfig` (for GT a learning rate of 0.001) and of the
    model's class. `fgai.train("GAT", data, seed=3)` is the command `fgai train --model GAT --seed 3`.

    With `batch_size` an epoch is a pass over the training nodes, a step for each mini-batch (see
    `fgai.large.Batches`). A stored graph is never loaded whole. Several processes share the batches inside
    `fgai.large.process_group`.

    Args:
        model: one of fgai's models, any PyG model called as `model(x, edge_index)`, or the name of one to
            build: `GAT`, `GATv2`, `GT` or `GCN`.
        data: a `Graph` or PyG `Data` with `y`, `train_mask` and `val_mask`; with `links` from
            `fgai.datasets.link_split`; or a batch of small graphs. With `batch_size` also a stored graph or
            its folder; one without masks gets a random split, drawn by the seed.
        seed: of dropout, and of the weights of a model built here; the same seed gives the same weights on
            the CPU.
        config: epochs, learning rate and so on, see `TrainConfig`.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        recipe: what to minimise, see `Recipe`; cross-entropy by default.
        tracker: called every epoch, see `fgai.trackers`.
        batch_size: training nodes of a mini-batch; None trains on the whole graph. For the models of
            `fgai.large.observe_store`.
        fan_out: neighbours drawn of each node, one number or one per layer, -1 for all; 10 by default.
        **settings: single settings: fields of `TrainConfig`, e.g. `epochs=100`; for a model built here its
            arguments, too, e.g. `dropout=0.3`.

    Returns:
        The trained model, of the class of `model` or of that name, in eval mode, with the weights of the
        best validation epoch.

    Raises:
        InputError: a setting or a model that is not known; no labels or no masks; outputs that do
            not fit the labels.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> len(model.history.terms)
        3
    """
    if batch_size is not None and recipe is not None:
        raise InputError("give `batch_size` or `recipe`, not both: recipes read the whole graph")
    with _open_source(data, seed, batch_size, fan_out) as source:
        model, config = _built(model, source.nodes, config, seed, settings)
        source.batched_for(model, batch_size, fan_out)
        if recipe is None:
            recipe = Vanilla(source.graph) if batch_size is None else source.vanilla()
        parts = recipe.name, config, seed
        source.agree(model, *parts)
        label = source.label(model, *parts) if checkpoint else ""
        trained = copied(model)
        options: dict[str, Any] = {"progress": progress, "checkpoint": checkpoint, "tracker": tracker}
        set_history(trained, fit(trained, recipe, config, seed=seed, fingerprint=label, **options))
    return trained


def _built(
    model: nn.Module | str, graph: Graph, config: TrainConfig | None, seed: int, settings: dict[str, Any]
) -> tuple[nn.Module, TrainConfig]:
    """Return the model, made here if it was named, and how it is trained."""
    if isinstance(model, str):
        model = one_of(model, "model", tuple(MODELS), any_case=True)
    name = model if isinstance(model, str) else type(unwrapped(model)).__name__
    check_names(settings, setting_names("vanilla", model) if isinstance(model, str) else TRAIN_FIELDS)
    fields = {name: value for name, value in settings.items() if name in TRAIN_FIELDS}
    if isinstance(model, str):
        arguments = {name: value for name, value in settings.items() if name not in TRAIN_FIELDS}
        model = untrained(model, graph, seed=seed, **arguments).to(graph.device)
    config = config or TrainConfig(lr=LEARNING_RATES.get(name, TrainConfig.lr))
    return model, config.replace(**fields)
