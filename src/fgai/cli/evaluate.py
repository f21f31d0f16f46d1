"""`fgai evaluate`, `compare`, `certify` and `explain`: measure models, prove bounds, look at one node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fgai.attacks import DEFAULT, make_attack, threat_of
from fgai.certificates import certify_attention, certify_injection
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import _on_all_ranks, _open_model, _Opened, _parsed_box, checked_output
from fgai.cli.output import Output, command
from fgai.errors import InputError
from fgai.evaluation import compare as compare_models
from fgai.evaluation import evaluate as evaluate_model
from fgai.large import StoredGraph, evaluate_store
from fgai.processes import current
from fgai.records import TabledDocument

Curves = Annotated[
    bool, typer.Option("--curves/--no-curves", help="Remove edges by rank and measure F-slopes; slower.")
]
Nulls = Annotated[
    bool, typer.Option("--nulls/--no-nulls", help="Also measure attention that says nothing; slower.")
]
Stored = Annotated[
    bool,
    typer.Option(
        "--stored",
        help="Leave a converted folder on disk: exact values without an attack, and nothing is loaded whole.",
    ),
]
PerNode = Annotated[bool, typer.Option("--per-node", help="Keep the values of every node in the record.")]


@command
@_on_all_ranks
def evaluate(
    model: options.ModelFile = None,
    *,
    vanilla: options.VanillaFile = None,
    threat: options.Threat = DEFAULT,
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    k: options.K = 5,
    seed: options.Seed = 0,
    curves: Curves = True,
    nulls: Nulls = True,
    per_node: PerNode = False,
    all_: options.All = False,
    stored: Stored = False,
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
    """Attack a model and measure how its predictions and its attention hold.

    With --stored there is no attack: F1, sharpness, and with --vanilla agreement, g-TVD and overlap; under
    torchrun several processes share the work.

    Examples:
    - `fgai evaluate gat.safetensors`
    - `fgai evaluate faithful-gat.safetensors --vanilla gat.safetensors --threat ensemble -o claim.json`
    - `fgai evaluate club.safetensors --nodes 2 --edges 2`
    - `fgai evaluate large.safetensors --stored --vanilla gat.safetensors`
    - `fgai evaluate --model mine:Model --weights w.pt --data folder --stored`
    """
    out = Output(json, quiet)
    if current().several and not stored:
        raise InputError("an attack is the work of one process: leave torchrun out, or give `--stored`")
    chosen = threat_of(threat).sized(nodes, edges, _parsed_box(box))
    opened = _open_model(model, data, root, device, own=own, weights=weights, stored=stored)
    plain = opened.load(vanilla)
    path = None if output is None else checked_output(output, force)
    if stored:
        if not isinstance(opened.graph, StoredGraph):
            raise InputError(f"`--stored` is for converted folders, {opened.graph.name!r} is in memory")
        if path is not None or per_node or any(option is not None for option in (nodes, edges, box)):
            raise InputError(
                "`--stored` attacks nothing: leave out --output, --nodes, --edges, --box and --per-node"
            )
        split = opened.about.get("split_seed", 0)
        exact = evaluate_store(opened.model, opened.graph, vanilla=plain, k=k, seed=split, together=True)
        if current().leads:
            out.result({"command": "evaluate", **exact.to_dict()}, exact.show)
        return
    out.say(
        f"evaluating {opened.kind if opened.untrained else opened.path} on {opened.graph!r}, threat {threat}"
    )
    parts: dict[str, Any] = {"curves": curves, "nulls": nulls, "per_node": per_node}
    record = evaluate_model(
        opened.model, opened.graph, chosen, vanilla=plain, seed=seed, name=opened.path.stem, k=k, **parts
    )
    _finish(out, record, path, partial(record.show, every=all_))


def _finish(
    out: Output, record: Any, path: Path | None, show: Callable[[Console], None] | None = None
) -> None:
    if path is not None:
        out.say(f"written to {record.save(path)}")
    out.result(record.to_dict(), show or record.show)


@command
def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]MODEL...", help="Models to compare; the first is the reference."),
    ],
    *,
    threat: options.Threat = DEFAULT,
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    k: options.K = 5,
    seed: options.Seed = 0,
    curves: Curves = True,
    nulls: Nulls = True,
    per_node: PerNode = False,
    all_: options.All = False,
    format_: Annotated[str, typer.Option("--format", "-f", help="table, markdown, latex or csv.")] = "table",
    own: options.Own = None,
    data: options.OtherData = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: options.Record = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Attack several models equally and put the numbers side by side.

    All models must have been trained on the same data with the same split.

    Examples:
    - `fgai compare gat.safetensors faithful-gat.safetensors`
    - `fgai compare GAT=gat.safetensors FGAI=fgai.safetensors --format markdown -o both.json`
    """
    out = Output(json, quiet)
    chosen = threat_of(threat).sized(nodes, edges, _parsed_box(box))
    one_of(format_, "--format", ("table", "markdown", "latex", "csv"))
    opened = _open_models(models, data, root, device, own)
    path = None if output is None else checked_output(output, force)
    graph = next(iter(opened.values())).graph
    out.say(f"comparing {', '.join(opened)} on {graph!r}, threat {threat}")
    parts: dict[str, Any] = {"curves": curves, "nulls": nulls, "per_node": per_node}
    named = {name: entry.model for name, entry in opened.items()}
    comparison = compare_models(named, graph, chosen, seed=seed, k=k, **parts)
    if path is not None:
        out.say(f"written to {comparison.save(path)}")
    if format_ == "table":
        out.result(comparison.to_dict(), partial(comparison.show, every=all_))
    else:
        text = getattr(comparison, f"to_{format_}")
        out.result(comparison.to_dict(), lambda console: typer.echo(text().rstrip("\n")))


