"""From a name to an untrained model, and which settings a training by name takes."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

from fgai import checks
from fgai.alone import seeded, with_gradients
from fgai.checks import one_of
from fgai.graph import Graph
from fgai.models import MODELS, AttentionModel
from fgai.training.loop import TrainConfig
from fgai.training.ranges import Tightness
from fgai.training.settings import ADVERSARY_FIELDS, LIMIT_FIELDS, FaithfulConfig
from fgai.training.terms import TERMS
from fgai.typed import typed

METHODS = ("vanilla", "ln", "limits", "at", "at-limits", "fgai", "fgai-certified")
ALONE = ("vanilla", "ln")
"""Methods that train from new weights and need no trained vanilla model."""


@typed
@with_gradients
def untrained(model: str, graph: Graph, *, seed: int = 0, **arguments: Any) -> AttentionModel:
    """Return a new model of the named class whose weights depend on the seed alone.

    Args:
        model: `GAT`, `GATv2`, `GT` or `GCN`.
        graph: gives the sizes and the task.
        seed: of the weights.
        **arguments: of the model.
    """
    one_of(model, "model", tuple(MODELS))
    with seeded(checks.seed(seed), torch.device("cpu")):
        return MODELS[model].for_data(graph, **arguments)


@typed
def setting_names(method: str, model: str) -> list[str]:
    """Return the names of the settings that a method takes: of the training and of the model.

    Args:
        method: one of `METHODS`.
        model: class name; one that is not fgai's has no settings of its own.
    """
    if method == "limits":  # nothing is trained
        return sorted(field.name for field in dataclasses.fields(Tightness))
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    if method.startswith("fgai"):
        names |= {field.name for field in dataclasses.fields(FaithfulConfig)} | set(TERMS)
        names -= {"weights", "train"}
    elif method in ("at", "at-limits"):
        names |= {*ADVERSARY_FIELDS, "attack_weight", "lean"}
        names |= set(LIMIT_FIELDS if method == "at-limits" else ())
    elif model in MODELS:
        arguments = inspect.signature(MODELS[model].__init__).parameters.values()
        names |= {each.name for each in arguments if each.kind is each.KEYWORD_ONLY}
    return sorted(names)
