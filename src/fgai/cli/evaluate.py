"""`fgai attack`, `evaluate`, `compare`, `certify` and `explain`: attack, measure and certify models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fgai import metrics
from fgai.attacks import THREATS, Ledger, make_attack
from fgai.attention import prepared
from fgai.certificates import certify_attention, certify_budget, certify_injection, vote
from fgai.checks import one_of
from fgai.cli import files, options
from fgai.cli.output import Output, command
from fgai.cli.train import NAMES
from fgai.errors import InputError
from fgai.evaluation import breaking_point as breaking_point_of
from fgai.evaluation import compare as compare_models
from fgai.evaluation import evaluate as evaluate_model
from fgai.evaluation.run import eval_logits
from fgai.graph import ChangeRecord
from fgai.large import StoredGraph, evaluate_store
from fgai.objectives import OBJECTIVES
from fgai.processes import current
from fgai.records import Column, Table, plain
from fgai.tasks import task_of


def _list_threats(listed: bool) -> None:
    if listed:
        rows = [[name, threat.attack.name, threat.about] for name, threat in THREATS.items()]
        columns = [Column(title) for title in ("name", "attack", "what")]
        Table("Threats", columns, rows).show(Console(highlight=False))
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
    if breaking_point is not None and attacker.nodes is not None:
        raise InputError("`--breaking-point` searches `nodes`; give the most as `--max-nodes`")
    opened = files._open_model(source)
    model, graph, task = opened.model, opened.graph, task_of(opened.graph)
    search = make_attack(threat, objective, targets=targets, k=k, task=task.name)
    record.check()
    tracker = files._open_log(log)
    passes = files.attack_passes(search) if breaking_point is None else 0
    files.announce(out, f"attacking {opened.path} on {graph!r}", [model], graph, passes)
    values: dict[str, Any] = {"command": "attack", "dataset": graph.name}
    if breaking_point is not None:
        limits: dict[str, Any] = {"threshold": breaking_point, "limit": max_nodes}
        point = breaking_point_of(model, graph, threat, k=k, seed=seed, targets=targets, **limits)
        record.write(out, {**values, "breaking_point": point.to_dict()}, point.show)
        return
    result = search.run(model, graph, seed=seed, tracker=tracker)
    ledger = result.ledger
    clean = prepared(model, task.view(graph, targets))
    rows, labels = task.rows(clean, targets), task.labels(clean)
    views = {"clean": clean, "attacked": result.graph}
    logits = {name: eval_logits(model, view)[rows] for name, view in views.items()}
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


@command
@files._on_all_ranks
def evaluate(
    source: options.Source,
    *,
    vanilla: options.VanillaFile = None,
    attacker: options.Evaluation,
    stored: Annotated[
        bool, "Leave a converted folder on disk and measure exact values without an attack."
    ] = False,
    change: Annotated[
        Path | None,
        "Replay a change that was saved on the page of `fgai explore`: class and attention of its node before"
        " and after, no attack.",
    ] = None,
    record: options.Record,
    out: Output,
) -> None:
    """Attack a model and measure how stable its predictions and its attention are.

    With --change there is no attack: one node is shown before and after the change. With --stored there is
    none, either: F1, sharpness, and with --vanilla agreement, g-TVD and overlap; under torchrun several
    processes share the work.

    Examples:
    - `fgai evaluate gat.safetensors`
    - `fgai evaluate faithful-gat.safetensors --vanilla gat.safetensors --threat ensemble -o claim.json`
    - `fgai evaluate club.safetensors --nodes 2 --edges 2`
    - `fgai evaluate gat.safetensors --change change-24.json`
    - `fgai evaluate large.safetensors --stored --vanilla gat.safetensors`
    - `fgai evaluate --model mine:Model --weights w.pt --data folder --stored`
    """
    if current().is_distributed and not stored:
        raise InputError("an attack runs in one process: leave torchrun out, or give `--stored`")
    if change is not None and (stored or vanilla is not None or attacker.is_sized or attacker.per_node):
        left_out = "--stored, --vanilla, --nodes, --edges, --box and --per-node"
        raise InputError(f"`--change` runs no attack: leave out {left_out}")
    threat = attacker.sized()
    opened = files._open_model(source, stored=stored)
    reference = opened.load(vanilla)
    record.check()
    if change is not None:
        _replay(opened, change, attacker.k, record, out)
        return
    if stored:
        if not isinstance(opened.graph, StoredGraph):
            raise InputError(f"`--stored` is for converted folders, {opened.graph.name!r} is in memory")
        if record.output or attacker.per_node or attacker.is_sized:
            left_out = "--output, --nodes, --edges, --box and --per-node"
            raise InputError(f"`--stored` runs no attack: leave out {left_out}")
        common: dict[str, Any] = {"k": attacker.k, "seed": opened.about.get("split_seed", 0)}
        exact = evaluate_store(opened.model, opened.graph, vanilla=reference, group=current(), **common)
        if current().is_main:
            out.result({"command": "evaluate", **exact.to_dict()}, exact.show)
        return
    name = opened.kind if opened.untrained else opened.path
    passes = files.evaluation_passes(threat, opened.graph, curves=attacker.curves, nulls=attacker.nulls)
    begins = f"evaluating {name} on {opened.graph!r}, threat {threat.name}"
    files.announce(out, begins, [opened.model], opened.graph, passes)
    arguments: dict[str, Any] = {"vanilla": reference, "name": opened.path.stem, **attacker.arguments}
    evaluation = evaluate_model(opened.model, opened.graph, threat, **arguments)
    record.write(out, evaluation, partial(evaluation.show, every=attacker.all_))


def _replay(opened: files._ModelAndGraph, path: Path, k: int, record: options.Record, out: Output) -> None:
    """Print one node before and after a change, the k neighbours it attends to most and the injected ones."""
    from fgai.reports.whatif import WhatIf

    change, answers = ChangeRecord.load(path), WhatIf({opened.kind: opened.model}, opened.graph, k=k)
    sides = dict(zip(("before", "after"), answers.view(opened.kind, change), strict=True))
    values = {name: side.summary() for name, side in sides.items()}
    total, names = opened.graph.num_nodes, opened.graph.class_names

    def show(console: Console) -> None:
        console.print(f"node {change.node} of {opened.graph.name}, {path}", markup=False)
        for name, side in values.items():
            label = names[side["class"]] if names else f"class {side['class']}"
            text = f"{name}: {label}, probability {side['probability']:.3f}, margin {side['margin']:.3f}"
            console.print(text, markup=False)
            for rank, (node, share) in enumerate(side["attention"]):
                if rank < k or node >= total:
                    word = f"injected {node - total + 1}" if node >= total else f"node {node}"
                    console.print(f"  {word:<14} {'itself' if node == change.node else '':<7}{share:.3f}")

    record.write(out, {"command": "evaluate", "change": str(path), "node": change.node, **values}, show)


@command
def compare(
    models: Annotated[
        list[str], "Models to compare; the first is the reference.", typer.Argument(metavar="[NAME=]MODEL...")
    ],
    *,
    attacker: options.Evaluation,
    format_: Annotated[str, "table, markdown, latex or csv.", "-f"] = "table",
    own: options.OwnModel,
    record: options.Record,
    out: Output,
) -> None:
    """Attack several models equally and put the numbers side by side.

    All models must have been trained on the same data with the same split.

    Examples:
    - `fgai compare gat.safetensors faithful-gat.safetensors`
    - `fgai compare GAT=gat.safetensors FGAI=fgai.safetensors --format markdown -o both.json`
    """
    threat = attacker.sized()
    one_of(format_, "--format", ("table", "markdown", "latex", "csv"))
    _, named, graph = files._open_models(models, own)
    record.check()
    passes = files.evaluation_passes(threat, graph, curves=attacker.curves, nulls=attacker.nulls)
    begins = f"comparing {', '.join(named)} on {graph!r}, threat {threat.name}"
    files.announce(out, begins, named.values(), graph, passes)
    comparison = compare_models(named, graph, threat, **attacker.arguments)

    def show(console: Console) -> None:
        if format_ == "table":
            comparison.show(console, every=attacker.all_)
        else:
            typer.echo(getattr(comparison, f"to_{format_}")().rstrip("\n"))

    record.write(out, comparison, show)


@dataclass(frozen=True)
class _Definition:
    """Arguments of `fgai.certify_attention`."""

    radius: Annotated[float, "R, at least 0.", "-r"] = 0.01
    norm: Annotated[str, "Ball around the attention: l1, l2 or linf."] = "l1"
    alpha: Annotated[float, "Largest change of prediction allowed."] = 0.1
    beta: Annotated[float, "Least overlap wanted, 0 to 1."] = 0.8
    divergence: Annotated[str, "Change of prediction on probabilities or logits."] = "probabilities"


@command
def certify(
    source: options.Source,
    *,
    vanilla: options.VanillaFile = None,
    k: options.K = 5,
    definition: _Definition,
    injected: Annotated[
        int | None,
        "Instead of a ball: new neighbours of a node at most, with any features.",
        typer.Option(min=0),
    ] = None,
    where: Annotated[
        str, "With --injected: any node gains them, or the certified one alone, direct."
    ] = "any",
    budget: Annotated[
        list[str] | None,
        "Instead of a ball: M new nodes with E edges each, e.g. 20x20; may be repeated.",
        typer.Option(metavar="MxE"),
    ] = None,
    votes: Annotated[options.Count, "Instead of a ball: the majority over so many groups."] = None,
    confidence: Annotated[float, "With --votes: least probability of a class that gets a vote."] = 0.0,
    record: options.Record,
    out: Output,
) -> None:
    """Count the nodes at which the four properties of Definition 1 hold, for each layer.

    Stability is proved while a layer's attention changes by at most --radius; the same explanation and
    prediction are measured against --vanilla. With --injected: which nodes keep class and explanation
    with any few new neighbours; with --budget: how many nodes can change their class at once; both for
    models with limits. With --votes: how many injected nodes a majority tolerates.

    Examples:
    - `fgai certify gat.safetensors --radius 0.01`
    - `fgai certify fgai.safetensors --vanilla gat.safetensors`
    - `fgai certify fgai.safetensors --injected 1 --where direct`
    - `fgai certify fgai.safetensors --budget 5x20 --budget 20x20`
    - `fgai certify gat.safetensors --votes 20`
    """
    if sum(one is not None for one in (injected, budget or None, votes)) > 1:
        text = "`--injected`, `--budget` and `--votes` are different certificates"
        raise InputError(f"{text}; give one of them")
    if confidence and votes is None:
        raise InputError("`--confidence` is of the votes; give `--votes`, too")
    sizes = [_parse_budget(text) for text in budget or ()]
    opened = files._open_model(source)
    reference = opened.load(vanilla)
    record.check()
    model, graph = opened.model, opened.graph
    files.announce(out, f"certifying {opened.path} on {graph!r}", [model], graph, files.CERTIFICATE)
    certificate: Any
    if votes is not None:
        certificate = vote(model, graph, groups=votes, confidence=confidence)
    elif sizes:
        certificate = certify_budget(model, graph, budgets=sizes)
    elif injected is not None:
        certificate = certify_injection(model, graph, neighbours=injected, where=where, k=k)
    else:
        certificate = certify_attention(model, graph, vanilla=reference, k1=k, k2=k, **vars(definition))
    record.write(out, certificate)


def _parse_budget(text: str) -> tuple[int, int]:
    nodes, times, edges = text.partition("x")
    if not (times and nodes.isdecimal() and edges.isdecimal()):
        raise InputError(f"`--budget` takes new nodes x edges of each, like 20x20, got {text!r}")
    return int(nodes), int(edges)


@dataclass(frozen=True)
class _OptionalAttacker(options.Attacker):
    threat: Annotated[str, "Attack to try the explanation with; `none` for no attack.", "-t"] = "standard"


@command
def explain(
    source: options.Source,
    *,
    node: Annotated[str, "Number or name of the node to explain.", "-n"],
    layer: Annotated[str, "Attention shown: mean, last or max over layers, or a layer's number."] = "mean",
    attacker: _OptionalAttacker,
    vanilla: options.VanillaFile = None,
    counterfactual: options.Counterfactual = False,
    save_change: Annotated[
        Path | None, "Write the smaller of both counterfactuals to replay it: .json."
    ] = None,
    output: Annotated[Path | None, "Also draw a picture: .png, .pdf or .svg.", "-o"] = None,
    force: options.Force = False,
    out: Output,
) -> None:
    """Show the neighbours behind a node's class by attention and contribution, under attack too.

    Certified: which of the four properties of Definition 1 the node has in each layer, at radius 0.01; two
    of them compare it with --vanilla. The picture shows attention before and after the attack, or alone with
    `--threat none`.

    Examples:
    - `fgai explain gat.safetensors --node 24`
    - `fgai explain fgai.safetensors --node 24 --vanilla gat.safetensors`
    - `fgai explain gat.safetensors --node 24 --output node-24.png --threat strong`
    - `fgai explain gat.safetensors --node 24 --counterfactual --save-change node-24.json`
    """
    from fgai.explanations import explain as explain_node
    from fgai.reports import figures  # matplotlib is slow to import, and few commands need it

    shown_layer: str | int = int(layer) if layer.lstrip("-").isdigit() else layer
    threat = None if attacker.threat == "none" else attacker.sized()
    if threat is None and attacker.is_sized:
        text = "`nodes`, `edges` and `box` need an attack, and `--threat none` is none"
        raise InputError(f"{text}; leave them out")
    opened = files._open_model(source)
    model, graph = opened.model, opened.graph
    reference = opened.load(vanilla)
    path, change_path = options.check_output(output, force), options.check_output(save_change, force)
    out.say(f"explaining node {node} of {graph!r}" + ("" if threat is None else f", threat {threat.name}"))
    number = graph.node_index(node)
    common: dict[str, Any] = {"k": attacker.k, "layer": shown_layer, "seed": attacker.seed}
    explain_node(model, graph, number, **common, threat=None, certificate=False)  # bad input first
    attack = None
    if threat is not None:
        attack = make_attack(threat, k=attacker.k).run(model, graph, seed=attacker.seed)
    common |= {"threat": threat, "attack": attack, "vanilla": reference}
    common |= {"counterfactual": counterfactual or save_change is not None}
    explanation = explain_node(model, graph, number, **common)
    if change_path is not None:
        searches = filter(None, (explanation.counterfactual or {}).values())
        changes = [one for one in searches if one["change"]]
        if changes:
            ChangeRecord.from_dict(min(changes, key=lambda one: int(one["size"]))["change"]).save(change_path)
            out.say(f"change written to {change_path}")
        else:
            out.say("no counterfactual was found, none is written")
    if path is not None:
        if attack is None:
            picture = figures.node_attention(model, graph, number, layer=shown_layer)
        else:
            case = figures.Case(opened.kind, model, attack)
            picture = figures.node_before_after([case], graph, number, layer=shown_layer)
        figures.save(picture, path)
        out.say(f"picture written to {path}")
    out.result(explanation.to_dict(), explanation.show)
