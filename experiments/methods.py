"""Methods of the tables that the package does not have: defences, Algorithm 1, the released variant.

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

from experiments.algorithm1 import Ascent, AscentSettings
from experiments.defences import DEFENCES, Regularised
from experiments.terms import paper_terms
from fgai import Graph, make_faithful, train, training
from fgai.attention import prepared
from fgai.checks import one_of
from fgai.models import MODELS
from fgai.tasks import task_of
from fgai.training import CERTIFIED_SETTINGS, FaithfulSettings, HardenSettings, TrainConfig, epoch_seed

VARIANTS = ("fgai-paper", "fgai-injection")
"""Variants of faithful training: Algorithm 1 as printed, and the released code's."""
RELEASED: dict[str, Any] = {
    "closeness": 1.0,
    "similarity": 7.0,
    "prediction_stability": 1.0,
    "margin": 0.0,
    "sharpness": 0.0,
    "limits": False,
}
"""Settings of `fgai-injection` over those of `FaithfulSettings`."""
RELEASED_TERMS: dict[str, Any] = {"divergence": "log", "explanation_stability": 1.0}
"""Its settings of terms that the package does not have."""
METHODS = (*training.METHODS, "at-limits", *VARIANTS, *DEFENCES)
FROM_SCRATCH = (*training.FROM_SCRATCH, *DEFENCES)
"""Methods that train from new weights and need no trained vanilla model."""
BELOW = {"at-limits": "at", **dict.fromkeys(DEFENCES, "vanilla")}
"""The method whose tables a method's own are laid over."""
PRESETS = Path(__file__).with_name("presets.toml")
"""Settings by method, model and dataset; links and small graphs in tables of their own."""


@cache
def _presets() -> dict[str, Any]:
    return tomllib.loads(PRESETS.read_text(encoding="utf-8"))


def preset(method: str, model: str, dataset: str, task: str = "node") -> dict[str, Any]:
    """Return the settings in `[method]`, `[method.MODEL]` and `[method.MODEL.dataset]`, later ones winning.

    Links and small graphs have the same tables under `[link]` and `[graph]`. A method, model or dataset
    without a table has no settings of its own.
    """
    found: dict[str, Any] = {}
    level: Any = _presets().get(task, {}) if task in ("link", "graph") else _presets()
    for name in (method, model, dataset):
        level = level.get(name)
        if not isinstance(level, dict):
            break
        found |= {key: value for key, value in level.items() if not isinstance(value, dict)}
    return found


def settings_for(
    method: str, model: str, dataset: str, task: str = "node", *, tuned: bool = True
) -> dict[str, Any]:
    """Return the settings of a method, laid over those of the method it is a variant of."""
    below = preset(BELOW[method], model, dataset, task) if method in BELOW else {}
    return {**below, **preset(method, model, dataset if tuned else "", task)}


def setting_names(method: str, model: str) -> list[str]:
    """Return the names of the settings that a method takes: of the training, of the model, of the defence."""
    if method in DEFENCES:
        return sorted({*training.setting_names("vanilla", model), *DEFENCES[method].own})
    if method == "fgai-paper":
        return sorted(each.name for each in dataclasses.fields(AscentSettings))
    if method == "fgai-injection":
        return sorted({*training.setting_names("fgai", model), *RELEASED_TERMS} - {"limits"})
    return training.setting_names("harden" if method == "at-limits" else method, model)


def defaults(method: str) -> dict[str, Any]:
    """Return a method's settings where neither a table nor the caller gives any."""
    if method in FROM_SCRATCH:
        own = DEFENCES[method].defaults() if method in DEFENCES else {}
        return {**dataclasses.asdict(TrainConfig()), **own}
    if method == "limits":
        return {"clip_share": 0.02, "shrink": 0.4}
    if method == "fgai-paper":
        return dataclasses.asdict(AscentSettings())
    if method in ("at", "at-limits", "harden"):
        return dataclasses.asdict(HardenSettings(limits=method != "at"))
    special = {"fgai-injection": {**RELEASED, **RELEASED_TERMS}, "fgai-certified": CERTIFIED_SETTINGS}
    return {**dataclasses.asdict(FaithfulSettings()), **special.get(method, {})}


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
    """Train one method with the settings of its tables; see `fgai.training.train_method`.

    Beside its methods there are `at-limits`, `harden` with settings tuned on each graph; defences (see
    `DEFENCES`), which train the named model behind them from new weights as vanilla does; `fgai-paper`,
    Algorithm 1 of the paper as printed; and `fgai-injection`, its released code's variant: injected nodes,
    output layer, graph-wide top-K. Defences and `fgai-paper` train once, whatever `check` says.
    """
    one_of(method, "method", METHODS)
    for name in settings or {}:
        one_of(name, "settings", setting_names(method, model))
    task = task_of(graph).name if isinstance(graph, Graph) else "node"
    chosen = {**settings_for(method, model, graph.name, task), **(settings or {})}
    common: dict[str, Any] = {"seed": seed, "progress": progress, **options}
    if vanilla is None and method not in FROM_SCRATCH:
        vanilla = train_method("vanilla", model, graph, seed=seed, device=device, progress=progress)
    if method not in (*DEFENCES, *VARIANTS):
        name = "harden" if method == "at-limits" else method
        where: dict[str, Any] = {"vanilla": vanilla, "device": device}
        return training.train_method(name, model, graph, settings=chosen, **where, **common)
    if method != "fgai-injection":
        common.pop("check", None)
    graph = graph.to(device)
    seen = task_of(graph).view(graph, "fit")
    if method in DEFENCES:
        loop = inspect.signature(TrainConfig).parameters
        schedule = TrainConfig(**{name: value for name, value in chosen.items() if name in loop})
        own = {name: value for name, value in chosen.items() if name not in loop}
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            fresh = DEFENCES[method].for_data(seen, base=one_of(model, "model", tuple(MODELS)), **own)
        fresh = fresh.to(device)
        recipe = Regularised(prepared(fresh, seen))
        return train(fresh, graph, config=schedule, recipe=recipe, **common)
    assert vanilla is not None
    if method == "fgai-injection":
        divergence, weight = (chosen.pop(name, value) for name, value in RELEASED_TERMS.items())
        half = max(1, graph.num_edges // 2)  # K is about half the number of edges in all of its experiments
        terms = paper_terms(half, divergence, weight)
        return make_faithful(vanilla, graph, terms=terms, **common, **{**RELEASED, **chosen})
    config = AscentSettings(**chosen)
    generator = torch.Generator().manual_seed(epoch_seed(seed, -3))
    drawn = task_of(graph).epoch(prepared(vanilla, seen), generator)
    return train(vanilla, graph, config=config.train, recipe=Ascent(vanilla, drawn, config), **common)
