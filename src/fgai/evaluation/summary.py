"""The short form of evaluations: at most twelve rows in plain words, and what they mean in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from fgai.attacks import THREATS
from fgai.evaluation.reliability import WEAK
from fgai.records import Cell, Column, Table, look_up
from fgai.tasks import TASKS, Task

Record = Mapping[str, Any]
"""An evaluation as plain values."""
SLIGHT = 0.02  # largest difference of slopes, or of shares if no per-node values exist, that counts as equal
RATIO = 1.1  # largest ratio of two distances that counts as equal
BETTER, SAME, WORSE = "better", "as before", "worse"
RULE = (
    "As before: shares whose difference is within the noise over nodes (paired 95 % interval), slopes within"
    f" {SLIGHT}, distances within a factor of {RATIO}. One run, one seed."
)


LEVEL = 0.95
"""Coverage of an interval if nodes were independent."""


class Interval(NamedTuple):
    """A mean difference (second model minus first), its interval, and the number of nodes counted."""

    difference: float
    low: float
    high: float
    nodes: int

    @property
    def exceeds_noise(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0


def paired_interval(
    first: NDArray[Any], second: NDArray[Any], counted: NDArray[np.bool_] | None = None
) -> Interval | None:
    """Return the interval of the mean of `second - first` over the nodes with both values, or None.

        d̄ ± t · s / √(n + 2),   d_i = second_i − first_i

    Both are [N] or [L, N] (the mean over layers counts), in [0, 1], NaN where a node has no value; only
    `counted` nodes count, if given. The mean d̄ and the standard deviation s are over the n values and
    two more, 1 and −1: otherwise a handful of nodes that agree would prove a difference. Of values of 0 and 1
    six nodes must be on one side and none on the other, as in the exact sign test. `difference` is the mean
    over the n nodes alone.

    Example:
        >>> right = np.ones(140)
        >>> paired_interval(right * (np.arange(140) > 3), right).exceeds_noise  # four of 140 nodes differ
        False
    """
    if first.shape != second.shape or (counted is not None and counted.shape != first.shape):
        return None
    difference = np.atleast_2d(second.astype(np.float64) - first.astype(np.float64))
    defined = np.isfinite(difference) & (True if counted is None else np.atleast_2d(counted))
    layers = defined.any(1)
    nodes = int(defined.any(0).sum())
    if not nodes:
        return None
    share = nodes / (defined[layers].sum(1, keepdims=True) * layers.sum())
    values = (np.where(defined[layers], difference[layers], 0.0) * share).sum(0)[defined.any(0)]
    mean, size = float(values.mean()), nodes + 2
    centre = values.sum() / size
    spread = float(stdtrit(size - 1, (1 + LEVEL) / 2)) * np.sqrt(
        max(0.0, (np.square(values).sum() + 2) / size - centre**2) / size
    )
    return Interval(mean, float(centre - spread), float(centre + spread), nodes)


@dataclass(frozen=True)
class Measure:
    """One row of the summary: a number of a record, in plain words."""

    key: str  # by which reports store its intervals
    name: str  # short, as tables call it
    title: str  # as sentences call it, with `{k}` for the size of an explanation
    path: str  # in records; empty for a share that certificates give
    form: str  # "share", "loss" (a share of which less is better), "distance" or "slope"
    chance: str = ""  # path of what chance gets
    where: str = ""  # layer and nodes it is about

    def paths(self, score: str) -> tuple[str, str]:
        """Its path and that of what chance gets, in records whose headline score is `score`, or empty."""
        return self.path.replace("f1.", f"{score}."), self.chance.replace("f1.", f"{score}.")

    def text(self, value: float) -> str:
        """Return a value as it is printed."""
        if self.form in ("share", "loss"):
            return percent(value, 1)
        return signed(value, "#.2g" if self.form == "distance" else ".2f").rstrip(".")

    def kind(self, before: float, after: float, interval: Interval | None) -> str:
        """Return `better`, `as before` or `worse`."""
        if interval is not None:
            return SAME if not interval.exceeds_noise else BETTER if interval.low > 0 else WORSE
        if self.form != "distance":
            gain = before - after if self.form == "loss" else after - before
            return SAME if abs(gain) <= SLIGHT + 1e-9 else BETTER if gain > 0 else WORSE
        if after * RATIO >= before and before * RATIO >= after:
            return SAME
        return BETTER if after < before else WORSE


Intervals = Mapping[str, Mapping[str, Any]]
"""By name of the model and key of the measure: the fields of an `Interval`, as reports store them."""
FALL = "fall"  # key of one model's own difference: share right under attack minus share right without


def interval_in(intervals: Intervals | None, name: str, key: str) -> Interval | None:
    """Return one of the `intervals`, by model and measure; None where it is missing or cannot be read."""
    by_measure = intervals.get(name) if isinstance(intervals, Mapping) else None
    fields = by_measure.get(key) if isinstance(by_measure, Mapping) else None
    try:
        interval = None if fields is None else Interval(**fields)
    except TypeError:  # from a file of another version
        return None
    return interval if interval and all(isinstance(value, int | float) for value in interval) else None


_KEPT = "overlap_touched.{}.all"
_TOUCHED = "all layers, touched nodes"
_KEPT_CHANCE = _KEPT.format("chance")
_TAKEN = Measure(
    "taken", "mass", "attention that injected nodes take, attack on explanations",
    "intruders.explanation.mass.all", "loss", "null.uniform.intruders.mass.all",
)  # fmt: skip
MEASURES = (
    Measure("attacked", "F1 attacked", "right under attack", "f1.attacked", "share", "f1.chance"),
    Measure("clean", "F1", "right without attack", "f1.clean", "share", "f1.chance"),
    Measure("moved", "g-TVD", "how far predictions move", "g_tvd.rel", "distance"),
    Measure("attention", "g-JSD", "how far attention moves", "g_jsd.all", "distance"),
    Measure(
        "kept", "overlap", "top {k} kept, attack on predictions",
        _KEPT.format("prediction"), "share", _KEPT_CHANCE, _TOUCHED,
    ),
    Measure(  # stored as "aimed": the attack aims at explanations
        "aimed", "overlap", "top {k} kept, attack on explanations",
        _KEPT.format("explanation"), "share", _KEPT_CHANCE, _TOUCHED,
    ),
    _TAKEN,
    Measure("slope", "F-gap", "F-slope gap, without attack", "f_slope.node.clean.gap", "slope"),
    Measure("slope_attacked", "F-gap", "F-slope gap, under attack", "f_slope.node.attacked.gap", "slope"),
    Measure("proved", "certified", "top {k} proved to stay", "", "share"),
    Measure(
        "definition", "Definition 1", "all four properties",
        "definition.r01.all_four.last", "share", where="output layer, R = 0.01",
    ),
)  # fmt: skip


def size_of(record: Record) -> int:
    """Return k, the neighbours in an explanation."""
    k = (record.get("config") or {}).get("k", 5)
    return k if isinstance(k, int) else 5


def sentences(
    records: Sequence[Record], intervals: Intervals | None = None, classes: Sequence[str] | None = None
) -> list[str]:
    """Say in plain sentences what the numbers of one or two records, the reference first, mean."""
    reference, out = records[0], list[str]()
    parts = [words for record in records if (words := _fall(record, intervals))]
    if parts:
        same = "Under the same threat" if len(parts) > 1 else "Under attack"
        chance = _chance(reference, f"{score_of(reference)}.chance")
        out.append(f"{same}, {' and '.join(parts)} {score_phrase(reference, 'of the ')}{chance}.")
    out.append(_missed(records, classes))
    aims = {key: f" when the attack aims at {key}s" for key in ("prediction", "explanation")}
    if one_attack(reference):
        aims = {"prediction": ""}
    stays = [f"{shares}{aim}" for key, aim in aims.items() if (shares := _shares(records, _KEPT.format(key)))]
    if stays:
        top = f"Of the top {size_of(reference)} neighbours of touched nodes there stay"
        out.append(f"{top} {', and '.join(stays)}{_chance(reference, _KEPT_CHANCE)}.")
    # Overlap is about original neighbours and cannot show this.
    if shares := _shares(records, _TAKEN.path, "{} ({})"):
        taken = f"Injected nodes take {shares} of the attention of the nodes they are joined to"
        uniform = _chance(reference, _TAKEN.chance, "uniform attention")
        out.append(f"{taken}{aims.get('explanation', '')}{uniform}.")
    out.append(sharpness_sentence(records))
    return [sentence for sentence in out if sentence]


def one_attack(record: Record) -> bool:
    """Whether the attack has no aim to name: its threat follows no gradients or has its own objective."""
    first, second = (look_up(record, f"ledgers.{name}") for name in ("prediction", "explanation"))
    if second is not None:
        return bool(first == second)
    threat = THREATS.get(str(look_up(record, "threat.name")))
    return look_up(record, "ledgers.prediction.steps") == 0 or bool(threat and threat.objective)


def _shares(records: Sequence[Record], path: str, form: str = "{} in {}") -> str:
    shares = [(record.get("name"), number_at(record, path)) for record in records]
    return " and ".join(form.format(percent(share), name) for name, share in shares if share is not None)


def _chance(record: Record, path: str, name: str = "chance") -> str:
    level = number_at(record, path)
    return "" if level is None else f" ({name}: {percent(level)})"


def recall_by_class(record: Record) -> list[tuple[int, float, float]]:
    """By class: tested nodes, and the shares classified right without the attack and under it; or empty."""
    recall = look_up(record.get("metrics") or {}, "recall")
    if not isinstance(recall, Mapping):
        return []
    columns = [recall.get(name) for name in ("support", "clean", "attacked")]
    if not all(isinstance(values, list) for values in columns) or len(set(map(len, columns))) > 1:  # type: ignore[arg-type]
        return []
    rows = list(zip(*columns, strict=True))
    complete = all(isinstance(value, int | float) for row in rows for value in row if row[0])
    return [row if row[0] else (0, 0.0, 0.0) for row in rows] if complete else []


def _rarest(record: Record) -> int | None:
    if score_of(record) != "balanced_accuracy":
        return None
    tested = [(row[0], number) for number, row in enumerate(recall_by_class(record)) if row[0]]
    return min(tested)[1] if tested else None


def _class_name(record: Record, number: int, names: Sequence[str] | None) -> str:
    names = names or (record.get("data") or {}).get("class_names") or ()
    return str(names[number]) if number < len(names) else str(number)


def _missed(records: Sequence[Record], names: Sequence[str] | None) -> str:
    rare, parts = _rarest(records[0]), []
    if rare is None:
        return ""
    count = recall_by_class(records[0])[rare][0]
    for record in records:
        recall = recall_by_class(record)
        if rare < len(recall):
            before, after = (round(count * (1 - share)) for share in recall[rare][1:])
            parts.append(f"{record.get('name')} misses {before} without the attack and {after} under it")
    label = _class_name(records[0], rare, names)
    return f"Of the {count} tested nodes of class {label}, the rarest, {' and '.join(parts)}."


def sharpness_sentence(records: Sequence[Record]) -> str:
    """Return the share of the strongest neighbour, beside that of uniform attention."""
    uniform, parts = number_at(records[0], "top_share.uniform.all"), []
    for record in records:
        top, sharp = number_at(record, "top_share.clean.all"), number_at(record, "sharpness.clean.all")
        if top is not None and sharp is not None:
            parts.append(f"{percent(top)} of its attention in {record.get('name')} (sharpness {sharp:#.2g})")
    if not parts or uniform is None:
        return ""
    gets = f"A node's strongest neighbour gets {' and '.join(parts)}"
    return f"{gets}; {percent(uniform)} if all got the same."


def _fall(record: Record, intervals: Intervals | None) -> str:
    before, after = score_at(record, "clean"), score_at(record, "attacked")
    if before is None or after is None:
        return ""
    name, ends = record.get("name"), (percent(before), percent(after))
    if ends[0] == ends[1]:
        return f"{name} stays at {ends[1]}"
    interval = interval_in(intervals, str(name), FALL)
    if interval is not None and not interval.exceeds_noise:
        return f"{name} goes from {ends[0]} to {ends[1]}, which may be noise,"
    return f"{name} {'falls' if after < before else 'rises'} from {ends[0]} to {ends[1]}"


def number_at(record: Record, path: str) -> float | None:
    """A metric of a record by its dotted path, None where it is missing or no number."""
    value = look_up(record.get("metrics") or {}, path)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


SCORES = {"f1": "F1", "accuracy": "accuracy", "roc_auc": "ROC-AUC", "balanced_accuracy": "balanced accuracy"}
"""Headings of scores by their names in records."""
SHARES = ("f1", "accuracy")  # scores that are shares of what is classified right


def _task_in(record: Record) -> Task:
    return TASKS.get((record.get("config") or {}).get("task", ""), TASKS["node"])


def score_of(record: Record) -> str:
    """Name of a record's headline score: its own, the task's, any that is there, or `f1`."""
    metrics, own = record.get("metrics") or {}, str((record.get("config") or {}).get("headline"))
    return next((name for name in (own, _task_in(record).headline, *SCORES) if name in metrics), "f1")


def heading_of(record: Record) -> str:
    """Return the headline score as tables call it, e.g. `F1`."""
    name = score_of(record)
    return SCORES.get(name, name)


def score_phrase(record: Record, prefix: str = "") -> str:
    """The headline score in words, e.g. `tested nodes classified right`; with `prefix` if it is a share."""
    rows = _task_in(record).rows_are
    if score_of(record) in SHARES:
        return f"{prefix}tested {rows} classified right"
    return f"{heading_of(record)} on the tested {rows}"


def score_at(record: Record, when: str) -> float | None:
    """Return the headline score, `clean` or `attacked`."""
    return number_at(record, f"{score_of(record)}.{when}")


def percent(value: float | None, digits: int = 0) -> str:
    """Return a share in percent, a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{digits}f}\u00a0%"


