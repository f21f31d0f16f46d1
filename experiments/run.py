"""Run one cell: train, attack, measure, record."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import traceback
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import fgai
from experiments.cells import Cell
from experiments.memory import PeakMemory
from experiments.store import Store
from fgai.attacks import make_attack
from fgai.attention import call_model, evaluating, prepared
from fgai.certificates import certify
from fgai.datasets import load, with_degrees
from fgai.errors import CheckpointError
from fgai.evaluation import evaluate
from fgai.evaluation.protocol import describe
from fgai.graph import Graph
from fgai.metrics import task_scores
from fgai.models import DEFENCES
from fgai.records import plain
from fgai.tasks import TASKS, task_of
from fgai.training import (
    ALONE,
    FaithfulConfig,
    TrainConfig,
    history_of,
    labelled,
    preset,
    save,
    settings_for,
    train_method,
)
from fgai.training import load as load_model

EXPLAINED = {"link": 5, "graph": 2, "truth": 5}
"""Neighbours in an explanation; atoms of a molecule have too few for five."""
TRAINS = ("adversaries", "models", "training")
"""The packages a training depends on, beside the objective."""
RADIUS = 0.01
"""Of the certificates in `certify` cells; curves run over all radii."""


def run_cell(
    cell: Cell,
    store: Store,
    *,
    device: str = "cpu",
    root: Path | str | None = None,
    cache: Path | None = None,
    redo: bool = False,
) -> dict[str, Any]:
    """Run a cell unless its record is there, write the record and return it.

    A cell that fails is recorded as failed, with its error, and raises nothing; running it again retries it.

    Args:
        cell: what to run.
        store: where records go.
        device: where to train and attack.
        root: folder of the datasets.
        cache: folder for trained models: vanilla ones, which AT and FGAI share, and those of evaluations,
            which certificates of the same cells take; None trains them anew.
        redo: run it again if its record was made with other settings, and replace that; else refuse.

    Raises:
        CheckpointError: the record is damaged, foreign or was made with other settings.
        FgaiError: the record cannot be written.
    """
    known = store.read(cell)
    if known is not None and is_done(known, cell, store, redo):
        return known
    began = perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            body = _measure(cell, device, root, cache)
        body["warnings"] = sorted(
            {str(w.message) for w in caught if isinstance(w.message, fgai.errors.FgaiWarning)}
        )
        body["status"] = "done"
    except Exception as error:  # whatever it was, the other cells go on
        body = {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
    body["seconds"] = perf_counter() - began
    body["about"] = {
        "fgai": fgai.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
    }
    store.write(cell, body)
    return {**body, "cell": cell.to_dict(), "key": cell.key}


def _measure(cell: Cell, device: str, root: Path | str | None, cache: Path | None) -> dict[str, Any]:
    graph = load(cell.dataset, root=root, seed=cell.seed, task=cell.predicts)
    if cell.task == "truth" and cell.dataset != "planted":
        graph = with_degrees(graph)
    graph = graph.to(device)
    vanilla = None if cell.method in ALONE else _vanilla(cell, graph, device, cache)[0]
    with PeakMemory(device) as memory:
        if cell.method == "vanilla" and cell.kind in ("evaluate", "certify") and not cell.settings:
            model, trained = _vanilla(cell, graph, device, cache)
        else:
            model, trained = _trained(cell, graph, vanilla, device, cache)
    history = history_of(model)
    body: dict[str, Any] = {
        "data": describe(graph),
        "training": {
            "seconds": history.seconds,
            "epoch_seconds": sorted(history.epoch_seconds)[len(history.epoch_seconds) // 2],
            "best_epoch": history.best_epoch,
            "epochs": len(history.terms),
            "tries": history.tries,
            "last": history.terms[-1],
            **settings_of(cell),
            "curve": _thin(history.terms),
        },
    }
    if memory.peak is not None and trained:  # a model from the cache says nothing of its training's memory
        body["training"]["peak_memory"] = memory.peak
        body["training"]["base_memory"] = memory.base
    if cell.kind == "cost":
        return body
    if cell.kind == "search":
        body["validation"] = _validate(model, graph, cell)
        return body
    parent = vanilla if vanilla is not None else (model if cell.method == "vanilla" else None)
    if cell.kind == "certify":
        made = certify(model, graph, vanilla=parent, radius=RADIUS)
        body["certificate"] = plain(
            {"norm": made.norm, "radius": RADIUS, "k1": made.k1, "k2": made.k2, **made.summary()}
        )
        task = task_of(graph)
        body["scores"] = _scores(model, prepared(model, task.view(graph, "test")), task.name, "test_mask")
        return body
    body["evaluations"] = {}
    for index, threat in enumerate(cell.threats):
        # What the tables need of the further threats is how predictions and attention hold.
        extras: dict[str, Any] = {} if not cell.task else {"curves": False, "k": EXPLAINED[cell.task]}
        if index:
            extras |= {"explanation_attack": False, "curves": False, "nulls": False}
        record = evaluate(model, graph, threat, vanilla=parent, seed=cell.seed, name=cell.row, **extras)
        body["evaluations"][threat] = record.to_dict()
    return body


def settings_of(cell: Cell) -> dict[str, Any]:
    """Everything a training depends on beside the code: own settings, the parent's, and the defaults."""
    alone = cell.method in ALONE
    defaults = [dataclasses.asdict(TrainConfig())]
    if cell.method in DEFENCES:
        defaults.append(DEFENCES[cell.method].defaults())
    elif not alone:
        faithful = dataclasses.asdict(FaithfulConfig())
        nested = {name: faithful.pop(name) for name in ("weights", "train")}
        defaults = [*defaults, faithful, *nested.values()]
    where = (cell.model, cell.dataset, cell.predicts)
    chosen = {**settings_for(cell.method, *where), **cell.settings}
    rest = {name: value for part in defaults for name, value in part.items() if name not in chosen}
    parent = {} if alone else preset("vanilla", *where)
    values = {"settings": chosen, "parent": parent, "defaults": rest}
    return {name: plain(part) for name, part in values.items()}


