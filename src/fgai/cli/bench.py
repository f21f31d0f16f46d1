"""`fgai bench`: run grids of experiments, and make tables and figures from their records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fgai.bench import Cell, Store, read_grid, run_grid
from fgai.bench import shard as shard_of
from fgai.bench import status as status_of
from fgai.checks import one_of
from fgai.cli import options
from fgai.cli.files import checked_folder, checked_output
from fgai.cli.grid_progress import GridProgress
from fgai.cli.output import FAILURE, Output, command
from fgai.evaluate.table import Column, Table
from fgai.files import write_atomic

app = typer.Typer(
    help="Reproduce: run grids of experiments, make tables and figures from records.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Grid = Annotated[
    str, typer.Argument(metavar="GRID", help="A TOML file, or node, ablation, search, cost or certify.")
]
Results = Annotated[Path, typer.Option("--results", "-r", help="Folder of the records.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", "--root", help="Folder with the datasets' files; $FGAI_DATA by default."),
]
Cache = Annotated[Path | None, typer.Option("--cache", help="Folder for trained models that cells share.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Format = Annotated[str, typer.Option("--format", "-f", help="table, markdown, latex or csv.")]
Here = Path("results")


@app.command("run", epilog="Example: fgai bench run node --device cuda --jobs 8 --cache cache --limit 500")
@command
def run(
    grid: Grid,
    *,
    results: Results = Here,
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    shard: Annotated[
        str | None, typer.Option("--shard", help="Run part i/n only, e.g. 2/5; parts may share a folder.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", min=0, help="Stop after so many seconds; run again to go on.")
    ] = None,
    data: Data = None,
    cache: Cache = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run every cell of a grid that has no record yet; failed cells are tried again.

    A killed run loses at most the cells it was in. Exits with 1 if cells failed; their records say why.
    """
    out, store = Output(json, quiet), Store(results)
    cells = read_grid(grid)
    part = cells if shard is None else shard_of(cells, shard)
    checked_folder(results)
    before = status_of(part, store)
    todo = len(part) - before.done
    out.say(f"{grid}: {len(part)} cells, {before.done} done, {todo} to run")
    with GridProgress(todo, out) as progress:
        after = run_grid(
            part,
            store,
            device=device,
            root=data,
            cache=cache,
            jobs=jobs,
            limit=limit,
            on_cell=progress.finished,
        )
    values = {"command": "bench run", "grid": grid, "cells": len(part), **dataclasses.asdict(after)}

    def show(console: Console) -> None:
        console.print(f"{after.done} done, {after.failed} failed, {after.open} open, of {len(part)}")

    out.result(values, show)
    if after.failed:
        raise typer.Exit(FAILURE)


@app.command("status", epilog="Example: fgai bench status node")
@command
def status(
    grid: Grid, *, results: Results = Here, json: options.Json = False, quiet: options.Quiet = False
) -> None:
    """Say how far a grid has come, by dataset, and which cells failed."""
    cells, store = read_grid(grid), Store(results)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.dataset, cell.model), []).append(cell)
    counts = {where: status_of(held, store) for where, held in groups.items()}
    whole = status_of(cells, store)
    failed = [_failure(cell, store) for cell in cells]
    errors = [entry for entry in failed if entry is not None]
    values: dict[str, Any] = {
        "command": "bench status",
        "grid": grid,
        "cells": len(cells),
        **dataclasses.asdict(whole),
        "groups": [
            {"dataset": dataset, "model": model, **dataclasses.asdict(count)}
            for (dataset, model), count in counts.items()
        ],
        "errors": errors,
    }

    def show(console: Console) -> None:
        rows: list[list[str | float | None]] = [
            [*where, count.done, count.failed, count.open] for where, count in counts.items()
        ]
        rows.append(["", "all", whole.done, whole.failed, whole.open])
        names = ("dataset", "model", "done", "failed", "open")
        columns = [Column(name, "d") for name in names]
        notes = [f"{entry['cell']}: {entry['error']}" for entry in errors]
        Table(f"{grid} in {results}", columns, rows, notes).show(console)

    Output(json, quiet).result(values, show)


