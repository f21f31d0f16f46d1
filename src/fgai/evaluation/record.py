"""`EvaluationRecord` and `Comparison`: evaluations as small JSON documents, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from numpy.typing import NDArray
from rich.console import Console

from fgai.attacks import THREATS, weak_search_note
from fgai.errors import InputError
from fgai.evaluation.summary import percent, sentences, sharpness_sentence, summary_table, verdict
from fgai.metrics import chance_path, null_path, quantity, shown_numbers
from fgai.records import Cell, Column, Table, TabledDocument, data_frame, look_up, plain, unpack_array
from fgai.records.table import csv_text
from fgai.tasks import TASKS
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


@typed
@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(TabledDocument):
    """One model on one dataset under one threat; numbers that are not defined are None."""

    KIND: ClassVar[str] = "evaluation"

    name: str  # of the model in tables
    model: dict[str, Any]  # class and settings
    data: dict[str, Any]  # name, fingerprint and sizes of the dataset
    threat: dict[str, Any]  # name and budget
    config: dict[str, Any]  # the other arguments of `evaluate`
    seed: int  # of the attacks and the random ranking
    version: dict[str, str]  # of fgai and torch
    device: str  # where it ran
    seconds: dict[str, float]  # wall-clock time, by part and in all
    peak_memory: dict[str, Any]  # bytes, and how they were counted
    metrics: dict[str, Any]  # nested, see docs/metrics.md
    # Under `prediction` and `explanation`, the `value` that the attack reached, that at its `start`, that of
    # random `noise`, and the fields of its `fgai.attacks.Ledger`.
    ledgers: dict[str, Any]
    warnings: list[dict[str, str]] = field(default_factory=list)  # code and message of each
    per_node: dict[str, Any] = field(default_factory=dict)  # packed arrays, see `node_values`
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)  # see `fgai.records.provenance`

    def value(self, path: str) -> Any:
        """Return one metric by its dotted name, e.g. `f1.attacked`; `InputError` if there is none."""
        value: Any = self.metrics
        above = ""
        for part in path.split("."):
            if isinstance(value, list) and part.lstrip("-").isdigit() and abs(int(part)) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                raise InputError(f"the record has no metric {path!r}: {_why_missing(value, part, above)}")
            above = f"{above}.{part}".lstrip(".")
        return value

    def get(self, path: str) -> Any:
        """Return one metric by its dotted name, or None where the record lacks it."""
        try:
            return self.value(path)
        except InputError:
            return None

    def node_values(self, name: str) -> NDArray[Any]:
        """Return an array of `evaluate(..., per_node=True)`; `InputError` if it is not there."""
        if name not in self.per_node:
            names = ", ".join(self.per_node) or "nothing; evaluate with `per_node=True`"
            raise InputError(f"the record holds no per-node {name!r}; it holds {names}")
        return unpack_array(self.per_node[name])

    def tables(self) -> list[Table]:
        """Return every metric, the recall by class, and the explanation metrics beside their null rows."""
        return [_long_table(self), *_class_table([self]), _explanation_table([self], self)]

    def show(self, console: Console | None = None, *, every: bool = False) -> None:
        """Print a summary of at most twelve rows and what it means; `every` prints all tables instead."""
        if every:
            super().show(console)
        else:
            _show_summary([self], console)

    def to_csv(self) -> str:
        """Return every number as CSV: dotted metric and value, layers and curves by position."""
        return csv_text([("metric", "value"), *self.flat().items()])

    def flat(self) -> dict[str, Any]:
        """Return every number by its dotted metric, layers and curves by position."""
        return dict(_flat("", self.metrics))

    def to_pandas(self) -> pandas.DataFrame:
        """Return every number as a `DataFrame` (needs pandas): a row per dotted metric, one column."""
        return data_frame({self.name: self.flat()})


@typed
@dataclass(frozen=True, kw_only=True)
class Comparison(TabledDocument):
    """Records of several models under one threat, which are compared with the model named `reference`."""

    KIND: ClassVar[str] = "comparison"

    records: list[EvaluationRecord]
    reference: str

    def __getitem__(self, name: str) -> EvaluationRecord:
        names = [record.name for record in self.records]
        if name not in names:
            raise InputError(f"there is no row {name!r}; there are {', '.join(names)}")
        return self.records[names.index(name)]

    def __iter__(self) -> Iterator[EvaluationRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the schema version first."""
        records = [record.to_dict() for record in self.records]
        return {"kind": self.KIND, "schema": self.SCHEMA, "reference": self.reference, "records": records}

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the names and types of a file's values."""
        return {**super().layout(), "records": list[dict[str, Any]]}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        records = [EvaluationRecord.from_dict(values) for values in fields["records"]]
        return cls(records=records, reference=fields["reference"])

    def tables(self) -> list[Table]:
        """Return the tables: prediction and stability, recall by class, explanation."""
        base = self[self.reference]
        predicted = _prediction_table(self.records, base)
        return [predicted, *_class_table(self.records), _explanation_table(self.records, base)]

    def show(self, console: Console | None = None, *, every: bool = False) -> None:
        """Print a summary of at most twelve rows and what it means; `every` prints all tables instead."""
        if every:
            super().show(console)
        else:
            _show_summary([self[self.reference], *(r for r in self if r.name != self.reference)], console)

    def to_csv(self) -> str:
        """Return one CSV, a row per model and metric; full precision."""
        rows = [(record.name, *item) for record in self.records for item in record.flat().items()]
        return csv_text([("model", "metric", "value"), *rows])

    def to_pandas(self) -> pandas.DataFrame:
        """Return every number as a `DataFrame` (needs pandas): a row per metric, a column per model."""
        return data_frame({record.name: record.flat() for record in self.records})


