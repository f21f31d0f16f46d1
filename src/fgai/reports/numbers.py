"""Numbers out of records, and what each of them means in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fgai.metrics import Quantity, measured, null_path, quantity
from fgai.records import look_up
from fgai.tasks import TASKS, Task

Record = Mapping[str, Any]


class Number(NamedTuple):
    """One row of the table of all numbers, in plain words; format and direction are the metric's.

    Attributes:
        path: in the metrics of a record.
        title: in plain words.
        about: one sentence.
        like: path of the number it should stay close to, where neither higher nor lower is better.
    """

    path: str
    title: str
    about: str
    like: str = ""

    @property
    def quantity(self) -> Quantity:
        """What is declared of it."""
        return quantity(self.path, self.title)

    @property
    def wanted(self) -> str:
        """Which value is best, in words."""
        return "closest to clean is best" if self.like else f"{self.quantity.direction} is better"

    def best(self, records: Sequence[Record]) -> list[bool]:
        """Which records hold the best value; none where all print alike, or only one has any."""
        shown = self.quantity
        values = [number(record, self.path) for record in records]
        if self.like:
            wanted = [number(record, self.like) for record in records]
            values = [
                None if v is None or w is None else abs(v - w) for v, w in zip(values, wanted, strict=True)
            ]
            shown = replace(shown, direction="lower")
        known = [value for value in values if value is not None]
        if len(known) < 2 or len({format(value, shown.form) for value in known}) == 1:
            return [False] * len(values)
        return [value is not None and value == shown.best(known) for value in values]


NUMBERS: dict[str, tuple[Number, ...]] = {
    "Predictions": (
        Number("f1.clean", "F1, clean graph", "Share of the tested nodes classified right."),
        Number("f1.attacked", "F1, prediction attacked", "The same on the attacked graph."),
        Number(
            "f1.attacked_random",
            "F1, new nodes joined at random",
            "The same where the attack may not choose its endpoints.",
        ),
        Number(
            "f1.attacked_chosen",
            "F1, new nodes joined where it hurts",
            "The same where rules that read the graph and the reference choose them.",
        ),
        Number(
            "f1.attacked_explanation",
            "F1, explanation attacked",
            "The same when the attack aims at the explanation instead.",
        ),
        Number(
            "balanced_accuracy.clean",
            "Balanced accuracy, clean graph",
            "Mean over classes of the share of their nodes that are found: rare classes count as much.",
        ),
        Number(
            "balanced_accuracy.attacked", "Balanced accuracy, attacked", "The same on the attacked graph."
        ),
        Number("macro_f1.clean", "Macro-F1, clean graph", "Mean over classes of their F1."),
        Number("macro_f1.attacked", "Macro-F1, attacked", "The same on the attacked graph."),
        Number("roc_auc.clean", "ROC-AUC, clean graph", "Chance that a positive outranks a negative."),
        Number("roc_auc.attacked", "ROC-AUC, attacked", "The same on the attacked graph."),
        Number("average_precision.clean", "Average precision, clean graph", "Precision over all thresholds."),
        Number(
            "average_precision.attacked", "Average precision, attacked", "The same on the attacked graph."
        ),
        Number("accuracy.clean", "Accuracy, clean graphs", "Share of the tested graphs classified right."),
        Number("accuracy.attacked", "Accuracy, attacked", "The same under attack."),
        Number(
            "g_tvd.rel",
            "Change of logits, relative (g-TVD)",
            "How far the outputs move under attack, as a share of their own spread.",
        ),
        Number(
            "g_tvd.probs",
            "Change of probabilities (g-TVD)",
            "Probability that changes hands between classes, averaged over nodes.",
        ),
    ),
    "Explanations": (
        Number(
            "overlap_touched.prediction.all",
            "Top-k kept, prediction attacked",
            "Share of a node's strongest neighbours that stay, over the nodes in reach of the attack.",
        ),
        Number(
            "overlap_touched.explanation.all",
            "Top-k kept, explanation attacked",
            "The same when the attack aims at the explanation.",
        ),
        Number(
            "lost.explanation.random",
            "Top-k lost, new nodes joined at random",
            "Share of the strongest neighbours that go, explanation attacked.",
        ),
        Number(
            "lost.explanation.chosen",
            "Top-k lost, new nodes joined where it hurts",
            "The same at endpoints chosen by a rule.",
        ),
        Number(
            "intruders.prediction.nodes.all",
            "Nodes that show an intruder, prediction attacked",
            "Of the nodes a new node was joined to, the share with a new one among their top k.",
        ),
        Number(
            "intruders.prediction.mass.all",
            "Attention on intruders, prediction attacked",
            "What new nodes take of the attention of the nodes they were joined to.",
        ),
        Number(
            "intruders.explanation.nodes.all",
            "Nodes that show an intruder, explanation attacked",
            "The same when the attack aims at the explanation.",
        ),
        Number(
            "intruders.explanation.mass.all",
            "Attention on intruders, explanation attacked",
            "The same when the attack aims at the explanation.",
        ),
        Number(
            "explanations.prediction.links.all",
            "Explanations of links kept",
            "Share of the strongest neighbours of both ends that stay, prediction attacked.",
        ),
        Number(
            "explanations.prediction.pairs.all", "… of pairs that are no links", "The same for other pairs."
        ),
        Number(
            "explanations.prediction.graphs.all",
            "Explanations of graphs kept",
            "Share of a graph's strongest edges that stay, prediction attacked.",
        ),
        Number(
            "g_jsd.all",
            "Change of attention, all layers (g-JSD)",
            "How far attention moves under attack, per edge.",
        ),
        Number(
            "g_jsd.last",
            "Change of attention, last layer (g-JSD)",
            "The same for the output layer, as in the paper's tables.",
        ),
        Number(
            "similarity.overlap.all",
            "Same top-k as the reference",
            "Share of the strongest neighbours the model has in common with the reference, clean graph.",
        ),
        Number(
            "sharpness.clean.all",
            "Sharpness, clean",
            "0: every neighbour gets the same attention, which explains nothing. 1: one gets it all.",
        ),
        Number(
            "sharpness.attacked.all",
            "Sharpness, attacked",
            "The same under attack. Sharper is no better here: attention that fake nodes draw is sharp, too.",
            like="sharpness.clean.all",
        ),
        Number(
            "top_share.clean.all",
            "Strongest neighbour's share, clean",
            "What a node's strongest neighbour gets of its attention: sharpness in plain words.",
        ),
    ),
    "Does attention decide?": (
        Number(
            "f_slope.node.clean.gap",
            "F-slope gap, clean",
            "How much more removing the strongest edges hurts than removing the weakest.",
        ),
        Number("f_slope.node.attacked.gap", "F-slope gap, attacked", "The same on the attacked graph."),
        Number(
            "f_slope.graph.clean.gap",
            "F-slope gap over the whole graph, clean",
            "The paper's way: all edges ranked together by the last layer.",
        ),
        Number("f_slope.graph.attacked.gap", "… attacked", "The same on the attacked graph."),
        Number(
            "fidelity.clean.characterization",
            "Characterization of the top-k",
            "Fidelity: are the strongest neighbours needed, and are they enough?",
        ),
        Number(
            "truth.auc.all",
            "Agreement with the true explanation (AUC)",
            "Where it is known which edges inform: 1 finds all of them, 0.5 is chance.",
        ),
    ),
}
_GROUPS = {"prediction": "Predictions", "explanation": "Explanations"}


def numbers_of(records: Sequence[Record]) -> dict[str, list[Number]]:
    """The rows of the table by group: those named above, and what other metrics measured."""
    found = {group: list(rows) for group, rows in NUMBERS.items()}
    for section, group in _GROUPS.items():
        for entry in measured(section, [record.get("metrics") or {} for record in records]):
            found[group].append(Number(entry.path, entry.title, entry.about))
    return found


def number(record: Record, path: str) -> float | None:
    """A metric of a record by its dotted path, None where it is missing or no number."""
    found = look_up(record.get("metrics") or {}, path)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


SCORES = {
    "f1": "F1",
    "accuracy": "accuracy",
    "roc_auc": "ROC-AUC",
    "balanced_accuracy": "balanced accuracy",
}
"""Headings of scores by their names in records."""
SHARES = ("f1", "accuracy")
"""Scores that are shares of what is classified right."""


def task_in(record: Record) -> Task:
    """The task of a record; that of nodes where it does not say, or says one that is not registered."""
    return TASKS.get((record.get("config") or {}).get("task", ""), TASKS["node"])


def score_of(record: Record) -> str:
    """The name of a record's headline score: that it names, the task's own, or what there is; else `f1`."""
    metrics, own = record.get("metrics") or {}, str((record.get("config") or {}).get("headline"))
    return next((name for name in (own, task_in(record).headline, *SCORES) if name in metrics), "f1")


def heading_of(record: Record) -> str:
    """The headline score as a heading."""
    name = score_of(record)
    return SCORES.get(name, name)


def score_phrase(record: Record) -> str:
    """What the headline score says of what was tested, in words: `tested nodes classified right`."""
    rows = task_in(record).rows_are
    if score_of(record) in SHARES:
        return f"tested {rows} classified right"
    return f"{heading_of(record)} on the tested {rows}"


def share_phrase(record: Record) -> str:
    """The same behind a percentage: `of the tested nodes classified right`."""
    return f"of the {score_phrase(record)}" if score_of(record) in SHARES else score_phrase(record)


def score(record: Record, when: str) -> float | None:
    """The headline score, `clean` or `attacked`."""
    return number(record, f"{score_of(record)}.{when}")


def of_null(record: Record, kind: str, path: str) -> float | None:
    """The same number for attention that says nothing."""
    return number(record, f"null.{kind}.{null_path(path)}")


def percent(value: float | None, digits: int = 0) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.{digits}f}\u00a0%"


def signed(value: float | None, form: str) -> str:
    """A number with a real minus sign, a dash where there is none."""
    return "–" if value is None else format(value, form).replace("-", "−")
