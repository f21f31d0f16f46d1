"""`fgai bench`: run grids of experiments, and make tables and figures from their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments import Cell, Store, grid_names, read_grid, run_grid
from experiments import command_records as records
from experiments import only as only_of
from experiments import shard as shard_of
from experiments import status as status_of
from experiments.command_records import Cache, Data, Device, Here, Results
from experiments.fingerprint import EARLIER, change_of
from experiments.rerun import TOLERANCE, find, rerun
from experiments.trained import training_code
from fgai.cli import FAILURE, App, Output, command
from fgai.cli.options import check_folder, choices
from fgai.errors import InputError
from fgai.progress import show_progress, stage
from fgai.records import Column, Table

app = App(
    help="Reproduce: run grids of experiments, make tables and figures from records.", no_args_is_help=True
)

Named = typer.Argument(metavar="GRID", help=f"A TOML file, or {choices(grid_names())}.")
Grid = Annotated[str, Named]


Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="FIELD=VALUE,...",
        help="Of the grid only these cells, e.g. method=vanilla,fgai; may be given again.",
    ),
]


@app.command("run", epilog="Example: fgai bench run node --only seed=0 --device cuda --jobs 8 --limit 500")
@command
def run(
    grid: Grid,
    *,
    results: Results = Here,
    only: Only = None,
    device: Device = "cpu",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    shard: Annotated[
        str | None, typer.Option("--shard", help="Run part i/n only, e.g. 2/5; parts may share a folder.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", min=0, help="End by then, in seconds; run again to go on.")
    ] = None,
    redo: Annotated[
        bool,
        typer.Option(
            "--redo", help="Run cells again whose records were made with other settings or searches."
        ),
    ] = False,
    data: Data = None,
    cache: Cache = None,
    out: Output,
) -> None:
    """Run every cell of a grid that has no record yet; failed cells are tried again.

    A killed run loses at most the cells it was in. Exits with 1 if cells failed; their records say why.
    """
    store = Store(results)
    cells = only_of(read_grid(grid), only or ())
    part = cells if shard is None else shard_of(cells, shard)
    check_folder(results)
    stale = len(_changes(part, store))
    todo = len(part) - status_of(part, store).done + stale * redo
    out.say(f"{grid}: {len(part)} cells, {len(part) - todo} done, {todo} to run")
    options: dict[str, Any] = {"device": device, "root": data, "cache": cache, "jobs": jobs, "limit": limit}
    began = monotonic()
    with show_progress(out.progress, out.notes), stage(grid, todo) as bar:

        def finished(cell: Cell, state: str, seconds: float) -> None:
            name = f"{cell.model} {cell.row} {cell.dataset} seed {cell.seed}"
            bar.advance(1, name)
            left = timedelta(seconds=round((monotonic() - began) / bar.done * (todo - bar.done)))
            if state != "done" or not out.notes.is_terminal:
                out.say(f"{bar.done}/{todo} {name} {state} ({seconds:.1f} s), {left} left")

        after = run_grid(part, store, redo=redo, on_cell=finished, **options)
    left = len(_changes(part, store))
    counts = {**dataclasses.asdict(after), "done": after.done - left, "outdated": left}
    values = {"command": "bench run", "grid": grid, "cells": len(part), **counts}

    def show(console: Console) -> None:
        said = ", ".join(f"{number} {name}" for name, number in counts.items() if left or name != "outdated")
        console.print(f"{said}, of {len(part)}")

    out.result(values, show)
    if after.failed:
        raise typer.Exit(FAILURE)


@app.command("status", epilog="Example: fgai bench status node")
@command
def status(
    grid: Annotated[str | None, Named] = None, *, results: Results = Here, only: Only = None, out: Output
) -> None:
    """Say how far a grid has come, by dataset, which cells failed, and which records are outdated.

    Without a grid: how far each of them has come.
    """
    if grid is None and only:
        raise InputError("`--only` chooses among the cells of a grid; name one")
    store = Store(results)
    values, table = _every_grid(store) if grid is None else _one_grid(grid, only or (), store)
    out.result({"command": "bench status", **values}, table.show)


def _every_grid(store: Store) -> tuple[dict[str, Any], Table]:
    """What `status` says of all grids: as JSON, and as a table."""
    names = ("grid", "cells", "done", "earlier", "outdated", "failed", "open", "other code")
    rows: list[list[str | float | None]] = []
    notes = []
    for name in grid_names():
        cells = read_grid(name)
        count, stale = status_of(cells, store), _changes(cells, store)
        earlier, other = sum(change == EARLIER for change in stale.values()), _of_other_code(cells, store)
        states = (count.done - len(stale), earlier, len(stale) - earlier, count.failed, count.open)
        rows.append([name, len(cells), *states, other])
        if count.failed:
            notes.append(f"what failed, and why: `fgai bench status {name}`")
    notes.append(OTHER_CODE)
    values = {"grids": [dict(zip(names, row, strict=True)) for row in rows]}
    return values, Table(f"grids in {store.root}", [Column(name, "d") for name in names], rows, notes)


def _one_grid(grid: str, only: Sequence[str], store: Store) -> tuple[dict[str, Any], Table]:
    """The same of one."""
    cells = only_of(read_grid(grid), only)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.dataset, cell.model), []).append(cell)
    counts = {where: status_of(held, store) for where, held in groups.items()}
    whole = status_of(cells, store)
    errors, stale = _failures(cells, store), _changes(cells, store)
    values: dict[str, Any] = {
        "grid": grid,
        "cells": len(cells),
        **dataclasses.asdict(whole),
        "groups": [
            {"dataset": dataset, "model": model, **dataclasses.asdict(count)}
            for (dataset, model), count in counts.items()
        ],
        "errors": errors,
        "other_code": _of_other_code(cells, store),
        "stale": [{"cell": cell, "change": change} for cell, change in stale.items()],
    }
    rows: list[list[str | float | None]] = [
        [*where, count.done, count.failed, count.open] for where, count in counts.items()
    ]
    rows.append(["", "all", whole.done, whole.failed, whole.open])
    columns = [Column(name, "d") for name in ("dataset", "model", "done", "failed", "open")]
    notes = [f"{entry['cell']}: {entry['error']}" for entry in errors]
    if earlier := sum(change == EARLIER for change in stale.values()):
        notes.append(f"{earlier} done with {EARLIER}")
    for which, change in [item for item in stale.items() if item[1] != EARLIER][:1]:
        notes.append(f"{len(stale) - earlier} outdated, left out of tables, e.g. {which}: {change}")
    return values, Table(f"{grid} in {store.root}", columns, rows, notes)


OTHER_CODE = (
    f"earlier: trained with {EARLIER} (claims.jsonl). other code: records made before a line of what trains"
    " was changed, or by code they do not name. Records whose settings or searches are other ones now are"
    " outdated; what else changes numbers stands in CHANGELOG.md."
)


def _of_other_code(cells: list[Cell], store: Store) -> int:
    """How many records of cells were made by other lines than those that train now."""
    records = [record for _, record in store.finished(cells)]
    return sum(record.get("fingerprint", {}).get("code") != training_code() for record in records)


def _changes(cells: list[Cell], store: Store) -> dict[str, str]:
    """Cells whose records would be made otherwise now, and what differs."""
    changes = {cell.path.stem: change_of(record, cell) for cell, record in store.finished(cells)}
    return {name: change for name, change in changes.items() if change is not None}


def _failures(cells: list[Cell], store: Store) -> list[dict[str, str]]:
    """Cells that failed, and their errors."""
    records = [(cell, store.read(cell)) for cell in cells]
    return [
        {"cell": cell.path.stem, "error": str(record.get("error", "unknown"))}
        for cell, record in records
        if record is not None and record["status"] != "done"
    ]


@app.command("again", epilog="Example: fgai bench again 4b662cbde8c2")
@command
def again(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="Its key, or the name of its record.")],
    *,
    results: Results = Here,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0, help="By which numbers may differ, absolutely or relatively."),
    ] = TOLERANCE,
    device: Device = "cpu",
    data: Data = None,
    cache: Cache = None,
    out: Output,
) -> None:
    """Run one cell again and compare its numbers with its record, which stays as it is.

    Exits with 1 if a number differs by more than the tolerance.
    """
    asked, store = find(cell), records.opened_store(results)
    made, numbers = rerun(asked, store, tolerance=tolerance, device=device, root=data, cache=cache)
    numbers.sort(key=lambda number: not number.agrees)
    agree, stored = sum(number.agrees for number in numbers), store.read(asked) or {}
    parts = ("device", "torch", "python", "fgai")
    about = [", ".join(f"{name} {one['about'][name]}" for name in parts) for one in (stored, made)]
    columns = [
        Column("number"),
        *(Column(name, ".6g") for name in ("record", "now", "difference")),
        Column(""),
    ]
    rows: list[list[str | float | None]] = [
        [path, then, now, None if now is None else now - then, "agrees" if same else "differs"]
        for path, then, now, same in numbers
    ]
    notes = [
        f"record: {about[0]}",
        f"now: {about[1]}",
        f"{agree} of {len(numbers)} numbers agree within {tolerance:g}",
    ]
    values = {"command": "bench again", "cell": asked.path.stem, "tolerance": tolerance, "agree": agree}
    values["numbers"] = [number._asdict() for number in numbers]
    out.result(values, Table(asked.path.stem, columns, rows, notes).show)
    if agree < len(numbers):
        raise typer.Exit(FAILURE)


app.command("table", epilog="Example: fgai bench table f1 --format markdown")(records.table)
app.command("figure", epilog="Example: fgai bench figure f-curves --data amazon-photo")(records.figure)
app.command("bars", epilog="Example: fgai bench bars --missed")(records.bars)
app.command("choose", epilog="Example: fgai bench choose --output presets.toml")(records.choose)
app.command("pack", epilog="Example: fgai bench pack")(records.pack)
app.command("fill", epilog="Example: fgai bench fill docs/results.md README.md")(records.fill)
