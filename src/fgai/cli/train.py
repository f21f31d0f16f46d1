"""`fgai train`, `faithful`, `harden` and `limit`: models from a dataset, and from other models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from fgai import datasets
from fgai.checks import device as checked_device
from fgai.checks import one_of
from fgai.cli import files, options
from fgai.cli.options import check_output
from fgai.cli.output import Output, command
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large import StoredGraph
from fgai.models import MODELS
from fgai.processes import current
from fgai.tasks import get_task, task_of
from fgai.training import (
    FROM_SCRATCH,
    METHODS,
    check_method,
    count_clipped,
    make_faithful,
    setting_names,
    train_method,
    untrained_model,
)
from fgai.training import harden as hardened_copy
from fgai.training import limit as with_limits
from fgai.training.settings import TRAIN_FIELDS, check_setting_names

NAMES = {"f1": "F1", "roc_auc": "ROC-AUC"}


@command
@files._on_all_ranks
def train(
    *,
    data: options.Data = "planted",
    task: Annotated[str | None, "node, link or graph; what the dataset is made for by default."] = None,
    model: options.Model = "GAT",
    method: Annotated[
        str, f"{options.choices(METHODS)}; ln: with layer norm; at: adversarial training without limits."
    ] = "vanilla",
    training: options.Training,
    source: options.Location,
    out: Output,
) -> None:
    """Train a model and write it to a file that names its data.

    The seed draws the split, the weights and everything random in training. Ctrl-C saves the training; the
    same command continues it. Under torchrun several processes share the mini-batches.

    Examples:
    - `fgai train --data cora --model GATv2 --output cora.safetensors`
    - `fgai train --method ln --epochs 50 --set dropout=0.3`
    - `fgai train --data cora --task link`
    - `fgai train --data folder --batch-size 1024 --fan-out 10,5`
    - `torchrun --nproc-per-node=2 -m fgai train --data folder --batch-size 512`
    """
    model = one_of(model, "--model", tuple(MODELS), any_case=True)
    check_method(method, "--method")
    settings, seed, batches = _settings(training, model, method), training.seed, training.batches
    if training.box is not None and "box" not in setting_names(method, model):
        raise InputError(f"`--box` is for methods that train with an adversary; {method} has none")
    graph = files._open_data(data, source, seed, task, stored=training.batch_size is not None)
    kind = task_of(graph).name if isinstance(graph, Graph) else "node"
    usual = datasets.info(data).task if data in datasets.names() else "node"  # of a graph of your own
    mark = "" if kind == usual else f"-{kind}"
    name = f"{method}-{model}-{Path(data).stem}{mark}.safetensors".lower()
    path = check_output(training.output or Path(name), training.force)
    common: dict[str, Any] = {"seed": seed, "device": checked_device(source.device), **batches}
    common |= {"progress": out.progress, "tracker": files._open_log(training.log), "settings": settings}
    networks, passes = list[nn.Module](), 0.0
    if isinstance(graph, Graph) and training.batch_size is None:
        sizes = {name: value for name, value in settings.items() if name not in TRAIN_FIELDS}
        network = untrained_model(model, graph, **(sizes if method in FROM_SCRATCH else {})).to(graph.device)
        networks, passes = [network], files.training_passes(method, settings)
    files.announce(out, f"training {model} ({method}) on {graph!r}", networks, graph, passes)
    work = partial(train_method, method, model, graph, **common)
    about = {"dataset": data, "split_seed": seed, "method": method, "task": kind}
    _run(out, "train", work, path, graph, about, training, settings)


def _settings(training: options.Training, model: str, method: str, **more: int | None) -> dict[str, Any]:
    """Return the settings of `--set`, as JSON where they can be read so, and of options, which win."""
    names = setting_names(method, model)
    settings: dict[str, Any] = {}
    for word in training.set_ or ():
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"`--set` takes NAME=VALUE, got {word!r}")
        check_setting_names([name], names, "--set")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        settings[name] = tuple(value) if isinstance(value, list) else value
    own = {"epochs": training.epochs, "lr": training.lr, **more, "box": options.parse_box(training.box)}
    return settings | {name: value for name, value in own.items() if value is not None}


def _run(
    out: Output,
    name: str,
    work: Callable[..., nn.Module],
    path: Path,
    graph: Graph | StoredGraph,
    about: dict[str, Any],
    training: options.Training,
    settings: dict[str, Any],
    factory: str | None = None,
) -> None:
    """Train with a folder for the state, write the model, and print a summary."""
    about = {**about, "seed": training.seed, "settings": settings}
    if training.batch_size is not None:
        about |= {"batch_size": training.batch_size, "fan_out": training.fan_out}
    with files._resumable(out, path) as folder:
        model: Any = work(checkpoint=folder)
        path = files._write_model(model, path, graph, about, factory)
    if not current().is_main:
        return
    history, scores = model.history, files._scores(model, graph, training.seed)
    measure = get_task(about.get("task", "node")).headline
    epochs, seconds = len(history.terms), history.seconds
    values = {"command": name, "output": str(path), "model": type(model).__name__, **about, measure: scores}
    values |= {"epochs": epochs, "kept_epoch": history.kept_epoch, "stopped": history.stopped}
    shares = ", ".join(f"{part} {value:.3f}" for part, value in scores.items())
    text = f"{NAMES.get(measure, measure)}: {shares}\n{epochs} epochs in {seconds:.1f} s, {history.ending};"
    text += f" kept: epoch {history.kept_epoch}\nwritten to {path}"
    out.result({**values, "seconds": seconds}, text)


def _output(opened: files._ModelAndGraph, prefix: str, output: Path | None, force: bool) -> Path:
    """Where a model made from another is written: `output`, or the other's name with a prefix."""
    path = output or opened.path.with_name(f"{prefix}-{opened.path.name}")
    stem = path.with_suffix("") if path.suffix in (".safetensors", ".pt", ".pth") else path
    return check_output(stem.with_name(f"{stem.name}.safetensors"), force)


