"""`fgai compare`: several models under one threat, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fgai.attacks import threat_of
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.evaluate import Curves, Nulls, PerNode
from fgai.cli.files import Opened, checked_output, open_model, parsed_box
from fgai.cli.output import Output, command
from fgai.errors import InputError
from fgai.evaluation import Comparison
from fgai.evaluation import compare as compare_models
from fgai.graph import Graph

FORMATS = ("table", "markdown", "latex", "csv")


@command
def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]MODEL...", help="Models to compare; the first is the reference."),
    ],
    *,
    threat: options.Threat = "standard",
    nodes: options.Nodes = None,
    edges: options.Edges = None,
    box: options.Box = None,
    k: options.K = 5,
    seed: options.Seed = 0,
    curves: Curves = True,
    nulls: Nulls = True,
    per_node: PerNode = False,
    format_: Annotated[str, typer.Option("--format", "-f", help="table, markdown, latex or csv.")] = "table",
    dataset: options.OtherDataset = None,
    root: options.Root = None,
    device: options.Device = "cpu",
    output: options.Record = None,
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
    chosen = threat_of(threat).sized(nodes, edges, parsed_box(box))
    one_of(format_, "--format", FORMATS)
    opened = open_models(models, dataset, root, device)
    path = None if output is None else checked_output(output)
    graph = next(iter(opened.values())).graph
    out.say(f"comparing {', '.join(opened)} on {graph!r}, threat {threat}")
    comparison = compare_models(
        {name: entry.model for name, entry in opened.items()},
        graph,
        chosen,
        seed=seed,
        k=k,
        curves=curves,
        nulls=nulls,
        per_node=per_node,
    )
    if path is not None:
        out.say(f"written to {comparison.save(path)}")
    out.result(comparison.to_dict(), lambda console: _show(comparison, format_, console))


def open_models(
    words: list[str], dataset: str | None, root: Path | None, device: str = "cpu"
) -> dict[str, Opened[Graph]]:
    """Read several `[NAME=]FILE` models that were trained on the same data with the same split.

    Raises:
        InputError: two of one name, or of different data.
    """
    opened: dict[str, Opened[Graph]] = {}
    for word in words:
        name, equals, path = word.rpartition("=")
        if not equals:
            name = Path(path).stem
        if name in opened:
            raise InputError(f"two models are called {name!r}; tell them apart with NAME=MODEL")
        opened[name] = open_model(Path(path), dataset, root, device)
    parts = ("dataset", "split_seed", "task")
    splits = {tuple(entry.about.get(part) for part in parts) for entry in opened.values()}
    if len(splits) > 1:
        found = "; ".join(
            f"{name}: {entry.about.get('dataset')}, seed {entry.about.get('split_seed')}"
            for name, entry in opened.items()
        )
        raise InputError(f"the models were trained on different data or splits ({found})")
    return opened


def _show(comparison: Comparison, form: str, console: Console) -> None:
    if form == "table":
        comparison.show(console)
    else:
        text = {"markdown": comparison.to_markdown, "latex": comparison.to_latex, "csv": comparison.to_csv}
        typer.echo(text[form]().rstrip("\n"))
