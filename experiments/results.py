"""`Results`: the records of a folder, found by model, dataset, row and seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from experiments.cells import Cell, current_names, read_grid
from experiments.fingerprint import change_of, is_earlier, is_older
from experiments.statistics import Estimate, Interval, estimate, paired
from experiments.store import Store, lost
from fgai.errors import CheckpointError
from fgai.metrics import UNIFORM_SHARPNESS
from fgai.records import look_up

MODELS = ("GAT", "GATv2", "GT")
GRAPHS = ("amazon-photo", "amazon-cs", "coauthor-cs", "coauthor-physics")
"""Those of the paper that bars are about."""
LARGE = ("arxiv-tape",)
DATASETS = (*GRAPHS, *LARGE, "cora", "citeseer", "pubmed", "planted")
ROWS = (
    "vanilla", "ln", "limits", "at", "at-limits", "fgai", "fgai-certified", "fgai-injection", "fgai-paper",
)  # fmt: skip
NODE_KINDS = ("evaluate", "attack")
"""Kinds of the cells of the node grid."""
Layers = Mapping[int, frozenset[int]]
"""By seed, some layers."""
RowKey = tuple[str, str, str]
"""Model, dataset and name of a row."""


class Key(NamedTuple):
    """What names a record in a table."""

    model: str
    dataset: str
    row: str
    seed: int


class Results:
    """Good records of one kind, read once.

    Records of one row that differ in their threats only are laid together. A row must mean one thing: records
    of one model, dataset and row whose settings differ raise `CheckpointError`.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], expected: Iterable[Cell] = ()) -> None:
        self.records: dict[Key, dict[str, Any]] = {}
        self.expected = list(expected)
        self.older_rows: set[RowKey] = set()
        self._there: set[str] = set()
        settings: dict[RowKey, tuple[Any, str]] = {}
        for record in sorted(records, key=is_earlier):
            cell = Cell.from_dict(record["cell"])
            key = key_of(cell)
            held, name = settings.setdefault(key[:3], (_training(record), record["key"]))
            if held != _training(record):
                if is_earlier(record):  # its row was run again
                    continue
                raise CheckpointError(
                    f"records {name} and {record['key']} of {cell.model}, {cell.dataset}, row {cell.row!r}"
                    " were run with different settings; label one of them, or move the old one away"
                )
            self._there.add(record["key"])
            before = self.records.get(key, {})
            both = [before.get("evaluations", {}), record.get("evaluations", {})]
            warned = [(cell.threats, code) for code in _codes(record)]
            self.records[key] = {
                **before,
                **record,
                "evaluations": {name: value for part in both for name, value in part.items()},
                "warned": [*before.get("warned", []), *warned],
            }
        self.outdated = 0
        self._keys = {key_of(cell) for cell in self.expected} | self.records.keys()
        self._seeds: dict[RowKey, set[int]] = {}
        for key in self._keys:
            self._seeds.setdefault(key[:3], set()).add(key.seed)
        self._rows: dict[RowKey, dict[int, dict[str, Any]]] = {}
        for key in sorted(self.records):
            self._rows.setdefault(key[:3], {})[key.seed] = self.records[key]

    @classmethod
    def read(
        cls, store: Store, kind: str = "evaluate", grid: str | None = None, *, defences: bool = False
    ) -> Results:
        """Read the records of a kind, labelled variants left out; `grid` names what should be there.

        Defences, and models the paper has no tables of, are left out too unless asked for.
        """
        plain = (record for record in store.records(kind) if not record["cell"]["label"])
        if not defences:
            plain = (r for r in plain if r["cell"]["model"] in MODELS and r["cell"]["method"] in ROWS)
        return cls.newest(plain, () if grid is None else [c for c in read_grid(grid) if not c.label])

    @classmethod
    def of_grid(cls, store: Store, grid: str, folder: str = "attack") -> Results:
        """Read the records of a grid's cells in one folder (see `Cell.folder`), labelled ones too."""
        cells = [cell for cell in read_grid(grid) if cell.folder == folder]
        keys = {cell.key for cell in cells}
        return cls.newest((record for record in store.records(folder) if record["key"] in keys), cells)

    @classmethod
    def newest(cls, records: Iterable[Mapping[str, Any]], expected: Iterable[Cell] = ()) -> Results:
        """Take the records of today's settings and searches, of rows without any the older ones.

        Tables mark what stands in `older_rows`, and say how much is `outdated` and not shown.
        """
        rows: dict[RowKey, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
        for record in records:
            cell = Cell.from_dict(record["cell"])
            current, older = rows.setdefault(key_of(cell)[:3], ([], []))
            (current if change_of(record, cell, earlier=True) is None else older).append(record)
        found = cls((record for pair in rows.values() for record in (pair[0] or pair[1])), expected)
        found.older_rows = {row for row, (current, _) in rows.items() if not current}
        found.outdated = sum(len(older) for current, older in rows.values() if current)
        return found

    @classmethod
    def node(cls, store: Store) -> Results:
        """Read what the node grid has on the paper's graphs: its records under every threat laid together.

        Records that would be made otherwise now, with other settings or by another search, are left out and
        counted as `outdated`. All tables share one reading.
        """
        return store.derived("node", NODE_KINDS, lambda: cls._node(store))

    @classmethod
    def _node(cls, store: Store) -> Results:
        held = [
            record
            for kind in NODE_KINDS
            for record in store.records(kind)
            if not record["cell"]["label"]
            and record["cell"]["model"] in MODELS
            and record["cell"]["method"] in ROWS
            and record["cell"]["dataset"] in GRAPHS
        ]
        current = [record for record in held if not is_older(record)]
        cells = [cell for cell in read_grid("node") if cell.dataset in GRAPHS]
        keys = {cell.key for cell in cells}
        found = cls((record for record in current if record["key"] in keys), cells)
        found.outdated = len(held) - len(current)
        return found

    def wanted(self, threats: Iterable[str] = ()) -> list[Cell]:
        """Expected cells; given threats, those that are attacked by one of them, or by none at all."""
        asked = set(threats)
        return [cell for cell in self.expected if not (asked and cell.threats) or asked & set(cell.threats)]

    def missing(self, threats: Iterable[str] = ()) -> int:
        """How many of the `wanted` cells have no good record."""
        return sum(cell.key not in self._there for cell in self.wanted(threats))

    def models(self) -> list[str]:
        """Models expected or there, in the paper's order."""
        return _ordered({key.model for key in self._keys}, MODELS)

    def datasets(self, model: str) -> list[str]:
        """Datasets expected or there for a model, in the paper's order."""
        return _ordered({key.dataset for key in self._keys if key.model == model}, DATASETS)

    def pairs(self) -> list[tuple[str, str]]:
        """All models and datasets expected or there, in the paper's order."""
        return [(model, dataset) for model in self.models() for dataset in self.datasets(model)]

    def rows(self, model: str, dataset: str, order: tuple[str, ...] = ROWS) -> list[str]:
        """Rows expected or there for a model on a dataset."""
        return _ordered({k.row for k in self._keys if k[:2] == (model, dataset)}, order)

    def seeds(self, row: RowKey) -> list[int]:
        """Seeds expected or there."""
        return sorted(self._seeds.get(row, ()))

    def held(self, row: RowKey) -> list[dict[str, Any]]:
        """The records of a row, by seed."""
        return list(self._rows.get(row, {}).values())

    def values(
        self, row: RowKey, path: str, threat: str = "standard", layers: Layers | None = None
    ) -> dict[int, float]:
        """Return a number per seed; records without it are left out.

        The path is that of a metric under a threat (`f1.clean`), or begins with `training`, `validation` or
        `certificate`; a number in it is an index of a list (`g_jsd.layers.0`). A mean over layers (`….all`)
        is taken over those that have a value, or over those of `layers` among them.
        """
        found: dict[int, float] = {}
        for seed, held in self._parts(row, path, threat):
            values = by_layer(held, path)
            chosen = None if layers is None else layers.get(seed)
            value = _found(held, path) if values is None else mean_over(values, chosen)
            if isinstance(value, int | float):
                found[seed] = float(value)
        return found

    def layers(self, rows: Iterable[RowKey], path: str, threat: str = "standard") -> Layers:
        """Return by seed the layers in which all of some rows have a value, where a path is a mean over them.

        What an attack reaches depends on the model it is after, and so do the layers that have a value: only
        over the same ones are two means comparable.
        """
        seeds: dict[int, list[dict[int, float]]] = {}
        for row in rows:
            for seed, held in self._parts(row, path, threat):
                if (values := by_layer(held, path)) is not None:
                    seeds.setdefault(seed, []).append(values)
        return {seed: common(values) for seed, values in seeds.items()}

    def flat(self, model: str, dataset: str, threat: str) -> list[int]:
        """Layers, from 1, whose vanilla attention says nothing on some seed: see `flat_layers`."""
        rows = [(model, dataset, name) for name in self.rows(model, dataset)]
        parts = (held for row in rows for _, held in self._parts(row, "", threat))
        return sorted({layer + 1 for held in parts for layer in flat_layers(held)})

    def _parts(self, row: RowKey, path: str, threat: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """By seed, what a path is looked up in: a record or its metrics under a threat."""
        top = path.partition(".")[0] in ("training", "validation", "certificate")
        for seed, record in self._rows.get(row, {}).items():
            held = record if top else _metrics(record["evaluations"].get(threat, {}), path)
            if held is not None:
                yield seed, held

    def estimate(
        self, row: RowKey, path: str, threat: str = "standard", layers: Layers | None = None
    ) -> Estimate | None:
        """Mean and spread over seeds."""
        return estimate(self.values(row, path, threat, layers).values())

    def pair(
        self, row: RowKey, path: str, threat: str = "standard", base: str = "vanilla"
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the values of a row and of `base` on the seeds and over the layers that both have."""
        rows = (row, (*row[:2], base))
        layers = self.layers(rows, path, threat)
        ours, theirs = (self.values(one, path, threat, layers) for one in rows)
        both = sorted(ours.keys() & theirs.keys())
        return {seed: ours[seed] for seed in both}, {seed: theirs[seed] for seed in both}

    def interval(
        self, row: RowKey, path: str, threat: str = "standard", base: str = "vanilla"
    ) -> Interval | None:
        """The paired 95 % interval of a row's difference to `base`, over the layers that both have."""
        return paired(*self.pair(row, path, threat, base))

    def warnings(self, threats: Iterable[str] = ()) -> dict[str, dict[RowKey, int]]:
        """How many records of each row carry each reliability warning; given threats, of cells with those."""
        asked, found = set(threats), dict[str, Counter[RowKey]]()
        for key, record in self.records.items():
            codes = {code for used, code in record["warned"] if not asked or asked & set(used)}
            for code in codes:
                found.setdefault(code, Counter())[key[:3]] += 1
        return {code: dict(sorted(rows.items())) for code, rows in sorted(found.items())}


def _metrics(evaluation: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """The metrics of an evaluation; unpacked, what the explanation attack took is in its ledger."""
    ledger = evaluation.get("ledgers", {}).get("explanation", {})
    if path.startswith("lost.explanation.") and ledger.get("members"):
        return {"lost": {"explanation": lost(ledger)}}
    metrics: Mapping[str, Any] | None = evaluation.get("metrics")
    return metrics


def _codes(record: Mapping[str, Any]) -> list[str]:
    """The reliability warnings of a record, by the word in brackets that each begins with."""
    texts = record.get("warnings", [])
    return sorted({text[1:].partition("]")[0] for text in texts if text.startswith("[")})


def _found(values: Mapping[str, Any], path: str) -> Any:
    """The value at a path whose last part may be a place in a list."""
    parent, _, last = path.rpartition(".")
    if not last.isdigit():
        return look_up(values, path)
    held = look_up(values, parent)
    return held[int(last)] if isinstance(held, list) and int(last) < len(held) else None


def key_of(cell: Cell) -> Key:
    """Return what names a cell in a table."""
    return Key(cell.model, cell.dataset, cell.row, cell.seed)


def _ordered(found: set[str], order: tuple[str, ...]) -> list[str]:
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def _training(record: Mapping[str, Any]) -> Any:
    """What must be equal among the records of a row."""
    parent = record.get("training", {}).get("parent")
    return {"settings": settings_in(record), "parent": current_names(parent) if parent else parent}


def settings_in(record: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a record's training by name: its own, laid over the defaults."""
    training = record.get("training", {})
    return current_names({**training.get("defaults", {}), **training.get("settings", {})})


WHOLE = "all"
"""Last part of the path of a mean over layers."""
SPEAKING = ("similarity", "sharpness")
"""What is only measured where the vanilla attention says something."""


def by_layer(metrics: Mapping[str, Any], path: str) -> dict[int, float] | None:
    """Return the values a mean over layers is made of, by layer; None where a path is no such mean.

    A layer has no value where nothing can be measured (no node whose top 5 could be lost is in reach), and,
    for similarity and sharpness, where the vanilla attention is flat.
    """
    parent, _, last = path.rpartition(".")
    held = look_up(metrics, f"{parent}.layers") if last == WHOLE else None
    if not isinstance(held, list):
        return None
    flat = flat_layers(metrics) if path.partition(".")[0] in SPEAKING else ()
    return {layer: value for layer, value in enumerate(held) if value is not None and layer not in flat}


def mean_over(values: Mapping[int, float], layers: Collection[int] | None = None) -> float | None:
    """Return the mean over some layers, all by default; None where none of them has a value."""
    held = [value for layer, value in values.items() if layers is None or layer in layers]
    return fmean(held) if held else None


def common(values: Iterable[Mapping[int, float]]) -> frozenset[int]:
    """Return the layers that all have; who has none at all says nothing and is not asked."""
    held = [frozenset(one) for one in values if one]
    return frozenset.intersection(*held) if held else frozenset()


def flat_layers(metrics: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers in which the vanilla model's attention is flat to `fgai.metrics.UNIFORM_SHARPNESS`.

    Where every layer is, none is left out. Records of before the vanilla model's sharpness was kept leave out
    none either.
    """
    held = look_up(metrics, "sharpness.vanilla.layers") or []
    flat = frozenset(
        layer for layer, value in enumerate(held) if value is not None and value <= UNIFORM_SHARPNESS
    )
    return flat if len(flat) < len(held) else frozenset()