@command
@files._on_all_ranks
def faithful(
    source: options.Source,
    *,
    training: options.Retraining,
    epoch_size: Annotated[
        options.Count, "Nodes of an epoch of mini-batches, drawn anew for each; all otherwise."
    ] = None,
    out: Output,
) -> None:
    """Make a model faithful: its attention keeps the same neighbours, under attack too.

    Labels are not used. Ctrl-C saves the training; the same command continues it. Under torchrun several
    processes share the mini-batches.

    Examples:
    - `fgai faithful gat.safetensors`
    - `fgai faithful gat.safetensors --epochs 100 --set similarity=4 --output fgai.safetensors`
    - `fgai faithful club.safetensors --nodes 2 --edges 2`
    - `fgai faithful large.safetensors --batch-size 1024 --fan-out 10,5 --epochs 20`
    - `fgai faithful --model mine:Model --weights w.pt --data folder --batch-size 512`
    """
    more: dict[str, Any] = {} if training.batch_size is None else {"epoch_size": epoch_size}
    work = partial(make_faithful, epoch_size=epoch_size)
    _retrain(out, "fgai", "making {} faithful", work, source, training, **more)


@command
@files._on_all_ranks
def harden(source: options.Source, *, training: options.Retraining, out: Output) -> None:
    """Harden a model: adversarial training with limits, for predictions that stay the same under attack.

    Needs labels. Explanations may change; `fgai faithful` keeps them. Ctrl-C saves the training; the same
    command continues it. Under torchrun several processes share the mini-batches.

    Examples:
    - `fgai harden gat.safetensors`
    - `fgai harden gat.safetensors --epochs 100 --set attack_weight=0.9 --output hard.safetensors`
    - `fgai harden --model mine:Model --weights w.pt --data folder --batch-size 512`
    """
    _retrain(out, "harden", "hardening {}", hardened_copy, source, training)


