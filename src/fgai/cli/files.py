"""Read and write models with their data, continue interrupted trainings, and estimate what commands cost.

A cost is the time of a pass of the model, times the number of passes.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fgai import datasets, metrics
from fgai.attacks import Attack, Threat, make_attack
from fgai.attention import call_model, evaluating, model_name, prepared
from fgai.checks import device as checked_device
from fgai.cli import options
from fgai.cli.output import Output
from fgai.datasets import load_graph
from fgai.errors import CheckpointError, FgaiWarning, InputError, collect_warnings, warn
from fgai.evaluation.run import eval_logits
from fgai.files import check
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.graph.on_disk import is_store
from fgai.large import StoredGraph
from fgai.large.processes import process_group
from fgai.processes import current
from fgai.records import Meter
from fgai.tasks import task_of
from fgai.trackers import LogFile, Tracker
from fgai.training import FROM_SCRATCH, TrainConfig, load_model, make_model, read_header, save_model
from fgai.training.stability import MIN_EPOCHS

UNTRAINED = "untrained weights: no --weights were given, so the model has its initial ones"


@dataclass(frozen=True, eq=False)
class _ModelAndGraph:
    """A model, its graph, and the `about` block of its file; `factory` makes it, if it is the user's own."""

    path: Path
    model: nn.Module
    graph: Any  # a Graph, or a StoredGraph where it stays on disk
    about: dict[str, Any]
    factory: str | None = None
    untrained: bool = False

    @property
    def kind(self) -> str:
        return model_name(self.model)

    def load(self, path: Path | None) -> nn.Module | None:
        """Another model of the same kind, from a file, on the same device."""
        if path is None:
            return None
        return load_model(path, factory=self.factory).to(next(self.model.parameters()).device)


def _open_data(
    name: str, place: options.Location, seed: int = 0, task: str | None = None, *, stored: bool = False
) -> Graph | StoredGraph:
    """Load a dataset; with `stored`, open a converted folder without loading it."""
    device = checked_device(place.device)
    if not stored or name in datasets.names() or not is_store(name):
        return datasets.load_dataset(name, place.root, seed, task=task).to(device)
    if task not in (None, "node"):
        raise InputError(f"mini-batches of a folder are for node tasks, got `--task {task}`")
    return StoredGraph(name)


def _open_model(source: options.Source, *, stored: bool = False) -> _ModelAndGraph:
    """Read a model and its graph: the one it was trained on, with the same split, or that of `--data`."""
    target, path = checked_device(source.device), source.model
    if source.own is not None:
        if path is not None:
            raise InputError(f"give {path} or `--model`, not both; weights go with `--weights`")
        return _open_own(source, source.own, stored=stored)
    if path is None or source.weights is not None:
        what = "`--weights` goes with" if path or source.weights else "give the file of a model, its name, or"
        raise InputError(f"{what} `--model package.module:name`, which makes a model of your own")
    header = read_header(path)
    about: dict[str, Any] = header.get("about") or {}
    kinds: dict[str, Any] = {"split_seed": int, "seed": int, "task": str | None}
    kinds |= dict.fromkeys(("dataset", "method", "vanilla"), str)
    for key in kinds.keys() & about.keys():
        check(about[key], kinds[key], f"{key} of {path}")
    name = source.data or about.get("dataset")
    if not name:
        raise InputError(f"{path} does not name its graph; add --data")
    model = load_model(path)
    graph = _open_data(name, source, about.get("split_seed", 0), about.get("task"), stored=stored)
    recorded = header.get("data_fingerprint")
    if recorded and name == about.get("dataset") and _fingerprint(graph) != recorded:
        raise CheckpointError(
            f"the files of {name!r} are not those {path} was trained on; restore them, or train anew"
        )
    return _ModelAndGraph(path, model.to(target), graph, about)


