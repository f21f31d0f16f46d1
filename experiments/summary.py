"""What holds and what does not, in sentences whose every number comes from records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from experiments import bars
from experiments.build import name_of
from experiments.claim_tables import BESIDE, CLAIM
from experiments.results import Results
from experiments.statistics import holm
from experiments.store import Store
from fgai.metrics import quantity


class Wins(NamedTuple):
    """On how many pairs of model and graph a row is better or worse than another, see `wins`.

    Attributes:
        better: pairs that differ in the better direction.
        worse: pairs that differ in the other one.
        pairs: with enough seeds in common for a test.
    """

    better: int
    worse: int
    pairs: int


def wins(results: Results, row: str, base: str, path: str, threat: str = CLAIM) -> Wins:
    """Count the pairs on which a row differs from `base` by a paired t-test, corrected by Holm's method."""
    sign = quantity(path).sign
    every = [
        results.interval(model, dataset, row, path, threat, base)
        for model in results.models()
        for dataset in results.datasets(model)
    ]
    tests = [interval for interval in every if interval is not None]
    differences = [
        sign * test.mean
        for test, differs in zip(tests, holm([test.p for test in tests]), strict=True)
        if differs
    ]
    better = sum(difference > 0 for difference in differences)
    return Wins(better, len(differences) - better, len(tests))


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
    return "\n".join([*_compared(results), "", *(f"- {line}" for line in _lines(results, store))])


COMPARED = (
    ("F1 under `ensemble`", "vanilla", "f1.attacked", CLAIM),
    ("F1 under `ensemble`", "at-limits", "f1.attacked", CLAIM),
    ("F1 under `ensemble-strong`", "ln", "f1.attacked", BESIDE),
    ("F1 under `ensemble-strong`", "at", "f1.attacked", BESIDE),
    ("F1 under `ensemble-strong`", "at-limits", "f1.attacked", BESIDE),
    ("Top 5 lost at `cover` endpoints, explanation attack", "vanilla", "lost.explanation.cover", CLAIM),
    ("Top 5 lost at `cover` endpoints, explanation attack", "at-limits", "lost.explanation.cover", CLAIM),
    ("Similarity to the vanilla explanation", "at-limits", "similarity.overlap.all", CLAIM),
)


def _compared(results: Results) -> Iterator[str]:
    """The lines of a table: where FGAI is better, worse or neither, counted in pairs of model and graph."""
    yield "| FGAI beside | in | better | worse | undecided |"
    yield "|---|---|---:|---:|---:|"
    for title, base, path, threat in COMPARED:
        found = wins(results, "fgai", base, path, threat)
        counts = (found.better, found.worse, found.pairs - found.better - found.worse)
        shown = " | ".join(map(str, counts)) if found.pairs else "– | – | –"
        yield f"| {name_of(base)} | {title} | {shown} |"


def _lines(results: Results, store: Store) -> Iterator[str]:
    yield from _losses(results)
    judged = bars.check(store)
    counts = [sum(bar.met is state for bar in judged) for state in (True, False, None)]
    yield (
        f"**Bars**, methods with one setting: {counts[0]} met, {counts[1]} missed, {counts[2]} without a"
        " number, [one by one](results/bars.md)."
    )


def paper_claim(store: Store) -> str:
    """Say what the paper's own method is left with under its own attack and under a better search."""
    results, lines = Results.node(store), []
    for row, what in (("fgai-paper", "as printed"), ("fgai-injection", "as released"), ("fgai", "ours")):
        pairs = [
            (model, dataset)
            for model in results.models()
            for dataset in results.datasets(model)
            if all(_scores(results, model, dataset, name) for name in (row, "vanilla"))
        ]
        if not pairs:
            lines.append(f"- **{name_of(row)}**, {what}: no records yet.")
            continue
        means = []
        for name in (row, "vanilla"):
            held = [_scores(results, *pair, name) for pair in pairs]
            means.append([f"{sum(column) / len(pairs):.3f}" for column in zip(*held, strict=True)])
        (clean, weak, strong), (_, weak_base, strong_base) = means
        lines.append(
            f"- **{name_of(row)}**, {what}: F1 {clean} clean, {weak} under the paper's attack and {strong}"
            f" under `{CLAIM}`, means over {len(pairs)} pairs of model and graph; vanilla is left with"
            f" {weak_base} and {strong_base}. {_beyond_doubt(results, row)}"
        )
    return "\n".join(lines)


def _beyond_doubt(results: Results, row: str) -> str:
    """On how many pairs a row keeps more than vanilla under `ensemble`: of F1, and of explanations."""
    kept = [
        f"{what} on {found.better} of {found.pairs} pairs and less on {found.worse}"
        for what, path in (("F1", "f1.attacked"), ("the top 5", "lost.explanation.cover"))
        if (found := wins(results, row, "vanilla", path)).pairs
    ]
    return f"Under `{CLAIM}` it keeps more of {', more of '.join(kept)}." if kept else ""


def _scores(results: Results, model: str, dataset: str, row: str) -> list[float]:
    """F1 clean, under the paper's attack and under `ensemble`; nothing where one of them is missing."""
    places = (("f1.clean", CLAIM), ("f1.attacked", "standard"), ("f1.attacked", CLAIM))
    found = [results.estimate(model, dataset, row, path, threat) for path, threat in places]
    return [one.mean for one in found if one is not None] if all(found) else []


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
