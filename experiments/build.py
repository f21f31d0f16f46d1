"""From results to sheets: one row per model, dataset and method, the best of each group marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.layers import SPEAKING
from experiments.paper import published
from experiments.results import ROWS, Layers, Results
from experiments.sheet import Entry, Estimated, Row, Sheet
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
}
NULLS = {"uniform": "uniform (null)", "random": "random (null)"}
TOUCHED = "overlap_touched."
COMMON = (
    "What is kept is compared, seed by seed, over the layers in which every method of a group has nodes with"
    " more than 5 neighbours in reach: where an attack chose endpoints with few neighbours, a layer may have"
    " none."
)


def name_of(row: str) -> str:
    """How a row is called in tables."""
    return NAMES.get(row, row.replace("fgai", "FGAI", 1))


def entry(
    results: Results,
    model: str,
    dataset: str,
    row: str,
    column: Estimated,
    layers: Layers | None = None,
    base: str = "vanilla",
) -> Entry:
    """Return one cell of a sheet; `layers` are those that its group is compared over."""
    wanted = len(results.seeds(model, dataset, row))
    known = None
    if column.paper is not None:
        known = published(column.paper[0], model, dataset, row, column.paper[1])
    where = (column.shown.path, column.threat, layers)
    found = results.estimate(model, dataset, row, *where)
    if row == base:
        return Entry(estimate=found if column.own else None, published=known, wanted=wanted)
    ratio = apart = None
    if column.own:
        apart = paired(*(results.values(model, dataset, name, *where) for name in (row, base)))
    reference = results.estimate(model, dataset, base, *where)
    if column.ratio and found is not None and reference is not None and found.mean:
        ratio = reference.mean / found.mean
    return Entry(
        estimate=found,
        interval=apart,
        ratio=ratio,
        published=known,
        published_ratio=_published_ratio(model, dataset, row, column, base),
        wanted=wanted,
    )


def null_entry(results: Results, model: str, dataset: str, kind: str, column: Estimated) -> Entry:
    """Return a cell of a null row, as measured on FGAI's model, or on vanilla where there is none."""
    path = f"null.{kind}.{null_path(column.shown.path)}"
    for row in ("fgai", "vanilla"):
        found = results.estimate(model, dataset, row, path, column.threat)
        if found is not None:
            return Entry(estimate=found, wanted=len(results.seeds(model, dataset, row)))
    return Entry()


def sheet(
    results: Results,
    title: str,
    columns: Sequence[Estimated],
    notes: Sequence[str] = (),
    *,
    order: tuple[str, ...] = ROWS,
    nulls: bool = False,
    models: Sequence[str] | None = None,
) -> Sheet | Table:
    """Return a sheet with a section per model and a row per dataset and method that has records.

    Args:
        results: of the records.
        title: of the sheet.
        columns: one per metric.
        notes: below it; missing cells and warnings are added.
        order: of the rows; others follow.
        nulls: add the null rows.
        models: shown; all there are by default.
    """
    if not results.records:
        return nothing(results, title)
    sections: dict[str, list[Row]] = {}
    for model in models or results.models():
        rows: list[Row] = []
        for dataset in results.datasets(model):
            names = [row for row in results.rows(model, dataset, order) if results.held(model, dataset, row)]
            if not names:
                continue
            shared = [results.layers(model, dataset, names, c.shown.path, c.threat) for c in columns]
            group = [
                [entry(results, model, dataset, row, *pair) for pair in zip(columns, shared, strict=True)]
                for row in names
            ]
            marked = [mark_best(c, held) for c, held in zip(columns, zip(*group, strict=True), strict=True)]
            lines = [tuple(line) for line in zip(*marked, strict=True)]
            rows += [Row((dataset, name_of(row)), line) for row, line in zip(names, lines, strict=True)]
            for kind, label in NULLS.items() if nulls else ():
                cells = tuple(null_entry(results, model, dataset, kind, column) for column in columns)
                if any(cell.estimate is not None for cell in cells):
                    rows.append(Row((dataset, label), cells))
        if rows:
            sections[model] = rows
    notes = [*notes, *layer_notes(results, columns), *about(results)]
    return Sheet(title, ("dataset", "method"), columns, sections, notes)


def nothing(results: Results, title: str) -> Table:
    """Return the table that says in words that there is nothing to show yet."""
    words = f"none yet; {results.missing} of the {len(results.expected)} cells of its grid are missing"
    if results.outdated:
        words += f"; {results.outdated} records of other settings or older searches are kept and not shown"
    return Table(title, [Column("records")], [[f"– {words}"]])


def mark_best(column: Estimated, cells: Sequence[Entry]) -> list[Entry]:
    """Mark the best of a group; all of them where they are equal, none where there is one only."""
    held = [cell.estimate.mean for cell in cells if cell.estimate is not None]
    if not column.shown.direction or len(held) < 2:
        return list(cells)
    best = column.shown.best(held)
    return [replace(cell, best=cell.estimate is not None and cell.estimate.mean == best) for cell in cells]


def about(results: Results) -> list[str]:
    """What every table says below itself: how numbers are made, what is missing, what was warned of."""
    lines = [
        "Mean ± sample standard deviation over seeds; in brackets the 95 % interval of the difference to"
        " vanilla, paired by seed (Student's t). Best of each group in bold. “paper”: as published."
    ]
    if results.expected:
        lines.append(count(results))
    if warned := results.warnings():
        said = ", ".join(f"{code} × {count}" for code, count in warned.items())
        lines.append(f"Reliability warnings in the records: {said}; see reliability.md.")
    return lines


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
        for model in results.models()
        for dataset in results.datasets(model)
        if (layers := results.flat(model, dataset, threat))
    ]
    said = "Similarity and sharpness leave out layers whose vanilla attention is flat to 1e-6"
    return [f"{said}: {'; '.join(found)}."] if found else []


def count(results: Results) -> str:
    """Say how many of the expected cells are there, and how many records are outdated."""
    total = len(results.expected)
    said = (
        f"{results.missing} of {total} cells are missing (–)"
        if results.missing
        else f"All {total} cells are there"
    )
    if results.outdated:
        said += f"; {results.outdated} records of other settings or older searches are not shown"
    if results.older:
        said += f"; {results.older} of the records shown are of other settings or older searches than today's"
    return f"{said}."


def _published_ratio(model: str, dataset: str, row: str, column: Estimated, base: str) -> float | None:
    if not column.ratio or column.paper is None:
        return None
    ours, theirs = (published(column.paper[0], model, dataset, r, column.paper[1]) for r in (row, base))
    return None if ours is None or theirs is None or not ours.mean else theirs.mean / ours.mean
