"""Linear bounds of what a budget of injected edges can do: `certify_budget` counts with them.

Let x_u be the number of injected neighbours of node u, and let node v be classified by two attention layers,
the last of one head. If v has a new neighbours itself, its class top stays ahead of class c while

    Σ_j term_vj(a, x_j) + a · worst_v(a) > 0,

the sum of `fgai.certificates.injection` over old neighbours j: each term is the least `e^s (z_top − z_c)` of
j behind x_j new neighbours. With lead_v(a) that sum where no other node has any, and
`damage_vj(a, t) = term_vj(a, 0) − term_vj(a, t)`, a change of class needs

    x_v > a   or   Σ_j damage_vj(a, x_j) ≥ lead_v(a),

for every a whose lead is positive. With `α_v = 1 / (a + 1)` and `w_vj = max_t min(1, damage / lead) / t`,
over t ≥ 1 and classes c, it so needs `α_v x_v + Σ_j w_vj x_j ≥ 1`: one row of a linear program. Of all a the
one with the least sum of the row is taken.

Other models that `certify_injection` covers have rows of a threshold: if the class stays while every node
gains up to t, a change needs a node in reach (as many steps as layers, less one) that gains t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from fgai.bounds.reading import ROUNDING, Reading
from fgai.bounds.scores import scores_of
from fgai.bounds.steps import affine_map
from fgai.certificates.injection import _Proof
from fgai.certificates.program import SLACK, _most_covered
from fgai.sparse import Adjacency

OWN = (0, 1, 2, 3, 5)
"""New neighbours of a node itself, a above, that are tried."""
PIECES = 4
"""Pieces of the interval of a destination's score."""
COUNTED = 1e-6
"""Rounding of a number of nodes."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """`weights @ x ≥ 1`, a row for each node: what has to hold if it changes its class."""

    weights: Any  # sparse [N, N]
    largest: Tensor  # [N], least bound of the largest weight: of all rows that hold, not only of this one
    lost: Tensor  # bool [N], nodes of which nothing is proved
    reason: str  # how they were bounded

    def without(self, nodes: Tensor) -> _Rows:
        """The same with more nodes, bool [N], of which nothing is proved."""
        return replace(self, lost=self.lost | nodes)

    def harmless(self, most: int) -> Tensor:
        """Injected edges anywhere, int64 [N], that change no class; at most `most`, -1 of lost nodes."""
        # A class that changes needs Σ w x ≥ 1, so more than (1 − ε) / max w edges.
        count = ((1 - SLACK) / self.largest.clamp(min=1 / (2 * most))).clamp(max=most)
        return torch.where(self.lost, -1, count.floor().long())

    def most_changed(self, nodes: Tensor, most: int, edges: int) -> int:
        """Return how many of the nodes, bool [N], can change at once at most.

        With x_u ≤ `most` new neighbours of a node and `edges` in all; see `_most_covered`.
        """
        asked = (nodes & ~self.lost).numpy()
        covered = _most_covered(self.weights[asked], most, edges)
        return int((nodes & self.lost).sum()) + floor(covered + COUNTED)


def _levels(most: Sequence[int]) -> list[int]:
    """Numbers of new neighbours of a node that are bounded, up to the largest; each of `most` is one."""
    levels, last = {1, *most}, 1
    while last < max(most):
        levels.add(last)
        last = -(-3 * last // 2)
    return sorted(levels)


def _collective_rows(proof: _Proof, classes: Tensor, asked: Tensor, most: Sequence[int]) -> dict[int, _Rows]:
    """Return rows of the nodes `asked` for, bool [N], if a node may gain each of `most` new nodes at most."""
    levels, steps, last = _levels(most), proof.steps[-1], proof.layers[-1]
    plain = affine_map(steps, last.channels) if last.heads == 1 else None
    if len(proof.layers) == 2 and plain is not None:
        leads = _Leads(proof, classes, plain if steps else None)
        readings = {0: proof.exact[-1], **{t: proof.against(t).readings[-1] for t in levels}}
        return _additive(leads, readings, asked, levels, most)
    holds = {t: proof.against(t).classes() for t in levels}
    return _thresholds(proof.adjacency, holds, len(proof.layers) - 1, most)


def _thresholds(
    adjacency: Adjacency, holds: dict[int, Tensor], steps: int, most: Sequence[int]
) -> dict[int, _Rows]:
    """Rows of 1 / (t + 1) for every node in reach, t the most that every node may gain."""
    nodes = adjacency.num_nodes
    ends = adjacency.destination.numpy(), adjacency.source.numpy()
    near = sp.csr_matrix((np.ones(len(ends[0])), ends), shape=(nodes, nodes)) + sp.identity(nodes)
    reach = sp.identity(nodes, format="csr")
    for _ in range(steps):
        reach = (reach @ near).sign()
    out, safe, open_ = {}, torch.zeros(nodes), torch.ones(nodes, dtype=torch.bool)
    for t in holds:
        open_ = open_ & holds[t]
        safe[open_] = t
        if t in most:
            share = torch.where(open_, 0.0, 1 / (safe.double() + 1))
            weights = sp.csr_matrix(sp.diags(share.numpy()) @ reach)
            weights.eliminate_zeros()
            why = "a linear program; a node needs one in reach that gains more than every node may"
            out[t] = _Rows(weights, share, torch.zeros(nodes, dtype=torch.bool), why)
    return out


class _Leads:
    """Terms of the lead of each node's class over the others, in the last layer of one head."""

    def __init__(self, proof: _Proof, classes: Tensor, plain: tuple[Tensor, Tensor] | None) -> None:
        self.layer, self.ranges, self.adjacency = proof.layers[-1], proof.ranges[-1], proof.adjacency
        self.plain, self.classes = plain, classes

    def terms(
        self, own: Reading, others: Reading, nodes: Tensor, peak: Tensor | None = None
    ) -> Iterator[_Terms]:
        """Yield, for each piece of the destinations' intervals, the terms of edges and new neighbours.

        Only those of `nodes`, bool [N], are computed; others are 0.

        `own` is what the last layer reads of a node itself, `others` what of neighbours; every exponential is
        relative to `peak` [N], the largest score of the first piece by default.
        """
        adjacency = self.adjacency
        width = self.layer.channels if self.plain is None else self.plain[1].numel()
        of_edge = torch.where(nodes, self.classes, -1)[adjacency.destination]
        parts = [
            (top, (of_edge == top).nonzero().flatten(), (nodes & (self.classes == top)).nonzero().flatten())
            for top in torch.unique(self.classes[nodes]).tolist()
        ]
        leads = {top: self._leads(top, own, others) for top, *_ in parts}
        for scores in scores_of(self.layer, self.ranges, own, others, adjacency, PIECES):
            if self.plain is not None:
                scores = scores.read(self.layer, self.ranges["value"], self.plain)
            low, high, new = scores.low[:, 0], scores.high[:, 0], scores.new[:, 0]
            if peak is None:
                peak = new.amax(1).scatter_reduce(0, adjacency.destination, high, "amax")
            edges = low.new_zeros(adjacency.num_edges, width)
            arrived = low.new_zeros(adjacency.num_nodes, width)
            for top, index, mine in parts:
                itself, theirs = leads[top]
                source, ends = adjacency.source[index], adjacency.destination[index]
                least = torch.where((source == ends)[:, None], itself[source], theirs[source])
                weak, strong = ((end[index] - peak[ends]).exp()[:, None] for end in (low, high))
                term = torch.where(least < 0, strong, weak) * least
                term = term - ROUNDING * term.abs()
                term[:, top] = 0.0
                edges[index] = term
                worst = (new[mine] - peak[mine][:, None]).exp()[:, :, None] * scores.new_lead[:, top]
                arrived[mine] = (1 + ROUNDING) * worst.clamp(max=0).amin(1)
            yield _Terms(edges, arrived, peak)

    def _leads(self, top: int, own: Reading, others: Reading) -> tuple[Tensor, Tensor]:
        """Least leads [N, C] of a class in the values of a node itself and in those of neighbours."""
        ahead = slice(top, top + 1)
        theirs = others.lead(self.layer, ahead, self.plain)[:, 0]
        return (theirs if own is others else own.lead(self.layer, ahead, self.plain)[:, 0]), theirs