def _open_own(source: options.Source, factory: str, *, stored: bool) -> _ModelAndGraph:
    device, data, weights = checked_device(source.device), source.data, source.weights
    if data is None:
        raise InputError("`--model` needs `--data`, the graph it is for")
    if data in datasets.names() or (stored and is_store(data)):
        graph = _open_data(data, source, stored=stored)
    elif Path(data).exists() or Path(data).suffix in (".npz", ".pt", ".csv"):
        # No split is drawn: it would differ from the model's.
        graph = load_graph(data).to(device)
    else:
        datasets.info(data)  # which says that there is none, and what comes close
    if (here := str(Path.cwd())) not in sys.path:  # `python -m fgai` has it
        sys.path.append(here)
    model = make_model(factory).eval() if weights is None else load_model(weights, factory=factory)
    if weights is None:
        warn(FgaiWarning(UNTRAINED))
    path = weights or Path(f"{model_name(model)}.safetensors".lower())
    about = {"dataset": data, "model": factory}
    return _ModelAndGraph(path, model.to(device), graph, about, factory, weights is None)


def _open_models(
    words: list[str], own: options.OwnModel
) -> tuple[dict[str, _ModelAndGraph], dict[str, nn.Module], Any]:
    """Read several `[NAME=]FILE` models of the same data and split, or weights of a model of the user's.

    Returns all that was read, the models alone, and their graph.
    """
    file = "model" if own.own is None else "weights"
    opened = {
        name: _open_model(options.Source(**vars(own), **{file: path}))  # type: ignore[arg-type]
        for name, path in options.named_files(words, "models").items()
    }
    parts = ("dataset", "split_seed", "task")
    if len({tuple(entry.about.get(part) for part in parts) for entry in opened.values()}) > 1:
        abouts = {name: entry.about for name, entry in opened.items()}
        splits = [f"{n}: {a.get('dataset')}, seed {a.get('split_seed')}" for n, a in abouts.items()]
        raise InputError(f"the models were trained on different data or splits ({'; '.join(splits)})")
    models = {name: entry.model for name, entry in opened.items()}
    return opened, models, next(iter(opened.values())).graph


def _fingerprint(graph: Graph | StoredGraph) -> str:
    return graph.fingerprint if isinstance(graph, StoredGraph) else fingerprint(graph)


def _open_log(text: str | None) -> Tracker | None:
    """Open the file that `--log` names, on the first rank."""
    return None if text is None or not current().is_main else LogFile(text)


def _write_model(
    model: nn.Module,
    path: Path,
    graph: Graph | StoredGraph,
    about: dict[str, Any],
    factory: str | None = None,
) -> Path:
    """Write a model with what `_open_model` needs to find its data again; of several ranks the first does."""
    if not current().is_main:
        return path
    return save_model(model, path, data_fingerprint=_fingerprint(graph), about=about, factory=factory)


@contextmanager
def _resumable(output: Output, path: Path) -> Iterator[Path]:
    """Give a folder for the state of a training, which stays if the training is interrupted."""
    folder = path.with_name(f"{path.name}.partial")
    if not current().is_main:
        yield folder
        return
    if folder.exists():
        output.say(f"continuing the training in {folder}")
    try:
        yield folder
    except KeyboardInterrupt:
        if folder.exists():
            output.notes.print(f"saved in {folder}; run the same command again to continue", markup=False)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _scores(model: nn.Module, graph: Graph | StoredGraph, seed: int = 0) -> dict[str, float]:
    """Return the headline metric of the task on training, validation and test nodes."""
    if isinstance(graph, StoredGraph):
        from fgai.large import evaluate_store  # imports PyG

        with collect_warnings():  # of the attention, which `fgai evaluate` measures
            return evaluate_store(model, graph, seed=seed).f1
    task, scores = task_of(graph), {}
    for part in ("train", "val", "test"):
        view = prepared(model, task.view(graph, part))
        rows, labels = task.rows(view, part), task.labels(view)
        if labels is None or not task.has_part(view, part) or not rows.numel():
            continue
        logits = eval_logits(model, view)[rows]
        value = metrics.task_scores(task.name, logits, labels[rows])[task.headline]
        if value == value:  # training pairs that are no links are drawn every epoch: no AUC without them
            scores[part] = value
    return scores


