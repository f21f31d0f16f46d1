"""What a model says of every node before and after the attack, as plain arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fgai.attacks import AttackResult
from fgai.attention import Observation, observe, prepared
from fgai.graph import Graph
from fgai.metrics.removal import combined
from fgai.tasks import task_of

UNIT = 1e-6  # attention is carried as whole multiples of this

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _View:
    """One model on one graph."""

    rowptr: Ints  # [N' + 1]
    source: Ints  # [E']
    weight: Floats  # [E'] `LayerAttention.explanation`, mean over layers
    predicted: Ints  # [N'] class: of the node, of a pair it is an end of, or of its graph
    confidence: Floats  # [N'] its probability

    @classmethod
    def of(cls, seen: Observation) -> Self:
        layer = combined(seen.attention.explanations()).to("cpu")
        confidence, predicted = seen.logits.double().softmax(1).max(1)
        row = task_of(seen.graph).row_of(seen.graph)
        return cls(
            layer.rowptr.numpy(),
            layer.source.numpy(),
            layer.values[:, 0].numpy(),
            torch.where(row >= 0, predicted[row], 0).cpu().numpy(),
            torch.where(row >= 0, confidence[row], 0.0).cpu().numpy(),
        )

    def row(self, node: int) -> tuple[Ints, Floats]:
        part = slice(int(self.rowptr[node]), int(self.rowptr[node + 1]))
        return self.source[part], self.weight[part]

    def weights(self, node: int) -> dict[int, float]:
        sources, weights = self.row(node)
        return dict(zip(sources.tolist(), weights.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class _Seen:
    """One model before and after the attack."""

    name: str
    clean: _View
    attacked: _View  # the first N nodes are the original ones
    new: Ints | None  # [M, e] the nodes each injected node is joined to
    changed: Ints  # nodes whose features the attack changed
    ends: Ints  # nodes the attack gave a new edge

    @classmethod
    def of(cls, name: str, model: nn.Module, graph: Graph, attack: AttackResult) -> Self:
        ends, rows, edges = attack.change.endpoints, attack.change.rows, attack.change.edges
        joined = [part.cpu().numpy().ravel() for part in (ends, edges) if part is not None]
        return cls(
            name=name,
            clean=_View.of(observe(model, prepared(model, graph))),
            attacked=_View.of(observe(model, attack.graph)),
            new=None if ends is None else ends.cpu().numpy().astype(np.int64),
            changed=np.zeros(0, np.int64) if rows is None else rows.cpu().numpy().astype(np.int64),
            ends=np.unique(np.concatenate([np.zeros(0, np.int64), *joined]).astype(np.int64)),
        )


def _coded(weight: float | None) -> int | None:
    """Attention in units; None where the edge is not there."""
    return None if weight is None else round(weight / UNIT)


MOST_NODES = 2000
MOST_ENTRIES = 120_000  # neighbour entries over all models; about 30 bytes each on the page
MOST_NEIGHBOURS = 40
WORST = 100
CANDIDATES = 200


@dataclass
class _Choice:
    nodes: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    def words(self, total: int) -> str:
        if self.complete:
            return f"This page carries all {total:,} nodes."
        parts = [f"{count:,} {reason}" for reason, count in self.counts.items()]
        listed = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
        return (
            f"This page carries {len(self.nodes):,} of {total:,} nodes: {listed}."
            " The numbers and curves above count all nodes."
        )


def _choose(
    total: int, priorities: Sequence[tuple[str, Iterable[int]]], cost: Ints, *, models: int = 1
) -> _Choice:
    """Take nodes group by group, then at random, until the page is full; `cost` [N] counts neighbours."""
    choice, taken = _Choice(), np.zeros(total, dtype=bool)
    left = MOST_ENTRIES // max(1, models)
    sample = np.random.Generator(np.random.PCG64(0)).permutation(total)
    for reason, nodes in (*priorities, ("drawn at random", sample.tolist())):
        for node in nodes:
            need = min(int(cost[node]), MOST_NEIGHBOURS) + 1
            if taken[node] or need > left or len(choice.nodes) >= MOST_NODES:
                continue
            taken[node] = True
            left -= need
            choice.nodes.append(int(node))
            choice.counts[reason] = choice.counts.get(reason, 0) + 1
    choice.complete = len(choice.nodes) == total
    return choice


def _telling_node(seen: Sequence[_Seen], degree: Ints, label: Ints | None, scored: Ints, k: int) -> int:
    """Pick the node the page opens with: attacked, of middling degree, and lost by the first model alone."""
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


def _kept(view: _Seen, node: int, k: int) -> float:
    """Share of a node's strongest k neighbours that stay among its original ones; 1 without neighbours."""
    sources, weights = view.clean.row(node)
    after, others = view.attacked.row(node)
    known = np.isin(after, sources)
    first = set(sources[np.argsort(-weights, kind="stable")[:k]].tolist())
    second = set(after[known][np.argsort(-others[known], kind="stable")[:k]].tolist())
    return len(first & second) / len(first) if first else 1.0


def _attacked_nodes(seen: Sequence[_Seen]) -> list[int]:
    """Nodes the attack changed directly: with a new edge, or with changed features."""
    return sorted({int(node) for view in seen for node in (*view.changed, *view.ends)})


def _flipped_nodes(view: _Seen, scored: Ints) -> list[int]:
    """Tested nodes the attack made the model predict otherwise, the surest ones first."""
    before, after = view.clean.predicted[scored], view.attacked.predicted[scored]
    flipped = scored[before != after]
    order = np.argsort(-view.clean.confidence[flipped], kind="stable")
    return [int(node) for node in flipped[order][:WORST]]
