"""`fgai report`, `audit`, `explore` and `demo`: pages about models, your own among them, or their records."""

from __future__ import annotations

import dataclasses
import json as encoder
import shlex
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

from fgai import datasets, reports
from fgai.certificates import ALL_FOUR, PROMISE, certify_attention
from fgai.checks import device as checked_device
from fgai.checks import one_of
from fgai.cli import files, options
from fgai.cli.output import Output, command
from fgai.errors import CheckpointError, InputError, MissingExtraError
from fgai.evaluation import evaluate
from fgai.evaluation.summary import RULE
from fgai.explanations.node import RADIUS, check_counterfactual
from fgai.files import regular
from fgai.models import MODELS
from fgai.reports.cards import card as make_card
from fgai.reports.compose import measure
from fgai.reports.page import check_page
from fgai.reports.results import certify_injections
from fgai.reports.whatif import Server, WhatIf
from fgai.reports.words import attack_words, balance_words, changes_in, headline, meaning, table
from fgai.training import train_method
from fgai.version import adding_facts

_Page = Annotated[Path, "The page; the document it is made of is beside it.", "-o"]


@command
def report(
    words: Annotated[
        list[str],
        "Models (.safetensors) or records (.json), the reference first.",
        typer.Argument(metavar="[NAME=]FILE..."),
    ],
    *,
    output: _Page = Path("report.html"),
    force: options.Force = False,
    open_: options.Open = False,
    node: options.PageNode = None,
    counterfactual: options.Counterfactual = False,
    node_names: Annotated[Path | None, "Text file with one name per node, line by line."] = None,
    class_names: Annotated[Path | None, "Text file with one name per class, line by line."] = None,
    what_if: Annotated[bool, "Put the graph and the weights into the page, to try changes."] = True,
    attacker: options.Attacker,
    own: options.OwnModel,
    out: Output,
) -> None:
    """Write one HTML page: headline numbers, attention before and after, every node, curves, settings.

    The page is one file, needs no network and opens from disk. Models are measured anew, with the threat, its
    budget, k and seed of the options; from records the page shows their numbers and names what is missing.

    Examples:
    - `fgai report GAT=gat.safetensors FGAI=faithful-gat.safetensors --open`
    - `fgai report comparison.json certificate-gat.json certificate-fgai.json -o page.html`
    - `fgai report report.json`
    """
    threat = attacker.sized()  # bad input first
    page = options.check_output(check_page(output), force)
    names: dict[str, Any] = {"node_names": _lines(node_names), "class_names": _lines(class_names)}
    records = [word for word in words if word.endswith(".json")]
    models = [word for word in words if not word.endswith(".json")]
    if models and records:
        raise InputError("give models or records, not both; models are measured anew")
    beside = page.with_suffix(".json")
    is_source = beside.resolve() in {Path(word.rpartition("=")[2]).resolve() for word in records}
    if not is_source:
        options.check_output(beside, force)
    if models:
        opened, networks, graph = files._open_models(models, own)
        passes = files.evaluation_passes(threat, graph) + files.CERTIFICATE
        text = f"comparing {', '.join(opened)} on {graph!r}, threat {threat.name}"
        files.announce(out, text, networks.values(), graph, passes)
        flags = {**vars(attacker), "counterfactual": counterfactual}
        document = reports.report(
            networks,
            graph,
            page,
            threat=threat,
            k=attacker.k,
            seed=attacker.seed,
            node=None if node is None else graph.node_index(node),
            reproduce=[*_reproduce(opened), _line("fgai", "report", *models, flags=flags)],
            what_if=what_if,
            counterfactual=counterfactual,
            on_step=lambda step: None if step == "comparing" else out.say(step),
            **names,
        )
    else:
        if counterfactual:
            raise InputError(
                "`--counterfactual` is a search, which needs models; give models instead of records"
            )
        if node_names is not None or class_names is not None:
            raise InputError("names of nodes and classes need models; give models instead of records")
        if node is not None and not node.isdecimal():
            raise InputError(f"`node` must be a number where the page is made of records, got {node!r}")
        named = any("=" in word for word in records)
        sources = options.named_files(records, "files") if named else [Path(word) for word in records]
        document = reports.read_report(sources, node=None if node is None else int(node))
        reports.write_report(document, page, document=not is_source)
    _show_page(out, document, page, open_=open_)