def _on_all_ranks(work: Callable[..., None]) -> Callable[..., None]:
    """Join the processes that torchrun started before a command runs; only the first one prints."""

    @functools.wraps(work)
    def together(*, source: options.Location, out: Output, **groups: Any) -> None:
        device = checked_device(source.device)
        with process_group(device) as ranks:
            source = replace(source, device=str(ranks.local_device(device)))
            work(source=source, out=replace(out, quiet=out.quiet or not ranks.is_main), **groups)

    return together


EPOCH = {"vanilla": 1.8, "ln": 1.8, "limits": 0, "at": 7, "harden": 7, "fgai": 4, "fgai-certified": 6}
"""Passes that take as long as an epoch of a method; measured on graphs of 2,000 nodes, like all below."""
CHECK = {"harden": 100, "fgai": 500, "fgai-certified": 500}
"""Passes that take as long as the check of a training, and another attempt now and then."""
STEP = 0.85
"""Passes that take as long as a step of an attack."""
MEASURES, CURVES, NULLS, CERTIFICATE = 110, 40, 200, 25
"""Passes that take as long as the measures of an evaluation, its curves, null rows, or a certificate."""
CAPTURED = 0.15
"""Seconds of a step captured in a CUDA graph, by those of one that is not (docs/performance.md)."""
COPIES = 12
"""Passes whose memory is held at a time, since searches run in parallel."""


def announce(out: Output, text: str, models: Iterable[nn.Module], graph: Any, passes: float) -> None:
    """Print `text`, and about what the work costs if it takes as long as `passes` of each model.

    A pass is one forward and backward on the graph. Nothing is estimated for a graph that stays on disk.
    """
    out.say(text)
    if not passes or out.quiet or not isinstance(graph, Graph):
        return
    with suppress(Exception), collect_warnings():  # the command itself raises what is wrong
        meter = Meter(graph.device)
        seconds, memory = zip(*(_pass_of(model, graph, meter) for model in models), strict=True)
        total = passes * sum(seconds) * (CAPTURED if graph.device.type == "cuda" else 1)
        gigabytes = (meter.peak_memory()["bytes"] + COPIES * max(memory)) / 1e9
        duration = f"{max(10, 10 * round(total / 10))} s" if total < 100 else f"{total / 60:.0f} min"
        out.say(f"this takes about {duration} and {gigabytes:.1f} GB of memory")


def training_passes(
    method: str, settings: dict[str, Any], *, trained: bool = False, check: bool = True
) -> float:
    """Return the passes of a training; `trained`: whether the vanilla model that most methods need exists."""
    epochs: int = settings.get("epochs", TrainConfig.epochs)
    passes = EPOCH[method] * epochs + CHECK.get(method, 0) * (check and epochs >= MIN_EPOCHS)
    needs_vanilla = not trained and method not in FROM_SCRATCH
    return passes + EPOCH["vanilla"] * TrainConfig.epochs * needs_vanilla


def attack_passes(*attacks: Attack) -> float:
    """Return the passes of attacks."""
    return STEP * sum(attack.max_steps for attack in attacks)


def evaluation_passes(threat: Threat, graph: Any, *, curves: bool = True, nulls: bool = True) -> float:
    """Return the passes of an evaluation: attacks on predictions and explanations, curves, and null rows."""
    objectives = ("prediction", "explanation") if threat.objective is None else (None,)
    attacks = [make_attack(threat, objective, task=task_of(graph).name) for objective in objectives]
    return MEASURES + attack_passes(*attacks) + CURVES * curves + NULLS * nulls


def _pass_of(model: nn.Module, graph: Graph, meter: Meter) -> tuple[float, int]:
    """Return seconds and bytes of a pass: the second of two, as the first may compile."""
    graph = prepared(model, task_of(graph).view(graph, "test"))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    began = 0.0
    with evaluating(model), torch.enable_grad():
        for _ in range(2):
            began = meter.seconds()["total"]
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                total = call_model(model, graph).sum()
            torch.autograd.grad(total, parameters, allow_unused=True)
    return meter.seconds()["total"] - began, sum(sizes.values())
