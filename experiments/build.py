"""From results to sheets: one row per model, dataset and method, the best of each group marked."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.paper import published
from experiments.results import ROWS, Results
from experiments.sheet import Entry, Metric, Row, Sheet

NAMES = {
    "vanilla": "vanilla",
    "ln": "LN",
    "at": "AT",
    "fgai": "FGAI",
    "fgai-paper": "FGAI-paper",
    "pro-gnn": "Pro-GNN",
    "gnn-svd": "GNN-SVD",
    "gnnguard": "GNNGuard",
}
NULLS = {"uniform": "uniform (null)", "random": "random (null)"}

# Where a null row keeps what a model's record keeps elsewhere.
_NULL_PATHS = {
    "overlap.prediction": "overlap",
    "overlap_touched.prediction": "overlap_touched",
    "overlap_touched.explanation": "overlap_touched",
    "rank_correlation.prediction": "rank_correlation",
    "sharpness.clean": "sharpness",
}


def name_of(row: str) -> str:
    """How a row is called in tables."""
    return NAMES.get(row, row.replace("fgai", "FGAI", 1))


def entry(
    results: Results, model: str, dataset: str, row: str, metric: Metric, base: str = "vanilla"
) -> Entry:
    """Return one cell of a sheet."""
    wanted = len(results.seeds(model, dataset, row))
    known = None
    if metric.paper is not None:
        known = published(metric.paper[0], model, dataset, row, metric.paper[1])
    found = results.estimate(model, dataset, row, metric.path, metric.threat)
    if row == base:
        return Entry(estimate=found if metric.own else None, published=known, wanted=wanted)
    ratio = apart = None
    if metric.own:
        apart = results.interval(model, dataset, row, metric.path, metric.threat, base)
    reference = results.estimate(model, dataset, base, metric.path, metric.threat)
    if metric.ratio and found is not None and reference is not None and found.mean:
        ratio = reference.mean / found.mean
    return Entry(
        estimate=found,
        interval=apart,
        ratio=ratio,
        published=known,
        published_ratio=_published_ratio(model, dataset, row, metric, base),
        wanted=wanted,
    )


def null_entry(results: Results, model: str, dataset: str, kind: str, metric: Metric) -> Entry:
    """Return a cell of a null row, as measured on FGAI's model, or on vanilla where there is none."""
    path = f"null.{kind}.{metric.path}"
    for long, short in _NULL_PATHS.items():
        path = path.replace(f".{long}.", f".{short}.")
    for row in ("fgai", "vanilla"):
        found = results.estimate(model, dataset, row, path, metric.threat)
        if found is not None:
            return Entry(estimate=found, wanted=len(results.seeds(model, dataset, row)))
    return Entry()


def sheet(
    results: Results,
    title: str,
    metrics: Sequence[Metric],
    notes: Sequence[str] = (),
    *,
    order: tuple[str, ...] = ROWS,
    nulls: bool = False,
    models: Sequence[str] | None = None,
) -> Sheet:
    """Return a sheet with a section per model and a row per dataset and method.

    Args:
        results: of the records.
        title: of the sheet.
        metrics: of the columns.
        notes: below it; missing cells and warnings are added.
        order: of the rows; others follow.
        nulls: add the null rows.
        models: shown; all there are by default.
    """
    sections: dict[str, list[Row]] = {}
    for model in models or results.models():
        rows: list[Row] = []
        for dataset in results.datasets(model):
            names = results.rows(model, dataset, order)
            group = [[entry(results, model, dataset, row, metric) for metric in metrics] for row in names]
            marked = [
                mark_best(column, m) for column, m in zip(zip(*group, strict=True), metrics, strict=True)
            ]
            lines = [tuple(line) for line in zip(*marked, strict=True)]
            rows += [Row((dataset, name_of(row)), line) for row, line in zip(names, lines, strict=True)]
            for kind, label in NULLS.items() if nulls else ():
                cells = tuple(null_entry(results, model, dataset, kind, metric) for metric in metrics)
                if any(cell.estimate is not None for cell in cells):
                    rows.append(Row((dataset, label), cells))
        sections[model] = rows
    return Sheet(title, ("dataset", "method"), metrics, sections, [*notes, *about(results)])


def mark_best(column: Sequence[Entry], metric: Metric) -> list[Entry]:
    """Mark the best of a group; all of them where they are equal, none where there is one only."""
    held = [cell.estimate.mean for cell in column if cell.estimate is not None]
    if not metric.better or len(held) < 2:
        return list(column)
    best = max(held) if metric.better == "higher" else min(held)
    return [
        Entry(**{**vars(cell), "best": cell.estimate is not None and cell.estimate.mean == best})
        for cell in column
    ]


def about(results: Results) -> list[str]:
    """What every table says below itself: how numbers are made, what is missing, what was warned of."""
    lines = [
        "Mean ± sample standard deviation over seeds; in brackets the 95 % interval of the difference to"
        " vanilla, paired by seed (Student's t). Best of each group in bold. “paper”: as published."
    ]
    if results.expected:
        total = len(results.expected)
        missing = f"{results.missing} of {total} cells are missing (–)" if results.missing else ""
        lines.append(f"{missing or f'All {total} cells are there'}.")
    if warned := results.warnings():
        said = ", ".join(f"{code} × {count}" for code, count in warned.items())
        lines.append(f"Reliability warnings in the records: {said}; see reliability.md.")
    return lines


def _published_ratio(model: str, dataset: str, row: str, metric: Metric, base: str) -> float | None:
    if not metric.ratio or metric.paper is None:
        return None
    ours, theirs = (published(metric.paper[0], model, dataset, r, metric.paper[1]) for r in (row, base))
    return None if ours is None or theirs is None or not ours.mean else theirs.mean / ours.mean
