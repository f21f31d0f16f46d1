"""`fgai demo`: train, make faithful, attack, certify and report on one dataset, in one command."""

from __future__ import annotations

import dataclasses
import shlex
import webbrowser
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from torch import nn

from fgai import datasets
from fgai.certificates import ALL_FOUR, PROMISE
from fgai.checks import device as checked_device
from fgai.checks import one_of
from fgai.cli import files, options
from fgai.cli.options import check_folder, check_output
from fgai.cli.output import Output, command
from fgai.errors import MissingExtraError
from fgai.evaluation.summary import RULE
from fgai.explanations.node import RADIUS
from fgai.models import MODELS
from fgai.reports import make_report, write_report
from fgai.reports.compose import measure
from fgai.reports.page import check_page
from fgai.reports.results import certify_injections
from fgai.reports.words import attack_words, balance_words, changes_in, headline, meaning, table
from fgai.training import train_method

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
    folder = check_folder(output)
    check_output(folder / "comparison.json", force)
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
    again = ["fgai", "demo", "--data", data, "--model", model, "--seed", str(seed)]
    again += [] if epochs is None else ["--epochs", str(epochs)]
    report = make_report(
        comparison,
        models=models,
        data=graph,
        certificates=certificates,
        injections=certify_injections(models, graph, K),
        attacks=attacks,
        reproduce=[shlex.join(again)],
    )
    node = int((report.explorer or {})["nodes"]["id"][0])
    comparison.save(folder / "comparison.json")
    for name, record in certificates.items():
        record.save(folder / f"certificate-{name.lower()}.json")
    if page is not None:
        write_report(report, page)
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
