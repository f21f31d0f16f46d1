"""Tables, figures, bars and presets from the records of `fgai bench run`."""

from __future__ import annotations

import csv
import dataclasses
import io
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments import Store
from experiments.tables import FORMATS, TABLES, render
from experiments.tables import table as parts_of
from fgai.checks import one_of
from fgai.cli import Output, command
from fgai.cli.options import Epochs, Seed, check_folder, check_output, choices
from fgai.errors import DataError
from fgai.files import write_atomic

Results = Annotated[Path, typer.Option("--results", "-r", help="Folder of the records.")]
Data = Annotated[
    Path | None, typer.Option("--root", help="Folder with the datasets' files; $FGAI_DATA by default.")
]
Cache = Annotated[Path | None, typer.Option("--cache", help="Folder for trained models that cells share.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Format = Annotated[str, typer.Option("--format", "-f", help=f"{choices(FORMATS)}.")]
Here = Path("results")


@command
def table(
    name: Annotated[str, typer.Argument(help=f"{choices(TABLES)}.")],
    *,
    results: Results = Here,
    format_: Format = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    out: Output,
) -> None:
    """Print a table, made from records alone, the paper's numbers beside ours."""
    one_of(format_, "--format", FORMATS)
    store = opened_store(results)
    if output is not None:
        write_atomic(check_output(output, force=True), _text(name, store, format_))
        out.say(f"written to {output}")

    def show(console: Console) -> None:
        if output is None and format_ == "table":
            for part in parts_of(name, store):
                part.show(console)
        elif output is None:
            typer.echo(_text(name, store, format_), nl=False)

    values: dict[str, Any] = {"command": "bench table", "table": name}
    if out.json:
        values["rows"] = list(csv.DictReader(io.StringIO(render(name, store, "csv"))))
        values["notes"] = list(dict.fromkeys(note for part in parts_of(name, store) for note in part.notes))
    out.result(values, show)


def opened_store(results: Path) -> Store:
    """Return the records of a folder; raise `DataError` if it is not there."""
    if not results.is_dir():
        raise DataError(f"there is no folder of records at {results}; name it with --results")
    return Store(results)


def _text(name: str, store: Store, form: str) -> str:
    return render(name, store, "markdown" if form == "table" else form).rstrip("\n") + "\n"


@command
def figure(
    name: Annotated[
        str,
        typer.Argument(
            help="f-curves, loss, attention-subgraph, topk-neighbours, certified, injection, explainers"
            " or instability."
        ),
    ],
    *,
    results: Results = Here,
    dataset: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="Only this one; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="Only this one; may be repeated.")
    ] = None,
    threat: Annotated[
        str, typer.Option("--threat", "-t", help="Threat that attacks the models drawn, at its own budget.")
    ] = "standard",
    seed: Seed = 0,
    epochs: Epochs = None,
    data: Data = None,
    cache: Cache = None,
    device: Device = "cpu",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path(
        "figures"
    ),
    out: Output,
) -> None:
    """Draw a figure as PDF and PNG: from records where they hold it, else from models trained for it."""
    from experiments.figures import Choice
    from experiments.figures import figure as figures_of
    from experiments.subjects import Source
    from fgai.attacks import THREATS
    from fgai.reports.figures import save

    one_of(threat, "--threat", tuple(THREATS))
    source = Source(seed=seed, root=data, cache=cache, device=device, epochs=epochs, threat=threat)
    folder = check_folder(output)
    written: list[str] = []
    for stem, drawn in figures_of(name, Store(results), source, Choice(dataset or (), model or ())):
        written += [str(save(drawn, folder / f"{stem}.{kind}")) for kind in ("pdf", "png")]
        out.say(f"written to {folder / stem}.pdf and .png")
    values = {"command": "bench figure", "figure": name, "files": written}
    out.result(values, lambda console: console.print(f"{len(written)} files in {folder}", markup=False))


@command
def bars(
    *,
    results: Results = Here,
    missed: Annotated[bool, typer.Option("--missed", help="Only bars missed or still open.")] = False,
    format_: Format = "table",
    out: Output,
) -> None:
    """Check what must come out: every bar on every model and dataset, met or missed, with the numbers."""
    from experiments import bars as checks

    one_of(format_, "--format", FORMATS)
    found = checks.check(opened_store(results))
    shown = checks.table(found, every=not missed)
    texts = {"markdown": shown.to_markdown, "latex": shown.to_latex, "csv": shown.to_csv}

    def show(console: Console) -> None:
        if format_ != "table":
            typer.echo(texts[format_]().rstrip("\n"))
            return
        shown.show(console)
        checks.summary(found).show(console)

    values = {"command": "bench bars", "bars": [dataclasses.asdict(bar) for bar in found]}
    out.result(values, show)


@command
def choose(
    *,
    results: Results = Here,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead of standard output.")
    ] = None,
    out: Output,
) -> None:
    """Print the presets with the best settings of the search, by validation nodes alone, as TOML."""
    from experiments.choose import presets

    text = presets(Store(results))
    if output is not None:
        write_atomic(check_output(output, force=True), text)
        out.say(f"written to {output}")
    values: dict[str, Any] = {"command": "bench choose", "presets": tomllib.loads(text)}
    out.result(values, lambda console: None if output else typer.echo(text, nl=False))


@command
def pack(*, results: Results = Here, out: Output) -> None:
    """Put the records of finished cells into one file for each kind, without the curves of searches.

    Numbers of evaluations keep nine digits. New records are again files of their own; packing again adds
    them. Not while a grid is running in the same folder.
    """
    count = opened_store(results).pack()
    values = {"command": "bench pack", "packed": count}
    out.result(values, lambda console: console.print(f"{count} records packed"))


@command
def fill(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files with table marks.")],
    *,
    results: Results = Here,
    out: Output,
) -> None:
    """Replace the tables between `<!-- table: NAME -->` and `<!-- end -->` by those of the records."""
    from experiments.document import update

    store = opened_store(results)
    changed = {str(path): update(path, store) for path in documents}

    def show(console: Console) -> None:
        for path, new in changed.items():
            console.print(f"{path}: {'rewritten' if new else 'unchanged'}", markup=False, soft_wrap=True)

    out.result({"command": "bench fill", "changed": changed}, show)