def _reproduce(opened: dict[str, files._ModelAndGraph]) -> list[str]:
    """The commands that made the models, as far as their files name them."""
    lines, others = [], [entry.path for entry in opened.values() if entry.about.get("method") != "fgai"]
    for entry in opened.values():
        about = entry.about
        if not about.get("dataset") or not about.get("method"):
            continue
        vanilla = about.get("vanilla") or (str(others[0]) if others else "")
        if about["method"] == "fgai" and vanilla:
            words = ["fgai", "faithful", str(vanilla)]
        else:
            words = ["fgai", "train", "--data", about["dataset"], "--model", entry.kind]
            words += ["--method", about["method"]]
        words += ["--seed", str(about.get("seed", 0))]
        for name, value in (about.get("settings") or {}).items():
            text = value if isinstance(value, str) else encoder.dumps(value)
            words += [f"--{name}", text] if name in ("epochs", "lr") else ["--set", f"{name}={text}"]
        lines.append(shlex.join([*words, "--output", str(entry.path)]))
    return lines


def _line(*words: str, flags: dict[str, Any]) -> str:
    """A command with its words and the flags that have a value."""
    line = list(words)
    for key, value in flags.items():
        if value is not None and value is not False:
            line += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return shlex.join(line)


def _lines(path: Path | None) -> list[str] | None:
    try:
        return None if path is None else regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} must be a readable text file ({error})") from error


def _show_page(
    out: Output,
    report: reports.Report,
    path: Path,
    *,
    open_: bool,
    command: str = "report",
    above: Callable[[Console], None] = lambda console: None,
    **more: Any,
) -> None:
    """Print which page was written, after the output of `above`, and open it if asked."""
    missing_parts, document, size = reports.missing(report), path.with_suffix(".json"), path.stat().st_size
    values: dict[str, Any] = {
        "command": command,
        "output": str(path),
        "document": str(document) if document.exists() else None,
        "bytes": size,
        "models": report.names,
        "nodes": len(((report.explorer or {}).get("nodes") or {}).get("id") or []),
        "missing": missing_parts,
        **more,
    }

    def show(console: Console) -> None:
        above(console)
        for line in missing_parts:
            console.print(f"not shown: {line}", style="dim", markup=False, soft_wrap=True)
        written = f"written to {path} ({size / 1e6:.1f} MB); open it in a browser"
        console.print(written, markup=False, soft_wrap=True)

    out.result(values, show)
    if open_:
        webbrowser.open(path.resolve().as_uri())


@command
def audit(
    source: options.Source,
    *,
    output: _Page = Path("audit.html"),
    card: Annotated[Path | None, "Also write a card, .json, for `fgai check`."] = None,
    force: options.Force = False,
    open_: options.Open = False,
    node: options.PageNode = None,
    counterfactual: options.Counterfactual = False,
    attacker: options.Attacker,
    all_: options.All = False,
    out: Output,
) -> None:
    """Attack, measure and certify one model, your own on your own graph, and write one page with a verdict.

    A function or class of yours makes the model; `fgai.wrap` adapts models with other calls. No code in the
    files is run: PyTorch's restricted loader reads a `.pt`. See `fgai.load_graph` for the formats of graphs.

    Examples:
    - `fgai audit --model mine:Model --weights mine.pt --data graph --card card.json --threat ensemble`
    - `fgai audit --model mine:Model --data edges.csv --nodes 2 --edges 3`
    - `fgai audit planted-gat --output page.html`
    """
    threat, k = attacker.sized(), attacker.k  # bad input first
    page = options.check_output(check_page(output), force)
    for file in (page.with_suffix(".json"), card, None if card is None else card.with_suffix(".md")):
        options.check_output(file, force)
    opened = files._open_model(source)
    graph, name = opened.graph, opened.kind
    opening_node = None if node is None else graph.node_index(node)
    check_counterfactual(graph, counterfactual)
    models = {name: opened.model}
    passes = files.evaluation_passes(threat, graph) + files.CERTIFICATE
    files.announce(out, f"auditing {name} on {graph!r}, threat {threat.name}", [opened.model], graph, passes)
    flags: dict[str, Any] = {"model": source.own, "weights": source.weights, "data": source.data}
    flags |= {**vars(attacker), "node": node, "counterfactual": counterfactual, "output": page}
    file_of = [] if source.model is None else [str(source.model)]
    attacks: dict[str, Any] = {}
    with adding_facts(**({"note": files.UNTRAINED} if opened.untrained else {})):
        common: dict[str, Any] = {"seed": attacker.seed, "name": name, "k": k, "per_node": True}
        record = evaluate(opened.model, graph, threat, on_attack=attacks.__setitem__, **common)
        out.say("certifying")
        proof = certify_attention(opened.model, graph, radius=RADIUS, k1=k, k2=k)
        injections = certify_injections(models, graph, k)
        out.say("making the page")
        document = reports.make_report(
            record,
            models=models,
            data=graph,
            certificates={name: proof},
            injections=injections,
            attacks={name: attacks[name]["prediction"]},
            node=opening_node,
            reproduce=[_line("fgai", "audit", *file_of, flags=flags)],
            counterfactual=counterfactual,
            what_if=False,  # an audit is for other readers: it holds no features and no weights
        )
        reports.write_report(document, page)
    more: dict[str, Any] = {"metrics": record.to_dict()["metrics"], "card": None}
    if card is not None:
        more["card"] = str(make_card(record, [proof, *injections[name]]).write(card)[0])
        out.say(f"card written to {card}; check it with fgai check {card}")
    above = partial(record.show, every=all_)
    _show_page(out, document, page, open_=open_, command="audit", above=above, **more)


