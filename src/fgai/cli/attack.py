"""`fgai attack`: the strongest perturbation found within a budget, its members, and the breaking point."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fgai import metrics
from fgai.attacks import DEFAULT, THREATS, Ledger, make_attack, threat_of
from fgai.attention import prepared
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import _open_model, _opened_log, _parsed_box, checked_output
from fgai.cli.output import Output, command
from fgai.cli.train import NAMES
from fgai.errors import InputError
from fgai.evaluation import breaking_point
from fgai.evaluation.run import logits_again
from fgai.files import write_atomic
from fgai.objectives import OBJECTIVES
from fgai.records import Column, Table, plain
from fgai.tasks import task_of


def _list_threats(wanted: bool) -> None:
    if not wanted:
        return
    rows = [[name, threat.attack.name, threat.about] for name, threat in THREATS.items()]
    Table("Threats", [Column("name"), Column("attack"), Column("what")], rows).show(Console(highlight=False))
    raise typer.Exit()


def _members_of(ledger: Ledger) -> list[dict[str, Any]]:
    """A row for each member at each set of endpoints; `won` marks the chosen one, none if it is noise."""
    names = ("member", "endpoints", "steps", "seconds")
    return [
        {**{name: row[name] for name in names}, "damage": damage, "won": index == ledger.won}
        for index, (row, damage) in enumerate(ledger.proposals())
        if row is not None
    ]


def _show_members(console: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        console.print("this attack has no members: it is one search", markup=False)
        return
    forms = {"member": "", "endpoints": "", "damage": ".3f", "steps": "d", "seconds": ".1f"}
    columns = [*(Column(name, form) for name, form in forms.items()), Column("")]
    cells = [[*(row[name] for name in forms), "won" * row["won"]] for row in rows]
    note = "Damage: one minus the score, the share of the top-k lost, or the attention that new nodes take."
    Table("Members", columns, cells, [note]).show(console)


@command
def attack(
    model: options.ModelFile = None,
    *,
    threat: options.Threat = DEFAULT,
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help=f"What the attacker wants: {options.listed(OBJECTIVES)}. Default: prediction, or that of the"
            " threat."
        ),
    ] = None,
    targets: Annotated[
        str, typer.Option(help="What is attacked: test, val or fit (training and validation).")
    ] = "test",
    breaking: Annotated[
        float | None,
        typer.Option(
            "--breaking-point",
            help="Search the fewest injected nodes at which touched explanations overlap by less than this.",
        ),
    ] = None,
    most: Annotated[
        int, typer.Option("--max-nodes", min=1, help="Most nodes --breaking-point may inject.")
    ] = 160,
    explain_members: Annotated[
        bool,
        typer.Option("--explain-members", help="Also list what every search of an ensemble found."),
    ] = False,
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_list_threats, is_eager=True, help="Name every threat and stop."),
    ] = False,
    k: options.K = 5,
    seed: options.Seed = 0,
    log: options.Log = None,
    own: options.Own = None,
    weights: options.Weights = None,
    data: options.OtherData = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: options.Record = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack a model through its own gradients and say what that did.

    The model's file is only read. `fgai evaluate` measures more, under the same attack.

    Examples:
    - `fgai attack gat.safetensors`
    - `fgai attack gat.safetensors --threat strong --objective explanation --json`
    - `fgai attack gat.safetensors --threat ensemble --explain-members`
    - `fgai attack gat.safetensors --threat standard --breaking-point 0.5`
    """
    out = Output(json, quiet)
    if objective is not None:
        one_of(objective, "--objective", tuple(OBJECTIVES))
    sized = threat_of(threat).sized(nodes, edges, _parsed_box(box))
    if breaking is not None and nodes is not None:
        raise InputError("`nodes` is what `--breaking-point` searches; set the most with `--max-nodes`")
    opened = _open_model(model, data, root, device, own=own, weights=weights)
    task = task_of(opened.graph)
    chosen = make_attack(sized, objective, targets=targets, k=k, task=task.name)
    path = None if output is None else checked_output(output, force)
    tracker = _opened_log(log)
    out.say(f"attacking {opened.path} on {opened.graph!r}")
    if breaking is not None:
        settings: dict[str, Any] = {"threshold": breaking, "limit": most, "k": k}
        point = breaking_point(opened.model, opened.graph, sized, **settings, seed=seed, targets=targets)
        values: dict[str, Any] = {"command": "attack", "dataset": opened.graph.name}
        values["breaking_point"] = point.to_dict()
        _write(path, values)
        out.result(values, point.show)
        return
    result = chosen.run(opened.model, opened.graph, seed=seed, tracker=tracker)
    graph = prepared(opened.model, task.view(opened.graph, targets))
    rows, labels = task.rows(graph, targets), task.labels(graph)
    before = logits_again(opened.model, graph)[rows]
    after = logits_again(opened.model, result.graph)[rows]
    values = {
        "command": "attack",
        "model": str(opened.path),
        "dataset": opened.graph.name,
        "threat": threat,
        "objective": chosen.objective.name,
        "targets": targets,
        "seed": seed,
        "budget": chosen.budget.to_dict(),
        "value": {"clean": result.start, "noise": result.noise, "attacked": result.value},
        "predictions_changed": float((before.argmax(1) != after.argmax(1)).double().mean()),
        "ledger": result.ledger.to_dict(),
    }
    if explain_members:
        values["members"] = _members_of(result.ledger)
    measures: list[str] = []
    if labels is not None:
        measures = list(dict.fromkeys((task.headline_for(graph), task.headline)))
        pair = {"clean": before, "attacked": after}
        scored = {name: metrics.task_scores(task.name, v, labels[rows]) for name, v in pair.items()}
        values |= {name: {view: scores[name] for view, scores in scored.items()} for name in measures}
    values = plain(values)

    def show(console: Console) -> None:
        lines: list[list[Any]] = [[f"{chosen.objective.name} objective", *values["value"].values()]]
        what = f"{targets} {task.rows_are}"
        for name in measures:
            label = NAMES.get(name, name.replace("_", " "))
            lines.append([f"{label}, {what}", values[name]["clean"], None, values[name]["attacked"]])
        changed = f"{100 * values['predictions_changed']:.1f} % of the {what} are predicted otherwise"
        ledger = result.ledger
        spent = f"{ledger.steps} steps, {ledger.forwards} forward passes, {ledger.seconds:.1f} s"
        if ledger.feasible is not None:
            spent += f"; {100 * ledger.feasible:.0f} % of what was tried kept the classes"
        columns = [Column(""), Column("clean"), Column("noise"), Column("attacked")]
        Table(f"{threat} attack on {opened.path.name}", columns, lines, [changed, spent]).show(console)
        if explain_members:
            _show_members(console, values["members"])

    _write(path, values)
    out.result(values, show)


def _write(path: Path | None, values: dict[str, Any]) -> None:
    if path is not None:
        write_atomic(path, dumps(values, indent=1) + "\n")
