"""Rivals of attention: defences, networks without attention or edges; and nodes unseen in training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.alone import accuracy_without_edges
from experiments.build import name_of
from experiments.cells import read_grid
from experiments.choose import best_of_all
from experiments.one_setting import ROWS, Methods
from experiments.results import GRAPHS, Results
from experiments.sheet import Sheet
from experiments.store import Store
from experiments.threats import CLAIM, EVERY_RULE
from fgai.records import Cell, Column, Table

NETWORKS = {"GCN": "vanilla", "GCN + SVD": "gnn-svd", "Soft-Median": "soft-median", "RUNG": "rung"}
"""Methods of the grid `baselines` by the names of their rows."""
EARLIER = {
    f"{model} + {name_of(method)} ‡": (model, method)
    for model, methods in {"GCN": ("gnnguard", "pro-gnn"), "GAT": ("gnnguard", "pro-gnn", "gnn-svd")}.items()
    for method in methods
}
"""Rows of the grid `defences`."""
ALONE = "without edges"
F1 = ("f1.clean", "f1.attacked")
NEEDED = 0.05
"""Accuracy that edges must bring where attention is said to be needed."""


def baselines(store: Store) -> list[Sheet | Table]:
    """F1, clean and attacked, of methods with attention, of networks without it, and of one without edges."""
    methods, networks = Methods(store), Results.of_grid(store, "baselines")
    earlier = Results.of_grid(store, "defences", "evaluate")

    def values(row: str, dataset: str, path: str) -> list[float]:
        if row in ROWS:
            return methods.values(("GAT", dataset), row, path, EVERY_RULE)
        if row == ALONE:
            alone = accuracy_without_edges(store, dataset)
            return [] if alone is None else [alone.mean] * alone.seeds
        if row in EARLIER:
            model, method = EARLIER[row]
            return list(earlier.values((model, dataset, method), path, CLAIM).values())
        return list(networks.values(("GCN", dataset, NETWORKS[row]), path, EVERY_RULE).values())

    rows = [
        _line(name_of(row), [[values(row, dataset, path) for path in F1] for dataset in GRAPHS])
        for row in (*ROWS, *NETWORKS, *EARLIER, ALONE)
    ]
    columns = [Column("method"), *map(Column, GRAPHS), Column("mean"), Column("seeds")]
    settings = {cell.method: cell.settings for cell in read_grid("baselines")}
    chosen = "; ".join(
        f"{row} {', '.join(f'{name} {value:g}' for name, value in settings[method].items())}"
        for row, method in NETWORKS.items()
    )
    note = (
        "F1, clean → attacked. Upper rows: GAT (table `methods`). Networks without attention have no such"
        " explanation; they are trained from scratch with one setting for every graph, the best of eight"
        " trials each on validation nodes of cora and planted (grid `baselines-search`, run for"
        f" {len(best_of_all('baselines-search', store))} of {len(NETWORKS)}): {chosen}. Every row meets the"
        " same searches and budget, with gradients through the defence. ‡: one seed, settings of Photo, three"
        " endpoint rules. Without edges: tuned on each graph; no injected node can change it."
        f" {_run(store, 'baselines')}"
    )
    return [Table("Networks without attention, 20 × 20", columns, rows, (note,))]


def _line(name: str, found: Sequence[Sequence[Sequence[float]]]) -> list[Cell]:
    """A row: clean → attacked on every graph, and the mean over graphs where all are known."""
    means = [tuple(map(fmean, pair)) if all(pair) else None for pair in found]
    known = [pair for pair in means if pair is not None]
    texts: list[Cell] = [None if pair is None else f"{pair[0]:.3f} → {pair[1]:.3f}" for pair in means]
    mean = " → ".join(f"{fmean(side):.3f}" for side in zip(*known, strict=True))
    seeds = sorted({len(hit) for _, hit in found if hit})
    counts = " or ".join(map(str, seeds)) or None
    return [name, *texts, mean if len(known) == len(means) else None, counts]


def _run(store: Store, grid: str) -> str:
    cells = read_grid(grid)
    return f"{len(list(store.finished(cells)))} of {len(cells)} cells of the grid `{grid}` are run."


def inductive(store: Store) -> list[Sheet | Table]:
    """The methods with one setting on test nodes that are not there in training, beside those that are."""
    methods, unseen = Methods(store), Results.of_grid(store, "inductive", "attack-inductive")
    paths = (*F1, "endpoints.cover.explanation.overlap.last", "similarity.overlap.all")
    rows: list[Sequence[Cell]] = []
    for dataset in GRAPHS:
        for row in ROWS:
            if (method := row.partition(",")[0]) == "at":
                continue
            found = [unseen.estimate(("GAT", dataset, method), path, EVERY_RULE) for path in paths]
            seen = [methods.mean(("GAT", dataset), row, path) for path in F1]
            seeds = None if found[0] is None else str(found[0].seeds)
            rows.append([dataset, name_of(row), *(one and one.mean for one in found), *seen, seeds])
    titles = ("clean F1", "F1, `ensemble`", "top 5 kept", "same top 5", "clean, seen", "`ensemble`, seen")
    columns = [Column("dataset"), Column("method"), *(Column(title, ".3f") for title in titles)]
    note = (
        "GAT. Test nodes (80 %) and their edges are taken out while models are trained, epochs are chosen and"
        " ranges of limits are measured; then the whole graph is predicted and attacked, 20 × 20 at four"
        " endpoint rules. “seen”: with the whole graph in training, without labels of test nodes (table"
        f" `methods`). {_run(store, 'inductive')}"
    )
    return [Table("Test nodes that are not there in training", [*columns, Column("seeds")], rows, (note,))]


def edges(store: Store) -> list[Sheet | Table]:
    """How much accuracy edges bring, by graph: where they bring little, attention is not needed."""
    methods = Methods(store)
    rows: list[Sequence[Cell]] = []
    for dataset in dict.fromkeys(cell.dataset for cell in read_grid("alone")):
        alone, whole = (
            accuracy_without_edges(store, dataset),
            methods.mean(("GAT", dataset), "vanilla", F1[0]),
        )
        more = None if alone is None or whole is None else whole - alone.mean
        needed = None if more is None else ("no" if more < NEEDED else "yes")
        rows.append([dataset, alone and alone.mean, whole, more, needed])
    columns = [Column("graph"), Column("without edges", ".3f"), Column("GAT", ".3f")]
    columns += [Column("difference", "+.3f"), Column("attention needed")]
    note = (
        "F1 of the test nodes. Without edges: a linear model or a network of two layers, tuned;"
        f" attention is not needed where GAT is less than {NEEDED:g} better. {_run(store, 'alone')}"
    )
    return [Table("Where edges matter", columns, rows, (note,))]