def _open_models(
    words: list[str], data: str | None, root: Path | None, device: str = "cpu", own: str | None = None
) -> dict[str, _Opened]:
    """Read several `[NAME=]FILE` models of the same data and split; files are weights of what `own` makes."""
    opened: dict[str, _Opened] = {}
    for word in words:
        name, equals, path = word.rpartition("=")
        if not equals:
            name = Path(path).stem
        if name in opened:
            raise InputError(f"two models are called {name!r}; tell them apart with NAME=MODEL")
        file = {"path": Path(path)} if own is None else {"path": None, "weights": Path(path)}
        opened[name] = _open_model(data=data, root=root, device=device, own=own, **file)
    parts = ("dataset", "split_seed", "task")
    if len({tuple(entry.about.get(part) for part in parts) for entry in opened.values()}) > 1:
        splits = "; ".join(
            f"{name}: {entry.about.get('dataset')}, seed {entry.about.get('split_seed')}"
            for name, entry in opened.items()
        )
        raise InputError(f"the models were trained on different data or splits ({splits})")
    return opened


@command
def certify(
    model: options.ModelFile = None,
    *,
    vanilla: options.VanillaFile = None,
    radius: Annotated[float, typer.Option("--radius", "-r", help="R, at least 0.")] = 0.01,
    k1: Annotated[int, typer.Option(min=1, help="Top-k compared with the vanilla model.")] = 5,
    k2: Annotated[int, typer.Option(min=1, help="Top-k certified.")] = 5,
    norm: Annotated[str, typer.Option(help="Ball around the attention: l1, l2 or linf.")] = "l1",
    alpha: Annotated[float, typer.Option(help="Largest change of prediction allowed.")] = 0.1,
    beta: Annotated[float, typer.Option(help="Least overlap wanted, 0 to 1.")] = 0.8,
    divergence: Annotated[str, typer.Option(help="Change of prediction on probabilities or logits.")] = (
        "probabilities"
    ),
    injected: Annotated[
        int | None,
        typer.Option(min=0, help="Instead of a ball: new neighbours of a node at most, with any features."),
    ] = None,
    where: Annotated[
        str, typer.Option(help="With --injected: any node gains them, or the certified one alone, direct.")
    ] = "any",
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
    """Say at how many nodes the four properties of Definition 1 hold, for each layer.

    Stability is proved while a layer's attention moves by at most --radius; the same explanation and
    prediction are measured against --vanilla. With --injected: which nodes keep class and explanation
    whatever a few new neighbours are; for models behind limits.

    Examples:
    - `fgai certify gat.safetensors --radius 0.01`
    - `fgai certify fgai.safetensors --vanilla gat.safetensors`
    - `fgai certify fgai.safetensors --injected 1 --where direct`
    """
    out = Output(json, quiet)
    opened = _open_model(model, data, root, device, own=own, weights=weights)
    plain = opened.load(vanilla)
    path = None if output is None else checked_output(output, force)
    out.say(f"certifying {opened.path} on {opened.graph!r}")
    made: TabledDocument
    if injected is None:
        made = certify_attention(
            opened.model,
            opened.graph,
            vanilla=plain,
            radius=radius,
            alpha=alpha,
            beta=beta,
            k1=k1,
            k2=k2,
            norm=norm,
            divergence=divergence,
        )
    else:
        made = certify_injection(opened.model, opened.graph, neighbours=injected, where=where, k=k2)
    _finish(out, made, path)


@command
def explain(
    model: options.ModelFile = None,
    *,
    node: Annotated[str, typer.Option("--node", "-n", help="Number or name of the node to explain.")],
    k: options.K = 5,
    layer: Annotated[
        str, typer.Option(help="Attention shown: mean, last or max over layers, or a layer's number.")
    ] = "mean",
    threat: Annotated[
        str, typer.Option("--threat", "-t", help="Attack to try the explanation with; `none` for no attack.")
    ] = "standard",
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    seed: options.Seed = 0,
    vanilla: options.VanillaFile = None,
    own: options.Own = None,
    weights: options.Weights = None,
    data: options.OtherData = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw a picture: .png, .pdf or .svg.")
    ] = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show whom a node attends to, whether that survives an attack, and what is certified about it.

    Certified: which of the four properties of Definition 1 the node has in each layer, at radius 0.01; two
    of them compare it with --vanilla. The picture shows attention before and after the attack, or alone with
    `--threat none`.

    Examples:
    - `fgai explain gat.safetensors --node 24`
    - `fgai explain fgai.safetensors --node 24 --vanilla gat.safetensors`
    - `fgai explain gat.safetensors --node 24 --output node-24.png --threat strong`
    """
    from fgai.explanations import explain as explain_node
    from fgai.reports import figures  # matplotlib is slow to import, and few commands need it

    out = Output(json, quiet)
    chosen: str | int = int(layer) if layer.lstrip("-").isdigit() else layer
    sized = None if threat == "none" else threat_of(threat).sized(nodes, edges, _parsed_box(box))
    if sized is None and any(option is not None for option in (nodes, edges, box)):
        raise InputError(
            "`nodes`, `edges` and `box` are those of an attack, and `--threat none` has none; leave them out"
        )
    opened = _open_model(model, data, root, device, own=own, weights=weights)
    plain = opened.load(vanilla)
    path = None if output is None else checked_output(output, force)
    out.say(f"explaining node {node} of {opened.graph!r}" + ("" if sized is None else f", threat {threat}"))
    number = opened.graph.number_of(node)
    subject = opened.model, opened.graph
    common: dict[str, Any] = {"k": k, "layer": chosen, "seed": seed}
    explain_node(*subject, number, **common, threat=None, certificate=False)  # bad input first
    attack = None if sized is None else make_attack(sized, k=k).run(*subject, seed=seed)
    explanation = explain_node(*subject, number, **common, threat=sized, attack=attack, vanilla=plain)
    if path is not None:
        if attack is None:
            picture = figures.node_attention(*subject, number, layer=chosen)
        else:
            case = figures.Case(opened.kind, opened.model, attack)
            picture = figures.node_before_after([case], opened.graph, number, layer=chosen)
        figures.save(picture, path)
        out.say(f"picture written to {path}")
    out.result(explanation.to_dict(), explanation.show)