def _why_missing(value: Any, part: str, above: str) -> str:
    if isinstance(value, list):
        return f"{above!r} is a list of {len(value)}"
    if value and isinstance(value, Mapping):
        return f"no {part!r} among {', '.join(value)}"
    return f"{above!r} was not measured" if value is None or value == {} else f"{above!r} is a single value"


def _show_summary(records: Sequence[EvaluationRecord], console: Console | None = None) -> None:
    """Print the summary of records, the reference first; sentences compare the first and the last."""
    console, plain_records = console or Console(), [vars(record) for record in records]
    pair = [plain_records[0], *plain_records[1:][-1:]]
    lines = sentences(pair) if len(records) > 1 else [verdict(pair[0]), *sentences(pair)]
    summary_table(plain_records).show(console)
    for line in [*lines, *_extra_notes(records)]:
        console.print(line, markup=False, highlight=False)
    pair_note = f"Sentences: {records[0].name} and {records[-1].name} alone. " if len(records) > 2 else ""
    console.print(
        f"{pair_note}Every number: show(every=True), --all.", style="dim", markup=False, highlight=False
    )


def _extra_notes(records: Sequence[EvaluationRecord]) -> list[str]:
    weak, what = weak_search_note(records[0].threat["name"]), _rows_name(records[0])
    defined = [f"{r.name}, {words}." for r in records if (words := _definition_words(r.metrics, what))]
    warned = [f"{record.name}: {entry['message']}" for record in records for entry in record.warnings]
    return [*([weak] if weak else []), *defined, *warned]


def _flat(prefix: str, values: Any) -> list[tuple[str, Any]]:
    if not isinstance(values, Mapping | list):
        return [(prefix, values)]
    items = enumerate(values) if isinstance(values, list) else values.items()
    return [row for key, value in items for row in _flat(f"{prefix}.{key}" if prefix else str(key), value)]


def shown_paths(metrics: Mapping[str, Any]) -> list[str]:
    """Return the paths that tables show of a record's metrics, in their order; the numbers may be None."""
    paths = []
    for entry in (*shown_numbers([metrics], "prediction"), *shown_numbers([metrics], "explanation")):
        parent, _, name = entry.path.rpartition(".")
        if name in ((look_up(metrics, parent) if parent else metrics) or {}):
            paths.append(entry.path)
    return paths


def _notes_of(records: Sequence[EvaluationRecord]) -> tuple[str, ...]:
    first = records[0]
    about = (
        f"{first.data['name']}, threat {threat_words(first)}, {first.config['targets']} {_rows_name(first)},"
        f" seed {first.seed}, k={first.config['k']}; `all` layers unless said otherwise;"
        " F-gap: f− minus f+, edges ranked within each node; whole-graph: all edges ranked together by the"
        " last layer, as the paper does."
    )
    sharp = sharpness_sentence([vars(record) for record in records])
    return (about, *([sharp] if sharp else []), *_extra_notes(records))


def _rows_name(record: EvaluationRecord) -> str:
    task = TASKS.get(record.config.get("task", "node"))
    return "rows" if task is None else task.rows_are


def threat_words(record: EvaluationRecord) -> str:
    """The name of a threat, with size and box where these are not its own: `standard (nodes=2, edges=3)`."""
    name, task = record.threat["name"], record.config.get("task", "node")
    if name not in THREATS or task not in TASKS:
        return str(name)
    own, used = plain(THREATS[name].budget_for(task).to_dict()), record.threat.get("budget") or {}
    parts = ("nodes", "edges", "box")
    sizes = [f"{part}={used[part]}" for part in parts if used.get(part, own[part]) != own[part]]
    return f"{name} ({', '.join(sizes)})" if sizes else str(name)


