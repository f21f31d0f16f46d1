"""`fgai train`, `faithful`, `harden` and `limit`: models from a dataset, and from other models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fgai import datasets
from fgai.checks import device as checked_device
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import (
    _model_output,
    _on_all_ranks,
    _open_data,
    _open_model,
    _Opened,
    _opened_log,
    _parsed_box,
    _parsed_settings,
    _resumable,
    _scores,
    _write_model,
    checked_output,
)
from fgai.cli.output import Output, command
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large import StoredGraph
from fgai.models import MODELS
from fgai.processes import current
from fgai.tasks import get_task, task_of
from fgai.training import METHODS, check_method, clipped, make_faithful, setting_names, train_method
from fgai.training import harden as hardened_copy
from fgai.training import limit as with_limits

Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Nodes the adversary injects; 60 by default.")
]
Edges = Annotated[int | None, typer.Option("--edges", min=1, help="Edges of each of them; 20 by default.")]
Check = Annotated[
    bool, typer.Option(help="Attack the result on validation nodes; train once more if it is not stable.")
]
NAMES = {"f1": "F1", "roc_auc": "ROC-AUC"}


@command
@_on_all_ranks
def train(
    *,
    data: options.Data = "planted",
    task: options.Task = None,
    model: options.Model = "GAT",
    method: Annotated[
        str,
        typer.Option(
            help=f"{options.listed(METHODS)}; ln is layer norm, at adversarial training without limits."
        ),
    ] = "vanilla",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; METHOD-MODEL-DATA by default.")
    ] = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    box: options.Box = None,
    batch_size: options.BatchSize = None,
    fan_out: options.FanOut = None,
    set_: options.Settings = None,
    log: options.Log = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a model and write it to a file that knows its data.

    The seed draws the split, the weights and everything random in training. Ctrl-C saves the training; the
    same command goes on with it. Under torchrun several processes share the mini-batches.

    Examples:
    - `fgai train --data cora --model GATv2 --output cora.safetensors`
    - `fgai train --method ln --epochs 50 --set dropout=0.3`
    - `fgai train --data cora --task link`
    - `fgai train --data folder --batch-size 1024 --fan-out 10,5`
    - `torchrun --nproc-per-node=2 -m fgai train --data folder --batch-size 512`
    """
    model = one_of(model, "--model", tuple(MODELS), any_case=True)
    check_method(method, "--method")
    out = Output(json, quiet)
    settings = _parsed_settings(set_, model, method)
    given = {"epochs": epochs, "lr": lr, "box": _parsed_box(box)}
    settings |= {name: value for name, value in given.items() if value is not None}
    if box is not None and "box" not in setting_names(method, model):
        raise InputError(f"`--box` is for methods that train with an adversary; {method} has none")
    place = checked_device(device)
    neighbours = _fan_out(fan_out)
    graph = _open_data(data, root, seed, task, place, stored=batch_size is not None)
    kind = task_of(graph).name if isinstance(graph, Graph) else "node"
    own = datasets.info(data).task if data in datasets.names() else "node"  # of a graph of your own
    mark = "" if kind == own else f"-{kind}"
    name = f"{method}-{model}-{Path(data).stem}{mark}.safetensors".lower()
    path = checked_output(output or Path(name), force)
    tracker = _opened_log(log)
    out.say(f"training {model} ({method}) on {graph!r}")
    with _resumable(out, path) as folder:
        trained = train_method(
            method,
            model,
            graph,
            seed=seed,
            device=place,
            progress=out.progress,
            checkpoint=folder,
            tracker=tracker,
            settings=settings,
            batch_size=batch_size,
            fan_out=neighbours,
        )
        about = {"dataset": data, "split_seed": seed, "seed": seed, "method": method, "settings": settings}
        about["task"] = kind
        about |= {} if batch_size is None else {"batch_size": batch_size, "fan_out": fan_out}
        path = _write_model(trained, path, graph, about)
    if current().leads:
        _report(out, "train", trained, _scores(trained, graph, seed), path, about)


