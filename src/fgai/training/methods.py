"""Every method of the tables behind one call: vanilla, layer norm, adversarial training, FGAI, defences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fgai.attacks import Budget
from fgai.attention import prepared
from fgai.checks import one_of
from fgai.graph import Graph
from fgai.models import DEFENCES, MODELS, AttentionModel
from fgai.tasks import task_of
from fgai.training.adversarial import Adversarial
from fgai.training.defended import Regularised
from fgai.training.faithful import make_faithful
from fgai.training.loop import TrainConfig, seeded
from fgai.training.presets import preset
from fgai.training.settings import FaithfulConfig
from fgai.training.train import train

METHODS = ("vanilla", "ln", "at", "fgai", "fgai-paper", *DEFENCES)
ALONE = ("vanilla", "ln", *DEFENCES)
"""Methods that train from new weights and need no trained vanilla model."""
TRAIN_FIELDS = {field.name for field in dataclasses.fields(TrainConfig)}


def untrained(model: str, graph: Graph, *, seed: int = 0, **arguments: Any) -> AttentionModel:
    """Return a new model of the named class whose weights depend on the seed alone."""
    one_of(model, "model", tuple(MODELS))
    with seeded(seed, torch.device("cpu")):
        return MODELS[model].for_data(graph, **arguments)


def settings_for(method: str, model: str, dataset: str, task: str = "node") -> dict[str, Any]:
    """Return the preset of a method; a defence takes the vanilla model's where it has none of its own."""
    chosen = preset(method, model, dataset, task)
    return {**preset("vanilla", model, dataset, task), **chosen} if method in DEFENCES else chosen


def train_method(
    method: str,
    model: str,
    graph: Graph,
    *,
    seed: int = 0,
    vanilla: nn.Module | None = None,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    settings: dict[str, Any] | None = None,
) -> nn.Module:
    """Train one method with its preset; `settings` win over the preset.

    AT and FGAI start from the same trained vanilla model and get the same adversary and epochs. Defences
    train the named model behind them from new weights, as vanilla does.

    Args:
        method: `vanilla`, `ln`, `at`, `fgai`, `fgai-paper` (last layer, graph scope), `gnnguard`, `gnn-svd`
            or `pro-gnn`.
        model: name of the network, see `fgai.models.MODELS`.
        graph: with labels and masks.
        seed: of the weights, dropout and adversary.
        vanilla: the trained vanilla model for AT and FGAI; trained here when None.
        device: where to train.
        progress: show a bar.
        checkpoint: folder to save the training in and to resume from.
        settings: settings of the training, arguments of the model or of its defence, by name.
    """
    one_of(method, "method", METHODS)
    task = task_of(graph)
    chosen = {**settings_for(method, model, graph.name, task.name), **(settings or {})}
    graph = graph.to(device)
    common: dict[str, Any] = {"seed": seed, "progress": progress, "checkpoint": checkpoint}
    if method in ("vanilla", "ln"):
        fields = {name: chosen.pop(name) for name in list(chosen) if name in TRAIN_FIELDS}
        if method == "ln":
            chosen["norm"] = "layer"
        fresh = untrained(model, graph, seed=seed, **chosen).to(device)
        return train(fresh, graph, config=TrainConfig(**fields), **common)
    if method in DEFENCES:
        fields = {name: chosen.pop(name) for name in list(chosen) if name in TRAIN_FIELDS}
        seen = task.view(graph, "fit")
        with seeded(seed, torch.device("cpu")):
            shielded = DEFENCES[method].for_data(seen, base=model, **chosen).to(device)
        guarded = Regularised(prepared(shielded, seen))
        return train(shielded, graph, recipe=guarded, config=TrainConfig(**fields), **common)
    if vanilla is None:
        vanilla = train_method("vanilla", model, graph, seed=seed, device=device, progress=progress)
    if method == "at":
        fields = {name: chosen.pop(name) for name in list(chosen) if name in TRAIN_FIELDS}
        default = FaithfulConfig()
        base = {
            "nodes": default.nodes,
            "edges": default.edges,
            "box": default.box,
            "step_size": default.step_size,
        }
        budget = Budget(**{**base, **chosen}, targets="fit")
        recipe = Adversarial(prepared(vanilla, task.view(graph, "fit")), budget)
        return train(vanilla, graph, recipe=recipe, config=TrainConfig(**fields), **common)
    config = FaithfulConfig()
    if method == "fgai-paper":
        config = config.replace(
            layers="last", scope="graph", k1=graph.num_edges // 2, k2=graph.num_edges // 2
        )
    return make_faithful(vanilla, graph, config, **common, **chosen)
