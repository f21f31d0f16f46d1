"""`make_faithful`: from a trained attention model to one whose attention stays put; once more if needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fgai.alone import with_gradients
from fgai.attention import add_limits, can_be_limited, model_name, prepared
from fgai.errors import FgaiWarning, warn
from fgai.graph import Graph
from fgai.progress import shown
from fgai.tasks import task_of
from fgai.trackers import Tracker
from fgai.training.faithful import Faithful, FaithfulRecipe
from fgai.training.loop import epoch_seed, fit
from fgai.training.resume import run_label, set_history
from fgai.training.retry import MIN_EPOCHS, StabilityCheck, attempt_options, retry
from fgai.training.settings import FaithfulConfig, _preset_named, set_ranges
from fgai.training.source import open_source
from fgai.training.train import _in_memory, _preset_class, copied
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)


@typed
@with_gradients
def make_faithful(
    model: M,
    data: Any,
    config: FaithfulConfig | None = None,
    *,
    seed: int = 0,
    check: bool = True,
    preset: str | None = "auto",
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 25,
    tracker: Tracker | None = None,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
    epoch_size: int | None = None,
    **settings: Any,
) -> M:
    """Return a faithful version of a trained attention model; the given one is untouched.

    With `check` both models are attacked on the validation nodes for a few steps. If the faithful model's
    predictions shift by more than half of the vanilla model's shift, or its predictions or explanations
    differ from the vanilla model's, it is trained once more with tightened settings and the better model is
    returned; a `ReliabilityWarning` names what is still missing. A training that diverges is repeated with
    half the learning rate. There is one retry at most. Trainings of fewer than 60 epochs, of mini-batches,
    and other tasks than node classification are not checked.

    The faithful model has the architecture of the vanilla one, so a preset changes the training alone. What
    is given by name wins over `config`, and `config` over the preset: `fgai faithful` on the command line
    does the same.

    With `batch_size` training reads mini-batches, of a graph in memory or of a stored one, which is never
    loaded whole: an epoch is then a pass over all nodes (`epoch_size`), a step for each batch. What the
    vanilla model says, and the ranges of limits, come from exact passes over the whole graph. Such trainings
    are not judged: the attack that judges sees the whole graph. Several processes share the batches inside
    `fgai.large.joined`.

    Args:
        model: trained; fgai's GAT, GATv2, GT or any PyG model the recorder supports.
        data: what it was trained on, a `Graph` or PyG `Data`; with `batch_size` also a stored graph or its
            folder. Labels are not used.
        config: see `FaithfulConfig`; instead of the preset's.
        seed: of the adversary's draws.
        check: attack the result on validation nodes, and train once more if it is not stable.
        preset: `auto` for that of the model's class and the data, the name of a dataset for what was chosen
            there, or None for the defaults of `FaithfulConfig`.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        checkpoint_every: epochs between saves.
        tracker: told of every epoch, see `fgai.trackers`; a second training is a run of its own, `fgai-2`.
        batch_size: nodes of a mini-batch; None trains on the whole graph. For GAT, GATv2, and GT without
            encodings.
        fan_out: neighbours drawn of each node, one number or one per layer, -1 for all; 10 by default.
        epoch_size: nodes of an epoch of mini-batches, drawn anew for each; all of them by default. On very
            large graphs this brings validations and checkpoints closer together.
        **settings: single settings by name, e.g. `epochs=50`, `similarity=4.0`.

    Returns:
        A model of the same class, in eval mode, with its `history` (`history.attempts`: trainings it took).

    Raises:
        InputError: a setting or a preset that is not known.
        AttentionError: the model has no attention that can be recorded.
    """
    options: dict[str, Any] = {
        "progress": progress,
        "checkpoint_every": checkpoint_every,
        "tracker": tracker,
    }
    if batch_size is not None:
        with shown(progress), open_source(data, seed) as source:
            source.batched_for(model, batch_size, fan_out, epoch_size)
            config = _config(model, source.nodes, config, preset, settings)
            batches, tightness = source.faithful(model, config), config.tightness
            source.agree(model, batches.name, config, seed)
            label = source.label(model, batches.name, config, seed, weights=True)
            options |= {"seed": seed, "checkpoint": checkpoint}
            return _fine_tune(model, batches, label, lambda one: source.set_ranges(one, tightness), **options)
    given = _in_memory(data, fan_out, epoch_size)
    task = task_of(given)
    config = _config(model, given, config, preset, settings)
    graph = prepared(model, task.view(given, "fit"))
    graph = task.epoch(graph, torch.Generator().manual_seed(epoch_seed(seed, -3)))

    def train(config: FaithfulConfig, count: int) -> M:
        recipe = Faithful(model, graph, config)
        own = attempt_options(recipe.name, count, seed, checkpoint, options)
        label = run_label(model, graph, recipe.name, config, own["seed"], weights=True) if checkpoint else ""
        return _fine_tune(model, recipe, label, lambda one: set_ranges(one, graph, config.tightness), **own)

    check = check and config.train.epochs >= MIN_EPOCHS
    check = check and config.injects and config.weights.prediction_stability > 0
    with shown(progress):
        return retry(train, StabilityCheck(model, graph, seed, config.box) if check else None, config)


def _config(
    model: nn.Module,
    given: Graph,
    config: FaithfulConfig | None,
    preset: str | None,
    settings: dict[str, Any],
) -> FaithfulConfig:
    """How a model is trained: preset, config and settings, without limits where it cannot have them."""
    task = task_of(given)
    chosen = _preset_named(preset, _method(task.name, settings), _preset_class(model), given.name, task.name)
    config = (config or FaithfulConfig().replace(**chosen)).replace(**settings)
    if config.limits and not can_be_limited(model):
        warn(
            FgaiWarning(
                f"{model_name(model)} has a layer that cannot be limited, so it is trained without limits;"
                " see `fgai.attention.register_limits`"
            )
        )
        config = config.replace(limits=False)
    return config


def _method(task: str, settings: dict[str, Any]) -> str:
    """Whose preset suits: what was chosen with limits is not for a training without them."""
    if task != "node":
        return "fgai"
    if settings.get("limits") is False:
        return "fgai-features"
    return "fgai-certified" if settings.get("certified") else "fgai"


def _fine_tune(
    model: M, recipe: FaithfulRecipe, label: str, set_ranges_of: Callable[[M], None], **options: Any
) -> M:
    """Train a copy of a model; the ranges of its limits are measured again at the end."""
    faithful, config = copied(model), recipe.config
    if config.limits:
        add_limits(faithful)
    set_history(faithful, fit(faithful, recipe, config.train, fingerprint=label, **options))
    if config.limits:
        set_ranges_of(faithful)
    return faithful