@dataclass(frozen=True, eq=False)
class _Terms:
    """Terms of old neighbours [E, C], the worst of a new neighbour [N, C], and the peak [N]; 0 for `top`."""

    edges: Tensor
    arrived: Tensor
    peak: Tensor


def _additive(
    leads: _Leads,
    readings: dict[int, Reading],
    ahead: Tensor,
    levels: Sequence[int],
    most: Sequence[int],
) -> dict[int, _Rows]:
    """Rows of `α_v x_v + Σ_j w_vj x_j ≥ 1`, for each number of new nodes those of the best a.

    `ahead`, bool [N], are the nodes that have one.
    """
    adjacency, nodes = leads.adjacency, leads.adjacency.num_nodes
    best = {m: _Best(adjacency) for m in most}
    for a in sorted({*OWN, *most} & set(readings)):
        own = readings[a]
        base = list(leads.terms(own, readings[0], ahead))
        itself = leads.classes[:, None] == torch.arange(base[0].edges.shape[1])
        lead = [_lead(adjacency, piece, a).masked_fill(itself, torch.inf) for piece in base]
        # More new neighbours never raise a lead, so nodes that have none are done.
        ahead = ahead & torch.stack([(piece > 0).all(1) for piece in lead]).all(0)
        weights, before = torch.zeros(adjacency.num_edges, dtype=torch.float64), 0
        for t in levels:
            pieces = zip(base, lead, leads.terms(own, readings[t], ahead, base[0].peak), strict=True)
            for clean, total, behind in pieces:
                share = (clean.edges - behind.edges) / total[adjacency.destination]
                share = share.nan_to_num(nan=1.0).clamp(0, 1).amax(1) / (before + 1)
                weights = torch.maximum(weights, share)
            before = t
            if t in best and a <= t:
                alone = torch.full((nodes,), 0.0 if a == t else 1 / (a + 1), dtype=torch.float64)
                best[t].offer(alone, weights, ahead)
    return {m: one.rows() for m, one in best.items()}


