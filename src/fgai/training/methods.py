"""Every method of the tables behind one call: vanilla, layer norm, adversarial training, FGAI, defences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fgai.alone import with_gradients
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import DEFENCES, MODELS
from fgai.store import StoredGraph
from fgai.tasks import task_of
from fgai.trackers import Tracker
from fgai.training.attempts import make_faithful
from fgai.training.build import ALONE, METHODS, setting_names, untrained
from fgai.training.hardened import HardenedConfig, harden
from fgai.training.judged import ATTEMPTS, check_attempts
from fgai.training.limiting import limit
from fgai.training.loop import TRAIN_FIELDS, TrainConfig
from fgai.training.presets import preset
from fgai.training.settings import ADVERSARY_FIELDS, FaithfulConfig
from fgai.training.train import history_of, in_memory, set_history, train
from fgai.training.whole import nodes_of
from fgai.typed import typed

BATCHED = ("vanilla", "ln", "fgai", "fgai-certified")
"""Methods that can be trained in mini-batches."""
PRINTED: dict[str, Any] = {
    "adversary": "ascent",
    "form": "paper",
    "divergence": "logits",
    "closeness_by": "logits",
    "similarity": 1e5,
    "prediction_stability": 1.0,
    "explanation_stability": 1e5,
    "ramp": 0.0,
    "radius": 0.1,
    "steps": 10,
    "epochs": 200,
    "lr": 0.01,
    "weight_decay": 5e-4,
    "decay": 0.0,
    "validate_every": 10_000,
}
"""Algorithm 1 as printed: its weights, total variation of outputs, Adam's settings, the last weights kept.
Radius and steps are not printed: these are the level and the steps of its attack on features."""
OUTPUT_LAYER: dict[str, Any] = {"layers": "last", "scope": "graph", "limits": False}
"""What the paper explains by: the output layer, and the top K of the whole graph."""
VARIANTS: dict[str, dict[str, Any]] = {
    "fgai-paper": {**OUTPUT_LAYER, **PRINTED},
    "fgai-injection": OUTPUT_LAYER,
}
"""Methods that start from other settings than `FaithfulConfig`'s defaults, and from which."""
SHARED = ("epochs", "lean", *ADVERSARY_FIELDS)
"""What adversarial training has as faithful training has it, wherever the two are compared."""


@typed
def settings_for(
    method: str, model: str, dataset: str, task: str = "node", *, tuned: bool = True
) -> dict[str, Any]:
    """Return the preset of a method, laid over that of the method it is a variant of.

    A defence takes the vanilla model's where it has none of its own, adversarial training with limits that of
    the one without. Both of these have the epochs and the adversary of `fgai` on the same graph.

    Args:
        method: see `train_method`.
        model: class name.
        dataset: e.g. `amazon-photo`.
        task: its name.
        tuned: with what was chosen for the method on this very dataset; the general preset otherwise.
    """
    parent = "vanilla" if method in DEFENCES else "at" if method == "at-limits" else None
    below = {} if parent is None else preset(parent, model, dataset, task)
    found = {**below, **preset(method, model, dataset if tuned else "", task)}
    if method in ("at", "at-limits"):
        faithful = preset("fgai", model, dataset, task)
        found |= {name: faithful[name] for name in SHARED if name in faithful}
    return found


