"""What each member of the ensemble is for: the cases that would be worse without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.cells import Cell as GridCell
from experiments.sheet import Sheet
from experiments.store import Store
from experiments.store import reached as by_rule
from fgai.records import Cell, Column, Table


class Reached(NamedTuple):
    """What one member did somewhere."""

    objective: str  # `prediction` or `explanation`
    threat: str  # under which
    where: tuple[str, str, str, int]  # model, dataset, method and seed
    rule: str  # of the endpoints
    # by member, judged by full passes: one minus F1, or the share of the top 5 lost
    damages: dict[str, float]


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
    return [*parts, _rules(found)]


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
            place = " ".join(map(str, one.where))
            most, where = gain, f"{place}, `{one.threat}`, {one.rule} endpoints"
    return [name, f"{most:.3f}", str(wins), where]


def _rules(found: Sequence[Reached]) -> Table:
    """What every rule for endpoints adds."""
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for one in found:
        places = groups.setdefault((one.objective, one.threat, one.where), {})
        places[one.rule] = max(one.damages.values())
    rows: list[list[Cell]] = []
    for rule in sorted({one.rule for one in found}):
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


def reached(record: Mapping[str, Any], threat: str, objective: str) -> Iterator[Reached]:
    """What members did to a record's model under one threat and objective, by the rule of the endpoints."""
    evaluation = record["evaluations"].get(threat, {})
    ledger = evaluation.get("ledgers", {}).get(objective, {})
    packed = evaluation.get("reached", {}).get(objective, {})
    cell = GridCell.from_dict(record["cell"])
    where = (cell.model, cell.dataset, cell.row, cell.seed)
    for rule, damages in (by_rule(ledger) if ledger.get("members") else packed).items():
        yield Reached(objective, threat, where, rule, damages)
