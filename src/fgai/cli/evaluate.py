"""`fgai evaluate`, `compare`, `certify` and `explain`: measure and certify models, explain one node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fgai.attacks import make_attack
from fgai.certificates import certify_attention, certify_budget, certify_injection, vote
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.estimate import CERTIFICATE, announce, evaluation_passes
from fgai.cli.files import _ModelAndGraph, _on_all_ranks, _open_model, _open_models
from fgai.cli.output import Output, command
from fgai.errors import InputError
from fgai.evaluation import compare as compare_models
from fgai.evaluation import evaluate as evaluate_model
from fgai.graph import ChangeRecord
from fgai.large import StoredGraph, evaluate_store
from fgai.processes import current


@command
@_on_all_ranks
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
        raise InputError(
            "`--change` runs no attack: leave out --stored, --vanilla, --nodes, --edges, --box and --per-node"
        )
    threat = attacker.sized()
    opened = _open_model(source, stored=stored)
    reference = opened.load(vanilla)
    record.check()
    if change is not None:
        _replay(opened, change, attacker.k, record, out)
        return
    if stored:
        if not isinstance(opened.graph, StoredGraph):
            raise InputError(f"`--stored` is for converted folders, {opened.graph.name!r} is in memory")
        if record.output or attacker.per_node or attacker.is_sized:
            raise InputError(
                "`--stored` runs no attack: leave out --output, --nodes, --edges, --box and --per-node"
            )
        split = opened.about.get("split_seed", 0)
        exact = evaluate_store(
            opened.model, opened.graph, vanilla=reference, k=attacker.k, seed=split, group=current()
        )
        if current().is_main:
            out.result({"command": "evaluate", **exact.to_dict()}, exact.show)
        return
    name = opened.kind if opened.untrained else opened.path
    passes = evaluation_passes(threat, opened.graph, curves=attacker.curves, nulls=attacker.nulls)
    begins = f"evaluating {name} on {opened.graph!r}, threat {threat.name}"
    announce(out, begins, [opened.model], opened.graph, passes)
    arguments: dict[str, Any] = {"vanilla": reference, "name": opened.path.stem, **attacker.arguments}
    evaluation = evaluate_model(opened.model, opened.graph, threat, **arguments)
    record.write(out, evaluation, partial(evaluation.show, every=attacker.all_))


def _replay(opened: _ModelAndGraph, path: Path, k: int, record: options.Record, out: Output) -> None:
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
    _, named, graph = _open_models(models, own)
    record.check()
    passes = evaluation_passes(threat, graph, curves=attacker.curves, nulls=attacker.nulls)
    begins = f"comparing {', '.join(named)} on {graph!r}, threat {threat.name}"
    announce(out, begins, named.values(), graph, passes)
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
        raise InputError(
            "`--injected`, `--budget` and `--votes` are different certificates; give one of them"
        )
    if confidence and votes is None:
        raise InputError("`--confidence` is of the votes; give `--votes`, too")
    sizes = [_parse_budget(text) for text in budget or ()]
    opened = _open_model(source)
    reference = opened.load(vanilla)
    record.check()
    announce(out, f"certifying {opened.path} on {opened.graph!r}", [opened.model], opened.graph, CERTIFICATE)
    model, graph = opened.model, opened.graph
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
    """Return the new nodes of `--budget` and the edges of each."""
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
        raise InputError(
            "`nodes`, `edges` and `box` need an attack, and `--threat none` is none; leave them out"
        )
    opened = _open_model(source)
    model, graph = opened.model, opened.graph
    reference = opened.load(vanilla)
    path, change_path = options.check_output(output, force), options.check_output(save_change, force)
    out.say(f"explaining node {node} of {graph!r}" + ("" if threat is None else f", threat {threat.name}"))
    number = graph.number_of(node)
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
