"""`fgai.train`: from an untrained attention model to the best weights on validation nodes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fgai.attention import prepared
from fgai.errors import InputError
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.training.loop import History, Recipe, TrainConfig, fit
from fgai.training.recipes import Vanilla
from fgai.training.resume import run_label

M = TypeVar("M", bound=nn.Module)


def train(
    model: M,
    data: Any,
    *,
    seed: int = 0,
    config: TrainConfig | None = None,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    recipe: Recipe | None = None,
    **settings: Any,
) -> M:
    """Train a copy of `model` on the labelled nodes, links or graphs of `data` and return it in eval mode.

    The given model is untouched. The result carries its `history` (loss terms, scores, seconds).

    Args:
        model: one of fgai's models or any PyG model called as `model(x, edge_index)`.
        data: a `Graph` or PyG `Data` with `y`, `train_mask` and `val_mask`; with `links` from
            `fgai.datasets.link_split`; or a batch of small graphs.
        seed: of dropout; the same seed gives the same weights on the CPU.
        config: epochs, learning rate and so on; or give single settings by name instead.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        recipe: what to minimise; plain cross-entropy when None.
        **settings: fields of `TrainConfig`, e.g. `epochs=100`.

    Returns:
        The trained model, in eval mode, with the weights of the best validation epoch.

    Example:
        >>> import fgai
        >>> data = fgai.load("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> len(model.history.terms)
        3
    """
    config = config or TrainConfig(**settings)
    given = as_graph(data)
    trained, graph = copied(model), prepared(model, task_of(given).view(given, "fit"))
    chosen = recipe or Vanilla(graph)
    label = run_label(model, graph, chosen.name, config, seed) if checkpoint else ""
    history = fit(
        trained,
        chosen,
        config,
        seed=seed,
        progress=progress,
        checkpoint=checkpoint,
        fingerprint=label,
    )
    set_history(trained, history)
    return trained


def copied(model: M) -> M:
    """Return an independent copy of a model; its history is not carried over."""
    twin = copy.deepcopy(model)
    if hasattr(twin, "history"):
        del twin.history
    return twin


def set_history(model: nn.Module, history: History) -> None:
    """Attach the history as a plain attribute, outside the module's parameters."""
    object.__setattr__(model, "history", history)


def history_of(model: nn.Module) -> History:
    """Return the history of a model that was trained here.

    Raises:
        InputError: if it was not.
    """
    history = getattr(model, "history", None)
    if not isinstance(history, History):
        raise InputError(f"this {type(model).__name__} has no history; it was not trained by fgai")
    return history