def _lead(adjacency: Adjacency, terms: _Terms, a: int) -> Tensor:
    """Lead over each class [N, C] while a node itself has `a` new neighbours, and no other node any."""
    total = torch.zeros_like(terms.arrived).index_add(0, adjacency.destination, terms.edges)
    return total + a * terms.arrived


class _Best:
    """The row of each node with the least sum."""

    def __init__(self, adjacency: Adjacency) -> None:
        self.adjacency, nodes = adjacency, adjacency.num_nodes
        self.size = torch.full((nodes,), torch.inf, dtype=torch.float64)
        self.largest = torch.ones(nodes, dtype=torch.float64)
        self.alone = torch.zeros(nodes, dtype=torch.float64)
        self.weights = torch.zeros(adjacency.num_edges, dtype=torch.float64)

    def offer(self, alone: Tensor, weights: Tensor, known: Tensor) -> None:
        """Take the rows that are better where they are `known` to be rows."""
        ends = self.adjacency.destination
        size = alone.index_add(0, ends, weights)
        peak = alone.scatter_reduce(0, ends, weights, "amax")
        self.largest = torch.where(known, torch.minimum(self.largest, peak), self.largest)
        better = known & (size < self.size)
        self.size = torch.where(better, size, self.size)
        self.alone = torch.where(better, alone, self.alone)
        self.weights = torch.where(better[ends], weights, self.weights)

    def rows(self) -> _Rows:
        """Return the rows as a sparse matrix."""
        adjacency, nodes = self.adjacency, len(self.size)
        every = np.arange(nodes)
        row = np.concatenate([adjacency.destination.numpy(), every])
        column = np.concatenate([adjacency.source.numpy(), every])
        values = np.concatenate([self.weights.numpy(), self.alone.numpy()])
        weights = sp.csr_matrix((values, (row, column)), shape=(nodes, nodes))
        weights.eliminate_zeros()
        why = "a linear program; damage of each neighbour's new neighbours, and of a node's own"
        return _Rows(weights, self.largest, self.size.isinf(), why)