@typed
@with_gradients
def train_method(
    method: str,
    model: str,
    graph: Graph | StoredGraph,
    *,
    seed: int = 0,
    vanilla: nn.Module | None = None,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    tracker: Tracker | None = None,
    settings: dict[str, Any] | None = None,
    max_attempts: int = ATTEMPTS,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
) -> nn.Module:
    """Train one method with its preset; `settings` win over the preset.

    AT and FGAI start from the same trained vanilla model and get the same adversary and epochs, and the same
    further attempts where a short attack says that the first did not make it more stable. Defences train the
    named model behind them from new weights, as vanilla does. `vanilla` is `fgai.train(model, ...)`
    and `fgai` is `fgai.make_faithful(vanilla, ...)`: both give the same weights.

    Args:
        method: `vanilla`, `ln`, `limits` (the vanilla model behind limits, nothing trained), `at`,
            `at-limits`, `fgai`, `fgai-certified` (towards certificates against injection), `fgai-paper`
            (the paper's Algorithm 1 as printed), `fgai-injection` (its released code's variant: injected
            nodes, last layer, graph scope), `gnnguard`, `gnn-svd` or `pro-gnn`.
        model: name of the network, see `fgai.models.MODELS`.
        graph: with labels and masks; with `batch_size` also a stored one.
        seed: of the weights, dropout and adversary.
        vanilla: the trained vanilla model for AT and FGAI; trained here when None.
        device: where to train.
        progress: show a bar.
        checkpoint: folder to save the training in and to resume from.
        tracker: told of every epoch, see `fgai.trackers`.
        settings: settings of the training, arguments of the model or of its defence, by name.
        max_attempts: trainings of AT and FGAI at most, see `make_faithful`.
        batch_size: seeds of a mini-batch, see `train` and `make_faithful`; for `vanilla`, `ln`, `fgai` and
            `fgai-certified`.
        fan_out: neighbours drawn of each node.

    Raises:
        InputError: a name that is not known, a setting that the method does not take, or a method that needs
            the whole graph.
    """
    one_of(method, "method", METHODS)
    one_of(model, "model", tuple(MODELS))
    check_attempts(max_attempts)
    for name in settings or {}:
        one_of(name, "settings", setting_names(method, model))
    sizes: dict[str, Any] = {"batch_size": batch_size, "fan_out": fan_out}
    if batch_size is not None and method not in BATCHED:
        raise InputError(f"`batch_size` is for {', '.join(BATCHED)}; {method} reads the whole graph")
    seen = in_memory(graph, fan_out) if batch_size is None else graph
    nodes = nodes_of(seen, seed) if isinstance(seen, StoredGraph) else seen
    chosen = {**settings_for(method, model, nodes.name, task_of(nodes).name), **(settings or {})}
    common: dict[str, Any] = {
        "seed": seed,
        "progress": progress,
        "checkpoint": checkpoint,
        "tracker": tracker,
    }
    if batch_size is None:
        seen = nodes = nodes.to(device)
    if method in ALONE:
        fields, fresh = _fresh(method, model, nodes, chosen, seed)
        return train(fresh.to(device), seen, config=TrainConfig(**fields), **common, **sizes)
    if vanilla is None:
        vanilla = train_method("vanilla", model, seen, seed=seed, device=device, progress=progress, **sizes)
    if method == "limits":
        limited = limit(vanilla, nodes, **chosen)
        set_history(limited, history_of(vanilla))
        return limited
    if method in ("at", "at-limits"):
        config = HardenedConfig.of(chosen, limits=method == "at-limits")
        return harden(vanilla, nodes, config, most=max_attempts, **common)
    sizes["max_attempts"] = max_attempts
    return make_faithful(vanilla, seen, _config(method, nodes), **common, **sizes, **chosen)


def _fresh(
    method: str, model: str, graph: Graph, chosen: dict[str, Any], seed: int
) -> tuple[dict[str, Any], nn.Module]:
    """New weights and how they are trained: the model as it is, with layer norm, or behind a defence."""
    fields, arguments = _split(chosen)
    if method == "ln":
        arguments["norm"] = "layer"
    if method in DEFENCES:
        arguments["defence"] = method
    seen = task_of(graph).view(graph, "fit") if method in DEFENCES else graph
    return fields, untrained(model, seen, seed=seed, **arguments)


def _config(method: str, graph: Graph) -> FaithfulConfig:
    """What a faithful method starts from, before its preset: the defaults, or the paper's own settings."""
    if method not in VARIANTS:
        return FaithfulConfig()
    half = max(1, graph.num_edges // 2)  # K is about half the number of edges in all of its experiments
    return FaithfulConfig().replace(k1=half, k2=half, **VARIANTS[method])


def _split(chosen: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell the settings of the loop from the others."""
    fields = {name: value for name, value in chosen.items() if name in TRAIN_FIELDS}
    return fields, {name: value for name, value in chosen.items() if name not in TRAIN_FIELDS}
