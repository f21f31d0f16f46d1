"""What the paper's own method is left with, in sentences whose every number comes from records."""

from __future__ import annotations

from typing import NamedTuple

from experiments.build import name_of
from experiments.results import Results, RowKey
from experiments.statistics import holm
from experiments.store import Store
from experiments.threats import CLAIM
from fgai.metrics import quantity


class Wins(NamedTuple):
    """On how many pairs of model and graph a row is better or worse than another, see `wins`."""

    better: int  # pairs that differ in the better direction
    worse: int  # pairs that differ in the other one
    pairs: int  # with enough seeds in common for a test


def wins(results: Results, row: str, base: str, path: str, threat: str = CLAIM) -> Wins:
    """Count the pairs on which a row differs from `base` by a paired t-test, corrected by Holm's method."""
    sign = {"higher": 1, "lower": -1, "": 0}[quantity(path).better]
    every = [
        results.interval((model, dataset, row), path, threat, base) for model, dataset in results.pairs()
    ]
    tests = [interval for interval in every if interval is not None]
    differences = [
        sign * test.mean
        for test, differs in zip(tests, holm([test.p for test in tests]), strict=True)
        if differs
    ]
    better = sum(difference > 0 for difference in differences)
    return Wins(better, len(differences) - better, len(tests))


def paper_claim(store: Store) -> str:
    """Say what the paper's own method is left with under its own attack and under a better search."""
    results, lines = Results.node(store), []
    for row, what in (("fgai-paper", "as printed"), ("fgai-injection", "as released"), ("fgai", "ours")):
        pairs = [
            pair
            for pair in results.pairs()
            if all(_scores(results, (*pair, name)) for name in (row, "vanilla"))
        ]
        if not pairs:
            lines.append(f"- **{name_of(row)}**, {what}: no records yet.")
            continue
        means = []
        for name in (row, "vanilla"):
            held = [_scores(results, (*pair, name)) for pair in pairs]
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


def _scores(results: Results, row: RowKey) -> list[float]:
    """F1 clean, under the paper's attack and under `ensemble`; nothing where one of them is missing."""
    places = (("f1.clean", CLAIM), ("f1.attacked", "standard"), ("f1.attacked", CLAIM))
    found = [results.estimate(row, path, threat) for path, threat in places]
    return [one.mean for one in found if one is not None] if all(found) else []
