"""`fgai.train`, and every method by its name: vanilla, layer norm, limits, adversarial training, FGAI."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fgai import checks
from fgai.attention import call_model, evaluating, prepared, unwrapped
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.on_disk import GraphOnDisk
from fgai.models import MODELS, AttentionModel, as_graph
from fgai.tasks import task_of
from fgai.threads import seeded, with_gradients
from fgai.trackers import Tracker
from fgai.training.faithful import make_faithful
from fgai.training.fine_tuning import _as_whole_graph, _open_source
from fgai.training.hardening import harden
from fgai.training.limiting import limit
from fgai.training.loop import fit
from fgai.training.recipes import Recipe, VanillaRecipe
from fgai.training.resume import History, copy_model, set_history
from fgai.training.settings import (
    CERTIFIED_SETTINGS,
    LEARNING_RATES,
    TRAIN_FIELDS,
    FaithfulSettings,
    HardenSettings,
    TrainConfig,
    check_setting_names,
)
from fgai.training.terms import certified
from fgai.typed import typed

METHODS = ("vanilla", "ln", "limits", "at", "harden", "fgai", "fgai-certified")
FROM_SCRATCH = ("vanilla", "ln")
"""Methods that need no trained vanilla model."""
EXPERIMENTS = {
    "fgai-paper": "paper-methods",
    "fgai-injection": "paper-methods",
    "gnnguard": "defences",
    "gnn-svd": "defences",
    "pro-gnn": "defences",
    "soft-median": "baselines",
    "rung": "baselines",
}  # methods of the paper's tables that only a checkout of fgai can train, and the grid of each


@typed
def check_method(method: str, name: str = "method") -> str:
    """Return `method` if `train_method` knows it; `InputError` for another name or an experiment."""
    if method in EXPERIMENTS:
        raise InputError(
            f"`{name}` {method!r} is an experiment, not a method of the package: run it in a checkout of fgai"
            f" with `fgai bench run {EXPERIMENTS[method]}`; methods are {', '.join(METHODS)}"
        )
    return one_of(method, name, METHODS)


@typed
@with_gradients
def untrained_model(model: str, graph: Graph, *, seed: int = 0, **arguments: Any) -> AttentionModel:
    """Return a new model of the named class for a graph; its weights depend on the seed alone."""
    model = one_of(model, "model", tuple(MODELS), any_case=True)
    with seeded(checks.seed(seed), torch.device("cpu")):
        return MODELS[model].for_data(graph, **arguments)


@typed
def setting_names(method: str, model: str) -> list[str]:
    """Return the names of a method's settings; with those of a new model's class, if it makes one."""
    check_method(method)
    if method == "limits":  # nothing is trained
        return ["clip_share", "shrink"]
    if method.startswith("fgai"):
        return sorted(FaithfulSettings.names())
    if method in ("at", "harden"):
        fixed = {"limits", "clip_share", "shrink"} if method == "at" else set()
        return sorted({*HardenSettings.names()} - fixed)
    names = set(TRAIN_FIELDS)
    if model in MODELS:
        arguments = inspect.signature(MODELS[model].__init__).parameters.values()
        names |= {each.name for each in arguments if each.kind is each.KEYWORD_ONLY}
    return sorted(names - {"norm"} if method == "ln" else names)


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

    It has the weights of the best validation epoch. Every graph has the same defaults: those of `TrainConfig`
    (for GT a learning rate of 0.001) and of the model's class. `fgai.train("GAT", data, seed=3)` is the
    command `fgai train --model GAT --seed 3`.

    With `batch_size` an epoch is a pass over the training nodes, with a step for each mini-batch (see
    `fgai.large.Batches`). Several processes share the batches inside `fgai.large.process_group`.

    Args:
        model: one of fgai's models, any PyG model called as `model(x, edge_index)`, or the name of a new one:
            `GAT`, `GATv2`, `GT` or `GCN`.
        data: a `Graph` or PyG `Data` with `y`, `train_mask` and `val_mask`; with `links` from
            `fgai.datasets.link_split`; or a batch of small graphs. With `batch_size` also a stored graph or
            its folder; one without masks gets a random split, drawn by the seed.
        seed: of dropout, and of the weights of a new model.
        config: see `TrainConfig`.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        recipe: loss and score, see `Recipe`; cross-entropy by default.
        tracker: called every epoch, see `fgai.trackers`.
        batch_size: training nodes of a mini-batch, for models that `fgai.large.observe_store` supports.
        fan_out: neighbours drawn of each node, one number or one per layer, -1 for all; 10 by default.
        **settings: fields of `TrainConfig`, which win over `config`; for a new model also its arguments.

    Raises:
        InputError: an unknown setting or model; no labels or no masks; outputs that do not fit the labels.

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
        model, config = _model_and_config(model, source.node_graph, config, seed, settings)
        source.prepare(model, batch_size, fan_out)
        if recipe is None:
            recipe = VanillaRecipe(source.graph) if batch_size is None else source.vanilla()
        identity = recipe.name, config, seed
        source.check_processes(model, *identity)
        trained = copy_model(model)
        history = fit(
            trained,
            recipe,
            config,
            seed=seed,
            fingerprint=source.fingerprint(model, *identity) if checkpoint else "",
            progress=progress,
            checkpoint=checkpoint,
            tracker=tracker,
        )
        set_history(trained, history)
    return trained


def _model_and_config(
    model: nn.Module | str, graph: Graph, config: TrainConfig | None, seed: int, settings: dict[str, Any]
) -> tuple[nn.Module, TrainConfig]:
    if isinstance(model, str):
        model = one_of(model, "model", tuple(MODELS), any_case=True)
    name = model if isinstance(model, str) else type(unwrapped(model)).__name__
    check_setting_names(settings, setting_names("vanilla", model) if isinstance(model, str) else TRAIN_FIELDS)
    fields = {name: settings.pop(name) for name in TRAIN_FIELDS if name in settings}
    if isinstance(model, str):
        model = untrained_model(model, graph, seed=seed, **settings).to(graph.device)
    config = config or TrainConfig(lr=LEARNING_RATES.get(name, TrainConfig.lr))
    return model, config.replace(**fields)


@typed
@with_gradients
def train_method(
    method: str,
    model: str,
    graph: Graph | GraphOnDisk,
    *,
    seed: int = 0,
    vanilla: nn.Module | None = None,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    tracker: Tracker | None = None,
    settings: dict[str, Any] | None = None,
    check: bool = True,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
) -> nn.Module:
    """Train a model by a method, with the method's defaults where `settings` has no value.

    `vanilla` is `fgai.train`, `ln` the same with layer norm, `limits` is `fgai.limit`, `harden` is
    `fgai.harden`, `at` is `harden` without limits, `fgai` is `fgai.make_faithful`, and `fgai-certified`
    trains towards certificates against injection. Each gives the same weights as that call. All but the first
    two start from the model `vanilla`; if it is None, it is trained first. `settings` holds settings of the
    training and arguments of the model by name; the other arguments are those of `make_faithful`.

    Raises:
        InputError: an unknown name, a setting that the method does not take, or `batch_size` for a method
            that needs the whole graph.
    """
    check_method(method)
    model = one_of(model, "model", tuple(MODELS), any_case=True)
    if batch_size is not None and method == "limits":
        raise InputError("`batch_size` is for training; `limits` reads the whole graph: leave it out")
    settings = dict(settings or {})
    check_setting_names(settings, setting_names(method, model))
    if batch_size is None:
        graph = _as_whole_graph(graph, fan_out).to(device)
    options: dict[str, Any] = {"seed": seed, "progress": progress}
    options |= {"batch_size": batch_size, "fan_out": fan_out}
    fit_options: dict[str, Any] = {"checkpoint": checkpoint, "tracker": tracker}
    if method in FROM_SCRATCH:
        fields = {name: settings.pop(name) for name in TRAIN_FIELDS if name in settings}
        if method == "ln":
            settings["norm"] = "layer"
        node_graph = graph.nodes(seed) if isinstance(graph, GraphOnDisk) else graph
        new = untrained_model(model, node_graph, seed=seed, **settings).to(device)
        trained: nn.Module = train(new, graph, **options, **fit_options, **fields)
        return trained
    if vanilla is None:
        vanilla = train_method("vanilla", model, graph, device=device, **options)
    if method == "limits":
        limited = limit(vanilla, graph, **settings)
        if isinstance(history := getattr(vanilla, "history", None), History):
            set_history(limited, history)
        return limited
    if method in ("at", "harden"):
        settings = {"limits": method == "harden", **settings}
        return harden(vanilla, graph, check=check, **options, **fit_options, **settings)
    if method == "fgai-certified":
        settings, fit_options["terms"] = {**CERTIFIED_SETTINGS, **settings}, [certified]
    return make_faithful(vanilla, graph, check=check, **options, **fit_options, **settings)


@typed
def accuracy_without_edges(data: Any, *, seed: int = 0, targets: str = "test", **settings: Any) -> float:
    """Return the accuracy of a network with two layers that is trained on the graph without its edges.

    No injected node can change its predictions, so a certified share below this number is of no use.
    `targets`, `test` or `val`, are the nodes it is computed on; for the settings see `fgai.train`.

    Raises:
        InputError: another task than nodes, no labels, or other targets.

    Example:
        >>> import fgai
        >>> 0.2 < accuracy_without_edges(fgai.load_dataset("planted"), epochs=20, progress=False) < 0.9
        True
    """
    one_of(targets, "targets", ("test", "val"))
    graph = as_graph(data)
    if not task_of(graph).row_per_node or graph.y is None:
        raise InputError(f"`accuracy_without_edges` needs node labels `y`, {graph.name!r} has none")
    bare = graph.remove(torch.arange(graph.num_edges, device=graph.device))[0]
    model = train("GCN", bare, seed=seed, **settings)
    with evaluating(model), torch.no_grad():
        predicted = call_model(model, prepared(model, bare)).argmax(1).cpu()
    rows = task_of(graph).rows(graph, targets).cpu()
    return float((predicted[rows] == graph.y.cpu()[rows]).double().mean())
