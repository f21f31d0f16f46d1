"""Run one cell: train, attack, measure, record."""

from __future__ import annotations

import itertools
import platform
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import fgai
from experiments.again import compared
from experiments.alone import without_edges
from experiments.cells import Cell
from experiments.explained import explained
from experiments.fingerprint import change_of, fingerprint
from experiments.memory import PeakMemory
from experiments.methods import FROM_SCRATCH
from experiments.store import Store
from experiments.threats import grid_threat
from experiments.trained import model_of, settings_of, training_graph, vanilla_of
from experiments.validation import scores, validate
from fgai import (
    CheckpointError,
    FgaiWarning,
    Graph,
    certify_attention,
    certify_budget,
    certify_injection,
    evaluate,
    load_dataset,
    vote,
)
from fgai.attention import observe, prepared
from fgai.certificates import WHERE
from fgai.datasets import with_degrees
from fgai.evaluation import definition_shares, describe
from fgai.metrics import sharpness
from fgai.records import plain
from fgai.tasks import task_of
from fgai.training import accuracy_without_edges, history_of

EXPLAINED = {"link": 5, "graph": 2, "truth": 5, "inductive": 5}
"""Neighbours in an explanation; atoms of a molecule have too few for five."""
INJECTED = (1, 2, 3, 5)
"""Injected neighbours that `inject` cells certify against."""
GROUPS, CONFIDENCE = (20, 100), (0.0, 0.5)
"""Groups that `vote` cells count votes of, and the least probability of a class that gets one."""
VOTED = (0, 1, 5, 20)
"""Injected nodes that `vote` cells certify against."""
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
    One whose record was made with other settings is refused without `redo`. `cache` holds trained models that
    cells share.

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
        body["warnings"] = sorted({str(w.message) for w in caught if isinstance(w.message, FgaiWarning)})
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
    """Train, and measure what the kind of the cell asks for."""
    graph = _graph(cell, device, root)
    if cell.kind == "alone":
        return {"data": describe(graph), "alone": without_edges(graph, cell.model, cell.seed)}
    seen = training_graph(graph) if cell.task == "inductive" else graph
    vanilla = None if cell.method in FROM_SCRATCH else vanilla_of(cell, seen, device, cache)[0]
    with PeakMemory(device) as memory:
        model, is_new = model_of(cell, seen, vanilla, device, cache)
    body: dict[str, Any] = {
        "fingerprint": fingerprint(cell),
        "data": describe(graph),
        "training": _training(model, cell),
    }
    if memory.peak is not None and is_new:  # a model from the cache says nothing of its training's memory
        body["training"] |= {"peak_memory": memory.peak, "base_memory": memory.base}
    parent = model if cell.method == "vanilla" else vanilla
    if cell.kind == "cost":  # the first call may compile
        began = perf_counter()
        model_of(cell, graph, vanilla, device, None)
        body["whole_seconds"] = perf_counter() - began
    elif cell.kind == "search":
        body["validation"] = validate(model, graph, vanilla, cell.seed)
    elif cell.kind == "certify":
        body |= _certify(model, graph, parent)
    elif cell.kind == "inject":
        body |= _inject(model, graph, cell.seed)
    elif cell.kind == "collective":
        body |= _collective(model, graph)
    elif cell.kind == "vote":
        body |= _vote(model, graph)
    elif cell.kind == "again":
        assert parent is not None
        body["evaluations"] = compared((model, _next_seed(cell, device, root, cache)), graph, parent)
    elif cell.kind == "explainers":
        body["explainers"] = explained(model, graph, cell)
    elif cell.kind in ("evaluate", "attack"):
        body["evaluations"] = _evaluate(model, graph, parent, cell)
    return body


def _next_seed(cell: Cell, device: str, root: Path | str | None, cache: Path | None) -> nn.Module:
    """Return the model of a cell trained with the next seed."""
    after = replace(cell, seed=cell.seed + 1)
    graph = _graph(after, device, root)
    vanilla = None if cell.method in FROM_SCRATCH else vanilla_of(after, graph, device, cache)[0]
    return model_of(after, graph, vanilla, device, cache)[0]


def _graph(cell: Cell, device: str, root: Path | str | None) -> Graph:
    graph = load_dataset(cell.dataset, root=root, seed=cell.seed, task=cell.predicts)
    if cell.task == "truth" and cell.dataset != "planted":
        graph = with_degrees(graph)
    return graph.to(device)