def _failure(cell: Cell, store: Store) -> dict[str, str] | None:
    record = store.read(cell)
    if record is None or record["status"] == "done":
        return None
    return {"cell": cell.path.stem, "error": str(record.get("error", "unknown"))}


@app.command("table", epilog="Example: fgai bench table f1 --format markdown")
@command
def table(
    name: Annotated[
        str,
        typer.Argument(
            help="headline, stability, f1, f-slope, similarity, ablation, cost, certificates or search."
        ),
    ],
    *,
    results: Results = Here,
    format_: Format = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Print a table, made from records alone, the paper's numbers beside ours."""
    from fgai.bench.tables import FORMATS, render
    from fgai.bench.tables import table as parts_of

    one_of(format_, "--format", FORMATS)
    out, store = Output(False, quiet), Store(results)
    if format_ == "table" and output is None:
        for part in parts_of(name, store):
            part.show(out.console)
        return
    text = render(name, store, "markdown" if format_ == "table" else format_).rstrip("\n") + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(checked_output(output), text)
        out.say(f"written to {output}")


@app.command("figure", epilog="Example: fgai bench figure f-curves --dataset amazon-photo")
@command
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="f-curves, loss, attention-subgraph, topk-neighbours, certified, instability or properties."
        ),
    ],
    *,
    results: Results = Here,
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", "-d", help="Only this one; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Only this one; may be repeated.")
    ] = None,
    seed: options.Seed = 0,
    epochs: options.Epochs = None,
    data: Data = None,
    cache: Cache = None,
    device: Device = "cpu",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path(
        "figures"
    ),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw a figure as PDF and PNG: from records where they hold it, else from models trained for it."""
    from fgai.bench.figures import Choice
    from fgai.bench.figures import figure as figures_of
    from fgai.bench.subjects import Source
    from fgai.figures import save

    out = Output(json, quiet)
    source = Source(seed=seed, root=data, cache=cache, device=device, epochs=epochs)
    folder = checked_folder(output)
    written: list[str] = []
    for stem, drawn in figures_of(name, Store(results), source, Choice(dataset or (), model or ())):
        written += [str(save(drawn, folder / f"{stem}.{kind}")) for kind in ("pdf", "png")]
        out.say(f"written to {folder / stem}.pdf and .png")
    values = {"command": "bench figure", "figure": name, "files": written}
    out.result(values, lambda console: console.print(f"{len(written)} files in {folder}", markup=False))


@app.command("bars", epilog="Example: fgai bench bars --missed")
@command
def bars(
    *,
    results: Results = Here,
    missed: Annotated[bool, typer.Option("--missed", help="Only bars missed or still open.")] = False,
    format_: Format = "table",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check what must come out: every bar on every model and dataset, met or missed, with the numbers."""
    from fgai.bench import bars as checks
    from fgai.bench.tables import FORMATS

    one_of(format_, "--format", FORMATS)
    found = checks.check(Store(results))
    shown = checks.table(found, every=not missed)
    texts = {"markdown": shown.to_markdown, "latex": shown.to_latex, "csv": shown.to_csv}

    def show(console: Console) -> None:
        if format_ != "table":
            typer.echo(texts[format_]().rstrip("\n"))
            return
        shown.show(console)
        checks.summary(found).show(console)

    values = {"command": "bench bars", "bars": [dataclasses.asdict(bar) for bar in found]}
    Output(json, quiet).result(values, show)


@app.command("choose", epilog="Example: fgai bench choose --output presets.toml")
@command
def choose(
    *,
    results: Results = Here,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead of standard output.")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Print the presets with the best settings of the search, by validation nodes alone, as TOML."""
    from fgai.bench.choose import presets

    text = presets(Store(results))
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(checked_output(output), text)
        Output(False, quiet).say(f"written to {output}")


@app.command("fill", epilog="Example: fgai bench fill docs/results.md README.md")
@command
def fill(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files with table marks.")],
    *,
    results: Results = Here,
    quiet: options.Quiet = False,
) -> None:
    """Replace the tables between `<!-- table: NAME -->` and `<!-- end -->` by those of the records."""
    from fgai.bench.document import update

    out, store = Output(False, quiet), Store(results)
    for path in documents:
        out.say(f"{path}: {'rewritten' if update(path, store) else 'unchanged'}")