def signed(value: float | None, form: str) -> str:
    """A number with a real minus sign, a dash where there is none."""
    return "–" if value is None else format(value, form).replace("-", "−")


def measure_names(record: Record) -> dict[str, str]:
    """Return readable names of the measures, with layer and nodes, and the paths they stand for."""
    score, out = score_of(record), dict[str, str]()
    for measure in MEASURES:
        title = measure.title.format(k=size_of(record))
        path, _ = measure.paths(score)
        if measure.path.startswith("f1."):
            title = f"{heading_of(record)}, {'without' if path.endswith('clean') else 'under'} attack"
        if path:
            out[f"{title}, {measure.where}" if measure.where else title] = path
    return out


def summary_table(records: Sequence[Record]) -> Table:
    """The measures that the records hold, a row each; a column for each model, and what chance gets."""
    first = records[0]
    columns = [Column(""), *(Column(str(record.get("name"))) for record in records), Column("chance")]
    rows: list[list[Cell]] = []
    in_records, one = [measure for measure in MEASURES if measure.path], one_attack(first)
    for measure, (name, path) in zip(in_records, measure_names(first).items(), strict=True):
        values = [number_at(record, path) for record in records]
        if all(value is None for value in values) or (measure.key == "aimed" and one):
            continue
        _, beside = measure.paths(score_of(first))
        texts = ["–" if value is None else measure.text(value) for value in values]
        title = name.removesuffix(f", {_TOUCHED}")
        if one and ", attack on " in title:
            title = f"{title.partition(', attack on ')[0]}, under attack"
        rows.append([title, *texts, percent(number_at(first, beside) if beside else None, 1)])
    data, threat, config = (first.get(part) or {} for part in ("data", "threat", "config"))
    note = (
        f"{config.get('targets')} {_task_in(first).rows_are}, seed {first.get('seed')}. Kept: all layers,"
        " touched nodes (in reach of the attack). F-slope gap: how much more it hurts to remove the"
        " strongest edges than the weakest. Chance: a random ranking, uniform attention, or always the most"
        " frequent class."
    )
    return Table(f"{data.get('name')}, threat {threat.get('name')}", columns, rows, [note])


