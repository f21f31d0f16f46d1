"""The rival without edges: a linear model and a network of two layers on features alone."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from experiments.statistics import Estimate, estimate
from experiments.store import Store
from experiments.validation import scores
from fgai import Graph, train
from fgai.attention import prepared
from fgai.checks import one_of
from fgai.training import untrained_model

LAYERS = {"linear": 1, "MLP": 2}
"""Of a GCN on the graph without edges: one is a linear model, two are an MLP."""
TRIALS: list[dict[str, Any]] = [
    {"lr": lr, "weight_decay": decay, "dropout": dropout}
    for lr, decay, dropout in itertools.product((0.01, 0.05), (5e-5, 5e-4), (0.0, 0.5))
]
"""As many as every other method has."""


def without_edges(graph: Graph, model: str, seed: int, epochs: int = 200) -> dict[str, Any]:
    """Train with every setting of `TRIALS`; return the test accuracy of the best on validation nodes."""
    one_of(model, "model", tuple(LAYERS))
    bare = graph.remove(torch.arange(graph.num_edges, device=graph.device))[0]
    trials: list[dict[str, Any]] = []
    for settings in TRIALS:
        rates = {name: settings[name] for name in ("lr", "weight_decay")}
        sizes = {"num_layers": LAYERS[model], "dropout": settings["dropout"]}
        fresh = untrained_model("GCN", bare, seed=seed, **sizes)
        fitted = train(fresh.to(graph.device), bare, seed=seed, epochs=epochs, progress=False, **rates)
        seen = prepared(fitted, bare)
        found = {part: scores(fitted, seen, f"{part}_mask")["f1"] for part in ("val", "test")}
        trials.append({**found, "settings": settings})
    best = max(trials, key=lambda trial: trial["val"])
    return {"accuracy": best["test"], "settings": best["settings"], "trials": trials}


def accuracy_without_edges(store: Store, dataset: str) -> Estimate | None:
    """The better of both models on a graph, over seeds; None without records."""
    held: dict[str, list[float]] = {}
    for record in store.records("alone"):
        if record["cell"]["dataset"] == dataset:
            held.setdefault(record["cell"]["model"], []).append(record["alone"]["accuracy"])
    found = [one for values in held.values() if (one := estimate(values)) is not None]
    return max(found, default=None)
