"""`fgai data`: which datasets there are, what is in them, and graphs on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fgai import datasets
from fgai.cli import options
from fgai.cli.output import Output, command
from fgai.cli.tree import App
from fgai.datasets.download import find, search_path
from fgai.large import convert as convert_graph

app = App(no_args_is_help=True)


@app.callback()
def data() -> None:
    """The datasets: which there are, what is in them, and graphs larger than memory."""


def location_of(name: str, root: Any = None) -> str:
    """Say where a dataset's files are: built in, a folder, or nowhere yet."""
    about = datasets.info(name)
    if not about.files:
        return "built in"
    files = find(about.files, search_path(root))
    return "to download" if files is None else str(files[0].parent)


@app.command("list", epilog="Example: fgai data list --json")
@command
def list_(*, root: options.Root = None, json: options.Json = False, quiet: options.Quiet = False) -> None:
    """List the datasets, their sizes, and whether their files are on this machine."""
    rows = [
        {
            "name": name,
            "nodes": about.num_nodes,
            "edges": about.num_edges,
            "features": about.num_features,
            "classes": about.num_classes,
            "graphs": about.num_graphs,
            "task": about.task,
            "where": location_of(name, root),
        }
        for name in datasets.names()
        for about in [datasets.info(name)]
    ]

    def show(console: Console) -> None:
        table = Table(box=None, padding=(0, 1))
        for column in ("name", "task", "nodes", "edges", "features", "classes", "where"):
            words = column in ("name", "task", "where")
            table.add_column(column, justify="left" if words else "right", no_wrap=True)
        for row in rows:
            where = str(row["where"])
            shown = where if where in ("built in", "to download") else "here"
            sizes = (f"{row[name]:,}" for name in ("nodes", "edges", "features", "classes"))
            table.add_row(str(row["name"]), str(row["task"]), *sizes, shown)
        console.print(table)

    Output(json, quiet).result({"command": "data list", "datasets": rows}, show)


@app.command("info", epilog="Example: fgai data info amazon-photo")
@command
def info(
    name: Annotated[str, typer.Argument(help="Name of a dataset.")],
    *,
    root: options.Root = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say what a dataset holds, where it comes from and which files it needs."""
    about = datasets.info(name)
    values = {**dataclasses.asdict(about), "where": location_of(name, root)}

    def show(console: Console) -> None:
        console.print(f"[bold]{about.name}[/]  ({values['where']})")
        console.print(about.description, markup=False)
        table = Table(show_header=False, box=None)
        for label in ("num_nodes", "num_edges", "num_features", "num_classes", "num_graphs"):
            table.add_row(label.removeprefix("num_"), f"{values[label]:,}")
        for label in ("task", "source", "citation", "licence"):
            table.add_row(label, str(values[label]))
        table.add_row("splits", ", ".join(about.splits))
        for layout in about.files:
            table.add_row("files", "\n".join(layout))
        console.print(table)

    Output(json, quiet).result({"command": "data info", **values}, show)


@app.command("convert", epilog="Example: fgai data convert edges.csv.gz graph --features x.npy --undirected")
@command
def convert(
    source: Annotated[str, typer.Argument(help="Edge list, PyG file, or name of a dataset.")],
    target: Annotated[Path, typer.Argument(help="The new folder.")],
    *,
    node_table: Annotated[
        Path | None, typer.Option("--node-table", help="CSV with features, labels and split of the nodes.")
    ] = None,
    features: Annotated[
        Path | None, typer.Option("--features", help=".npy with the features [N, F].")
    ] = None,
    labels: Annotated[Path | None, typer.Option("--labels", help=".npy with the classes [N].")] = None,
    undirected: Annotated[
        bool, typer.Option("--undirected", help="Also store every edge's reverse.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older stored graph.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Go on where an earlier run was stopped, or discard what it left.")
    ] = True,
    root: options.Root = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn a graph into a folder of memory-mapped arrays, which `--dataset` takes like a name.

    Edge lists (.csv, .txt, .tsv, .edges, also .gz; .parquet, .npy) are streamed and may be larger than
    memory. The folder appears when it is whole; a run that was stopped goes on from its last finished stage.
    """
    stored = convert_graph(
        source,
        target,
        node_table=node_table,
        features=features,
        labels=labels,
        undirected=undirected,
        overwrite=overwrite,
        resume=resume,
        root=root,
    )
    sizes = {"nodes": stored.num_nodes, "edges": stored.num_edges, "features": stored.num_features}
    values = {"path": str(stored.path), "name": stored.name, **sizes, "fingerprint": stored.fingerprint}

    def show(console: Console) -> None:
        counts = ", ".join(f"{count:,} {what}" for what, count in sizes.items())
        console.print(f"{target}: {counts} ({stored.fingerprint})", markup=False, soft_wrap=True)

    Output(json, quiet).result({"command": "data convert", **values}, show)
