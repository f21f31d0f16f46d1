"""Numbers out of records, and what each of them means in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fgai.records import look_up
from fgai.tasks import TASKS, Task

Record = Mapping[str, Any]


class Metric(NamedTuple):
    """One row of the table of all numbers."""

    title: str
    path: str
    form: str
    better: str
    about: str
    null: str = ""


SHARE, SMALL, PLAIN = ".3f", ".2e", ".3f"
METRICS: dict[str, tuple[Metric, ...]] = {
    "Predictions": (
        Metric("F1, clean graph", "f1.clean", SHARE, "higher", "Share of the tested nodes classified right."),
        Metric("F1, prediction attacked", "f1.attacked", SHARE, "higher", "The same on the attacked graph."),
        Metric(
            "F1, explanation attacked", "f1.attacked_explanation", SHARE, "higher",
            "The same when the attack aims at the explanation instead.",
        ),
        Metric(
            "ROC-AUC, clean graph", "roc_auc.clean", SHARE, "higher",
            "Chance that a positive outranks a negative.",
        ),
        Metric("ROC-AUC, attacked", "roc_auc.attacked", SHARE, "higher", "The same on the attacked graph."),
        Metric(
            "Average precision, clean graph", "average_precision.clean", SHARE, "higher",
            "Precision over all thresholds.",
        ),
        Metric(
            "Average precision, attacked", "average_precision.attacked", SHARE, "higher",
            "The same on the attacked graph.",
        ),
        Metric(
            "Accuracy, clean graphs", "accuracy.clean", SHARE, "higher",
            "Share of the tested graphs classified right.",
        ),
        Metric("Accuracy, attacked", "accuracy.attacked", SHARE, "higher", "The same under attack."),
        Metric(
            "Change of logits, relative (g-TVD)", "g_tvd.rel", SMALL, "lower",
            "How far the outputs move under attack, as a share of their own spread.",
        ),
        Metric(
            "Change of probabilities (g-TVD)", "g_tvd.probs", SMALL, "lower",
            "Probability that changes hands between classes, averaged over nodes.",
        ),
    ),
    "Explanations": (
        Metric(
            "Top-k kept, prediction attacked", "overlap_touched.prediction.all", SHARE, "higher",
            "Share of a node's strongest neighbours that stay, over the nodes in reach of the attack.",
            "overlap_touched.all",
        ),
        Metric(
            "Top-k kept, explanation attacked", "overlap_touched.explanation.all", SHARE, "higher",
            "The same when the attack aims at the explanation.", "overlap_touched.all",
        ),
        Metric(
            "Explanations of links kept", "explanations.prediction.links.all", SHARE, "higher",
            "Share of the strongest neighbours of both ends that stay, prediction attacked.",
        ),
        Metric(
            "… of pairs that are no links", "explanations.prediction.pairs.all", SHARE, "higher",
            "The same for other pairs.",
        ),
        Metric(
            "Explanations of graphs kept", "explanations.prediction.graphs.all", SHARE, "higher",
            "Share of a graph's strongest edges that stay, prediction attacked.",
        ),
        Metric(
            "Change of attention, all layers (g-JSD)", "g_jsd.all", SMALL, "lower",
            "How far attention moves under attack, per edge.", "g_jsd.all",
        ),
        Metric(
            "Change of attention, last layer (g-JSD)", "g_jsd.last", SMALL, "lower",
            "The same for the output layer, as in the paper's tables.", "g_jsd.last",
        ),
        Metric(
            "Same top-k as the reference", "similarity.overlap.all", SHARE, "higher",
            "Share of the strongest neighbours the model has in common with the reference, clean graph.",
            "similarity.overlap.all",
        ),
        Metric(
            "Sharpness, clean", "sharpness.clean.all", SHARE, "higher",
            "0: every neighbour gets the same attention, which explains nothing. 1: one gets it all.",
            "sharpness.all",
        ),
        Metric("Sharpness, attacked", "sharpness.attacked.all", SHARE, "higher", "The same under attack."),
    ),
    "Does attention decide?": (
        Metric(
            "F-slope gap, clean", "f_slope.node.clean.gap", PLAIN, "higher",
            "How much more removing the strongest edges hurts than removing the weakest.",
            "f_slope.node.clean.gap",
        ),
        Metric(
            "F-slope gap, attacked", "f_slope.node.attacked.gap", PLAIN, "higher",
            "The same on the attacked graph.", "f_slope.node.attacked.gap",
        ),
        Metric(
            "F-slope gap over the whole graph, clean", "f_slope.graph.clean.gap", PLAIN, "higher",
            "The paper's way: all edges ranked together by the last layer.", "f_slope.graph.clean.gap",
        ),
        Metric(
            "… attacked", "f_slope.graph.attacked.gap", PLAIN, "higher", "The same on the attacked graph.",
            "f_slope.graph.attacked.gap",
        ),
        Metric(
            "Characterization of the top-k", "fidelity.clean.characterization", SHARE, "higher",
            "Fidelity: are the strongest neighbours needed, and are they enough?",
        ),
        Metric(
            "Agreement with the true explanation (AUC)", "truth.auc.all", SHARE, "higher",
            "Where it is known which edges inform: 1 finds all of them, 0.5 is chance.", "truth.auc.all",
        ),
    ),
}  # fmt: skip


def number(record: Record, path: str) -> float | None:
    """A metric of a record by its dotted path, None where it is missing or no number."""
    found = look_up(record.get("metrics") or {}, path)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


SCORES = {"f1": "F1", "accuracy": "accuracy", "roc_auc": "ROC-AUC"}
"""Headings of scores by their names in records."""
SHARES = ("f1", "accuracy")
"""Scores that are shares of what is classified right."""


def task_in(record: Record) -> Task:
    """The task of a record; that of nodes where it does not say, or says one that is not registered."""
    return TASKS.get((record.get("config") or {}).get("task", ""), TASKS["node"])


def score_of(record: Record) -> str:
    """The name of a record's headline score: the task's own, or what there is; `f1` where there is none."""
    metrics = record.get("metrics") or {}
    return next((name for name in (task_in(record).headline, *SCORES) if name in metrics), "f1")


def heading_of(record: Record) -> str:
    """The headline score as a heading."""
    name = score_of(record)
    return SCORES.get(name, name)


def tested(record: Record) -> str:
    """What the headline score says of what was tested, in words: `tested nodes classified right`."""
    rows = task_in(record).rows_are
    if score_of(record) in SHARES:
        return f"tested {rows} classified right"
    return f"{heading_of(record)} on the tested {rows}"


def of_tested(record: Record) -> str:
    """The same behind a percentage: `of the tested nodes classified right`."""
    return f"of the {tested(record)}" if score_of(record) in SHARES else tested(record)


def score(record: Record, when: str) -> float | None:
    """The headline score, `clean` or `attacked`."""
    return number(record, f"{score_of(record)}.{when}")


def of_null(record: Record, kind: str, metric: Metric) -> float | None:
    """The same metric for attention that says nothing."""
    return number(record, f"null.{kind}.{metric.null}") if metric.null else None


def percent(value: float | None, digits: int = 0) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.{digits}f}\u00a0%"


def signed(value: float | None, form: str) -> str:
    """A number with a real minus sign, a dash where there is none."""
    return "–" if value is None else format(value, form).replace("-", "−")
