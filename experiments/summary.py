"""What holds and what does not, in sentences whose every number comes from records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from experiments import bars
from experiments.build import name_of
from experiments.claim_tables import BESIDE, CLAIM
from experiments.results import Results
from experiments.store import Store
from fgai.metrics import quantity


class Wins(NamedTuple):
    """On how many pairs of model and graph a row is better or worse than another, beyond doubt.

    Attributes:
        better: pairs whose 95 % interval lies on the better side of zero.
        worse: on the other side.
        pairs: with two seeds in common at least; without an interval nothing is won or lost.
    """

    better: int
    worse: int
    pairs: int


def wins(results: Results, row: str, base: str, path: str, threat: str = CLAIM) -> Wins:
    """Count the pairs on which the paired interval of `row − base` excludes zero."""
    sign, better, worse, pairs = quantity(path).sign, 0, 0, 0
    for model in results.models():
        for dataset in results.datasets(model):
            found = results.interval(model, dataset, row, path, threat, base)
            if found is not None:
                pairs += 1
                better += min(sign * found.low, sign * found.high) > 0
                worse += max(sign * found.low, sign * found.high) < 0
    return Wins(better, worse, pairs)


def summary(store: Store) -> str:
    """Return the list of what holds, as Markdown; without records one sentence that says so."""
    results = Results.node(store)
    if not results.records:
        older = f" {results.outdated} records of other settings or older searches are kept in `results/`, and"
        return (
            f"No record of today's searches is there yet: {len(results.expected)} cells of the node grid are"
            " to be run. Nothing is claimed until then."
            + (f"{older} what they showed is [history](results/history.md)." if results.outdated else "")
        )
    return "\n".join(f"- {line}" for line in _lines(results, store))


def _lines(results: Results, store: Store) -> Iterator[str]:
    for title, base, path, threat in (
        ("F1 under `ensemble`", "vanilla", "f1.attacked", CLAIM),
        ("F1 under `ensemble-strong`", "at", "f1.attacked", BESIDE),
        ("F1 under `ensemble-strong`", "at-limits", "f1.attacked", BESIDE),
        ("Top 5 kept under the explanation attack", "vanilla", "overlap_touched.explanation.all", CLAIM),
        ("Similarity to the vanilla explanation", "at-limits", "similarity.overlap.all", CLAIM),
    ):
        found = wins(results, "fgai", base, path, threat)
        if found.pairs:
            yield (
                f"**{title}**: FGAI is better than {name_of(base)} on {found.better} of {found.pairs} pairs"
                f" of model and graph, worse on {found.worse}; on the others the interval holds zero."
            )
    yield from _losses(results)
    judged = bars.check(store)
    counts = [sum(bar.met is state for bar in judged) for state in (True, False, None)]
    yield (
        f"**Bars**: {counts[0]} met, {counts[1]} missed, {counts[2]} without records,"
        " [one by one](results/bars.md)."
    )


def _losses(results: Results) -> Iterator[str]:
    """What FGAI loses of its own clean F1, on average and at worst."""
    for threat in (CLAIM, BESIDE):
        lost = {
            (model, dataset): clean.mean - attacked.mean
            for model in results.models()
            for dataset in results.datasets(model)
            if (clean := results.estimate(model, dataset, "fgai", "f1.clean", threat)) is not None
            and (attacked := results.estimate(model, dataset, "fgai", "f1.attacked", threat)) is not None
        }
        if lost:
            worst = max(lost, key=lambda pair: lost[pair])
            mean = sum(lost.values()) / len(lost)
            yield (
                f"**What `{threat}` costs**: FGAI loses {mean:.3f} of its clean F1 on average, and most,"
                f" {lost[worst]:.3f}, with {worst[0]} on {worst[1]}."
            )