CERTIFIED = 20_000
"""Nodes up to which models are certified before the what-if page opens."""


@command
def explore(
    models: Annotated[
        list[str], "Models to look at, e.g. vanilla and faithful.", typer.Argument(metavar="[NAME=]MODEL...")
    ],
    *,
    node: options.PageNode = None,
    k: options.K = 5,
    open_: options.Open = False,
    own: options.OwnModel,
    out: Output,
) -> None:
    """Serve a page on which you change the graph around a node and see its attention and class change.

    It listens on 127.0.0.1 under a random address until Ctrl-C, and writes nothing.

    Examples:
    - `fgai explore GAT=planted-gat FGAI=planted-fgai --open`
    - `fgai explore weights.pt --model mine:Model --data graph`
    """
    _, networks, graph = files._open_models(models, own)
    answers = WhatIf(networks, graph, k=k)
    start = None if node is None else graph.node_index(node)
    certified = {}
    if graph.num_nodes <= CERTIFIED:
        out.say("certifying against injected neighbours")
        certified = answers.certify()
    with Server(answers, answers.facts(node=start, certified=certified)) as server:
        out.result({"command": "explore", "address": server.address}, f"open {server.address}")
        out.say("Ctrl-C ends it")
        if open_:
            webbrowser.open(server.address)
        try:
            server.serve()
        except KeyboardInterrupt:
            out.say("ended")


K = 5
NOTE = (
    f"Predictions move: relative to their spread. Top {K}: the neighbours a node attends to most, over"
    " touched nodes (in reach of the attack). F-slope gap: how much more it hurts to remove the strongest"
    f" edges than the weakest. Proved: at the output layer, R = {RADIUS}. Chance: a random ranking, uniform"
    f" attention, or always the most frequent class. {RULE}"
)


