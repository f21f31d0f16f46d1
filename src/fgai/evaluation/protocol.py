"""`evaluate`: one model under one threat, measured as the protocol says, as a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fgai import checks
from fgai.attacks import DEFAULT, AttackResult, Threat, threat_of
from fgai.attention import model_name, prepared
from fgai.attention.calls import device_of
from fgai.attention.interface import originals
from fgai.checks import one_of
from fgai.errors import InputError, collect_warnings, warn
from fgai.evaluation import reliability
from fgai.evaluation.record import EvaluationRecord
from fgai.evaluation.run import _Run
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.models import as_graph
from fgai.progress import show_progress
from fgai.records import Meter, plain, provenance
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.typed import typed
from fgai.version import versions


@typed
@show_progress()
@with_gradients
def evaluate(
    model: nn.Module,
    data: Any,
    threat: str | Threat = DEFAULT,
    *,
    vanilla: nn.Module | None = None,
    seed: int = 0,
    name: str | None = None,
    k: int = 5,
    targets: str = "test",
    nodes: int | None = None,
    edges: int | None = None,
    explanation_attack: bool = True,
    curves: bool = True,
    nulls: bool = True,
    per_node: bool = False,
    on_step: Callable[[str], None] | None = None,
    on_attack: Callable[[str, dict[str, AttackResult]], None] | None = None,
) -> EvaluationRecord:
    """Attack a model and measure how its predictions and its attention hold, on original nodes and edges.

    The model is attacked through its own gradients in eval mode and is left as it was. docs/metrics.md
    defines the numbers. Every model meets the same threat. Scores are under the strongest change found, whose
    endpoints may differ between models; under an ensemble explanations are compared at endpoints that all
    models with the same seed and `vanilla` share. Where a number may mislead, a `ReliabilityWarning` is given
    and kept in the record.

    Args:
        model: fgai's, or any PyG model the recorder supports, for the task of the data.
        data: a `Graph` or PyG `Data` with labels; without `test_mask` all nodes are tested.
        threat: a name from `fgai.attacks.THREATS` or a `Threat` of your own. The default, `ensemble-short`,
            takes about a minute on a small graph. A claim needs `ensemble`, which takes minutes on a CPU.
            `standard`, the paper's, is fast and weak.
        vanilla: the model that `model` was made from, to measure their similarity.
        seed: of the attacks and of the random null row.
        name: of the model in tables; its class by default.
        k: neighbours in a node's explanation.
        targets: what is attacked and scored: `test`, or `val` while settings are still being chosen.
        nodes: how many nodes the attack injects; the threat's number by default. Lower it if the graph has
            few nodes.
        edges: how many edges each injected node gets, or how many change where none is injected; the threat's
            number by default.
        explanation_attack: also attack the explanation. A threat without gradient steps, or with its own
            objective as `preserving` has, runs once; its numbers then count for both attacks.
        curves: remove edges by rank and measure F-slopes and fidelity; about 45 forward passes.
        nulls: also measure uniform attention and a random ranking; with `curves` about 70 more.
        per_node: keep values of every node in the record.
        on_step: called with a few words before each long step of an attack.
        on_attack: called with `name` and the result of each attack by its objective.

    Raises:
        InputError: a model for another task, no features, or the outputs do not fit the labels.
        BudgetError: the threat is impossible on this graph.
        AttentionError: the model has no attention that can be recorded.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=20, progress=False)
        >>> record = evaluate(model, data, "random", curves=False)
        >>> record.value("f1.clean") > 0.5
        True
    """
    checks.whole(k, "k", 1)
    checks.seed(seed)
    one_of(targets, "targets", ("test", "val"))
    threat = threat_of(threat).sized(nodes, edges)
    model, vanilla = originals(model, vanilla)
    data = as_graph(data)
    task = task_of(data)
    if getattr(model, "task", task.name) != task.name:
        raise InputError(f"{data.name!r} holds a {task.name} task, got a model for {model.task!r} tasks")
    original = task.view(data.to(device_of(model, data)), targets)
    graph = prepared(model, original)
    meter = Meter(graph.device)
    with collect_warnings() as notes:
        run = _Run(model, original, graph, vanilla, k, seed, targets, on_step)
        options = {"explanation_attack": explanation_attack, "curves": curves, "nulls": nulls}
        measured = run.measure(threat, meter, per_node=per_node, **options)
    name = name or model_name(model)
    if on_attack is not None:
        on_attack(name, run.results)
    for note in notes:
        warn(note)
    described, config = describe(data), getattr(model, "config", None)
    return EvaluationRecord(
        name=name,
        model={
            "class": model_name(model),
            "config": plain(config) if isinstance(config, dict) else {},
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        data=described,
        config={
            "k": k,
            "task": task.name,
            "headline": run.headline,
            "targets": targets,
            **options,
            "vanilla": vanilla is not None,
        },
        seed=seed,
        version=versions(),
        device=torch.cuda.get_device_name(graph.device) if graph.device.type == "cuda" else str(graph.device),
        seconds=meter.seconds(),
        peak_memory=meter.peak_memory(),
        warnings=reliability.warning_entries(notes),
        provenance=provenance(model, described["fingerprint"], command="fgai.evaluate", seed=seed),
        **measured,
    )


@typed
def describe(graph: Graph) -> dict[str, Any]:
    """Name, fingerprint and sizes of a graph; the fingerprint is computed once per graph object."""
    names = {} if graph.class_names is None else {"class_names": list(graph.class_names)}
    return {
        "name": graph.name,
        "fingerprint": fingerprint(graph),
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.num_features,
        "classes": graph.num_classes,
        **names,
    }
