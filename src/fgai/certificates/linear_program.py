"""The linear program behind `certify_budget`: at how many nodes a budget of edges can change the class.

Let x_u be the number of injected neighbours of node u. In a model of two attention layers, the last of one
head, a change of v's class needs, for every number a of its own new neighbours with a positive margin,

    x_v > a   or   Σ_j damage_vj(a, x_j) ≥ margin_v(a),

and so `α_v x_v + Σ_j w_vj x_j ≥ 1` with `α_v = 1 / (a + 1)` and `w_vj = max_t min(1, damage / margin) / t`,
over t ≥ 1 and classes (docs/budget.md has the proof): a row of W. Of all a the one with the least sum of the
row is taken. In other models, if the class stays while every node gains up to t, a change needs a node in
reach (as many steps as layers, less one) that gains t + 1. The number of changes is at most

    max Σ_v min(1, (W x)_v)   over   0 ≤ x ≤ most,  Σ_u x_u ≤ edges,

the saddle point of `Σ_v (1 − π_v) + πᵀ W x` over prices (dual variables) 0 ≤ π ≤ 1 and allocations x. Any
prices bound it from above, by `Σ_v (1 − π_v) + max_x πᵀ W x`, whose maximum takes the columns of the largest
value: bad prices give a loose bound, never a wrong one. The search takes primal-dual steps with a step size
of each row and column (Pock and Chambolle, 2011) and restarts at the mean (Applegate and others, 2021).
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

from fgai.bounds.intervals import ROUNDING, LayerBounds
from fgai.bounds.scores import score_bounds
from fgai.bounds.steps import linear_map
from fgai.certificates.injection import _InjectionBounds
from fgai.sparse import Adjacency

Array = np.ndarray[Any, np.dtype[np.float64]]

SLACK = 1e-9
"""Rounding of sums in float64, relative."""
GAP, LEAST_GAP = 1e-3, 0.25
"""Distance from the optimum at which the search ends: relative, and in nodes."""
STEPS, GAP_EVERY = 4000, 50
"""Steps at most, and steps between two computations of the gap."""
HALVINGS = 50
OWN = (0, 1, 2, 3, 5)
"""New neighbours of the node itself, a above, for which rows are computed."""
PIECES = 4
"""Pieces of the interval of a destination's score."""
COUNT_ROUNDING = 1e-6
"""Rounding of a number of nodes."""


@dataclass(frozen=True, eq=False)
class _Constraints:
    """`weights @ x ≥ 1`, a row for each node: a necessary condition for a change of its class."""

    weights: Any  # sparse [N, N]
    largest: Tensor  # [N], upper bound of the largest weight, the least one over all rows of the node
    unproved: Tensor  # bool [N], nodes without a proof
    reason: str  # the method

    def without(self, nodes: Tensor) -> _Constraints:
        """Return the same with more nodes, bool [N], unproved."""
        return replace(self, unproved=self.unproved | nodes)

    def edge_radius(self, most: int) -> Tensor:
        """Return how many injected edges change no class, int64 [N]; at most `most`, -1 if unproved."""
        # A class that changes needs Σ w x ≥ 1, so more than (1 − ε) / max w edges.
        count = ((1 - SLACK) / self.largest.clamp(min=1 / (2 * most))).clamp(max=most)
        return torch.where(self.unproved, -1, count.floor().long())

    def max_changes(self, nodes: Tensor, most: int, edges: int) -> int:
        """Bound how many of the nodes, bool [N], can change at once.

        With x_u ≤ `most` new neighbours of a node and `edges` in all; see `_max_covered`.
        """
        covered = _max_covered(self.weights[(nodes & ~self.unproved).numpy()], most, edges)
        return int((nodes & self.unproved).sum()) + floor(covered + COUNT_ROUNDING)


