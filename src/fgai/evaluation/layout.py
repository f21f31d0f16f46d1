"""Records as tables: which numbers stand where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fgai.attacks import THREATS, doubt
from fgai.metrics import Quantity, measured, null_path, quantity
from fgai.records import Cell, Column, Table, look_up, plain
from fgai.tasks import TASKS

# What the tables show, in this order; headings, formats and directions are declared with the metrics.
_PREDICTION = (
    "f1.clean", "f1.attacked", "f1.attacked_random", "f1.attacked_chosen",
    "balanced_accuracy.clean", "balanced_accuracy.attacked",
    "balanced_accuracy.attacked_random", "balanced_accuracy.attacked_chosen",
    "macro_f1.clean", "macro_f1.attacked",
    "accuracy.clean", "accuracy.attacked", "accuracy.attacked_random", "accuracy.attacked_chosen",
    "roc_auc.clean", "roc_auc.attacked", "roc_auc.attacked_random", "roc_auc.attacked_chosen",
    "average_precision.clean", "average_precision.attacked",
    "g_tvd.rel", "g_tvd.probs", "g_jsd.last", "g_jsd.all",
)  # fmt: skip
_EXPLANATION = (
    "overlap.prediction.all", "overlap_touched.prediction.all",
    "intruders.prediction.nodes.all", "intruders.prediction.mass.all",
    "overlap_touched.explanation.all", "lost.explanation.random", "lost.explanation.chosen",
    "intruders.explanation.nodes.all", "intruders.explanation.mass.all",
    "explanations.prediction.links.all", "explanations.prediction.pairs.all",
    "explanations.prediction.graphs.all",
    "similarity.overlap.all", "sharpness.clean.all",
    "f_slope.node.clean.gap", "f_slope.node.attacked.gap",
    "f_slope.graph.clean.gap", "f_slope.graph.attacked.gap",
    "truth.auc.all", "truth_prediction.auc.all",
)  # fmt: skip


class _Evaluated(Protocol):
    """What a table reads of an `EvaluationRecord`; the fields are described there."""

    @property
    def name(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...
    @property
    def threat(self) -> dict[str, Any]: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def seed(self) -> int: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def peak_memory(self) -> dict[str, Any]: ...
    @property
    def metrics(self) -> dict[str, Any]: ...
    @property
    def warnings(self) -> list[dict[str, str]]: ...


def shown_quantities(metrics: Mapping[str, Any]) -> list[Quantity]:
    """Return what the tables show of a record's metrics, in their order: all it has a number for, or None."""
    declared = [quantity(path) for path in (*_PREDICTION, *_EXPLANATION) if _has(metrics, path)]
    return [*declared, *measured("prediction", [metrics]), *measured("explanation", [metrics])]


