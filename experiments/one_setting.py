"""Tables of the methods that have one setting for every graph: robustness, Definition 1, and each term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from experiments.alone import accuracy_without_edges
from experiments.build import name_of
from experiments.cells import read_grid
from experiments.results import GRAPHS, Results
from experiments.sheet import Sheet
from experiments.store import Store
from experiments.threats import BESIDE, CLAIM, EVERY_RULE
from fgai.certificates import ALL_FOUR, PROPERTIES
from fgai.records import Cell, Column, Table
from fgai.training import FaithfulSettings

ROWS = ("vanilla", "limits, one setting", "at", "harden", "fgai, one setting")
"""Rows of the table `methods`; vanilla models of the paper's graphs, and `at`, are in other grids."""
FAITHFUL = "fgai, one setting"
CALLS = {"limits": "`limit`", "harden": "`harden`", "FGAI": "`make_faithful` (FGAI)"}
"""What the rows of the README's table are called."""
Pair = tuple[str, str]
Costs = dict[str, dict[str, float]]
_MOST_LAYERS = 8
_SHARES = ("clean F1", "F1, `ensemble`", "F1, `ensemble-strong`", "all four", "top 5 kept", "same top 5")
_COLUMNS = [Column("method"), *(Column(title, ".3f") for title in _SHARES), Column("sharpness ÷", ".2f")]


class Methods:
    """What the methods with one setting reach, by pair of model and graph."""

    def __init__(self, store: Store) -> None:
        cells = read_grid("methods")
        self.asked: list[Pair] = list(dict.fromkeys((cell.model, cell.dataset) for cell in cells))
        self.progress = f"{sum(store.read(cell) is not None for cell in cells)} of {len(cells)}"
        self._seeds = {cell.seed for cell in cells}
        self._ours, self._every = (Results.of_grid(store, grid) for grid in ("methods", "endpoints"))
        self._node = Results.node(store)
        self._proofs = _proofs(store)

    def values(self, pair: Pair, row: str, path: str, threat: str = EVERY_RULE) -> list[float]:
        """Return a number of each seed."""
        source = self._ours
        if row == "at" or (row == "vanilla" and pair[1] in GRAPHS):
            source = self._node if threat == BESIDE or row == "at" else self._every
        threat = CLAIM if row == "at" and threat == EVERY_RULE else threat
        return [
            value for seed, value in source.values((*pair, row), path, threat).items() if seed in self._seeds
        ]

    def mean(self, pair: Pair, row: str, path: str, threat: str = EVERY_RULE) -> float | None:
        """Return the mean over seeds."""
        values = self.values(pair, row, path, threat)
        return fmean(values) if values else None

    def over(self, pairs: Sequence[Pair], row: str, path: str, threat: str = EVERY_RULE) -> float | None:
        """Return the mean over pairs, None unless each has a value."""
        values = [self.mean(pair, row, path, threat) for pair in pairs]
        known = [value for value in values if value is not None]
        return fmean(known) if len(known) == len(values) > 0 else None

    def layers(self, pair: Pair, row: str, path: str) -> list[float]:
        """Return the mean of each layer whose vanilla attention is not flat."""
        flat = self._ours.flat(*pair, EVERY_RULE)
        means = (self.mean(pair, row, f"{path}.layers.{place}") for place in range(_MOST_LAYERS))
        return [mean for place, mean in enumerate(means, 1) if mean is not None and place not in flat]

    def shares(self, pair: Pair, row: str, radius: str = "r01", layer: int = -1) -> list[float]:
        """Return the share of nodes that satisfy Definition 1, of each seed; empty where it is unknown."""
        records = self._proofs.get((*pair, row), [])
        if any(record["definition"][radius][ALL_FOUR][layer] is None for record in records):
            return []
        return _shares(records, radius, layer=layer)

    def whole(self, pair: Pair, row: str) -> list[float]:
        """Return the share of nodes whose whole top 5 is certified in the output layer, of each seed."""
        return _whole(self._proofs.get((*pair, row), []))


def methods(store: Store) -> list[Sheet | Table]:
    """Means over pairs of model and graph, of the paper's graphs and of the others."""
    read = Methods(store)
    costs = whole_seconds(store)

    def complete(pair: Pair) -> bool:
        both = (EVERY_RULE, BESIDE)
        return all(
            read.values(pair, row, "f1.attacked", threat) for row in ROWS if row != "at" for threat in both
        )

    pairs = [pair for pair in read.asked if complete(pair)]
    seeds = {len(read.values(pair, "harden", "f1.attacked", EVERY_RULE)) for pair in pairs}
    note = (
        f"{' or '.join(map(str, sorted(seeds)))} seeds each; {read.progress} cells of the grid `methods` are"
        " run. `ensemble`: 20 × 20 at four endpoint rules; `ensemble-strong`: 60 × 40 at three. All four:"
        " share of nodes that satisfy Definition 1 in the output layer at R = 0.01 (grid `definition`)."
        " Top 5 kept: output layer, explanation attack, `cover` endpoints. Settings were chosen on validation"
        " nodes of five graphs (grid `search-one`); AT has settings for each graph, and three endpoint rules."
        " Cost: whole calls on two CPU threads, graphs on which every method is timed (table `whole`)."
    )
    columns = [*_COLUMNS, Column("cost ÷ training", ".1f")]
    tables: list[Sheet | Table] = []
    for title, chosen, notes in (
        ("Methods with one setting for every graph", [pair for pair in pairs if pair[1] in GRAPHS], (note,)),
        ("The same on other graphs", [pair for pair in pairs if pair[1] not in GRAPHS], ()),
    ):
        graphs = dict.fromkeys(dataset for _, dataset in chosen)
        means = f"Means over {len(chosen)} pairs of model and graph ({', '.join(graphs)})."
        rows = [[*_row(row, chosen, read), _times(costs, row)] for row in ROWS]
        known = [row for row in rows if row[1] is not None]
        tables.append(Table(title, columns, known or rows, (means, *notes)))
    return tables


