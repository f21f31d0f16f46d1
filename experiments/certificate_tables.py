"""Tables of certificates: the share of nodes for which nothing can change, radius by radius."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.alone import accuracy_without_edges
from experiments.build import OLDER, about, label, name_of, sheet
from experiments.cells import read_grid
from experiments.fingerprint import is_older
from experiments.one_setting import ROWS
from experiments.results import Results
from experiments.run import INJECTED, VOTED
from experiments.sheet import Sheet, estimated
from experiments.statistics import estimate
from experiments.store import Store
from experiments.threats import CLAIM
from fgai.certificates import (
    ARITHMETIC,
    BUDGET_PROMISE,
    BUDGETS,
    INJECTION_PROMISE,
    PROMISE,
    TABLE_RADII,
    VOTING_PROMISE,
    WHERE,
    full_promise,
)
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table

WHAT = {"topk": "Top 5 cannot change", "class": "Class cannot change"}


def certificates(store: Store) -> list[Sheet | Table]:
    """What no perturbation of a layer's attention within a radius can do: to the top 5, and to the class."""
    results = Results.of_grid(store, "definition", "certify")
    return [_table(results, kind, title) for kind, title in WHAT.items()]


def _table(results: Results, kind: str, title: str) -> Table:
    """One row per model, graph, layer and method; methods stand together, to be compared."""
    columns = [Column(name) for name in ("model", "dataset", "layer", "method")]
    columns += [*_shares(), quantity("certificate.median_radius"), Column("trivial")]
    columns.append(quantity("certificate.sharpness"))
    columns += [Column("how")] if kind == "class" else []
    rows: list[Sequence[Cell]] = []
    for model, dataset in results.pairs():
        keys = [(model, dataset, method) for method in results.rows(model, dataset, ROWS)]
        held = [[r["certificate"]["layers"] for r in results.held(key)] for key in keys]
        for index in range(max((len(seed) for seeds in held for seed in seeds), default=0)):
            for key, seeds in zip(keys, held, strict=True):
                layers = [seed[index] for seed in seeds if index < len(seed)]
                if layers:
                    rows.append([model, dataset, str(index + 1), label(results, key), *_row(layers, kind)])
    notes = (
        "Shares in % of the nodes with more than five neighbours, l1 ball, mean ± std over seeds. The median"
        " radius is over the same nodes. `trivial`: the share of the other nodes, whose top 5 are all their"
        " neighbours. `sharpness`: 0 where all neighbours get the same attention.",
        *promises(record["certificate"] for record in results.records.values()),
        *about(results)[1:],
    )
    return Table(title, columns, rows, notes)


def injection(store: Store) -> list[Sheet | Table]:
    """What no injected neighbour can do to a class, whatever its features: by method and number of them."""
    results = Results.newest(store.records("inject"))
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns += [quantity("f1.clean", "F1"), Column("sharpness")]
    columns += [Column(f"t = {t}, {where}") for where in WHERE for t in INJECTED]
    columns += [Column("right, t = 1"), Column("features alone"), Column("seeds")]
    rows: list[Sequence[Cell]] = []
    for key in sorted({key[:3] for key in results.records}):
        records = results.held(key)
        shares = [_injected(records, where, t, "share") for where in WHERE for t in INJECTED]
        right = [_injected(records, where, 1, "right") for where in WHERE]
        rows.append(
            [
                *key[:2],
                label(results, key),
                _spread([record["scores"]["f1"] for record in records], 1.0, ".3f"),
                " / ".join(f"{mean:.2g}" for mean in _means([record["sharpness"] for record in records])),
                *shares,
                " / ".join(one or "–" for one in right),
                _spread([record["alone"] for record in records], 100.0, ".1f"),
                str(len(records)),
            ]
        )
    notes = (
        "Share of the test nodes in % whose class provably stays when every node (`any`), or the node itself"
        " (`direct`), gains t injected neighbours with any features; – where nothing is known, as without"
        " limits. `right`: of those, the ones that are classified right (any / direct). `features alone`:"
        " what a network without edges classifies right; a certificate below it protects nothing.",
        INJECTION_PROMISE,
        *[OLDER] * bool(results.older_rows),
        *[f"{results.outdated} records of other settings than today's are not shown."]
        * bool(results.outdated),
    )
    return [Table("Classes no injected neighbour can change", columns, rows, notes), _attacked(store)]


def collective(store: Store) -> list[Sheet | Table]:
    """At how many test nodes a budget of injected nodes can change the class at once; missing cells too."""
    columns = [Column(name) for name in ("model", "dataset", "method")] + [quantity("f1.clean", "F1")]
    columns += [Column(f"{m} × {e}: class stays") for m, e in BUDGETS]
    columns += [Column(f"{m} × {e}: right") for m, e in BUDGETS]
    columns += [Column("without edges"), Column("seeds")]

    def cells(held: list[dict[str, Any]]) -> list[list[Cell]]:
        found = [record["collective"] for record in held]
        known = [one for one in found if one["known"]]
        stays: list[Cell] = [
            _spread([1 - one["budgets"][place]["changed"] / one["nodes"] for one in known], 100.0, ".1f")
            for place in range(len(BUDGETS))
        ]
        right = [
            _spread([one["budgets"][place]["right"] / one["nodes"] for one in known], 100.0, ".1f")
            for place in range(len(BUDGETS))
        ]
        return [[_f1(held), *stays, *right]]

    notes = (
        "Shares of the test nodes in %, at least, whose class stays, and is right and stays, when M new nodes"
        " with E edges each (M × E) are spent to change as many as possible.",
        BUDGET_PROMISE,
    )
    return [_beside(store, "collective", "What a budget can change at once", columns, cells, notes)]


