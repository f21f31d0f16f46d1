"""Estimates of what a long command costs: the time of a pass of the model, times the number of passes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attacks import Attack, Threat, make_attack
from fgai.attention import call_model, evaluating, prepared
from fgai.cli.output import Output
from fgai.errors import collect_warnings
from fgai.graph import Graph
from fgai.records import Meter
from fgai.tasks import task_of
from fgai.training import FROM_SCRATCH, TrainConfig
from fgai.training.stability import MIN_EPOCHS

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