def _has(metrics: Mapping[str, Any], path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return name in (look_up(metrics, parent) or {})


def notes_of(records: Sequence[_Evaluated]) -> tuple[str, ...]:
    """What a table must say below itself: data, threat, parameters and warnings."""
    first = records[0]
    task = TASKS.get(first.config.get("task", "node"))
    what = "rows" if task is None else task.rows_are
    about = (
        f"{first.data['name']}, threat {threat_words(first)}, {first.config['targets']} {what},"
        f" seed {first.seed}, k={first.config['k']}; `all` layers unless said otherwise;"
        " F-gap = f− − f+ by node, the paper's over the whole graph by the last layer."
    )
    weak = doubt(first.threat["name"])
    sharp = [f"{r.name}, {words}." for r in records if (words := sharpness_words(r.metrics))]
    warned = [f"{record.name}: {entry['message']}" for record in records for entry in record.warnings]
    return (about, *([weak] if weak else []), *sharp, *warned)


def threat_words(record: _Evaluated) -> str:
    """The name of a threat, with size and box where these are not its own: `standard (nodes=2, edges=3)`."""
    name, task = record.threat["name"], record.config.get("task", "node")
    if name not in THREATS or task not in TASKS:
        return str(name)
    own, used = plain(THREATS[name].budget_for(task).to_dict()), record.threat.get("budget") or {}
    parts = ("nodes", "edges", "box")
    sizes = [f"{part}={used[part]}" for part in parts if used.get(part, own[part]) != own[part]]
    return f"{name} ({', '.join(sizes)})" if sizes else str(name)


def sharpness_words(metrics: Mapping[str, Any]) -> str:
    """Say what a sharpness means: what the strongest neighbour gets, beside its share if all got the same.

    Args:
        metrics: of a record; nothing is said where they lack it.

    Example:
        >>> shares = {"clean": {"all": 0.26}, "uniform": {"all": 0.13}}
        >>> words = sharpness_words({"sharpness": {"clean": {"all": 0.08}}, "top_share": shares})
        >>> " ".join(words.split())
        "sharpness 0.080: the strongest neighbour gets 26 % of a node's attention, 13 % if all got the same"
    """
    sharp = look_up(metrics, "sharpness.clean.all")
    top, uniform = (look_up(metrics, f"top_share.{name}.all") for name in ("clean", "uniform"))
    if not all(isinstance(value, int | float) for value in (sharp, top, uniform)):
        return ""
    digits = 0 if f"{top:.0%}" != f"{uniform:.0%}" else 1
    shares = [f"{100 * value:.{digits}f}\u00a0%" for value in (top, uniform)]
    return (
        f"sharpness {sharp:#.2g}: the strongest neighbour gets {shares[0]} of a node's attention,"
        f" {shares[1]} if all got the same"
    )


def prediction_table(records: Sequence[_Evaluated], reference: _Evaluated | None = None) -> Table:
    """Scores and stability of each model, cost beside them; ratios to `reference` in brackets."""
    shown = [quantity(path) for path in _PREDICTION if any(_holds(record, path) for record in records)]
    shown += measured("prediction", [record.metrics for record in records])
    columns = [Column("model"), *(entry.column for entry in shown)]
    columns += [Column("seconds", ".1f"), Column("peak MB", ".0f")]
    rows: list[list[Cell]] = []
    for record in records:
        row: list[Cell] = [record.name]
        for entry in shown:
            value = look_up(record.metrics, entry.path)
            row.append(_with_ratio(value, reference, record, entry) if entry.sign < 0 else value)
        row += [record.seconds["total"], (record.peak_memory["bytes"] or 0) / 2**20 or None]
        rows.append(row)
    chance = [look_up(records[0].metrics, chance_path(entry.path)) for entry in shown]
    if any(value is not None for value in chance):
        rows.append(["chance", *chance, None, None])
    return Table("Prediction and stability", columns, rows, notes_of(records))


def chance_path(path: str) -> str:
    """Where a record keeps what chance gives the number at `path`; nothing is there where chance has no say.

    Example:
        >>> chance_path("f1.attacked"), chance_path("overlap_touched.explanation.all")
        ('f1.chance', 'overlap_touched.chance.all')
        >>> chance_path("similarity.overlap.all"), chance_path("truth.precision.last")
        ('overlap.chance.all', 'truth.chance.last')
    """
    if path.startswith("similarity."):  # an overlap, over the same nodes
        name, *rest = path.split(".")[1:]
        return ".".join([name, "chance", *rest])
    name, *rest = path.split(".")
    if name.startswith("truth") and rest[:1] != ["precision"]:
        return ""
    return ".".join([name, "chance", *rest[1:]])


def _holds(record: _Evaluated, path: str) -> bool:
    """Whether a column belongs in the table: every score of the record's task, and all the rest.

    Only attacks with several sets of endpoints tell what they reached at each.
    """
    if path.endswith(("_random", "_chosen")):
        return look_up(record.metrics, path) is not None
    return path.split(".")[0] in record.metrics


def _with_ratio(
    value: float | None, reference: _Evaluated | None, record: _Evaluated, shown: Quantity
) -> Cell:
    base = None if reference is None or reference is record else look_up(reference.metrics, shown.path)
    if not value or base is None:
        return value
    return f"{value:{shown.form}} ({base / value:.1f}×)"


def class_table(records: Sequence[_Evaluated]) -> list[Table]:
    """Recall of every class that was scored, for each model; no table where records do not hold it."""
    held = [(record.name, record.metrics["recall"]) for record in records if record.metrics.get("recall")]
    if not held:
        return []
    columns = [Column("class", "d"), Column("scored", "d")]
    for name, _ in held:
        whose = f"{name}, " if len(held) > 1 else ""
        columns += [Column(f"{whose}{view}", better="higher") for view in ("clean", "attacked")]
        columns.append(Column(f"{whose}missed under attack", "d", "lower"))
    rows: list[list[Cell]] = []
    for number, count in enumerate(held[0][1]["support"]):
        if count:
            row: list[Cell] = [number, count]
            for _, values in held:
                shares = [values[view][number] for view in ("clean", "attacked")]
                row += [*shares, round(count * (1 - shares[1]))]
            rows.append(row)
    return [Table("Recall by class", columns, rows)]


def explanation_table(records: Sequence[_Evaluated], nulls: _Evaluated | None = None) -> Table:
    """Explanation metrics of each model, and of attention that says nothing on the model `nulls` is of."""
    possible = [quantity(path) for path in _EXPLANATION]
    possible += measured("explanation", [record.metrics for record in records])
    paths = [entry.path for entry in possible]
    rows: list[list[Cell]] = [
        [record.name, *(look_up(record.metrics, path) for path in paths)] for record in records
    ]
    if nulls is not None:
        for kind, values in nulls.metrics.get("null", {}).items():
            name = "uniform (null)" if kind == "uniform" else "random (null)"
            rows.append([name, *(look_up(values, null_path(path)) for path in paths)])
        rows.append(["chance", *(look_up(nulls.metrics, chance_path(path)) for path in paths)])
    shown = [i for i in range(1, len(possible) + 1) if any(row[i] is not None for row in rows)]
    kept = [Column("model"), *(possible[i - 1].column for i in shown)]
    return Table("Explanation", kept, [[row[0], *(row[i] for i in shown)] for row in rows])


def long_table(record: _Evaluated) -> Table:
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
    return Table(title, columns, rows, notes_of([record]))