def overview(store: Store) -> list[Sheet | Table]:
    """The README's table: the first one of `methods` without the columns a newcomer can do without."""
    table = methods(store)[0]
    assert isinstance(table, Table)
    titles = (
        "method",
        "clean F1",
        "F1, `ensemble`",
        "top 5 kept",
        "same top 5",
        "all four",
        "cost ÷ training",
    )
    shown = [[column.title for column in table.columns].index(title) for title in titles]
    columns = [table.columns[place] for place in shown]
    columns[-1] = replace(columns[-1], title="call ÷ training")
    rows = []
    for row in table.rows:
        name = str(row[0]).removesuffix(", one setting")
        cost = None if name == "vanilla" else row[shown[-1]]
        rows.append([CALLS.get(name, name), *(row[place] for place in shown[1:-1]), cost])
    return [Table("Twenty injected nodes with twenty edges each", columns, rows, table.notes[:1])]


def pairs(store: Store) -> list[Sheet | Table]:
    """What `methods` averages, for each pair of model and graph."""
    read = Methods(store)
    columns = [Column("model"), Column("graph"), *_COLUMNS]
    rows = [[*pair, *_row(row, [pair], read)] for pair in read.asked for row in ROWS]
    known = [row for row in rows if row[3] is not None] or [[None] * len(columns)]
    return [Table("Pair by pair", columns, known, ("Two or five seeds; columns as in the table `methods`.",))]


def _row(row: str, pairs: Sequence[Pair], methods: Methods) -> list[Cell]:
    sharp, base = (methods.over(pairs, name, "sharpness.clean.all") for name in (row, "vanilla"))
    proven = [fmean(shares) for pair in pairs if (shares := methods.shares(pair, row))]
    return [
        name_of(row),
        methods.over(pairs, row, "f1.clean"),
        methods.over(pairs, row, "f1.attacked"),
        methods.over(pairs, row, "f1.attacked", BESIDE),
        fmean(proven) if proven else None,
        methods.over(pairs, row, "endpoints.cover.explanation.overlap.last"),
        1.0 if row == "vanilla" else methods.over(pairs, row, "similarity.overlap.all"),
        sharp / base if sharp is not None and base else None,
    ]


def whole_seconds(store: Store) -> Costs:
    """Seconds of whole calls by graph and method, from the grid `whole`."""
    costs: Costs = {}
    for cell, record in store.finished(read_grid("whole")):
        costs.setdefault(cell.dataset, {})[cell.method] = record["whole_seconds"]
    return costs


def _times(costs: Costs, row: str) -> float | None:
    """Mean of a whole call's time as a multiple of vanilla training's, over graphs where all were timed."""
    method = row.partition(",")[0]
    known = set().union(*costs.values())
    ratios = [held[method] / held["vanilla"] for held in costs.values() if {method} <= known <= held.keys()]
    return fmean(ratios) if ratios else None


def whole_calls(store: Store) -> list[Sheet | Table]:
    """Seconds of a whole call of each method beside vanilla training, on a CPU."""
    costs = whole_seconds(store)
    columns = [Column("graph"), Column("method"), Column("seconds", ".2f"), Column("÷ training", ".2f")]
    rows: list[Sequence[Cell]] = []
    for cell in sorted(read_grid("whole"), key=lambda cell: cell.dataset):
        calls = costs.get(cell.dataset, {})
        seconds, base = calls.get(cell.method), calls.get("vanilla")
        ratio = seconds / base if seconds is not None and base else None
        rows.append([cell.dataset, name_of(cell.method), seconds, ratio])
    note = (
        "GAT, seed 0, two CPU threads. Second call in a process, from a trained vanilla model to the result:"
        " all attempts and the check included, the training of the vanilla model not."
    )
    return [Table("Seconds of whole calls", columns, rows, (note,))]