def voting(store: Store) -> list[Sheet | Table]:
    """Majorities over groups of neighbours: right whatever is injected, and what stays of the explanation."""
    columns = [Column(name) for name in ("model", "dataset", "method")] + [quantity("f1.clean", "F1")]
    columns += [Column("groups"), Column("confidence")]
    columns += [Column(f"right, m = {m}") for m in VOTED] + [Column("top 5 groups, m = 1")]
    columns += [Column("without edges"), Column("seeds")]

    def cells(held: list[dict[str, Any]]) -> list[list[Cell]]:
        rows: list[list[Cell]] = []
        for place, one in enumerate(held[0]["votes"] if held else [{}]):
            votes = [record["votes"][place] for record in held]
            right = [_spread([vote["right"][at] for vote in votes], 100.0, ".1f") for at in range(len(VOTED))]
            kept = _spread([vote["kept"][VOTED.index(1)] for vote in votes], 100.0, ".1f")
            confidence = f"{one['confidence']:g}" if one else None
            rows.append([_f1(held), str(one["groups"]) if one else None, confidence, *right, kept])
        return rows

    notes = (
        "Share of the test nodes in % whose majority is right and stays whatever m injected nodes are; of the"
        " groups that explain it, the share that stays, 0 where the class may change. The models were trained"
        " on whole neighbourhoods. Most of 100 groups hold no neighbour of a node, so its majority is mostly"
        " the model's answer to the node's own features.",
        VOTING_PROMISE,
    )
    return [_beside(store, "vote", "Majorities over groups of neighbours", columns, cells, notes, "voting")]


def _beside(
    store: Store,
    kind: str,
    title: str,
    columns: Sequence[Column],
    cells: Callable[[list[dict[str, Any]]], list[list[Cell]]],
    notes: Sequence[str],
    grid: str = "",
) -> Table:
    """Rows of every model, graph and method of a grid, run or not, beside the best model without edges."""
    asked = read_grid(grid or kind)
    held: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in asked:
        held.setdefault((cell.dataset, cell.model, cell.row), [])
    for cell, record in store.finished(asked):
        if not is_older(record):
            held[cell.dataset, cell.model, cell.row].append(record)
    rows: list[Sequence[Cell]] = []
    for (dataset, model, row), records in held.items():
        alone = accuracy_without_edges(store, dataset)
        last: list[Cell] = [None if alone is None else f"{100 * alone.mean:.1f}", str(len(records))]
        rows += [[model, dataset, name_of(row), *values, *last] for values in cells(records)]
    counted = sum(map(len, held.values()))
    beside = (
        "`without edges`: the better of a linear model and a network of two layers on features alone, tuned"
        f" (grid `alone`). {counted} of {len(asked)} cells are run; – where none is, or nothing is known."
    )
    return Table(title, columns, sorted(rows, key=lambda row: tuple(map(str, row[:3]))), (*notes, beside))


def _f1(records: Sequence[dict[str, Any]]) -> str | None:
    return _spread([record["scores"]["f1"] for record in records], 1.0, ".3f")


def _attacked(store: Store) -> Sheet | Table:
    """What is trained towards certificates, under attack like everything else."""
    results = Results.of_grid(store, "injection")
    columns = {
        "f1.clean": "clean",
        "f1.attacked": f"`{CLAIM}`",
        "f1.attacked_random": "random endpoints",
        "f1.attacked_chosen": "chosen endpoints",
        "similarity.overlap.all": "as vanilla",
    }
    metrics = [estimated(path, title, threat=CLAIM) for path, title in columns.items()]
    return sheet(results, "Trained towards certificates, under attack", metrics)


def promises(certificates: Iterable[Mapping[str, Any]]) -> list[str]:
    """What stored certificates promise, a note for each vector they are about, with its share of them."""
    found = Counter(
        full_promise(one.get("promise", PROMISE), one.get("explanation", ARITHMETIC)) for one in certificates
    )
    if len(found) < 2:
        return list(found)
    return [f"{count} of {found.total()} records: {words}" for words, count in found.items()]


def _injected(records: Sequence[dict[str, Any]], where: str, neighbours: int, what: str) -> str | None:
    """A share over the seeds, in %; None where nothing is known."""
    found = [
        one[what]
        for record in records
        for one in record["injection"]
        if one["where"] == where and one["neighbours"] == neighbours and one["known"]
    ]
    return _spread(found, 100.0, ".1f")


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def _shares() -> list[Column]:
    """A column per radius."""
    return [quantity("certificate.share", f"R = {radius:g}") for radius in TABLE_RADII]


def _row(layers: list[dict[str, Any]], kind: str) -> list[Cell]:
    values: list[Cell] = [
        _spread([layer[kind]["table"][place] for layer in layers], 100.0, ".1f")
        for place in range(len(TABLE_RADII))
    ]
    values.append(_spread([layer[kind]["median_radius"] for layer in layers], 1.0, ".2g"))
    values.append(_spread([layer["trivial_share"] for layer in layers], 100.0, ".1f"))
    values.append(_spread([layer["sharpness"] for layer in layers], 1.0, ".3f"))
    if kind == "class":
        values.append(", ".join(sorted({str(layer["class"]["status"]) for layer in layers})))
    return values


def _spread(values: Sequence[float | None], scale: float, form: str) -> str | None:
    """Mean ± standard deviation of what is known."""
    found = estimate(scale * value for value in values if value is not None)
    return None if found is None else f"{found.mean:{form}} ± {found.std:{form}}"
