"""What stored certificates say: shares of classes that no injected neighbour can change, and promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from experiments.cells import Cell
from experiments.fingerprint import change_of
from experiments.statistics import Estimate, estimate
from experiments.store import Store
from fgai.certificates import ARITHMETIC, PROMISE, full_promise

ROW = "fgai-certified"
"""FGAI trained towards certificates."""


def certified_share(
    store: Store, model: str, dataset: str, *, row: str = ROW, neighbours: int = 1, where: str = "any"
) -> Estimate | None:
    """Return the share of the test nodes, over seeds."""
    return estimate(
        one["share"]
        for record in _records(store, model, dataset, row)
        for one in record["injection"]
        if one["known"] and (one["where"], one["neighbours"]) == (where, neighbours)
    )


def features_alone(store: Store, model: str, dataset: str) -> Estimate | None:
    """Return what a network without edges classifies right, over the same seeds."""
    return estimate(record["alone"] for record in _records(store, model, dataset, ROW))


def _records(store: Store, model: str, dataset: str, row: str) -> Iterator[dict[str, Any]]:
    for record in store.records("inject"):
        cell = Cell.from_dict(record["cell"])
        if (cell.model, cell.dataset, cell.row) == (model, dataset, row) and change_of(
            record, cell, earlier=True
        ) is None:
            yield record


def promises(certificates: Iterable[Mapping[str, Any]]) -> list[str]:
    """What stored certificates promise, a note for each vector they are about, with its share of them."""
    found = Counter(
        full_promise(one.get("promise", PROMISE), one.get("explanation", ARITHMETIC)) for one in certificates
    )
    if len(found) < 2:
        return list(found)
    return [f"{count} of {found.total()} records: {words}" for words, count in found.items()]