def _levels(most: Sequence[int]) -> list[int]:
    """Return increasing numbers of new neighbours to bound, by a factor of 1.5, with 1 and all of `most`."""
    levels, last = {1, *most}, 1
    while last < max(most):
        levels.add(last)
        last = -(-3 * last // 2)
    return sorted(levels)


def _budget_constraints(
    proof: _InjectionBounds, classes: Tensor, nodes: Tensor, most: Sequence[int]
) -> dict[int, _Constraints]:
    """Return the constraints of `nodes`, bool [N], by how many new neighbours each node may gain (`most`)."""
    levels, steps, last = _levels(most), proof.steps[-1], proof.layers[-1]
    read_out = linear_map(steps, last.channels) if last.heads == 1 else None
    if len(proof.layers) == 2 and read_out is not None:
        terms = _MarginTerms(proof, classes, read_out if steps else None)
        bounds = {0: proof.clean[-1], **{t: proof.with_neighbours(t).bounds[-1] for t in levels}}
        return _additive_rows(terms, bounds, nodes, levels, most)
    certified = {t: proof.with_neighbours(t).certified_classes() for t in levels}
    return _threshold_rows(proof.adjacency, certified, len(proof.layers) - 1, most)


def _threshold_rows(
    adjacency: Adjacency, certified: dict[int, Tensor], steps: int, most: Sequence[int]
) -> dict[int, _Constraints]:
    """Return rows of 1 / (t + 1) for nodes within `steps`, t the most that every node may gain."""
    nodes = adjacency.num_nodes
    ends = adjacency.destination.numpy(), adjacency.source.numpy()
    near = sp.csr_matrix((np.ones(len(ends[0])), ends), shape=(nodes, nodes)) + sp.identity(nodes)
    reach = sp.identity(nodes, format="csr")
    for _ in range(steps):
        reach = (reach @ near).sign()
    out, safe, stays = {}, torch.zeros(nodes), torch.ones(nodes, dtype=torch.bool)
    for t in certified:
        stays = stays & certified[t]
        safe[stays] = t
        if t in most:
            share = torch.where(stays, 0.0, 1 / (safe.double() + 1))
            weights = sp.csr_matrix(sp.diags(share.numpy()) @ reach)
            weights.eliminate_zeros()
            reason = "a linear program; a node needs one in reach that gains more than every node may"
            out[t] = _Constraints(weights, share, torch.zeros(nodes, dtype=torch.bool), reason)
    return out


@dataclass(frozen=True, eq=False)
class _Terms:
    """Terms of old neighbours [E, C] and of a new one [N, C], over exp(peak [N]); 0 for the class top."""

    edges: Tensor
    new: Tensor
    peak: Tensor


class _MarginTerms:
    """Terms of the margins of each node's class over the others, in the last layer of one head."""

    def __init__(
        self, proof: _InjectionBounds, classes: Tensor, read_out: tuple[Tensor, Tensor] | None
    ) -> None:
        self.layer, self.ranges, self.adjacency = proof.layers[-1], proof.ranges[-1], proof.adjacency
        self.read_out, self.classes = read_out, classes

    def compute(
        self, own: LayerBounds, others: LayerBounds, nodes: Tensor, peak: Tensor | None = None
    ) -> Iterator[_Terms]:
        """Yield the terms for each piece of the destinations' intervals; 0 but for `nodes`, bool [N].

        A node has the bounds `own`, its neighbours have the bounds `others`. `peak` is the largest score of
        the first piece by default.
        """
        adjacency, layer = self.adjacency, self.layer
        width = layer.channels if self.read_out is None else self.read_out[1].numel()
        of_edge = torch.where(nodes, self.classes, -1)[adjacency.destination]
        parts = []
        for top in torch.unique(self.classes[nodes]).tolist():
            tops = slice(top, top + 1)
            margins = others.margins(layer, tops, self.read_out)[:, 0]
            loops = margins if own is others else own.margins(layer, tops, self.read_out)[:, 0]
            index = (of_edge == top).nonzero().flatten()
            parts.append((top, index, (nodes & (self.classes == top)).nonzero().flatten(), margins, loops))
        for scores in score_bounds(layer, self.ranges, own, others, adjacency, PIECES):
            if self.read_out is not None:
                scores = scores.behind(layer, self.ranges["value"], self.read_out)
            low, high, new = scores.low[:, 0], scores.high[:, 0], scores.new[:, 0]
            if peak is None:
                peak = new.amax(1).scatter_reduce(0, adjacency.destination, high, "amax")
            edges = low.new_zeros(adjacency.num_edges, width)
            of_new = low.new_zeros(adjacency.num_nodes, width)
            for top, index, rows, margins, loops in parts:
                source, ends = adjacency.source[index], adjacency.destination[index]
                least = torch.where((source == ends)[:, None], loops[source], margins[source])
                weak, strong = ((end[index] - peak[ends]).exp()[:, None] for end in (low, high))
                term = torch.where(least < 0, strong, weak) * least
                term = term - ROUNDING * term.abs()
                term[:, top] = 0.0
                edges[index] = term
                worst = (new[rows] - peak[rows][:, None]).exp()[:, :, None] * scores.new_margins[:, top]
                of_new[rows] = (1 + ROUNDING) * worst.clamp(max=0).amin(1)
            yield _Terms(edges, of_new, peak)


def _additive_rows(
    terms: _MarginTerms,
    bounds: dict[int, LayerBounds],
    nodes: Tensor,
    levels: Sequence[int],
    most: Sequence[int],
) -> dict[int, _Constraints]:
    """Return rows of `α_v x_v + Σ_j w_vj x_j ≥ 1`, for each of `most` those of the best a.

    `bounds` are those of the last layer by number of new neighbours of every node.
    """
    adjacency, classes = terms.adjacency, terms.classes
    best = {m: _BestRows(adjacency) for m in most}
    for a in sorted({*OWN, *most} & set(bounds)):
        own = bounds[a]
        clean = list(terms.compute(own, bounds[0], nodes))
        itself = classes[:, None] == torch.arange(clean[0].edges.shape[1])
        margins = []
        for piece in clean:
            total = torch.zeros_like(piece.new).index_add(0, adjacency.destination, piece.edges)
            margins.append((total + a * piece.new).masked_fill(itself, torch.inf))
        # More new neighbours never raise a margin, so a node without one has none for larger a.
        nodes = nodes & torch.stack([(margin > 0).all(1) for margin in margins]).all(0)
        weights, before = torch.zeros(adjacency.num_edges, dtype=torch.float64), 0
        for t in levels:
            behind = terms.compute(own, bounds[t], nodes, clean[0].peak)
            for one, margin, other in zip(clean, margins, behind, strict=True):
                share = (one.edges - other.edges) / margin[adjacency.destination]
                share = share.nan_to_num(nan=1.0).clamp(0, 1).amax(1) / (before + 1)
                weights = torch.maximum(weights, share)
            before = t
            if t in best and a <= t:
                own_weight = torch.full(classes.shape, 0.0 if a == t else 1 / (a + 1), dtype=torch.float64)
                best[t].update(own_weight, weights, nodes)
    return {m: one.constraints() for m, one in best.items()}


class _BestRows:
    """The row of each node with the least sum of weights."""

    def __init__(self, adjacency: Adjacency) -> None:
        self.adjacency, nodes = adjacency, adjacency.num_nodes
        self.sum = torch.full((nodes,), torch.inf, dtype=torch.float64)
        self.largest = torch.ones(nodes, dtype=torch.float64)
        self.own = torch.zeros(nodes, dtype=torch.float64)
        self.weights = torch.zeros(adjacency.num_edges, dtype=torch.float64)

    def update(self, own: Tensor, weights: Tensor, nodes: Tensor) -> None:
        """Take the rows of `nodes`, bool [N], that are better: their `own` weight [N] and `weights` [E]."""
        ends = self.adjacency.destination
        total = own.index_add(0, ends, weights)
        peak = own.scatter_reduce(0, ends, weights, "amax")
        self.largest = torch.where(nodes, torch.minimum(self.largest, peak), self.largest)
        better = nodes & (total < self.sum)
        self.sum = torch.where(better, total, self.sum)
        self.own = torch.where(better, own, self.own)
        self.weights = torch.where(better[ends], weights, self.weights)

    def constraints(self) -> _Constraints:
        """Return the rows as a sparse matrix."""
        adjacency, nodes = self.adjacency, len(self.sum)
        every = np.arange(nodes)
        row = np.concatenate([adjacency.destination.numpy(), every])
        column = np.concatenate([adjacency.source.numpy(), every])
        values = np.concatenate([self.weights.numpy(), self.own.numpy()])
        weights = sp.csr_matrix((values, (row, column)), shape=(nodes, nodes))
        weights.eliminate_zeros()
        reason = "a linear program; damage of each neighbour's new neighbours, and of a node's own"
        return _Constraints(weights, self.largest, self.sum.isinf(), reason)


def _max_covered(weights: Any, most: int, edges: int) -> float:
    """Return an upper bound of the program for `weights`, sparse [R, N] and not negative."""
    weights = weights[_coverable(weights, most, edges)]
    weights = weights[:, np.unique(weights.indices)].tocsr()
    best = float(weights.shape[0])
    if not best:
        return 0.0
    covered = 0.0
    for prices, allocation in _price_search(weights, most, edges):
        best = min(best, _dual_bound(weights, prices, most, edges))
        covered = max(covered, float(np.minimum(1, weights @ allocation).sum()))
        if best - covered < max(LEAST_GAP, GAP * covered):
            break
    return best


def _dual_bound(weights: Any, prices: Array, most: int, edges: int) -> float:
    """Return the upper bound of the program by prices [R] in [0, 1]."""
    return float((1 - prices).sum()) + _best_value(weights.T @ prices, most, edges)


def _best_value(values: Array, most: int, edges: int) -> float:
    """Return the largest total value of an allocation to columns of these values [N]."""
    best = -np.sort(-values)
    full, rest = divmod(edges, most)
    return float(most * best[:full].sum() + rest * best[full : full + 1].sum())


def _coverable(weights: Any, most: int, edges: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the rows, bool [R], that the whole budget can bring to 1 by itself."""
    ends = zip(weights.indptr, weights.indptr[1:], strict=False)
    covered = [_best_value(weights.data[start:stop], most, edges) for start, stop in ends]
    return np.array(covered, dtype=np.float64) >= 1 - SLACK


def _price_search(weights: Any, most: int, edges: int) -> Iterator[tuple[Array, Array]]:
    """Yield prices of rows [R] and allocations [N] that approach the optimum."""
    transposed = weights.T.tocsr()
    up, down = (1 / np.asarray(weights.sum(axis=axis)).ravel() for axis in (0, 1))  # step sizes
    prices, allocation = np.full(len(down), 0.5), _project(1 / up, np.ones_like(up), most, edges)
    covered, sums, count, last = weights @ allocation, [0 * prices, 0 * allocation], 0, np.inf
    for step in range(1, STEPS + 1):
        allocation = _project(allocation + up * (transposed @ prices), up, most, edges)
        before, covered = covered, weights @ allocation
        prices = np.clip(prices - down * (2 * covered - before - 1), 0, 1)
        sums, count = [sums[0] + prices, sums[1] + allocation], count + 1
        if step % GAP_EVERY:
            continue
        pairs = [(prices, allocation), (sums[0] / count, sums[1] / count)]
        gaps = [_dual_bound(weights, p, most, edges) - np.minimum(1, weights @ x).sum() for p, x in pairs]
        chosen = int(np.argmin(gaps))
        yield pairs[chosen]
        if gaps[chosen] < last / 2 or count >= 20 * GAP_EVERY:
            (prices, allocation), last = pairs[chosen], gaps[chosen]
            covered, sums, count = weights @ allocation, [0 * prices, 0 * allocation], 0


def _project(allocation: Array, size: Array, most: int, edges: int) -> Array:
    """Project an allocation on the budget, in the norm that weighs column u by `1 / size_u`."""
    inside = np.clip(allocation, 0, most)
    if inside.sum() <= edges:
        return inside
    low, high = 0.0, float((allocation / size).max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if np.clip(allocation - size * middle, 0, most).sum() > edges:
            low = middle
        else:
            high = middle
    return np.clip(allocation - size * high, 0, most)