@command
def demo(
    *,
    data: options.Data = "planted",
    model: options.Model = "GAT",
    seed: options.Seed = 0,
    output: Annotated[Path, "Folder for models, records and pictures.", "-o"] = Path("fgai-demo"),
    force: options.Force = False,
    open_: Annotated[bool, "Open the result when done."] = False,
    epochs: options.Epochs = None,
    source: options.Location,
    out: Output,
) -> None:
    """Train a model, make it faithful, attack both equally, and show what changed.

    Writes a report for the browser, both models, the records and pictures to a folder. Ctrl-C saves the
    training; the same command continues it.

    Examples:
    - `fgai demo`
    - `fgai demo --data cora --model GATv2 --output cora-demo --open`
    """
    from fgai.reports import figures  # matplotlib is slow to import

    model = one_of(model, "--model", tuple(MODELS), any_case=True)
    target = checked_device(source.device)
    graph = datasets.load_dataset(data, source.root, seed).to(target)
    folder = options.check_folder(output)
    options.check_output(folder / "comparison.json", force)
    page: Path | None = None
    try:
        page = check_page(folder / "report.html")
    except MissingExtraError as error:
        out.say(f"there will be no report: {error}")
    out.say(
        f"Attention shows which neighbours a {model} attends to. Does that survive an attack, and does a"
        " faithful version of it (FGAI) do better?"
    )
    settings = {} if epochs is None else {"epochs": epochs}
    about = {"dataset": data, "split_seed": seed, "seed": seed, "settings": settings}
    common: dict[str, Any] = {"seed": seed, "device": target, "progress": out.progress, "settings": settings}
    models: dict[str, nn.Module] = {}
    paths: dict[str, Path] = {}
    first = f"1/4  training {model} on {graph!r} (the first run compiles the kernels)"
    steps = ((model, "vanilla", first), ("FGAI", "fgai", "2/4  making it faithful"))
    for name, method, step in steps:
        out.say(step)
        path, vanilla = folder / f"{method}.safetensors", models.get(model)
        with files._resumable(out, path) as state:
            models[name] = train_method(method, model, graph, vanilla=vanilla, checkpoint=state, **common)
            paths[name] = files._write_model(models[name], path, graph, {**about, "method": method})
    out.say("3/4  attacking both with the same budget, measuring and certifying")
    comparison, certificates, attacks = measure(models, graph, k=K, seed=seed)
    out.say("4/4  drawing")
    again = _line("fgai", "demo", flags={"data": data, "model": model, "seed": seed, "epochs": epochs})
    report = reports.make_report(
        comparison,
        models=models,
        data=graph,
        certificates=certificates,
        injections=certify_injections(models, graph, K),
        attacks=attacks,
        reproduce=[again],
    )
    node = int((report.explorer or {})["nodes"]["id"][0])
    comparison.save(folder / "comparison.json")
    for name, record in certificates.items():
        record.save(folder / f"certificate-{name.lower()}.json")
    if page is not None:
        reports.write_report(report, page)
    cases = [figures.Case(name, entry, attacks[name]) for name, entry in models.items()]
    drawn = {
        "subgraph": figures.subgraph_attention(cases, graph, node),
        "top-neighbours": figures.top_neighbours(cases, graph, node, k=K),
        "four-properties": figures.four_properties(comparison),
    }
    pictures = [figures.save(figure, folder / f"{name}.png") for name, figure in drawn.items()]
    changes = changes_in(report)
    notes = [attack_words(report.records[0]), NOTE, PROMISE]
    shown = dataclasses.replace(table(changes, model, "FGAI"), notes=notes)
    shares = {name: record.shares() for name, record in certificates.items()}
    all_four = {name: share[ALL_FOUR] for name, share in shares.items()}
    parts = [f"{share:.0%} of the nodes of {name}" for name, share in all_four.items() if share is not None]
    definition = (
        "Definition 1 (same and stable explanation, same and stable prediction; output layer, R ="
        f" {RADIUS}) holds at {' and '.join(parts) or 'an unknown number of nodes'}."
    )
    text = "\n".join([headline(report) + ".", *meaning(report), definition, balance_words(changes)])
    rows = [
        {"measure": c.title, "name": c.name, model: c.before, "FGAI": c.after, "chance": c.chance}
        | {"change": c.kind}
        for c in changes
    ]
    values: dict[str, Any] = {
        "command": "demo",
        "dataset": data,
        "model": model,
        "seed": seed,
        "meaning": text,
        "promise": PROMISE,
        "definition": shares,
        "table": rows,
        "node": node,
        "models": {name: str(path) for name, path in paths.items()},
        "pictures": [str(path) for path in pictures],
        "report": None if page is None else str(page),
        "comparison": str(folder / "comparison.json"),
    }

    lines = [] if page is None else [f"see it all in a browser:  {page}"]
    lines += [f"pictures, models and records are in {folder}/"]
    lines += [f"look at one node:  fgai explain {paths['FGAI']} --node {node}"]

    def show(console: Console) -> None:
        shown.show(console)
        console.print(f"\n{text}\n", markup=False)
        console.print("\n".join(lines), markup=False, soft_wrap=True)

    out.result(values, show)
    if open_:
        webbrowser.open((page or pictures[0]).resolve().as_uri())
