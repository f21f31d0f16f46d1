"""`fgai report`, `audit` and `explore`: pages about models, from records, models or a model of your own."""

from __future__ import annotations

import json as encoder
import shlex
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fgai.certificates import certify_attention
from fgai.cli import files, options
from fgai.cli.output import Output, command
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import evaluate
from fgai.explanations.node import check_counterfactual
from fgai.files import regular
from fgai.version import adding_facts

if TYPE_CHECKING:
    from fgai.attacks import AttackResult
    from fgai.reports import Report

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
    what_if: Annotated[
        bool,
        "Put the graph and the weights into the page, to try changes.",
        typer.Option("--what-if/--no-what-if"),
    ] = True,
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
    from fgai.reports import read_report, write_report
    from fgai.reports import report as make_page
    from fgai.reports.page import check_page

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
        document = make_page(
            networks,
            graph,
            page,
            threat=threat,
            k=attacker.k,
            seed=attacker.seed,
            node=None if node is None else graph.number_of(node),
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
        document = read_report(sources, node=None if node is None else int(node))
        write_report(document, page, document=not is_source)
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
    report: Report,
    path: Path,
    *,
    open_: bool,
    command: str = "report",
    above: Callable[[Console], None] = lambda console: None,
    **more: Any,
) -> None:
    """Print which page was written, after the output of `above`, and open it if asked."""
    from fgai.reports import missing

    missing_parts, document, size = missing(report), path.with_suffix(".json"), path.stat().st_size
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
    from fgai.explanations.node import RADIUS
    from fgai.reports import make_report, write_report
    from fgai.reports.cards import card as make_card
    from fgai.reports.page import check_page
    from fgai.reports.results import certify_injections

    threat, k = attacker.sized(), attacker.k  # bad input first
    page = options.check_output(check_page(output), force)
    for file in (page.with_suffix(".json"), *([] if card is None else [card, card.with_suffix(".md")])):
        options.check_output(file, force)
    opened = files._open_model(source)
    graph, name = opened.graph, opened.kind
    opening_node = None if node is None else graph.number_of(node)
    check_counterfactual(graph, counterfactual)
    models = {name: opened.model}
    passes = files.evaluation_passes(threat, graph) + files.CERTIFICATE
    files.announce(out, f"auditing {name} on {graph!r}, threat {threat.name}", [opened.model], graph, passes)
    flags: dict[str, Any] = {"model": source.own, "weights": source.weights, "data": source.data}
    flags |= {**vars(attacker), "node": node, "counterfactual": counterfactual, "output": page}
    file_of = [] if source.model is None else [str(source.model)]
    attacks: dict[str, AttackResult] = {}
    with adding_facts(**({"note": files.UNTRAINED} if opened.untrained else {})):
        record = evaluate(
            opened.model,
            graph,
            threat,
            seed=attacker.seed,
            name=name,
            k=k,
            per_node=True,
            on_attack=lambda name, results: attacks.update({name: results["prediction"]}),
        )
        out.say("certifying")
        proof = certify_attention(opened.model, graph, radius=RADIUS, k1=k, k2=k)
        injections = certify_injections(models, graph, k)
        out.say("making the page")
        document = make_report(
            record,
            models=models,
            data=graph,
            certificates={name: proof},
            injections=injections,
            attacks=attacks,
            node=opening_node,
            reproduce=[_line("fgai", "audit", *file_of, flags=flags)],
            counterfactual=counterfactual,
            what_if=False,  # an audit is for other readers: it holds no features and no weights
        )
        write_report(document, page)
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
    from fgai.reports.whatif import Server, WhatIf

    _, networks, graph = files._open_models(models, own)
    answers = WhatIf(networks, graph, k=k)
    start = None if node is None else graph.number_of(node)
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
