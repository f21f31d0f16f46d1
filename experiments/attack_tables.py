"""What a better search shows: the node tables under the ensemble, and what each of its members is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from experiments.build import name_of
from experiments.cells import Cell as GridCell
from experiments.results import Results
from experiments.sheet import Sheet
from experiments.store import Store
from fgai.metrics import quantity
from fgai.records import Cell, Column, Table

RANDOM = "random"


class Reached(NamedTuple):
    """What one member did somewhere.

    Attributes:
        objective: `prediction` or `explanation`.
        threat: under which.
        where: model, dataset, method and seed.
        rule: of the endpoints.
        damages: by member, judged by full passes: one minus F1, or the share of the top 5 lost.
    """

    objective: str
    threat: str
    where: tuple[str, str, str, int]
    rule: str
    damages: dict[str, float]


def before(store: Store) -> list[Sheet | Table]:
    """F1 of the models of before limits, by the paper's attack and by the ensemble of then: history."""
    older = (
        record for record in store.records("attack") if record["schema"] == 1 and not record["cell"]["label"]
    )
    results = Results(older)
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns += [quantity("f1.clean", "clean").column]
    for title in ("`standard`", "random", "chosen", "`strong`", "random", "chosen"):
        columns.append(quantity("f1.attacked", title).column)
    columns += [Column("top 5 lost"), Column("chosen"), Column("seeds")]
    rows = [
        _row(results, model, dataset, row)
        for model in results.models()
        for dataset in results.datasets(model)
        for row in results.rows(model, dataset)
    ] or [[None] * len(columns)]
    notes = [
        "Means over seeds. Three columns at a time have the same number of new nodes and edges and the same"
        " box: `standard` and `strong` climb by signs, “random” is the worst of every search at the same"
        " random endpoints, “chosen” the worst at endpoints chosen by rules that read the graph and the"
        " vanilla model. “top 5 lost”: under the explanation objective of `ensemble`,"
        " nodes in reach, mean over layers (seeds 0 and 1). Records of older code: the models were trained"
        " without limits.",
    ]
    return [Table("Models without limits: what a better search showed", columns, rows, notes)]


def _row(results: Results, model: str, dataset: str, row: str) -> list[Cell]:
    def mean(path: str, threat: str) -> float | None:
        found = results.estimate(model, dataset, row, path, threat)
        return None if found is None else found.mean

    def worst(objective: str, threat: str, random: bool) -> list[float]:
        return [
            max(max(one.damages.values()) for one in group)
            for record in results.held(model, dataset, row)
            if (group := [
                one for one in reached(record, threat, objective) if (one.rule == RANDOM) == random
            ])
        ]  # fmt: skip

    def score(threat: str, random: bool) -> float | None:
        found = worst("prediction", threat, random)
        return 1 - fmean(found) if found else None

    def lost(random: bool) -> str | None:
        found = worst("explanation", "ensemble", random)
        return f"{fmean(found):.3f}" if found else None

    return [
        model,
        dataset,
        name_of(row),
        mean("f1.clean", "standard"),
        mean("f1.attacked", "standard"),
        score("ensemble", True),
        score("ensemble", False),
        mean("f1.attacked", "strong"),
        score("ensemble-strong", True),
        score("ensemble-strong", False),
        lost(True),
        lost(False),
        str(len(results.held(model, dataset, row))),
    ]


def members(store: Store) -> list[Sheet | Table]:
    """What every member of the ensemble adds: the case that would be worst without it."""
    found = [
        one
        for record in store.records("attack")
        for threat in record["evaluations"]
        if threat.startswith("ensemble")
        for objective in ("prediction", "explanation")
        for one in reached(record, threat, objective)
    ]
    parts: list[Sheet | Table] = []
    for objective in ("prediction", "explanation"):
        chosen = [one for one in found if one.objective == objective]
        names = list(dict.fromkeys(name for one in chosen for name in one.damages))
        rows = sorted((_member_row(name, chosen) for name in names), key=lambda row: -float(row[1] or 0))
        columns = [Column("member"), Column("adds at most"), Column("wins"), Column("where it adds most")]
        notes = (
            f"{len(chosen)} searches on {len({one.where for one in chosen})} models, one for each budget"
            " and set of endpoints. “adds”: damage of all members minus damage of all but this one, both"
            " without `polish`, which starts from the others' worst point. `plain sign` and `evolution` are"
            " checks, not members: the paper's attack as it is, and a search without gradients.",
        )
        parts.append(Table(f"Members, {objective} objective", columns, rows or [[None] * 4], notes))
    rules = sorted({one.rule for one in found})
    parts.append(_rules(found, rules))
    return parts


def _member_row(name: str, found: Sequence[Reached]) -> list[Cell]:
    most, where, wins = 0.0, "", 0
    for one in found:
        if name not in one.damages:
            continue
        wins += one.damages[name] == max(one.damages.values())
        others = {n: d for n, d in one.damages.items() if n == name or not n.startswith("polish")}
        rest = [damage for other, damage in others.items() if other != name]
        gain = max(others.values()) - max(rest) if rest else 0.0
        if gain > most:
            most, where = gain, _where(one)
    return [name, f"{most:.3f}", str(wins), where]


def _rules(found: Sequence[Reached], rules: Sequence[str]) -> Table:
    """What every rule for endpoints adds."""
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for one in found:
        places = groups.setdefault((one.objective, one.threat, one.where), {})
        places[one.rule] = max(one.damages.values())
    rows: list[list[Cell]] = []
    for rule in rules:
        gains = [
            (places[rule] - max(d for r, d in places.items() if r != rule), key)
            for key, places in groups.items()
            if rule in places and len(places) > 1
        ]
        gain, key = max(gains)
        wins = sum(value > 0 for value, _ in gains)
        text = f"{key[0]}, {' '.join(map(str, key[2]))}, `{key[1]}`"
        rows.append([rule, f"{max(0.0, gain):.3f}", f"{wins} of {len(gains)}", text])
    columns = [Column("endpoints"), Column("add at most"), Column("worst in"), Column("where they add most")]
    return Table("Endpoints", columns, rows or [[None] * 4])


def _where(one: Reached) -> str:
    return f"{' '.join(map(str, one.where))}, `{one.threat}`, {one.rule} endpoints"


def reached(record: Mapping[str, Any], threat: str, objective: str) -> Iterator[Reached]:
    """What members did to a record's model under one threat and objective, by the rule of the endpoints."""
    ledgers = record["evaluations"].get(threat, {}).get("ledgers", {})
    ledger = ledgers.get(objective)
    if not ledger or not ledger.get("members"):
        return
    cell = GridCell.from_dict(record["cell"])
    where = (cell.model, cell.dataset, cell.row, cell.seed)
    places: dict[str, dict[str, float]] = {}
    for row, damage in zip(ledger["members"], ledger["damages"][1:], strict=True):
        held = places.setdefault(row["endpoints"], {})
        held[row["member"]] = max(damage, held.get(row["member"], 0.0))
    for rule, damages in places.items():
        yield Reached(objective, threat, where, rule, damages)
