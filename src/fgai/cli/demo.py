"""`fgai demo`: the whole story on one dataset, in one command."""

from __future__ import annotations

import dataclasses
import shlex
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from fgai import datasets
from fgai.attacks import AttackResult, make_attack
from fgai.certificates import PROMISE, CertificateRecord
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import checked_folder, resumable, write_model
from fgai.cli.output import Output, command
from fgai.errors import MissingExtraError
from fgai.evaluation import Comparison
from fgai.graph import Graph
from fgai.models import MODELS
from fgai.reports.balance import RULE, Change, balance_words, changes, table, verdict
from fgai.reports.compose import RADIUS, measure
from fgai.reports.page import checked_page, write_report
from fgai.reports.words import attack_words
from fgai.training import History, train_method

K = 5
TUNED: dict[tuple[str, str, str], dict[str, Any]] = {
    ("fgai", "GAT", "planted"): {
        "epochs": 400,
        "lr": 0.01,
        "divergence": "kl",
        "prediction_stability": 10.0,
        "explanation_stability": 3.0,
        "nodes": 20,
    }
}
"""Settings for the built-in graph, by method, model and dataset; it is small enough for more epochs."""


@command
def demo(
    *,
    dataset: options.Dataset = "planted",
    model: options.Model = "GAT",
    seed: options.Seed = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for models, records and pictures.")
    ] = Path("fgai-demo"),
    open_: Annotated[bool, typer.Option("--open", help="Open the result when done.")] = False,
    epochs: options.Epochs = None,
    root: options.Root = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a model, make it faithful, attack both equally, and show what changed.

    Writes a report to look at in a browser, both models, the records and pictures to a folder. Ctrl-C saves
    the training; the same command goes on with it.

    Examples:
    - `fgai demo`
    - `fgai demo --dataset cora --model GATv2 --output cora-demo --open`
    """
    one_of(model, "--model", tuple(MODELS))
    out = Output(json, quiet)
    graph = datasets.load_dataset(dataset, root, seed)
    folder = checked_folder(output)
    page = page_in(out, folder)
    out.say(
        f"Attention shows which neighbours a {model} listens to. Does that survive an attack, and does a"
        " faithful version of it (FGAI) do better?"
    )
    out.say(f"1/4  training {model} on {graph!r} (the first run compiles the kernels)")
    chosen = {} if epochs is None else {"epochs": epochs}
    about = {"dataset": dataset, "split_seed": seed, "seed": seed}
    models: dict[str, nn.Module] = {}
    paths: dict[str, Path] = {}
    for name, method in ((model, "vanilla"), ("FGAI", "fgai")):
        if method == "fgai":
            out.say("2/4  making it faithful")
        settings = {**(TUNED.get((method, model, dataset)) or {}), **chosen}
        path = folder / f"{method}.safetensors"
        with resumable(out, path) as state:
            models[name] = train_method(
                method,
                model,
                graph,
                seed=seed,
                vanilla=models.get(model),
                progress=out.progress,
                checkpoint=state,
                settings=settings,
            )
            paths[name] = write_model(
                models[name], path, graph, {**about, "method": method, "settings": settings}
            )
    out.say("3/4  attacking both with the same budget, measuring and certifying")
    comparison, certificates = measure(models, graph, k=K, seed=seed)
    out.say("4/4  drawing")
    node, pictures = draw(folder, models, graph, comparison, certificates, seed)
    comparison.save(folder / "comparison.json")
    for name, record in certificates.items():
        record.save(folder / f"certificate-{name.lower()}.json")
    again = ["fgai", "demo", "--dataset", dataset, "--model", model, "--seed", str(seed)]
    again += [] if epochs is None else ["--epochs", str(epochs)]
    if page is not None:
        shown_with: dict[str, Any] = {"models": models, "data": graph, "certificates": certificates}
        write_report(comparison, page, **shown_with, node=node, reproduce=[shlex.join(again)])
    found = changes_of(comparison, certificates)
    shown = dataclasses.replace(table(found, model, "FGAI"), notes=notes_of(comparison))
    meaning = what_it_means(found, model)
    values: dict[str, Any] = {
        "command": "demo",
        "dataset": dataset,
        "model": model,
        "seed": seed,
        "meaning": meaning,
        "promise": PROMISE,
        "table": [
            {"measure": c.title, "name": c.name, model: c.before, "FGAI": c.after, "change": c.kind}
            for c in found
        ],
        "node": node,
        "models": {name: str(path) for name, path in paths.items()},
        "pictures": [str(path) for path in pictures],
        "report": None if page is None else str(page),
        "comparison": str(folder / "comparison.json"),
    }

    def show(console: Console) -> None:
        shown.show(console)
        console.print(f"\n{meaning}\n", markup=False)
        if page is not None:
            console.print(f"see it all in a browser:  {page}", markup=False, soft_wrap=True)
        console.print(f"pictures, models and records are in {folder}/", markup=False, soft_wrap=True)
        first = paths["FGAI"]
        console.print(f"look at one node:  fgai explain {first} --node {node}", markup=False, soft_wrap=True)

    out.result(values, show)
    if open_:
        webbrowser.open((page or pictures[0]).resolve().as_uri())


def page_in(out: Output, folder: Path) -> Path | None:
    """Where the report goes; None where it cannot be made, and what to install is said before the work."""
    try:
        return checked_page(folder / "report.html")
    except MissingExtraError as error:
        out.say(f"there will be no report: {error}")
        return None


def changes_of(comparison: Comparison, certificates: dict[str, CertificateRecord]) -> list[Change]:
    """What changed from the vanilla model to the faithful one, measure by measure."""
    shares = {
        name: {"layers": [{"topk_share": record.layer().share("topk", RADIUS)}]}
        for name, record in certificates.items()
    }
    vanilla, faithful = (record.to_dict() for record in comparison)
    return changes(vanilla, faithful, shares)


def notes_of(comparison: Comparison) -> list[str]:
    """What the table's words mean, and what attacked."""
    first = comparison.records[0]
    return [
        attack_words(first.to_dict()),
        f"Predictions move: relative to their spread. Top {K}: the neighbours a node attends to most, over"
        " the nodes in reach of the attack. Attention decides: how much more it hurts to remove the strongest"
        f" edges than the weakest. Proved: at the output layer, R = {RADIUS}. {RULE}",
        PROMISE,
    ]


