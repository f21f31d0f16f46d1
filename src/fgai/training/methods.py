"""Every method behind one call: vanilla, layer norm, limits, adversarial training, FGAI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fgai.alone import with_gradients
from fgai.attention import call_model, evaluating, prepared
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.on_disk import GraphOnDisk
from fgai.models import MODELS, as_graph
from fgai.tasks import task_of
from fgai.trackers import Tracker
from fgai.training.faithful import make_faithful
from fgai.training.hardening import harden
from fgai.training.limiting import limit
from fgai.training.loop import TRAIN_FIELDS
from fgai.training.resume import history_of, set_history
from fgai.training.settings import CERTIFIED, check_names
from fgai.training.source import _in_memory
from fgai.training.terms import certified
from fgai.training.train import ALONE, METHODS, setting_names, train, untrained
from fgai.typed import typed

EXPERIMENTS = {
    "fgai-paper": "paper-methods",
    "fgai-injection": "paper-methods",
    "gnnguard": "defences",
    "gnn-svd": "defences",
    "pro-gnn": "defences",
}
"""Methods of the paper's tables that are trained in a checkout of fgai alone, and the grid of each."""


@typed
def check_method(method: str, name: str = "method") -> str:
    """Return the name of a method of `train_method`; `InputError` if there is none, or it is an experiment.

    Args:
        method: its name.
        name: of the argument, for the error.
    """
    if method in EXPERIMENTS:
        raise InputError(
            f"`{name}` {method!r} is an experiment, not a method of the package: run it in a checkout of fgai"
            f" with `fgai bench run {EXPERIMENTS[method]}`; methods are {', '.join(METHODS)}"
        )
    return one_of(method, name, METHODS)


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
    """Train one method with its defaults; `settings` win.

    All but `vanilla` and `ln` start from the same trained vanilla model. `vanilla` is `fgai.train`, `limits`
    is `fgai.limit`, `harden` is `fgai.harden`, `at` is that without limits, and `fgai` is
    `fgai.make_faithful`: all give the same weights.

    Args:
        method: `vanilla`, `ln` (layer norm), `limits`, `at`, `harden`, `fgai`, or `fgai-certified` (trained
            towards certificates against injection).
        model: name of the network, see `fgai.models.MODELS`.
        graph: with labels and masks; with `batch_size` also a stored one.
        seed: of the weights, dropout and adversary.
        vanilla: the trained vanilla model; trained here when None.
        device: where to train.
        progress: show a bar, as in `make_faithful`.
        checkpoint: likewise.
        tracker: likewise.
        settings: settings of the training, arguments of the model, by name.
        check: as in `make_faithful`.
        batch_size: likewise; for all methods but `limits`.
        fan_out: likewise.

    Raises:
        InputError: a name that is not known, a setting that the method does not take, or a method that needs
            the whole graph.
    """
    check_method(method)
    model = one_of(model, "model", tuple(MODELS), any_case=True)
    if batch_size is not None and method == "limits":
        raise InputError("`batch_size` needs a method that trains; limits reads the whole graph")
    settings = dict(settings or {})
    check_names(settings, setting_names(method, model))
    if batch_size is None:
        graph = _in_memory(graph, fan_out).to(device)
    options: dict[str, Any] = {"seed": seed, "progress": progress}
    options |= {"batch_size": batch_size, "fan_out": fan_out}
    saving: dict[str, Any] = {"checkpoint": checkpoint, "tracker": tracker}
    if method in ALONE:
        norm = {"norm": "layer"} if method == "ln" else {}
        arguments = {name: value for name, value in settings.items() if name not in TRAIN_FIELDS}
        nodes = graph.nodes(seed) if isinstance(graph, GraphOnDisk) else graph
        fresh = untrained(model, nodes, seed=seed, **arguments, **norm).to(device)
        fields = {name: value for name, value in settings.items() if name in TRAIN_FIELDS}
        trained: nn.Module = train(fresh, graph, **options, **saving, **fields)
        return trained
    if vanilla is None:
        vanilla = train_method("vanilla", model, graph, device=device, **options)
    if method == "limits":
        limited = limit(vanilla, graph, **settings)
        set_history(limited, history_of(vanilla))
        return limited
    if method in ("at", "harden"):
        settings = {"limits": method == "harden", **settings}
        return harden(vanilla, graph, check=check, **options, **saving, **settings)
    if method == "fgai-certified":
        settings, saving["terms"] = {**CERTIFIED, **settings}, [certified]
    return make_faithful(vanilla, graph, check=check, **options, **saving, **settings)


@typed
def features_alone(data: Any, *, seed: int = 0, targets: str = "test", **settings: Any) -> float:
    """Return the share of nodes that a network classifies right by their features, without any edge.

    Two layers on the graph without its edges, trained like any other model; no injected node can change it.
    A certified share of a graph network below this number protects nothing.

    Args:
        data: a `Graph` or PyG `Data` with labels and masks.
        seed: of the training.
        targets: the nodes that are scored, `test` or `val`.
        **settings: of the training, e.g. `epochs=100`, see `fgai.train`.

    Raises:
        InputError: another task than nodes, no labels, or other targets.

    Example:
        >>> import fgai
        >>> 0.2 < features_alone(fgai.load_dataset("planted"), epochs=20, progress=False) < 0.9
        True
    """
    one_of(targets, "targets", ("test", "val"))
    graph = as_graph(data)
    if not task_of(graph).row_per_node or graph.y is None:
        raise InputError(f"`features_alone` needs classes of nodes, {graph.name!r} has none")
    bare = graph.remove(torch.arange(graph.num_edges, device=graph.device))[0]
    model = train("GCN", bare, seed=seed, **settings)
    with evaluating(model), torch.no_grad():
        predicted = call_model(model, prepared(model, bare)).argmax(1).cpu()
    rows = task_of(graph).rows(graph, targets).cpu()
    return float((predicted[rows] == graph.y.cpu()[rows]).double().mean())