def is_done(record: dict[str, Any], cell: Cell, store: Store, redo: bool = False) -> bool:
    """Whether a record makes running its cell needless.

    Raises:
        CheckpointError: its training was set otherwise than it would be now, unless `redo`.
    """
    if record["status"] != "done":
        return False
    changed = change_of(record, cell)
    if changed is not None and not redo:
        raise CheckpointError(
            f"{store.path(cell)} was run with {changed}; nothing was overwritten: move it away, or run with"
            " --redo"
        )
    return changed is None


def change_of(record: dict[str, Any], cell: Cell) -> str | None:
    """The first setting that a record's training had otherwise than it would have now, in words."""
    for part, now in settings_of(cell).items():
        then = record.get("training", {}).get(part, now)
        for name in sorted({**then, **now}):
            if then.get(name) != now.get(name):
                return f"another {name!r} ({part}: {then.get(name)!r}, now {now.get(name)!r})"
    return None


def _vanilla(cell: Cell, graph: Graph, device: str, cache: Path | None) -> tuple[nn.Module, bool]:
    """Return the trained vanilla parent, from the cache when it is there, and whether it was trained now."""
    chosen = preset("vanilla", cell.model, cell.dataset, cell.predicts)
    task = cell.task if cell.task in TASKS else ""
    tag = Cell(model=cell.model, dataset=cell.dataset, seed=cell.seed, settings=chosen, task=task).key
    path = (
        None if cache is None else Path(cache) / f"{cell.dataset}-{cell.model}-s{cell.seed}-{tag}.safetensors"
    )
    if path is not None and path.exists():
        return load_model(path).to(device), False
    model = train_method("vanilla", cell.model, graph, seed=cell.seed, device=device, progress=False)
    if path is not None:
        save(model, path)
    return model, True


def _trained(
    cell: Cell, graph: Graph, vanilla: nn.Module | None, device: str, cache: Path | None
) -> tuple[nn.Module, bool]:
    """Return the cell's model, and whether it was trained now.

    Evaluations train, because their records hold the training's cost, and leave the model in the cache;
    certificates take it from there.
    """
    path = None
    if cache is not None and cell.kind in ("evaluate", "certify"):
        bare = dataclasses.replace(cell, kind="evaluate", threats=(), label="")
        tag = dataclasses.replace(bare, settings={**settings_of(cell), "code": training_code()}).key
        path = Path(cache) / f"{cell.dataset}-{cell.model}-{cell.method}-s{cell.seed}-{tag}.safetensors"
        if cell.kind == "certify" and path.exists():
            return load_model(path).to(device), False
    model = train_method(
        cell.method,
        cell.model,
        graph,
        seed=cell.seed,
        vanilla=vanilla,
        device=device,
        progress=False,
        settings=cell.settings,
    )
    if path is not None:
        save(model, path)
    return model, True


@functools.cache
def training_code() -> str:
    """A short hash of the code that trains: a model of other code is not taken for this one's."""
    root, digest = Path(fgai.__file__).parent, hashlib.sha256()
    sources = [root / "objective.py", *(f for part in TRAINS for f in sorted((root / part).rglob("*.py")))]
    for file in sources:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _validate(model: nn.Module, graph: Graph, cell: Cell) -> dict[str, float]:
    """Mean of clean and standard-attacked score on the validation part; the test part is never looked at."""
    task = task_of(graph)
    seen = prepared(model, task.view(graph, "val"))
    result = make_attack("standard", targets="val", task=task.name).run(model, seen, seed=cell.seed)
    name = task.headline
    clean = _scores(model, seen, task.name, "val_mask")[name]
    attacked = _scores(model, seen, task.name, "val_mask", result.graph)[name]
    return {"clean": clean, "attacked": attacked, "criterion": (clean + attacked) / 2}


def _scores(
    model: nn.Module, seen: Graph, task: str, mask: str, attacked: Graph | None = None
) -> dict[str, float]:
    """Scores of the rows of `seen` under a mask, predicted on it or on its attacked version."""
    rows, labels = labelled(seen, mask)
    with evaluating(model), torch.no_grad():
        logits = call_model(model, seen if attacked is None else attacked)[rows]
    return task_scores(task, logits, labels)


def _thin(terms: list[dict[str, float]], points: int = 50) -> list[dict[str, float]]:
    """At most `points` epochs of a loss curve, the last one among them."""
    stride = max(1, len(terms) // points)
    kept = list(range(0, len(terms), stride))
    if kept[-1] != len(terms) - 1:
        kept.append(len(terms) - 1)
    return [{"epoch": index, **{k: float(f"{v:.5g}") for k, v in terms[index].items()}} for index in kept]
