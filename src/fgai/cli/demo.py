"""`fgai demo`: the whole story on one dataset, in one command."""

from __future__ import annotations

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
from fgai.certify import CertificateRecord, certify
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import checked_folder, resumable, write_model
from fgai.cli.output import Output, command
from fgai.errors import MissingExtraError
from fgai.evaluate import Comparison, EvaluationRecord, compare
from fgai.evaluate.table import Cell, Column, Table
from fgai.graph import Graph
from fgai.training import MODELS, History, train_method

RADIUS = 0.01
K = 5


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
    graph = datasets.load(dataset, root, seed)
    folder = checked_folder(output)
    out.say(f"1/4  training {model} on {graph!r} (the first run compiles the kernels)")
    settings = {} if epochs is None else {"epochs": epochs}
    about = {"dataset": dataset, "split_seed": seed, "seed": seed, "settings": settings}
    models: dict[str, nn.Module] = {}
    paths: dict[str, Path] = {}
    for name, method in ((model, "vanilla"), ("FGAI", "fgai")):
        if method == "fgai":
            out.say("2/4  making it faithful")
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
            paths[name] = write_model(models[name], path, graph, {**about, "method": method})
    out.say("3/4  attacking both with the same budget, and measuring")
    comparison = compare(models, graph, seed=seed, k=K, per_node=True)
    out.say("4/4  certifying and drawing")
    certificates = {
        name: certify(entry, graph, vanilla=models[model], radius=RADIUS, k1=K, k2=K)
        for name, entry in models.items()
    }
    node, pictures = draw(folder, models, graph, comparison, certificates, seed)
    comparison.save(folder / "comparison.json")
    for name, record in certificates.items():
        record.save(folder / f"certificate-{name.lower()}.json")
    again = ["fgai", "demo", "--dataset", dataset, "--model", model, "--seed", str(seed)]
    again += [] if epochs is None else ["--epochs", str(epochs)]
    page = folder / "report.html"
    made = write_page(out, page, models, graph, comparison, certificates, node, shlex.join(again))
    table = summary_table(comparison, certificates)
    meaning = what_it_means(comparison)
    values: dict[str, Any] = {
        "command": "demo",
        "dataset": dataset,
        "model": model,
        "seed": seed,
        "meaning": meaning,
        "table": {column.title: [row[i] for row in table.rows] for i, column in enumerate(table.columns)},
        "node": node,
        "models": {name: str(path) for name, path in paths.items()},
        "pictures": [str(path) for path in pictures],
        "report": str(page) if made else None,
        "comparison": str(folder / "comparison.json"),
    }

    def show(console: Console) -> None:
        table.show(console)
        console.print(f"\n{meaning}\n", markup=False)
        if made:
            console.print(f"see it all in a browser:  {page}", markup=False, soft_wrap=True)
        console.print(f"pictures, models and records are in {folder}/", markup=False, soft_wrap=True)
        first = paths["FGAI"]
        console.print(f"look at one node:  fgai explain {first} --node {node}", markup=False, soft_wrap=True)

    out.result(values, show)
    if open_:
        webbrowser.open((page if made else pictures[0]).resolve().as_uri())


def write_page(
    out: Output,
    path: Path,
    models: dict[str, nn.Module],
    graph: Graph,
    comparison: Comparison,
    certificates: dict[str, CertificateRecord],
    node: int,
    line: str,
) -> bool:
    """Write the report; say what to install where it cannot be made."""
    from fgai.report import write_report

    options: dict[str, Any] = {"models": models, "data": graph, "certificates": certificates, "node": node}
    try:
        write_report(comparison, path, **options, reproduce=[line])
    except MissingExtraError as error:
        out.say(f"no report: {error}")
        return False
    return True


def summary_table(comparison: Comparison, certificates: dict[str, CertificateRecord]) -> Table:
    """The headline numbers, one row per model."""
    columns = [
        Column("model"),
        Column("F1", ".3f", "higher"),
        Column("F1 attacked", ".3f", "higher"),
        Column("g-TVD", ".1e", "lower"),
        Column("g-JSD", ".1e", "lower"),
        Column("overlap", ".3f", "higher"),
        Column("F-slope gap", ".2f", "higher"),
        Column("… attacked", ".2f", "higher"),
        Column("certified", ".1%", "higher"),
    ]
    paths = (
        "f1.clean",
        "f1.attacked",
        "g_tvd.rel",
        "g_jsd.all",
        "overlap_touched.explanation.all",
        "f_slope.node.clean.gap",
        "f_slope.node.attacked.gap",
    )
    rows: list[list[Cell]] = []
    for record in comparison:
        share = certificates[record.name].layer().share("topk", RADIUS)
        rows.append([record.name, *(record.get(path) for path in paths), share])
    first = comparison.records[0]
    note = (
        f"attack: {first.threat['name']}, {first.data['name']}, test nodes."
        f" g-TVD: change of predictions relative to their spread. g-JSD: change of attention, all layers."
        f" overlap: top-{K} neighbours kept under the explanation attack, nodes in its reach."
        " F-slope gap: how much more removing the strongest edges hurts than removing the weakest."
        f" certified: nodes whose top-{K} at the output layer provably stays, radius {RADIUS}."
    )
    return Table("What faithful attention changes", columns, rows, (note,))


def what_it_means(comparison: Comparison) -> str:
    """One sentence that says whether it helped: how much of the prediction and of the explanation holds."""
    vanilla, twin = comparison.records[0], comparison.records[-1]
    parts = []
    for record, who, when in ((vanilla, vanilla.name, ""), (twin, "its faithful twin", " the same")):
        before, after = (record.get(f"f1.{view}") for view in ("clean", "attacked"))
        if before is not None and after is not None:
            share = f"{100 * before:.0f} % of the test nodes right and {100 * after:.0f} %"
            parts.append(f"{who} gets {share} under{when or ' the'} attack")
    text = f"{verdict(vanilla, twin)}: {', '.join(parts)}"
    lost = [record.get("overlap_touched.explanation.all") for record in (vanilla, twin)]
    if None not in lost:
        first, second = (f"{K * (1 - overlap):.1f}" for overlap in lost)
        text += (
            f"; an attack on the explanation replaces {first} of a node's {K} strongest neighbours,"
            f" {second} after faithful training"
        )
    return f"{text}."


def verdict(vanilla: EvaluationRecord, twin: EvaluationRecord) -> str:
    """Say `It helped`, `Mixed` or `It did not help`.

    It helped if predictions hold better under attack, clean predictions are as good (within 0.02) and the
    explanation holds no worse (within 0.005). Mixed: predictions hold better, but at such a cost.
    """

    def gain(path: str) -> float:
        ours, theirs = twin.get(path), vanilla.get(path)
        return 0.0 if ours is None or theirs is None else float(ours) - float(theirs)

    if gain("f1.attacked") <= 0:
        return "It did not help"
    costly = gain("f1.clean") < -0.02 or gain("overlap_touched.explanation.all") < -0.005
    return "Mixed" if costly else "It helped"


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
    """Pick a node worth looking at: attacked, of middling degree, and lost by vanilla but not by the twin.

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