def _proofs(store: Store) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """The records of the grid `definition` by model, dataset and row."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, record in store.finished(read_grid("definition")):
        if "definition" in record:
            found.setdefault((cell.model, cell.dataset, cell.row), []).append(record)
    return found


def _shares(
    records: Sequence[dict[str, Any]], radius: str = "r01", name: str = ALL_FOUR, layer: int = -1
) -> list[float]:
    """One share of every record; unknown counts as not satisfied."""
    return [record["definition"][radius][name][layer] or 0.0 for record in records]


def _whole(records: Sequence[dict[str, Any]]) -> list[float]:
    """Share of the nodes whose whole top 5 is certified in the output layer, of every record."""
    return [record["certificate"]["layers"][-1]["topk"]["share"] or 0.0 for record in records]


def definition(store: Store) -> list[Sheet | Table]:
    """Definition 1: share of the nodes with each property, and with all four."""
    proofs = _proofs(store)
    rows: list[Sequence[Cell]] = []
    for (model, dataset, row), records in sorted(proofs.items(), key=lambda item: item[0][:2]):
        hidden = [record["definition"]["r001"][ALL_FOUR][0] for record in records]
        parts = [fmean(_shares(records, name=name)) for name in (*PROPERTIES, ALL_FOUR)]
        known = [share for share in hidden if share is not None]
        last = fmean(known) if len(known) == len(hidden) else "unknown"
        alone = accuracy_without_edges(store, dataset)
        rest = [fmean(_whole(records)), last, None if alone is None else alone.mean]
        rows.append([model, dataset, name_of(row), *parts, *rest])
    names = [f"P{number}" for number in range(1, 5)]
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns += [
        Column(name, ".3f")
        for name in (*names, "all four", "whole top 5", "all four, hidden layer", "F1 without edges")
    ]
    notes = (
        "Share of the nodes with more than five neighbours, mean over seeds. P1 same explanation, P2 stable"
        " explanation, P3 same prediction, P4 stable prediction: output layer, l1 ball of"
        " R = 0.01, α = 0.1 on probabilities, β = 0.8, k = 5. Whole top 5: all of it"
        " stays (β = 1). Hidden layer: R = 0.001; nothing is known of GT's. F1 without"
        " edges: the better of a linear model and a network of two layers on features alone, five seeds (grid"
        " `alone`); no injected node can change it.",
    )
    return [Table("Definition 1", columns, rows, notes), _margins(store)]


def _margins(store: Store) -> Table:
    """What the weight of the margin trades: robustness and similarity against Definition 1."""
    usual = FaithfulSettings().replace(edges=20)
    held: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell, record in store.finished(read_grid("search-one")):
        asked = {**cell.settings}
        weight = asked.pop("margin")
        same = all(getattr(usual, name) == value for name, value in asked.items())
        if same and "definition" in record["validation"]:
            held.setdefault((cell.model, weight), []).append(record["validation"])
    rows: list[Sequence[Cell]] = []
    for (model, weight), found in sorted(held.items()):
        scores = [fmean(one[name] for one in found) for name in ("clean", "attacked", "strong")]
        alike = fmean(one["similarity"]["sharpest"] for one in found)
        rows.append([model, f"{weight:g}", *scores, alike, fmean(_shares(found))])
    titles = ("clean F1", "attacked F1", "attacked F1, strong", "same top 5, sharpest layer", "all four")
    columns = [Column("model"), Column("margin"), *(Column(title, ".3f") for title in titles)]
    note = (
        "Validation nodes of planted, cora, pubmed, amazon-photo and coauthor-cs, two seeds, an adversary of"
        " 60 × 20; other settings are the defaults. Short attacks of 20 × 20 and 60 × 40 (grid `search-one`)."
    )
    return Table("The weight of the margin", columns, rows, (note if rows else f"–. {note}",))


def terms(store: Store) -> list[Sheet | Table]:
    """Each part of faithful training removed: paired differences to the whole method, five seeds."""
    results = Results.of_grid(store, "terms")
    paths = {
        "clean F1": "f1.clean",
        "F1, `ensemble`": "f1.attacked",
        "same top 5": "similarity.overlap.all",
        "all four": "definition.r01.all_four.last",
        "sharpness": "sharpness.clean.all",
    }
    rows: list[Sequence[Cell]] = []
    for model, dataset in dict.fromkeys((cell.model, cell.dataset) for cell in results.expected):
        for row in dict.fromkeys(cell.row for cell in results.expected):
            found: list[Cell] = []
            for path in paths.values():
                if row == FAITHFUL:
                    whole = results.estimate((model, dataset, row), path, CLAIM)
                    found.append(None if whole is None else f"{whole.mean:.3f}")
                    continue
                change = results.interval((model, dataset, row), path, CLAIM, FAITHFUL)
                text = (
                    None if change is None else f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
                )
                apart = change is not None and (change.low > 0 or change.high < 0)
                found.append(f"**{text}**" if apart else text)
            rows.append([model, dataset, name_of(row), *found])
    columns = [Column(name) for name in ("model", "dataset", "method", *paths)]
    notes = (
        "First row of each graph: the method. Below: the change when a part is removed, with the paired 95 %"
        " interval over five seeds; bold where it excludes zero. All four: Definition 1, output layer, R ="
        " 0.01.",
    )
    return [Table("Each part removed, one setting", columns, rows, notes)]
