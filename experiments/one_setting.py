"""Tables of the methods that have one setting for every graph: robustness, Definition 1, and each term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from experiments.alone import accuracy_without_edges
from experiments.build import name_of
from experiments.cells import read_grid
from experiments.claim_tables import BESIDE, CLAIM, every_rule
from experiments.results import GRAPHS, Results
from experiments.sheet import Sheet
from experiments.statistics import Interval
from experiments.store import Store
from experiments.threats import EVERY_RULE
from fgai.certificates import ALL_FOUR, PROPERTIES
from fgai.records import Cell, Column, Table
from fgai.training import FaithfulSettings

ROWS = ("vanilla", "limits, one setting", "harden", "fgai, one setting")
"""Rows of the grid `methods`; the vanilla models of the paper's graphs are in other grids."""
FAITHFUL = "fgai, one setting"
Pair = tuple[str, str]


def one_setting(store: Store) -> list[Sheet | Table]:
    """Means over pairs of model and graph, of the paper's graphs and of the others, seeds 0 and 1."""
    cells = read_grid("methods")
    keys = {cell.key for cell in cells}
    ours = Results.newest((record for record in store.records("attack") if record["key"] in keys), cells)
    every, strong = every_rule(store), Results.node(store)
    seeds, proofs = {cell.seed for cell in cells}, _proofs(store)

    def values(pair: Pair, row: str, path: str, threat: str = EVERY_RULE) -> list[float]:
        other = row == "vanilla" and pair[1] in GRAPHS
        source = ours if not other else strong if threat == BESIDE else every
        return [value for seed, value in source.values(*pair, row, path, threat).items() if seed in seeds]

    def complete(pair: Pair) -> bool:
        both = (EVERY_RULE, BESIDE)
        return all(values(pair, row, "f1.attacked", threat) for row in ROWS for threat in both)

    pairs = [pair for pair in dict.fromkeys((cell.model, cell.dataset) for cell in cells) if complete(pair)]
    done = sum(store.read(cell) is not None for cell in cells)
    note = (
        f"Up to two seeds each; {done} of {len(cells)} cells of the grid `methods` are run. `ensemble`: 20 ×"
        " 20 at four endpoint rules; `ensemble-strong`: 60 × 40 at three. All four: share of nodes that"
        " satisfy Definition 1 in the output layer at R = 0.01 (grid `definition`). Top 5 kept: output layer,"
        " explanation attack, `cover` endpoints. Settings were chosen on validation nodes of five graphs"
        " (grid `search-one`)."
    )
    titles = ("clean F1", "F1, `ensemble`", "F1, `ensemble-strong`", "all four", "top 5 kept", "same top 5")
    columns = [Column("method"), *(Column(title, ".3f") for title in titles), Column("sharpness ÷", ".2f")]
    tables: list[Sheet | Table] = []
    for title, chosen, notes in (
        ("Methods with one setting for every graph", [pair for pair in pairs if pair[1] in GRAPHS], (note,)),
        ("The same on small graphs", [pair for pair in pairs if pair[1] not in GRAPHS], ()),
    ):
        graphs = dict.fromkeys(dataset for _, dataset in chosen)
        said = f"Means over {len(chosen)} pairs of model and graph ({', '.join(graphs)})."
        rows = [_row(row, chosen, values, proofs) for row in ROWS]
        tables.append(Table(title, columns, rows, (said, *notes)))
    return tables


def _row(
    row: str, pairs: Sequence[Pair], values: Callable[..., list[float]], proofs: dict[Any, list[Any]]
) -> list[Cell]:
    def mean(name: str, path: str, threat: str = EVERY_RULE) -> float | None:
        found = [fmean(held) for pair in pairs if (held := values(pair, name, path, threat))]
        return fmean(found) if len(found) == len(pairs) > 0 else None

    sharp, base = (mean(name, "sharpness.clean.all") for name in (row, "vanilla"))
    held = [fmean(shares) for pair in pairs if (shares := _shares(proofs.get((*pair, row), ())))]
    return [
        name_of(row),
        mean(row, "f1.clean"),
        mean(row, "f1.attacked"),
        mean(row, "f1.attacked", BESIDE),
        fmean(held) if held else None,
        mean(row, "endpoints.cover.explanation.overlap.last"),
        1.0 if row == "vanilla" else mean(row, "similarity.overlap.all"),
        sharp / base if sharp is not None and base else None,
    ]


