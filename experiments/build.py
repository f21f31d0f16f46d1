"""From results to sheets: one row per model, dataset and method, the best of each group marked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from experiments.results import ROWS, SPEAKING, Layers, Results, RowKey
from experiments.sheet import Entry, Estimated, Row, Sheet, published
from experiments.statistics import paired
from fgai.metrics import null_path
from fgai.records import Column, Table

NAMES = {
    "vanilla": "vanilla",
    "ln": "LN",
    "at": "AT",
    "limits": "vanilla + limits",
    "at-limits": "AT + limits",
    "fgai": "FGAI",
    "fgai-certified": "FGAI-certified",
    "fgai-injection": "FGAI-injection",
    "fgai-paper": "FGAI-paper",
    "pro-gnn": "Pro-GNN",
    "gnn-svd": "GNN-SVD",
    "gnnguard": "GNNGuard",
    "soft-median": "Soft-Median",
    "rung": "RUNG",
}
NULLS = {"uniform": "uniform (null)", "random": "random (null)"}
TOUCHED = "overlap_touched."
COMMON = (
    "What is kept is compared with vanilla, seed by seed, over the layers in which both have nodes with more"
    " than 5 neighbours in reach: where an attack chose endpoints with few neighbours, a layer may have none."
    " Vanilla's own number is over those it shares with FGAI."
)
RATIO = "n×: vanilla's mean divided by this one; below 1× it moves more."
OLDER = "†: records of other settings or older searches than today's."


def name_of(row: str) -> str:
    """How a row is called in tables."""
    return NAMES.get(row, row.replace("fgai", "FGAI", 1))


def label(results: Results, row: RowKey) -> str:
    """A row's name, marked where its records are older than today's settings or searches."""
    return f"{name_of(row[2])} †" if row in results.older_rows else name_of(row[2])


def beside_vanilla(results: Results, row: RowKey, path: str, threat: str) -> Layers:
    """By seed the layers that a row is compared with vanilla over; vanilla itself with FGAI."""
    vanilla, fgai = (*row[:2], "vanilla"), (*row[:2], "fgai")
    other = fgai if row == vanilla and results.held(fgai) else row
    return results.layers(dict.fromkeys((vanilla, other)), path, threat)


def entry(results: Results, row: RowKey, column: Estimated, layers: Layers | None = None) -> Entry:
    """Return one cell of a sheet; `layers` are those that its group is compared over."""
    vanilla, wanted = (*row[:2], "vanilla"), len(results.seeds(row))
    known = None if column.paper is None else published(*column.paper, row)
    where = (column.shown.path, column.threat, layers)
    found = results.estimate(row, *where)
    if row == vanilla:
        return Entry(estimate=found if column.own else None, published=known, wanted=wanted)
    ratio = apart = None
    if column.own:
        apart = paired(results.values(row, *where), results.values(vanilla, *where))
    reference = results.estimate(vanilla, *where)
    if column.ratio and found is not None and reference is not None and found.mean:
        ratio = reference.mean / found.mean
    return Entry(
        estimate=found,
        interval=apart,
        ratio=ratio,
        published=known,
        published_ratio=_published_ratio(row, vanilla, column),
        wanted=wanted,
    )


def null_entry(results: Results, model: str, dataset: str, kind: str, column: Estimated) -> Entry:
    """Return a cell of a null row, as measured on FGAI's model, or on vanilla where there is none.

    Strong searches measure no null rows; there those of `standard` stand in.
    """
    if ".chance." in column.shown.path:  # a null row is one itself
        return Entry()
    path = f"null.{kind}.{null_path(column.shown.path)}"
    for threat, name in itertools.product((column.threat, "standard"), ("fgai", "vanilla")):
        row = (model, dataset, name)
        found = results.estimate(row, path, threat)
        if found is not None:
            return Entry(estimate=found, wanted=len(results.seeds(row)))
    return Entry()


def sheet(
    results: Results,
    title: str,
    columns: Sequence[Estimated],
    notes: Sequence[str] = (),
    *,
    order: tuple[str, ...] = ROWS,
    nulls: bool = False,
) -> Sheet | Table:
    """Return a sheet with a section per model and a row per dataset and method that has records."""
    if not results.records:
        return nothing(results, title)
    sections: dict[str, list[Row]] = {}
    for model, dataset in results.pairs():
        rows = sections.setdefault(model, [])
        keys = [(model, dataset, name) for name in results.rows(model, dataset, order)]
        keys = [key for key in keys if results.held(key)]
        if not keys:
            continue
        by_column = []
        for column in columns:
            compared = ((key, beside_vanilla(results, key, column.shown.path, column.threat)) for key in keys)
            by_column.append(mark_best(column, [entry(results, key, column, held) for key, held in compared]))
        lines = zip(*by_column, strict=True)
        rows += [Row((dataset, label(results, key)), line) for key, line in zip(keys, lines, strict=True)]
        for kind, name in NULLS.items() if nulls else ():
            cells = tuple(null_entry(results, model, dataset, kind, column) for column in columns)
            if any(cell.estimate is not None for cell in cells):
                rows.append(Row((dataset, name), cells))
    sections = {model: rows for model, rows in sections.items() if rows}
    threats = dict.fromkeys(column.threat for column in columns)
    entries = [row.entries for rows in sections.values() for row in rows]
    there = [any(line[place].estimate is not None for line in entries) for place in range(len(columns))]
    if not any(there):
        return nothing(results, title, threats)
    sections = {
        model: [replace(row, entries=tuple(itertools.compress(row.entries, there))) for row in rows]
        for model, rows in sections.items()
    }
    unknown = [column.shown.title for column, held in zip(columns, there, strict=True) if not held]
    columns = list(itertools.compress(columns, there))
    later = [f"No records yet of: {', '.join(unknown)}."] * bool(unknown)
    notes = [*notes, *layer_notes(results, columns), *later, *about(results, threats)]
    return Sheet(title, columns, sections, notes)


def nothing(results: Results, title: str, threats: Iterable[str] = ()) -> Table:
    """Return the table that says in words that there is nothing to show yet."""
    threats = list(threats)
    total, missing = len(results.wanted(threats)), results.missing(threats)
    words = f"none yet; {missing} of the {total} cells of its grid are missing"
    if results.outdated:
        words += f"; {results.outdated} records of other settings or older searches are kept and not shown"
    return Table(title, [Column("records")], [[f"– {words}"]])


def mark_best(column: Estimated, cells: Sequence[Entry]) -> list[Entry]:
    """Mark the best of a group among those with most seeds; all that are equal, none where there is one."""
    most = max((cell.estimate.seeds for cell in cells if cell.estimate is not None), default=0)
    held = [cell.estimate.mean for cell in cells if cell.estimate is not None and cell.estimate.seeds == most]
    if not column.shown.better or len(held) < 2:
        return list(cells)
    best = (column.shown.best(held), most)
    return [
        replace(cell, best=cell.estimate is not None and (cell.estimate.mean, cell.estimate.seeds) == best)
        for cell in cells
    ]


def about(results: Results, threats: Iterable[str] = ()) -> list[str]:
    """What every table says below itself: how numbers are made, what is missing, what was warned of."""
    lines = [
        "Mean ± standard deviation over seeds; bold: the best of a group; “paper”: as published; intervals:"
        " `fgai bench table`."
    ]
    threats = list(threats)
    if results.expected:
        lines.append(count(results, threats))
    return [*lines, *warned(results, threats)]


def warned(results: Results, threats: Iterable[str] = ()) -> list[str]:
    """How many records carry each reliability warning; one sentence, or none."""
    found = []
    for code, places in results.warnings(threats).items():
        found.append(f"{code} × {sum(places.values())}")
    said = "Reliability warnings in the records (reliability.md)"
    return [f"{said}: {', '.join(found)}."] if found else []


def layer_notes(results: Results, columns: Sequence[Estimated]) -> list[str]:
    """What means over layers leave out: layers that some method of a group has no value in, flat ones."""
    means = [column for column in columns if column.shown.path.endswith(".all")]
    lines = [COMMON] if any(column.shown.path.startswith(TOUCHED) for column in means) else []
    speaking = {column.threat for column in means if column.shown.path.partition(".")[0] in SPEAKING}
    return lines + [line for threat in sorted(speaking) for line in flat_note(results, threat)]


def flat_note(results: Results, threat: str) -> list[str]:
    """Name the layers that similarity and sharpness leave out, if there are any."""
    found = [
        f"{model} on {dataset}, layer {', '.join(map(str, layers))}"
        for model, dataset in results.pairs()
        if (layers := results.flat(model, dataset, threat))
    ]
    said = "Similarity and sharpness leave out layers whose vanilla attention is flat to 1e-6"
    return [f"{said}: {'; '.join(found)}."] if found else []


def count(results: Results, threats: Iterable[str] = ()) -> str:
    """Say how many of the expected cells are there, and how many records are outdated."""
    threats = list(threats)
    total, missing = len(results.wanted(threats)), results.missing(threats)
    said = f"{missing} of {total} cells are missing (–)" if missing else f"All {total} cells are there"
    if results.outdated:
        said += f"; {results.outdated} records of other settings or older searches are not shown"
    if results.older_rows:
        said += f". {OLDER.removesuffix('.')}"
    return f"{said}."


def _published_ratio(row: RowKey, vanilla: RowKey, column: Estimated) -> float | None:
    if not column.ratio or column.paper is None:
        return None
    ours, theirs = (published(*column.paper, key) for key in (row, vanilla))
    return None if ours is None or theirs is None or not ours.mean else theirs.mean / ours.mean
