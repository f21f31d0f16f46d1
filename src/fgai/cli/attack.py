"""`fgai attack`: the strongest perturbation found within a budget."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from fgai import metrics
from fgai.attacks import make_attack
from fgai.attacks.objectives import OBJECTIVES
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import checked_output, open_model
from fgai.cli.output import Output, command
from fgai.cli.train import NAMES
from fgai.evaluate.measures import logits_again
from fgai.evaluate.record import plain
from fgai.evaluate.table import Column, Table
from fgai.files import write_atomic
from fgai.tasks import task_of
from fgai.training import prepared


@command
def attack(
    model: options.ModelFile,
    *,
    threat: options.Threat = "standard",
    objective: Annotated[
        str, typer.Option(help="What is attacked: prediction, margin or explanation.")
    ] = "prediction",
    targets: Annotated[
        str, typer.Option(help="What is attacked: test, val or fit (training and validation).")
    ] = "test",
    k: options.K = 5,
    seed: options.Seed = 0,
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    output: options.Record = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack a model through its own gradients and say what that did.

    The model's file is only read. `fgai evaluate` measures more, under the same attack.

    Examples:
    - `fgai attack gat.safetensors`
    - `fgai attack gat.safetensors --threat strong --objective explanation --json`
    """
    out = Output(json, quiet)
    one_of(objective, "--objective", OBJECTIVES)
    opened = open_model(model, dataset, root)
    task = task_of(opened.graph)
    chosen = make_attack(threat, objective, targets=targets, k=k, task=task.name)
    path = None if output is None else checked_output(output)
    out.say(f"attacking {model} on {opened.graph!r}")
    result = chosen.run(opened.model, opened.graph, seed=seed)
    graph = prepared(opened.model, task.view(opened.graph, targets))
    rows, labels = task.rows(graph, targets), task.labels(graph)
    before = logits_again(opened.model, graph)[rows]
    after = logits_again(opened.model, result.graph)[rows]
    values: dict[str, Any] = {
        "command": "attack",
        "model": str(model),
        "dataset": opened.graph.name,
        "threat": threat,
        "objective": objective,
        "targets": targets,
        "seed": seed,
        "budget": chosen.budget.to_dict(),
        "value": {"clean": result.start, "noise": result.noise, "attacked": result.value},
        "predictions_changed": float((before.argmax(1) != after.argmax(1)).double().mean()),
        "ledger": result.ledger.to_dict(),
    }
    measure = metrics.SCORES[task.name][0]
    if labels is not None:
        values[measure] = {
            name: metrics.task_scores(task.name, logits, labels[rows])[measure]
            for name, logits in (("clean", before), ("attacked", after))
        }
    values = plain(values)

    def show(console: Console) -> None:
        lines: list[list[Any]] = [
            [f"{objective} objective", *(values["value"][name] for name in ("clean", "noise", "attacked"))]
        ]
        what = f"{targets} {task.rows_are}"
        if measure in values:
            found = values[measure]
            lines.append([f"{NAMES.get(measure, measure)}, {what}", found["clean"], None, found["attacked"]])
        changed = f"{100 * values['predictions_changed']:.1f} % of the {what} are predicted otherwise"
        spent = (
            f"{result.ledger.steps} steps, {result.ledger.forwards} forward passes,"
            f" {result.ledger.seconds:.1f} s"
        )
        columns = [Column(""), Column("clean"), Column("noise"), Column("attacked")]
        Table(f"{threat} attack on {model.name}", columns, lines, [changed, spent]).show(console)

    if path is not None:
        import json as encoder

        write_atomic(path, encoder.dumps(values, indent=1) + "\n")
    out.result(values, show)
