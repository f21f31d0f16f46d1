"""Methods of the tables that the package does not have: three defences, Algorithm 1, the released variant.

Everything here has the name and the arguments of its namesake in `fgai.training`, and is that for all others.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.algorithm1 import OUTPUT_LAYER, PRINTED, Ascent
from experiments.defences import DEFENCES, Regularised
from fgai import Graph, make_faithful, train, training
from fgai.attention import prepared
from fgai.checks import one_of
from fgai.models import MODELS
from fgai.tasks import task_of
from fgai.training import FaithfulConfig, TrainConfig, epoch_seed, seeded

VARIANTS: dict[str, dict[str, Any]] = {
    "fgai-paper": {**OUTPUT_LAYER, **PRINTED, "adversary": "ascent"},
    "fgai-injection": OUTPUT_LAYER,
}
"""Variants of faithful training, and the settings in which each differs from `FaithfulConfig`'s defaults."""
FIXED = ("adversary", "limits", "margin")
"""Settings of faithful training that Algorithm 1 does not have."""
METHODS = (*training.METHODS, *VARIANTS, *DEFENCES)
ALONE = (*training.ALONE, *DEFENCES)
"""Methods that train from new weights and need no trained vanilla model."""
PRESETS = Path(__file__).with_name("presets.toml")
"""Settings of the methods here, by method, model and dataset."""


@cache
def _presets() -> dict[str, Any]:
    return tomllib.loads(PRESETS.read_text(encoding="utf-8"))


def settings_for(
    method: str, model: str, dataset: str, task: str = "node", *, tuned: bool = True
) -> dict[str, Any]:
    """Return the preset of a method; a defence takes the vanilla model's where it has none of its own."""
    if method not in (*DEFENCES, *VARIANTS):
        return training.settings_for(method, model, dataset, task, tuned=tuned)
    found = training.preset("vanilla", model, dataset, task) if method in DEFENCES else {}
    if tuned and task == "node":
        found |= _presets().get(method, {}).get(model, {}).get(dataset, {})
    return found


def setting_names(method: str, model: str) -> list[str]:
    """Return the names of the settings that a method takes: of the training, of the model, of the defence."""
    if method in DEFENCES:
        return sorted({*training.setting_names("vanilla", model), *DEFENCES[method].own})
    if method == "fgai-paper":  # it injects nothing and has no limits
        return [name for name in training.setting_names("fgai", model) if name not in FIXED]
    return training.setting_names("fgai" if method in VARIANTS else method, model)


def defaults(method: str) -> dict[str, Any]:
    """Return a method's settings where neither a preset nor the caller gives any."""
    found = dataclasses.asdict(TrainConfig())
    if method in DEFENCES:
        found |= DEFENCES[method].defaults()
    elif method not in ALONE:
        faithful = dataclasses.asdict(FaithfulConfig())
        nested = [faithful.pop(name) for name in ("weights", "train")]
        found |= {**faithful, **nested[0], **nested[1], **VARIANTS.get(method, {})}
    return found


def train_method(
    method: str,
    model: str,
    graph: Graph,
    *,
    seed: int = 0,
    vanilla: nn.Module | None = None,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Train one method with its preset; see `fgai.training.train_method`.

    Args:
        method: one of `METHODS`: also `gnnguard`, `gnn-svd` or `pro-gnn`, which train the named model behind
            them from new weights as vanilla does; `fgai-paper`, Algorithm 1 of the paper as printed; or
            `fgai-injection`, its released code's variant: injected nodes, output layer, graph scope.
        model: name of the network, see `fgai.models.MODELS`.
        graph: with labels and masks.
        seed: of the weights, dropout and adversary.
        vanilla: the trained vanilla model for variants of FGAI; trained here when None.
        device: where to train.
        progress: show a bar.
        settings: settings of the training, arguments of the model or of its defence, by name.
        **options: further ones of `fgai.training.train_method`; defences and `fgai-paper` train once,
            whatever `check` says.
    """
    one_of(method, "method", METHODS)
    common: dict[str, Any] = {"seed": seed, "progress": progress}
    if method not in (*DEFENCES, *VARIANTS):
        return training.train_method(
            method, model, graph, vanilla=vanilla, device=device, settings=settings, **common, **options
        )
    common |= options
    if method != "fgai-injection":
        common.pop("check", None)
    for name in settings or {}:
        one_of(name, "settings", setting_names(method, model))
    chosen = {**settings_for(method, model, graph.name, task_of(graph).name), **(settings or {})}
    graph = graph.to(device)
    seen = task_of(graph).view(graph, "fit")
    if method in DEFENCES:
        loop = inspect.signature(TrainConfig).parameters
        schedule = TrainConfig(**{name: value for name, value in chosen.items() if name in loop})
        own = {name: value for name, value in chosen.items() if name not in loop}
        with seeded(seed, torch.device("cpu")):
            fresh = DEFENCES[method].for_data(seen, base=one_of(model, "model", tuple(MODELS)), **own)
        fresh = fresh.to(device)
        recipe = Regularised(prepared(fresh, seen))
        return train(fresh, graph, config=schedule, recipe=recipe, **common)
    if vanilla is None:
        vanilla = training.train_method("vanilla", model, graph, seed=seed, device=device, progress=progress)
    half = max(1, graph.num_edges // 2)  # K is about half the number of edges in all of its experiments
    config = FaithfulConfig().replace(k1=half, k2=half, **OUTPUT_LAYER)
    if method == "fgai-injection":
        return make_faithful(vanilla, graph, config, **common, **chosen)
    config = config.replace(**{**PRINTED, **chosen})
    generator = torch.Generator().manual_seed(epoch_seed(seed, -3))
    drawn = task_of(graph).epoch(prepared(vanilla, seen), generator)
    return train(vanilla, graph, config=config.train, recipe=Ascent(vanilla, drawn, config), **common)
