"""Which nodes the page carries: those that matter, then a sample, within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fgai.reports.views import Ints, Seen

MOST_NODES = 2000
MOST_ENTRIES = 120_000
"""Neighbour entries over all models; about 30 bytes each on the page."""
MOST_NEIGHBOURS = 40
WORST = 100
CANDIDATES = 200


@dataclass
class Choice:
    """The nodes the page carries and why.

    Attributes:
        nodes: in order of importance.
        counts: how many came for which reason.
        complete: whether these are all nodes of the graph.
    """

    nodes: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    def words(self, total: int) -> str:
        """One sentence on what is carried and what is not."""
        if self.complete:
            return f"This page carries all {total:,} nodes."
        parts = [f"{count:,} {reason}" for reason, count in self.counts.items() if count]
        listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
        return (
            f"This page carries {len(self.nodes):,} of {total:,} nodes: {listed}."
            " The numbers and curves above count all nodes."
        )


def choose(
    total: int,
    priorities: Sequence[tuple[str, Iterable[int]]],
    cost: Ints,
    *,
    models: int = 1,
    seed: int = 0,
    most: int = MOST_NODES,
) -> Choice:
    """Take nodes group by group until the page is full; what is left is filled by a sample.

    Args:
        total: nodes of the graph.
        priorities: reason and nodes, the most important first; a node counts for its first reason.
        cost: [N] neighbour entries a node needs per model.
        models: how many are shown.
        seed: of the sample.
        most: nodes at most.
    """
    choice, taken = Choice(), np.zeros(total, dtype=bool)
    left = MOST_ENTRIES // max(1, models)
    sample = np.random.Generator(np.random.PCG64(seed)).permutation(total)
    for reason, nodes in (*priorities, ("drawn at random", sample.tolist())):
        for node in nodes:
            need = min(int(cost[node]), MOST_NEIGHBOURS) + 1
            if taken[node] or need > left or len(choice.nodes) >= most:
                continue
            taken[node] = True
            left -= need
            choice.nodes.append(int(node))
            choice.counts[reason] = choice.counts.get(reason, 0) + 1
    choice.complete = len(choice.nodes) == total
    return choice


def telling_node(seen: Sequence[Seen], degree: Ints, label: Ints | None, scored: Ints, k: int) -> int:
    """Pick the node the page opens with: one the attack reached, that tells the models apart.

    Best is an attacked node of middling degree that only the first model loses, and whose explanation the
    last one keeps better; otherwise what comes nearest.

    Args:
        seen: the models, the reference first.
        degree: [N].
        label: [N] or None.
        scored: the nodes that are tested.
        k: neighbours in an explanation.
    """
    first, last = seen[0], seen[-1]
    count = degree.size
    score = np.zeros(count)
    score[scored] += 8.0
    score[first.ends] += 4.0
    score += 3.0 * ((degree > k) & (degree <= 12))
    truth = first.clean.predicted[:count] if label is None else label
    stays = [view.attacked.predicted[:count] == truth for view in (first, last)]
    right = (first.clean.predicted[:count] == truth) & (last.clean.predicted[:count] == truth)
    score += right * (2.0 + 2.0 * ~stays[0] + 1.0 * stays[1])
    score += first.clean.confidence[:count] + np.minimum(degree, 12) / 50
    if first is not last:
        for node in np.argsort(-score, kind="stable")[:CANDIDATES]:
            score[node] += 4.0 * (_kept(last, int(node), k) - _kept(first, int(node), k))
    return int(score.argmax())


def _kept(view: Seen, node: int, k: int) -> float:
    """Share of a node's strongest k neighbours that stay among its original ones; 1 without neighbours."""
    sources, weights = view.clean.row(node)
    after, others = view.attacked.row(node)
    known = np.isin(after, sources)
    first = set(sources[np.argsort(-weights, kind="stable")[:k]].tolist())
    second = set(after[known][np.argsort(-others[known], kind="stable")[:k]].tolist())
    return len(first & second) / len(first) if first else 1.0


def attacked_nodes(seen: Sequence[Seen]) -> list[int]:
    """Nodes the attack changed directly: with a new edge, or with changed features."""
    found: set[int] = set()
    for view in seen:
        found |= set(view.changed.tolist()) | set(view.ends.tolist())
    return sorted(found)


def flipped_nodes(view: Seen, scored: Ints) -> list[int]:
    """Tested nodes the attack made the model predict otherwise, the surest ones first."""
    before, after = view.clean.predicted[scored], view.attacked.predicted[scored]
    flipped = scored[before != after]
    order = np.argsort(-view.clean.confidence[flipped], kind="stable")
    return [int(node) for node in flipped[order][:WORST]]