def verdict(record: Record, classes: Sequence[str] | None = None) -> str:
    """Say in two sentences how a model holds: how many top neighbours stay, and what an attack can do."""
    kept = [number_at(record, f"overlap_touched.{key}.all") for key in ("explanation", "prediction")]
    shares = [share for share in kept if share is not None]
    out = [f"{percent(min(shares))} of the top neighbours stay."] if shares else []
    budget = (record.get("threat") or {}).get("budget") or {}
    nodes = budget.get("nodes") if isinstance(budget, Mapping) else None
    who = f"{nodes} fake node{'s' if nodes != 1 else ''}" if nodes else "The attack"
    before, after, rare = score_at(record, "clean"), score_at(record, "attacked"), _rarest(record)
    if rare is not None:
        _, before, after = recall_by_class(record)[rare]
    if before and after is not None:
        lost = max(0, round(100 * (before - after) / before))
        does = f"can turn {lost} of 100 right predictions wrong"
        if rare is not None:
            does = f"can hide {lost} of 100 nodes of class {_class_name(record, rare, classes)} that it finds"
        elif score_of(record) not in SHARES:
            fall = f"can lower {heading_of(record)} from {percent(before)} to {percent(after)}"
            does = fall if after < before else f"did not lower {heading_of(record)} of {percent(before)}"
        out.append(f"{who} {does}.")
    return " ".join(out) or "How far can its attention be trusted?"