def _proofs(store: Store) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """The records of the grid `definition` by model, dataset and row."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in read_grid("definition"):
        record = store.read(cell)
        if record is not None and "definition" in record:
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
        "Share of the nodes with more than five neighbours, mean of two seeds. P1 same explanation, P2 stable"
        " explanation, P3 same prediction, P4 stable prediction: output layer, l1 ball of"
        " R = 0.01, α = 0.1 on probabilities, β = 0.8, k = 5. Whole top 5: all of it"
        " stays (β = 1). Hidden layer: R = 0.001; nothing is known of GT's. F1 without"
        " edges: the better of a linear model and a network of two layers on features alone, five seeds (grid"
        " `alone`); no injected node can change it.",
        _against_vanilla(proofs),
    )
    return [Table("Definition 1", columns, rows, notes), _margins(store)]


def _margins(store: Store) -> Table:
    """What the weight of the margin trades: robustness and similarity against Definition 1."""
    usual = FaithfulSettings().replace(edges=20)
    held: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell in read_grid("search-one"):
        record, asked = store.read(cell), {**cell.settings}
        weight = asked.pop("margin")
        same = all(getattr(usual, name) == value for name, value in asked.items())
        if same and record is not None and "definition" in record.get("validation", {}):
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


def _against_vanilla(proofs: dict[tuple[str, str, str], list[dict[str, Any]]]) -> str:
    """How FGAI compares with vanilla on the paper's graphs, in a sentence."""
    pairs = [key[:2] for key in proofs if key[2] == FAITHFUL and key[1] in GRAPHS]
    both = [[proofs[(*pair, row)] for row in (FAITHFUL, "vanilla")] for pair in pairs]
    ahead = [fmean(_shares(ours)) - fmean(_shares(base)) for ours, base in both]
    hidden = [
        fmean(_shares(ours, "r001", layer=0)) - fmean(_shares(base, "r001", layer=0))
        for ours, base in both
        if base[0]["definition"]["r001"][ALL_FOUR][0] is not None
    ]
    whole = [[fmean(_whole(held)) for held in pair] for pair in both]
    more = sum(gain > 0 for gain in ahead)
    if not ahead:
        return "FGAI: –, no cell of the grid `definition` is run."
    return (
        f"FGAI on the paper's graphs: all four at more nodes than vanilla on {more}"
        f" of {len(ahead)} pairs, {fmean(ahead):+.3f} on average; hidden layer not below vanilla on"
        f" {sum(gain >= 0 for gain in hidden)} of {len(hidden)}; whole top 5 at least 1.5 times vanilla's on"
        f" {sum(ours >= 1.5 * base for ours, base in whole)} of {len(whole)}."
    )


def _interval(change: Interval) -> str:
    text = f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
    return f"**{text}**" if change.excludes_zero else text


def terms(store: Store) -> list[Sheet | Table]:
    """Each part of faithful training removed: paired differences to the whole method, five seeds."""
    cells = read_grid("terms")
    keys = {cell.key for cell in cells}
    results = Results.newest((record for record in store.records("attack") if record["key"] in keys), cells)
    paths = {
        "clean F1": "f1.clean",
        "F1, `ensemble`": "f1.attacked",
        "same top 5": "similarity.overlap.all",
        "all four": "definition.r01.all_four.last",
        "sharpness": "sharpness.clean.all",
    }
    rows: list[Sequence[Cell]] = []
    for model, dataset in dict.fromkeys((cell.model, cell.dataset) for cell in cells):
        for row in dict.fromkeys(cell.row for cell in cells):
            found: list[Cell] = []
            for path in paths.values():
                if row == FAITHFUL:
                    whole = results.estimate(model, dataset, row, path, CLAIM)
                    found.append(None if whole is None else f"{whole.mean:.3f}")
                    continue
                change = results.interval(model, dataset, row, path, CLAIM, base=FAITHFUL)
                text = (
                    None if change is None else f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
                )
                found.append(f"**{text}**" if change is not None and change.excludes_zero else text)
            rows.append([model, dataset, name_of(row), *found])
    columns = [Column(name) for name in ("model", "dataset", "method", *paths)]
    notes = (
        "First row of each graph: the method. Below: the change when a part is removed, with the paired 95 %"
        " interval over five seeds; bold where it excludes zero. All four: Definition 1, output layer, R ="
        " 0.01.",
    )
    return [Table("Each part removed, one setting", columns, rows, notes)]