def _training(model: nn.Module, cell: Cell) -> dict[str, Any]:
    """What a record says of the training: its cost and its settings."""
    history = history_of(model)
    return {
        "seconds": history.seconds,
        "epoch_seconds": sorted(history.epoch_seconds)[len(history.epoch_seconds) // 2],
        "best_epoch": history.best_epoch,
        "epochs": len(history.terms),
        "attempts": history.attempts,
        **settings_of(cell),
    }


def _certify(model: nn.Module, graph: Graph, parent: nn.Module | None) -> dict[str, Any]:
    made, task = certify_attention(model, graph, vanilla=parent, radius=RADIUS), task_of(graph)
    about = {"norm": made.norm, "radius": RADIUS, "k1": made.k1, "k2": made.k2}
    return {
        "certificate": plain({**about, **made.summary()}),
        "definition": definition_shares(model, graph, parent),
        "scores": scores(model, prepared(model, task.view(graph, "test")), "test_mask"),
    }


def _inject(model: nn.Module, graph: Graph, seed: int) -> dict[str, Any]:
    """Of the test nodes, those whose class, and whose class and truth, no injection can change."""
    alone = accuracy_without_edges(graph, seed=seed, progress=False)
    graph = graph.to("cpu")
    assert graph.y is not None and graph.test_mask is not None
    scored, found = graph.test_mask, list[dict[str, Any]]()
    for where, count in itertools.product(WHERE, INJECTED):
        made = certify_injection(model, graph, neighbours=count, where=where)
        right = made.certified & (made.classes == graph.y)
        found.append(
            {
                "where": where,
                "neighbours": count,
                "known": made.known,
                "share": made.share(scored),
                "right": float(right[scored].double().mean()),
                "order": [made.order_share(place, scored) for place in range(len(made.layers))],
                "status": [layer.status for layer in made.layers],
                "seconds": made.seconds,
            }
        )
    model = model.to("cpu")
    attention = observe(model, prepared(model, graph), heads="mean").attention
    return {
        "injection": found,
        "alone": alone,
        "sharpness": [sharpness(layer.heads(), layer.rowptr) for layer in attention],
        "scores": scores(model, prepared(model, graph), "test_mask"),
    }


def _collective(model: nn.Module, graph: Graph) -> dict[str, Any]:
    """At how many test nodes budgets can change the class at once, and how many stay right."""
    model, graph = model.to("cpu"), graph.to("cpu")
    made = certify_budget(model, graph)
    assert graph.test_mask is not None
    radius = made.edge_radius[graph.test_mask]
    return {
        "collective": {
            "known": made.known,
            "nodes": int(graph.test_mask.sum()),
            "budgets": made.budgets,
            "harmless": torch.bincount(radius[radius >= 0]).tolist(),
            "seconds": made.seconds,
        },
        "scores": scores(model, prepared(model, graph), "test_mask"),
    }


def _vote(model: nn.Module, graph: Graph) -> dict[str, Any]:
    """Of the test nodes, those whose majority is right and stays, and the groups of its explanation."""
    assert graph.y is not None and graph.test_mask is not None
    scored, found = graph.test_mask.cpu(), []
    for groups, confidence in itertools.product(GROUPS, CONFIDENCE):
        made = vote(model, graph, groups=groups, confidence=confidence)
        found.append(
            {
                "groups": groups,
                "confidence": confidence,
                "right": [made.certified_accuracy(m, graph.y.cpu(), scored) for m in VOTED],
                "kept": [made.topk_share(m, nodes=scored) for m in VOTED],
                "seconds": made.seconds,
            }
        )
    return {"votes": found, "scores": scores(model, prepared(model, graph), "test_mask")}


def _evaluate(model: nn.Module, graph: Graph, parent: nn.Module | None, cell: Cell) -> dict[str, Any]:
    """One evaluation per threat; of the further ones tables need how predictions and attention hold."""
    found = {}
    for index, threat in enumerate(cell.threats):
        extras: dict[str, Any] = {} if not cell.task else {"curves": False, "k": EXPLAINED[cell.task]}
        if index or cell.kind == "attack":
            extras |= {"curves": False, "nulls": False}
        if (index and threat != "ensemble") or (cell.kind == "attack" and cell.model == "GCN"):
            extras["explanation_attack"] = False
        chosen = grid_threat(threat)
        record = evaluate(model, graph, chosen, vanilla=parent, seed=cell.seed, name=cell.row, **extras)
        found[threat] = record.to_dict()
    return found


def is_done(record: dict[str, Any], cell: Cell, store: Store, redo: bool = False) -> bool:
    """Whether a record makes running its cell needless.

    If its settings differ from today's, raise `CheckpointError`, or with `redo` return False.
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
