"""Run one cell: train, attack, measure, record."""

from __future__ import annotations

import platform
import traceback
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import fgai
from fgai.attacks import make_attack
from fgai.attention import call_model, evaluating
from fgai.bench.cells import Cell
from fgai.bench.store import Store
from fgai.datasets import load
from fgai.errors import FgaiError
from fgai.evaluate import evaluate
from fgai.graph import Graph
from fgai.training import history_of, labelled, preset, save, train_method
from fgai.training import load as load_model


def run_cell(
    cell: Cell,
    store: Store,
    *,
    device: str = "cpu",
    root: Path | str | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Run a cell unless its record is there, write the record and return it.

    A cell that fails is recorded as failed, with its error, and raises nothing; running it again retries it.

    Args:
        cell: what to run.
        store: where records go.
        device: where to train and attack.
        root: folder of the datasets.
        cache: folder for trained vanilla models, which AT and FGAI share; None trains them anew.
    """
    known = store.read(cell)
    if known is not None and known["status"] == "done":
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
    except (FgaiError, RuntimeError, MemoryError) as error:
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
    graph = load(cell.dataset, root=root, seed=cell.seed).to(device)
    vanilla = None
    if cell.method not in ("vanilla", "ln"):
        vanilla = _vanilla(cell, graph, device, cache)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    tick = perf_counter()
    cached = cell.method == "vanilla" and cell.kind == "evaluate" and not cell.settings
    if cached:
        model = _vanilla(cell, graph, device, cache)
    else:
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
    history = history_of(model)
    body: dict[str, Any] = {
        "training": {
            "seconds": perf_counter() - tick,
            "epoch_seconds": sorted(history.epoch_seconds)[len(history.epoch_seconds) // 2],
            "best_epoch": history.best_epoch,
            "epochs": len(history.terms),
            "last": history.terms[-1],
            "settings": {**preset(cell.method, cell.model, cell.dataset), **cell.settings},
            "curve": _thin(history.terms),
        }
    }
    if device.startswith("cuda"):
        body["training"]["peak_memory"] = torch.cuda.max_memory_allocated()
    if cell.kind == "search":
        body["validation"] = _validate(model, graph, cell)
        return body
    parent = vanilla if vanilla is not None else (model if cell.method == "vanilla" else None)
    body["evaluations"] = {}
    for index, threat in enumerate(cell.threats):
        # What the tables need of the further threats is how predictions and attention hold.
        extras = {} if index == 0 else {"explanation_attack": False, "curves": False, "nulls": False}
        record = evaluate(model, graph, threat, vanilla=parent, seed=cell.seed, name=cell.row, **extras)
        body["evaluations"][threat] = record.to_dict()
    return body


def _vanilla(cell: Cell, graph: Graph, device: str, cache: Path | None) -> nn.Module:
    """Return the trained vanilla parent, from the cache when it is there."""
    chosen = preset("vanilla", cell.model, cell.dataset)
    tag = Cell(model=cell.model, dataset=cell.dataset, seed=cell.seed, settings=chosen).key
    path = (
        None if cache is None else Path(cache) / f"{cell.dataset}-{cell.model}-s{cell.seed}-{tag}.safetensors"
    )
    if path is not None and path.exists():
        return load_model(path).to(device)
    model = train_method("vanilla", cell.model, graph, seed=cell.seed, device=device, progress=False)
    if path is not None:
        save(model, path)
    return model


def _validate(model: nn.Module, graph: Graph, cell: Cell) -> dict[str, float]:
    """Mean of clean and standard-attacked accuracy on validation nodes; test nodes are never looked at."""
    nodes, labels = labelled(graph, "val_mask")
    result = make_attack("standard", targets="val").run(model, graph, seed=cell.seed)
    with evaluating(model), torch.no_grad():
        scores = {}
        for name, where in (("clean", graph), ("attacked", result.graph)):
            right = call_model(model, where)[nodes].argmax(1) == labels
            scores[name] = float(right.float().mean())
    return {**scores, "criterion": (scores["clean"] + scores["attacked"]) / 2}


def _thin(terms: list[dict[str, float]], points: int = 50) -> list[dict[str, float]]:
    """At most `points` epochs of a loss curve, the last one among them."""
    stride = max(1, len(terms) // points)
    kept = list(range(0, len(terms), stride))
    if kept[-1] != len(terms) - 1:
        kept.append(len(terms) - 1)
    return [{"epoch": index, **{k: float(f"{v:.5g}") for k, v in terms[index].items()}} for index in kept]