def what_it_means(found: list[Change], base: str) -> str:
    """Say whether it helped: in a few words, then predictions under attack, then every measure."""
    held = {change.key: change for change in found}
    text = f"{verdict(found, base, 'FGAI')}."
    if {"attacked", "clean"} <= held.keys():
        (hit, safe), (kept, clean) = (
            [held[key].texts[place] for key in ("attacked", "clean")] for place in (0, 1)
        )
        text += (
            f" Under the same attack {base} gets {hit} of the test nodes right ({safe} without attack), its"
            f" faithful version {kept} ({clean})."
        )
    return f"{text} {balance_words(found)}"


def draw(
    folder: Path,
    models: dict[str, nn.Module],
    graph: Graph,
    comparison: Comparison,
    certificates: dict[str, CertificateRecord],
    seed: int,
) -> tuple[int, list[Path]]:
    """Draw the pictures; return the node they show and where they are."""
    from fgai import figures  # matplotlib is slow to import, and only this needs it

    cases = [
        figures.Case(name, entry, make_attack("standard", "prediction").run(entry, graph, seed=seed))
        for name, entry in models.items()
    ]
    node = telling_node(graph, cases[0].attack, comparison)
    drawn = {
        "before-after": figures.node_before_after(cases, graph, node),
        "attention": figures.node_attention(next(iter(models.values())), graph, node),
        "top-neighbours": figures.top_neighbours(cases, graph, node, k=K),
        "subgraph": figures.subgraph_attention(cases, graph, node),
        "four-properties": figures.four_properties(comparison),
        "f-curves": figures.f_curves(comparison),
        "certified": figures.certified_curves(certificates),
        "losses": figures.loss_curves({name: _history(entry) for name, entry in models.items()}),
    }
    return node, [figures.save(figure, folder / f"{name}.png") for name, figure in drawn.items()]


def telling_node(graph: Graph, attack: AttackResult, comparison: Comparison) -> int:
    """Pick a node worth looking at: attacked, of middling degree, lost by vanilla and not by FGAI.

    Falls back to what comes nearest, and to the node with most neighbours when no node was attacked.
    """
    degree = graph.adjacency.degree.cpu()
    score = torch.zeros(graph.num_nodes)
    if attack.change.endpoints is not None:
        score[attack.change.endpoints.flatten().cpu()] = 4.0
    score += 2.0 * ((degree > K) & (degree <= 12)).float()
    right = [
        torch.from_numpy(record.node_values("correct_attacked").copy())
        for record in (comparison.records[0], comparison.records[-1])
        if "correct_attacked" in record.per_node
    ]
    if len(right) == 2:
        clean = torch.from_numpy(comparison.records[0].node_values("correct_clean").copy())
        score += (clean & ~right[0]).float() + (clean & right[1]).float()
    score += degree.clamp(max=12) / 100.0
    return int(score.argmax())


def _history(model: nn.Module) -> History:
    history = model.history
    assert isinstance(history, History)
    return history