_PROBLEM = 0.05  # share of right predictions, or of top neighbours, lost under attack


def next_steps(record: Record) -> list[str]:
    """Say what to do about the numbers of a record, most important first."""
    steps = []
    if record.get("warnings"):
        steps.append("Read the warnings first: each may make a number on this page wrong.")
    if (sharp := number_at(record, "sharpness.clean.all")) is not None and sharp < WEAK:
        steps.append(
            "Its attention is nearly flat. Do not show it as a reason; another seed may rank otherwise."
        )
    before, after = score_at(record, "clean"), score_at(record, "attacked")
    falls = before is not None and after is not None and after < (1 - _PROBLEM) * before
    kept = number_at(record, "overlap_touched.explanation.all")
    moves = kept is not None and kept < 1 - _PROBLEM
    if falls:
        steps.append(
            "Predictions move. Put limits around its layers (fgai limit, one pass), or fine-tune it: fgai"
            " faithful keeps its explanation, fgai harden does not and is more robust."
        )
    elif moves:
        steps.append("Predictions hold and explanations move. Fine-tune it: fgai faithful.")
    name = str((record.get("threat") or {}).get("name"))
    if name != "ensemble-strong":
        stronger = "ensemble-strong" if name == "ensemble" else "ensemble"
        steps.append(f"Before you call it robust, run this again with --threat {stronger}.")
    return steps