def _report(
    out: Output, name: str, model: Any, found: dict[str, float], path: Path, about: dict[str, Any]
) -> None:
    """Print what a training came to."""
    history = model.history
    measure = get_task(about.get("task", "node")).headline
    values = {
        "command": name,
        "output": str(path),
        "model": type(model).__name__,
        **about,
        measure: found,
        "epochs": len(history.terms),
        "kept_epoch": history.kept_epoch,
        "stopped": history.stopped,
        "seconds": history.seconds,
    }

    def show(console: Console) -> None:
        shares = ", ".join(f"{part} {value:.3f}" for part, value in found.items())
        console.print(f"{NAMES.get(measure, measure)}: {shares}")
        console.print(
            f"{len(history.terms)} epochs in {history.seconds:.1f} s, {history.ending};"
            f" kept: epoch {history.kept_epoch}",
            soft_wrap=True,
        )
        console.print(f"written to {path}", markup=False, soft_wrap=True)

    out.result(values, show)


@command
@_on_all_ranks
def faithful(
    model: options.ModelFile = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; faithful-NAME by default.")
    ] = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    nodes: Nodes = None,
    edges: Edges = None,
    box: options.Box = None,
    batch_size: options.BatchSize = None,
    fan_out: options.FanOut = None,
    epoch_size: options.EpochSize = None,
    check: Check = True,
    set_: options.Settings = None,
    log: options.Log = None,
    own: options.Own = None,
    weights: options.Weights = None,
    data: options.OtherData = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a model faithful: attention that points at the same neighbours and stays put under attack.

    Labels are not used. Ctrl-C saves the training; the same command goes on with it. Under torchrun several
    processes share the mini-batches.

    Examples:
    - `fgai faithful gat.safetensors`
    - `fgai faithful gat.safetensors --epochs 100 --set similarity=4 --output fgai.safetensors`
    - `fgai faithful club.safetensors --nodes 2 --edges 2`
    - `fgai faithful large.safetensors --batch-size 1024 --fan-out 10,5 --epochs 20`
    - `fgai faithful --model mine:Model --weights w.pt --data folder --batch-size 512`
    """
    out = Output(json, quiet)
    neighbours = _fan_out(fan_out)
    opened = _open_model(model, data, root, device, own=own, weights=weights, stored=batch_size is not None)
    _check_split(opened, seed)
    given = {"epochs": epochs, "lr": lr, "nodes": nodes, "edges": edges, "box": _parsed_box(box)}
    settings = _merged_settings(set_, opened.kind, "fgai", given)
    path = _model_output(output, opened, "faithful", force)
    tracker = _opened_log(log)
    out.say(f"making {opened.path} faithful on {opened.graph!r}")
    if isinstance(opened.graph, Graph) and not task_of(opened.graph).has_part(opened.graph, "fit"):
        out.say("the graph has no train_mask: training on all nodes; labels are not used")
    with _resumable(out, path) as folder:
        faithful = make_faithful(
            opened.model,
            opened.graph,
            seed=seed,
            check=check,
            progress=out.progress,
            checkpoint=folder,
            tracker=tracker,
            batch_size=batch_size,
            fan_out=neighbours,
            epoch_size=epoch_size,
            **settings,
        )
        about = {
            **opened.about,
            "method": "fgai",
            "seed": seed,
            "settings": settings,
            "vanilla": str(opened.path),
        }
        sizes = {"batch_size": batch_size, "fan_out": fan_out, "epoch_size": epoch_size}
        about |= {} if batch_size is None else sizes
        path = _write_model(faithful, path, opened.graph, about, opened.factory)
    if current().leads:
        _report(out, "faithful", faithful, _scores(faithful, opened.graph, seed), path, about)


def _merged_settings(
    words: list[str] | None, model: str, method: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of `--set`, and those of options of their own, which win."""
    return _parsed_settings(words, model, method) | {k: v for k, v in given.items() if v is not None}