def _definition_words(metrics: Mapping[str, Any], what: str) -> str:
    layers = look_up(metrics, "definition.r01") or {}
    shares = {name: look_up(part, "last") for name, part in layers.items() if isinstance(part, Mapping)}
    if not shares:
        return ""
    texts = {n: "not measured" if v is None else percent(v, 1) for n, v in shares.items()}
    parts = ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in texts.items())
    return f"Definition 1 at the output layer, radius 0.01, of {layers['counted'][-1]} {what}: {parts}"


def _prediction_table(records: Sequence[EvaluationRecord], reference: EvaluationRecord) -> Table:
    """Scores and stability of each model, cost beside them; ratios to `reference` in brackets."""
    possible = shown_numbers([record.metrics for record in records], "prediction")
    shown = [quantity(e.path) for e in possible if any(_holds(record, e.path) for record in records)]
    columns = [Column("model"), *shown]
    columns += [Column("seconds", ".1f"), Column("peak MB", ".0f")]
    rows: list[list[Cell]] = []
    for record in records:
        row: list[Cell] = [record.name]
        for column in shown:
            value, base = (look_up(one.metrics, column.path) for one in (record, reference))
            if column.better == "lower" and record is not reference and value and base is not None:
                value = f"{value:{column.form}} ({base / value:.1f}×)"
            row.append(value)
        row += [record.seconds["total"], (record.peak_memory["bytes"] or 0) / 2**20 or None]
        rows.append(row)
    chance = [look_up(records[0].metrics, chance_path(entry.path)) for entry in shown]
    if any(value is not None for value in chance):
        rows.append(["chance", *chance, None, None])
    return Table("Prediction and stability", columns, rows, _notes_of(records))


def _holds(record: EvaluationRecord, path: str) -> bool:
    """Whether a column belongs in the table: every score of the record's task, and all the rest."""
    if path.endswith(("_random", "_chosen")):
        return look_up(record.metrics, path) is not None
    return path.split(".")[0] in record.metrics


def _class_table(records: Sequence[EvaluationRecord]) -> list[Table]:
    """Recall of every class that was scored, for each model; no table where records do not hold it."""
    recalls = [(record.name, record.metrics["recall"]) for record in records if record.metrics.get("recall")]
    if not recalls:
        return []
    columns = [Column("class", "d"), Column("scored", "d")]
    for name, _ in recalls:
        whose = f"{name}, " if len(recalls) > 1 else ""
        columns += [Column(f"{whose}{view}", better="higher") for view in ("clean", "attacked")]
        columns.append(Column(f"{whose}missed under attack", "d", "lower"))
    rows: list[list[Cell]] = []
    for number, count in enumerate(recalls[0][1]["support"]):
        if count:
            row: list[Cell] = [number, count]
            for _, values in recalls:
                shares = [values[view][number] for view in ("clean", "attacked")]
                row += [*shares, round(count * (1 - shares[1]))]
            rows.append(row)
    return [Table("Recall by class", columns, rows)]


def _explanation_table(records: Sequence[EvaluationRecord], nulls: EvaluationRecord) -> Table:
    """Explanation metrics of each model, and of null attention on the model of `nulls`."""
    paths = [entry.path for entry in shown_numbers([record.metrics for record in records], "explanation")]
    rows = [[record.name, *(look_up(record.metrics, path) for path in paths)] for record in records]
    for kind, metrics in nulls.metrics.get("null", {}).items():
        rows.append([f"{kind} (null)", *(look_up(metrics, null_path(path)) for path in paths)])
    rows.append(["chance", *(look_up(nulls.metrics, chance_path(path)) for path in paths)])
    shown = [i for i in range(1, len(paths) + 1) if any(row[i] is not None for row in rows)]
    columns = [Column("model"), *(quantity(paths[i - 1]) for i in shown)]
    return Table("Explanation", columns, [[row[0], *(row[i] for i in shown)] for row in rows])


def _long_table(record: EvaluationRecord) -> Table:
    """Every metric of one record but its null rows: its value, or last, all and sharpest layer."""
    columns = [Column("metric"), *(Column(name, ".4g") for name in ("value", "last", "all", "sharpest"))]
    rows: list[list[Cell]] = []

    def walk(prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            path = f"{prefix}{name}"
            if isinstance(value, Mapping) and "layers" in value:
                rows.append([path, None, value["last"], value["all"], value["sharpest"]])
            elif isinstance(value, Mapping):
                walk(f"{path}.", value)
            elif not isinstance(value, list):
                rows.append([path, value, None, None, None])

    walk("", {name: value for name, value in record.metrics.items() if name != "null"})
    title = f"{record.name} on {record.data['name']}, threat {record.threat['name']}"
    return Table(title, columns, rows, _notes_of([record]))