def _retrain(
    out: Output,
    method: str,
    remark: str,
    train: Callable[..., nn.Module],
    source: options.Source,
    training: options.Retraining,
    **more: Any,
) -> None:
    """Train a model further and write the result; `more` is added to its file."""
    batches, opened = training.batches, files._open_model(source, stored=training.batch_size is not None)
    graph, split_seed, seed = opened.graph, opened.about.get("split_seed", 0), training.seed
    if isinstance(graph, StoredGraph) and graph.array("train_mask") is None and seed != split_seed:
        raise InputError(
            f"{graph.name!r} has no masks, so the seed draws its split, and the model's was {split_seed}; use"
            f" `--seed {split_seed}`"
        )
    settings = _settings(training, opened.kind, method, nodes=training.nodes, edges=training.edges)
    name, prefix = ("harden", "hardened") if method == "harden" else ("faithful", "faithful")
    path = _output(opened, prefix, training.output, training.force)
    common: dict[str, Any] = {"seed": seed, "check": training.check, "progress": out.progress, **batches}
    work = partial(train, opened.model, graph, tracker=files._open_log(training.log), **common, **settings)
    passes = files.training_passes(method, settings, trained=True, check=training.check)
    passes = passes if training.batch_size is None else 0.0
    files.announce(out, f"{remark.format(opened.path)} on {graph!r}", [opened.model], graph, passes)
    if method == "fgai" and isinstance(graph, Graph) and not task_of(graph).has_part(graph, "fit"):
        out.say("the graph has no train_mask: training on all nodes; labels are not used")
    about = {**opened.about, "method": method, "vanilla": str(opened.path), **more}
    _run(out, name, work, path, graph, about, training, settings, opened.factory)


@command
def limit(
    source: options.Source,
    *,
    clip_share: Annotated[str, "Share of the nodes outside either end of each range, or `auto`."] = "0.02",
    shrink: Annotated[
        float, "Share of the nodes, those of largest norm, shrunk to the norm of the rest."
    ] = 0.4,
    output: Annotated[Path | None, "File to write; limited-NAME by default.", "-o"] = None,
    force: options.Force = False,
    out: Output,
) -> None:
    """Clip values in a model's attention layers to their range on the graph it was trained on; no training.

    An injected node then contributes no more than an ordinary one could. Part of the explanation is lost:
    `fgai faithful` restores it. With `--clip-share 0 --shrink 0` nothing changes on that graph.

    Examples:
    - `fgai limit gat.safetensors`
    - `fgai limit gat.safetensors --clip-share auto --shrink 0.1 --output limited.safetensors`
    """
    opened = files._open_model(source)
    path = _output(opened, "limited", output, force)
    try:
        share: float | str = clip_share if clip_share == "auto" else float(clip_share)
    except ValueError:
        raise InputError(f"`clip_share` must be a number or `auto`, got {clip_share!r}") from None
    limited = with_limits(opened.model, opened.graph, share, shrink=shrink)
    clips = count_clipped(limited, opened.graph)
    about = {**opened.about, "settings": {"clip_share": share, "shrink": shrink}, "vanilla": str(opened.path)}
    path = files._write_model(limited, path, opened.graph, about, opened.factory)
    after, before = files._scores(limited, opened.graph), files._scores(opened.model, opened.graph)
    measure = get_task(about.get("task", "node")).headline
    values = {"command": "limit", "output": str(path), "model": type(limited).__name__, **about}
    values |= {measure: after, f"{measure}_before": before}
    values |= {"clipped": clips.count, "clipped_share": clips.share}
    lines = [f"{measure} {p}: {before[p]:.3f} before, {v:.3f} behind limits" for p, v in after.items()]
    lines.append(f"{clips.count} of {clips.total} numbers clipped on this graph ({clips.share:.2%})")
    out.result(values, "\n".join([*lines, f"written to {path}"]))
