"""`fgai attack`: the strongest perturbation within a budget that a search finds, and the breaking point."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from fgai import metrics
from fgai.attacks import THREATS, Ledger, make_attack
from fgai.attention import prepared
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.estimate import announce, attack_passes
from fgai.cli.files import _open_log, _open_model
from fgai.cli.output import Output, command
from fgai.cli.train import NAMES
from fgai.errors import InputError
from fgai.evaluation import breaking_point as breaking_point_of
from fgai.evaluation.run import eval_logits
from fgai.objectives import OBJECTIVES
from fgai.records import Column, Table, plain
from fgai.tasks import task_of


def _list_threats(listed: bool) -> None:
    if not listed:
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
        console.print("this attack has no members: it is a single search", markup=False)
        return
    forms = {"member": "", "endpoints": "", "damage": ".3f", "steps": "d", "seconds": ".1f"}
    columns = [*(Column(name, form) for name, form in forms.items()), Column("")]
    cells = [[*(row[name] for name in forms), "won" * row["won"]] for row in rows]
    note = "Damage: one minus the score, the share of the top-k lost, or the attention that new nodes take."
    Table("Members", columns, cells, [note]).show(console)


@command
def attack(
    source: options.Source,
    *,
    attacker: options.Attacker,
    objective: Annotated[
        str | None,
        f"Aim of the attack: {options.choices(OBJECTIVES)}. Default: prediction, or that of the threat.",
    ] = None,
    targets: Annotated[str, "What is attacked: test, val or fit (training and validation)."] = "test",
    breaking_point: Annotated[
        float | None,
        "Search the fewest injected nodes at which explanations in reach overlap by less than this.",
    ] = None,
    max_nodes: Annotated[int, "Most nodes --breaking-point may inject.", typer.Option(min=1)] = 160,
    explain_members: Annotated[bool, "Also list the results of every search of an ensemble."] = False,
    listed: Annotated[
        bool, "Name every threat and stop.", typer.Option("--list", callback=_list_threats, is_eager=True)
    ] = False,
    log: options.Log = None,
    record: options.Record,
    out: Output,
) -> None:
    """Attack a model through its own gradients and print the damage.

    The model's file is only read. `fgai evaluate` measures more, under the same attack.

    Examples:
    - `fgai attack gat.safetensors`
    - `fgai attack gat.safetensors --threat strong --objective explanation --json`
    - `fgai attack gat.safetensors --threat ensemble --explain-members`
    - `fgai attack gat.safetensors --threat standard --breaking-point 0.5`
    """
    if objective is not None:
        one_of(objective, "--objective", tuple(OBJECTIVES))
    threat, k, seed = attacker.sized(), attacker.k, attacker.seed
    searches_size = breaking_point is not None
    if searches_size and attacker.nodes is not None:
        raise InputError("`--breaking-point` searches `nodes`; give the most as `--max-nodes`")
    opened = _open_model(source)
    model, graph, task = opened.model, opened.graph, task_of(opened.graph)
    search = make_attack(threat, objective, targets=targets, k=k, task=task.name)
    record.check()
    tracker = _open_log(log)
    values: dict[str, Any]
    passes = 0 if searches_size else attack_passes(search)
    announce(out, f"attacking {opened.path} on {graph!r}", [model], graph, passes)
    if searches_size:
        limits: dict[str, Any] = {"threshold": breaking_point, "limit": max_nodes}
        point = breaking_point_of(model, graph, threat, k=k, seed=seed, targets=targets, **limits)
        values = {"command": "attack", "dataset": graph.name, "breaking_point": point.to_dict()}
        record.write(out, values, point.show)
        return
    result = search.run(model, graph, seed=seed, tracker=tracker)
    ledger = result.ledger
    clean = prepared(model, task.view(graph, targets))
    rows, labels = task.rows(clean, targets), task.labels(clean)
    logits = {
        name: eval_logits(model, view)[rows] for name, view in (("clean", clean), ("attacked", result.graph))
    }
    changed = logits["clean"].argmax(1) != logits["attacked"].argmax(1)
    values = {
        "command": "attack",
        "model": str(opened.path),
        "dataset": graph.name,
        "threat": threat.name,
        "objective": search.objective.name,
        "targets": targets,
        "seed": seed,
        "budget": search.budget.to_dict(),
        "value": {"clean": result.start, "noise": result.noise, "attacked": result.value},
        "predictions_changed": float(changed.double().mean()),
        "ledger": ledger.to_dict(),
    }
    if explain_members:
        values["members"] = _members_of(ledger)
    table = [[f"{search.objective.name} objective", *values["value"].values()]]
    subject = f"{targets} {task.rows_are}"
    if labels is not None:
        scores = {view: metrics.task_scores(task.name, v, labels[rows]) for view, v in logits.items()}
        for name in dict.fromkeys((task.headline_for(clean), task.headline)):
            values[name] = {view: scores[view][name] for view in scores}
            label = NAMES.get(name, name.replace("_", " "))
            table.append([f"{label}, {subject}", values[name]["clean"], None, values[name]["attacked"]])
    notes = [f"{100 * values['predictions_changed']:.1f} % of the {subject} are predicted otherwise"]
    notes.append(f"{ledger.steps} steps, {ledger.forwards} forward passes, {ledger.seconds:.1f} s")
    if ledger.feasible is not None:
        notes[-1] += f"; {100 * ledger.feasible:.0f} % of the tried changes kept the classes"

    def show(console: Console) -> None:
        columns = [Column(name) for name in ("", "clean", "noise", "attacked")]
        Table(f"{threat.name} attack on {opened.path.name}", columns, table, notes).show(console)
        if explain_members:
            _show_members(console, values["members"])

    record.write(out, plain(values), show)
