"""How trials are judged: on validation nodes alone, by a short ensemble, and by what attention keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from experiments.threats import grid_threat
from fgai import Graph
from fgai.attacks import PREDICTION_MEMBERS, Attack, EnsembleInjection, Member
from fgai.attention import call_model, evaluating, observe, prepared
from fgai.evaluation import definition_shares
from fgai.metrics import UNIFORM_SHARPNESS, overlap, sharpness, task_scores
from fgai.tasks import task_of
from fgai.training import labelled_rows

STEPS = 100
"""Of each member of the short ensemble."""
FIRST = ("small", "medium", "middle")
"""Starts of the members that are in it: those that need nothing but the model."""
SITES = ("random", "defects")
"""Where it joins new nodes: at random, and where the rule does that did most damage in the whole ensemble."""
K = 5
"""Neighbours in an explanation."""


def short_members() -> tuple[Member, ...]:
    """Sign steps, large and small, and Adam behind tanh from several scales, true and straight-through."""
    chosen = [
        member for member in PREDICTION_MEMBERS if member.start in FIRST and member.gradient != "smooth"
    ]
    return tuple(replace(member, steps=STEPS) for member in chosen)


def short_attack(task: str, threat: str = "ensemble") -> Attack:
    """Return the search of a trial, its endpoints drawn from validation nodes, links or graphs."""
    budget = replace(grid_threat(threat).budget_for(task), targets="val")
    return EnsembleInjection(budget, members=short_members(), rules=SITES)


def validate(model: nn.Module, graph: Graph, vanilla: nn.Module | None, seed: int) -> dict[str, Any]:
    """Return what a trial is judged by; the test part is never looked at.

    That is the score on the validation part, clean and under the short ensemble, and the mean of both; of a
    model made from a vanilla one also what its attention keeps of it: the top 5, and the sharpness relative
    to the vanilla one's, over the validation nodes, as the mean of the layers whose vanilla attention says
    something and of the layer that is the vanilla model's sharpest. Beside them, for information: the score
    under `ensemble-strong`, and the shares of Definition 1, which need no labels.
    """
    task = task_of(graph)
    seen = prepared(model, task.view(graph, "val"))
    result = short_attack(task.name).run(model, seen, seed=seed, vanilla=vanilla)
    clean, attacked = (
        scores(model, seen, "val_mask", where)[task.headline] for where in (None, result.graph)
    )
    found: dict[str, Any] = {"clean": clean, "attacked": attacked, "criterion": (clean + attacked) / 2}
    if vanilla is not None and task.name == "node":
        found |= _kept(model, vanilla, seen)
        strong = short_attack(task.name, "ensemble-strong").run(model, seen, seed=seed, vanilla=vanilla).graph
        found["strong"] = scores(model, seen, "val_mask", strong)[task.headline]
        found["definition"] = definition_shares(model, graph, vanilla)
    return found


def scores(model: nn.Module, seen: Graph, mask: str, attacked: Graph | None = None) -> dict[str, float]:
    """Return the scores of the rows of `seen` under a mask, predicted on it or on its attacked version."""
    rows, labels = labelled_rows(seen, mask)
    with evaluating(model), torch.no_grad():
        logits = call_model(model, seen if attacked is None else attacked)[rows]
    return task_scores(task_of(seen).name, logits, labels)


def _kept(model: nn.Module, vanilla: nn.Module, graph: Graph) -> dict[str, dict[str, float]]:
    """Similarity and relative sharpness of the attention at the validation nodes."""
    ours, theirs = (observe(one, graph, heads="mean").attention for one in (model, vanilla))
    nodes = graph.val_mask
    alike, before, after = [], [], []
    for one, two in zip(ours, theirs, strict=True):
        alike.append(overlap(two.ranking(), one.ranking(), one.rowptr, K, nodes=nodes))
        before.append(sharpness(two.heads(), two.rowptr, nodes=nodes))
        after.append(sharpness(one.heads(), one.rowptr, nodes=nodes))
    top = before.index(max(before))
    said = [value for value, old in zip(alike, before, strict=True) if old > UNIFORM_SHARPNESS] or alike
    return {
        "similarity": {"all": sum(said) / len(said), "sharpest": alike[top]},
        "sharpness": {
            "all": sum(after) / max(sum(before), 1e-12),
            "sharpest": after[top] / max(before[top], 1e-12),
        },
    }