@command
@_on_all_ranks
def harden(
    model: options.ModelFile = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; hardened-NAME by default.")
    ] = None,
    force: options.Force = False,
    seed: options.Seed = 0,
    epochs: options.Epochs = None,
    lr: options.Rate = None,
    nodes: Nodes = None,
    edges: Edges = None,
    box: options.Box = None,
    batch_size: options.BatchSize = None,
    fan_out: options.FanOut = None,
    check: Check = True,
    set_: options.Settings = None,
    log: options.Log = None,
    own: options.Own = None,
    weights: options.Weights = None,
    data: options.OtherData = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Harden a model: adversarial training behind limits, for predictions that stay the same under attack.

    Needs labels. Explanations may change; `fgai faithful` keeps them. Ctrl-C saves the training; the same
    command goes on with it. Under torchrun several processes share the mini-batches.

    Examples:
    - `fgai harden gat.safetensors`
    - `fgai harden gat.safetensors --epochs 100 --set attack_weight=0.9 --output hard.safetensors`
    - `fgai harden --model mine:Model --weights w.pt --data folder --batch-size 512`
    """
    out = Output(json, quiet)
    neighbours = _fan_out(fan_out)
    opened = _open_model(model, data, root, device, own=own, weights=weights, stored=batch_size is not None)
    _check_split(opened, seed)
    given = {"epochs": epochs, "lr": lr, "nodes": nodes, "edges": edges, "box": _parsed_box(box)}
    settings = _merged_settings(set_, opened.kind, "harden", given)
    path = _model_output(output, opened, "hardened", force)
    tracker = _opened_log(log)
    out.say(f"hardening {opened.path} on {opened.graph!r}")
    with _resumable(out, path) as folder:
        hardened = hardened_copy(
            opened.model,
            opened.graph,
            seed=seed,
            check=check,
            progress=out.progress,
            checkpoint=folder,
            tracker=tracker,
            batch_size=batch_size,
            fan_out=neighbours,
            **settings,
        )
        about = {**opened.about, "method": "harden", "seed": seed, "settings": settings}
        about["vanilla"] = str(opened.path)
        about |= {} if batch_size is None else {"batch_size": batch_size, "fan_out": fan_out}
        path = _write_model(hardened, path, opened.graph, about, opened.factory)
    if current().leads:
        _report(out, "harden", hardened, _scores(hardened, opened.graph, seed), path, about)


@command
def limit(
    model: options.ModelFile = None,
    *,
    clip_share: Annotated[
        str, typer.Option(help="Share of the nodes left out at either end of each range, or `auto`.")
    ] = "0.02",
    shrink: Annotated[
        float,
        typer.Option(help="Share of the nodes, those of largest norm, shrunk to the norm of the rest."),
    ] = 0.4,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; limited-NAME by default.")
    ] = None,
    force: options.Force = False,
    own: options.Own = None,
    weights: options.Weights = None,
    data: options.OtherData = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Clip values in a model's attention layers to those seen on the graph it was trained for; no training.

    An injected node then contributes no more than an ordinary one could. It costs part of the explanation:
    `fgai faithful` restores it. With `--clip-share 0 --shrink 0` nothing changes on that graph.

    Examples:
    - `fgai limit gat.safetensors`
    - `fgai limit gat.safetensors --clip-share auto --shrink 0.1 --output limited.safetensors`
    """
    out = Output(json, quiet)
    opened = _open_model(model, data, root, device, own=own, weights=weights)
    path = _model_output(output, opened, "limited", force)
    share = _share(clip_share)
    limited = with_limits(opened.model, opened.graph, share, shrink=shrink)
    moved = clipped(limited, opened.graph)
    about = {**opened.about, "settings": {"clip_share": share, "shrink": shrink}, "vanilla": str(opened.path)}
    path = _write_model(limited, path, opened.graph, about, opened.factory)
    found, before = _scores(limited, opened.graph), _scores(opened.model, opened.graph)
    measure = get_task(about.get("task", "node")).headline
    values = {
        "command": "limit",
        "output": str(path),
        "model": type(limited).__name__,
        **about,
        measure: found,
        f"{measure}_before": before,
        "clipped": moved.count,
        "clipped_share": moved.share,
    }

    def show(console: Console) -> None:
        for part, value in found.items():
            console.print(f"{measure} {part}: {before[part]:.3f} before, {value:.3f} behind limits")
        console.print(f"{moved.count} of {moved.total} numbers clipped on this graph ({moved.share:.2%})")
        console.print(f"written to {path}", markup=False, soft_wrap=True)

    out.result(values, show)


def _share(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"`clip_share` must be a number or `auto`, got {text!r}") from None


def _check_split(opened: _Opened, seed: int) -> None:
    """Raise if the split of a stored graph is drawn by a seed, and by another one than the model's was."""
    graph, known = opened.graph, opened.about.get("split_seed", 0)
    if isinstance(graph, StoredGraph) and graph.array("train_mask") is None and seed != known:
        raise InputError(
            f"{graph.name!r} has no masks, so the seed draws its split, and the model's was {known}; use"
            f" `--seed {known}`"
        )


def _fan_out(text: str | None) -> int | tuple[int, ...] | None:
    """Turn what `--fan-out` was given into one number, or one per layer."""
    if text is None:
        return None
    try:
        first, *others = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"`--fan-out` takes whole numbers like 10 or 10,5, got {text!r}") from None
    return (first, *others) if others else first
