"""The rival without edges: a linear model and a network of two layers on features alone."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from experiments.statistics import Estimate, estimate
from experiments.store import Store
from fgai import Graph
from fgai.checks import one_of
from fgai.training import labelled, seeded

MODELS = ("linear", "MLP")
EPOCHS = 200
EVERY = 5
"""Epochs between validations; the best validated weights are kept."""
HIDDEN = 64
TRIALS: list[dict[str, Any]] = [
    {"lr": lr, "weight_decay": decay, "normalise": normalise}
    for lr, decay, normalise in itertools.product((0.01, 0.05), (5e-5, 5e-4), (False, True))
]
"""As many as every other method has."""


def without_edges(graph: Graph, model: str, seed: int) -> dict[str, Any]:
    """Train with every setting of `TRIALS`; return the test accuracy of the best on validation nodes.

    Args:
        graph: with features, labels and masks.
        model: one of `MODELS`.
        seed: of weights and dropout.
    """
    one_of(model, "model", MODELS)
    parts = {name: labelled(graph, f"{name}_mask") for name in ("train", "val", "test")}
    trials: list[dict[str, Any]] = []
    for settings in TRIALS:
        x = {name: _rows(graph, rows, settings["normalise"]) for name, (rows, _) in parts.items()}
        y = {name: labels.to(graph.device) for name, (_, labels) in parts.items()}
        with seeded(seed, graph.device):
            scores = _fit(x, y, model, graph.num_classes, settings["lr"], settings["weight_decay"])
        trials.append({**scores, "settings": settings})
    best = max(trials, key=lambda trial: trial["val"])
    return {"accuracy": best["test"], "settings": best["settings"], "trials": trials}


def _rows(graph: Graph, rows: Tensor, normalise: bool) -> Tensor:
    """Features of some nodes as a sparse matrix, each row divided by its length if asked for."""
    assert graph.features is not None
    x = graph.features.select(rows.to(graph.device)).to(torch.float32)
    found: Tensor = (nn.functional.normalize(x) if normalise else x).to_sparse_csr()
    return found


def _fit(
    x: dict[str, Tensor], y: dict[str, Tensor], model: str, classes: int, lr: float, weight_decay: float
) -> dict[str, float]:
    """Accuracy on validation and test nodes of the weights that were best on validation nodes."""
    width = x["train"].shape[1]
    sizes = [width, classes] if model == "linear" else [width, HIDDEN, classes]
    weights = [nn.init.xavier_uniform_(torch.empty(a, b)) for a, b in itertools.pairwise(sizes)]
    parameters = [nn.Parameter(w.to(x["train"].device)) for w in weights]
    parameters += [nn.Parameter(torch.zeros(size, device=x["train"].device)) for size in sizes[1:]]
    optimiser = torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)
    depth = len(sizes) - 1

    def logits(part: str, training: bool) -> Tensor:
        out: Tensor = x[part]
        for index in range(depth):
            out = out @ parameters[index] + parameters[depth + index]
            if index < depth - 1:
                out = nn.functional.dropout(out.relu(), training=training)
        return out

    def accuracy(part: str) -> float:
        with torch.no_grad():
            return float((logits(part, False).argmax(1) == y[part]).double().mean())

    best, kept = -1.0, list[Tensor]()
    for epoch in range(1, EPOCHS + 1):
        optimiser.zero_grad()
        nn.functional.cross_entropy(logits("train", True), y["train"]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if epoch % EVERY == 0 and (found := accuracy("val")) > best:
            best, kept = found, [parameter.detach().clone() for parameter in parameters]
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data.copy_(value)
    return {"val": best, "test": accuracy("test")}


def accuracy_without_edges(store: Store, dataset: str) -> Estimate | None:
    """The better of both models on a graph, over seeds; None without records."""
    held: dict[str, list[float]] = {}
    for record in store.records("alone"):
        if record["cell"]["dataset"] == dataset:
            held.setdefault(record["cell"]["model"], []).append(record["alone"]["accuracy"])
    found = [one for values in held.values() if (one := estimate(values)) is not None]
    return max(found, default=None)
