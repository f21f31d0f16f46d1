"""`certify_budget`: at how many nodes a budget of injected nodes and edges can change the class at once.

Any prices 0 ≤ π ≤ 1 bound `max Σ_v min(1, (W x)_v)` over 0 ≤ x ≤ most, Σ_u x_u ≤ edges, by `Σ_v (1 − π_v) +
max_x πᵀ W x`. The search takes primal-dual steps (Pock and Chambolle, 2011) and restarts at the mean
(Applegate and others, 2021). docs/budget.md has the rows of W and the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from fgai.bounds.intervals import LayerBounds
from fgai.certificates.base import BOOL, _Certificate, _record_fields
from fgai.certificates.injection import _InjectionBounds, _subject
from fgai.checks import mask, whole
from fgai.errors import InputError
from fgai.records import Column, Table, data_frame
from fgai.sparse import Adjacency
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas


BUDGETS = ((1, 20), (5, 20), (20, 20))
"""New nodes, and edges of each."""
BUDGET_PROMISE = (
    "Certified: M new nodes with E edges each to old nodes, any endpoints, any features, any edges among the"
    " new nodes; however they are spent, no more nodes change their class at once. Old edges and features"
    " stay."
)
_LARGEST = 10_000
SLACK = 1e-9  # rounding of sums in float64, relative
GAP, LEAST_GAP = 1e-3, 0.25  # distance from the optimum at which the search ends: relative, and in nodes
STEPS, GAP_EVERY = 4000, 50  # steps at most, and steps between two computations of the gap
HALVINGS = 50
OWN = (0, 1, 2, 3, 5)  # new neighbours of the node itself for which rows are computed
PIECES = 4  # pieces of the interval of a destination's score
COUNT_ROUNDING = 1e-6  # rounding of a number of nodes

Array = np.ndarray[Any, np.dtype[np.float64]]


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetCertificate(_Certificate):
    """How many nodes can change their class at once, by budget, and how many edges each node withstands.

    Attributes:
        budgets: `nodes`, `edges` of each, `changed` (most counted nodes that can change at once) and `right`
            (fewest counted nodes that stay right; None without labels); both None where nothing is known.
        counted: bool [N], the nodes that count.
        edge_radius: int64 [N], up to this many injected edges, wherever they go, cannot change a counted
            node's class; at most the largest number of new nodes. -1 where nothing is known.
        classes: int64 [N], the predicted class; -1 where nothing is known.
        reason: why nothing is certified, or the method.
        known: whether a bound could be computed at all.
    """

    KIND: ClassVar[str] = "budget-certificate"
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        "counted": (BOOL, 1),
        "edge_radius": ("<i8", 1),
        "classes": ("<i8", 1),
    }
    OLD_NAMES: ClassVar[dict[str, str]] = {"holds": "edge_radius"}

    budgets: list[dict[str, int | None]]
    counted: Tensor
    edge_radius: Tensor
    classes: Tensor
    reason: str
    known: bool
    seconds: float
    promise: str = BUDGET_PROMISE

    def tables(self) -> list[Table]:
        """Return a row per budget."""
        total = int(self.counted.sum())
        rows = [
            [
                f"{one['nodes']} × {one['edges']}",
                one["changed"],
                None if one["changed"] is None or not total else 1 - one["changed"] / total,
                None if one["right"] is None or not total else one["right"] / total,
            ]
            for one in self.budgets
        ]
        columns = [Column("new nodes × edges"), Column("can change, at most", "d")]
        columns += [Column("class stays, at least"), Column("right, at least")]
        title = f"{self.model['class']} on {self.data['name']}: {total} nodes counted"
        return [Table(title, columns, rows, (self.reason, self.promise))]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per node."""
        values = {"class": self.classes, "edge radius": self.edge_radius, "counted": self.counted}
        return data_frame({name: tensor.numpy() for name, tensor in values.items()})


@typed
def certify_budget(
    model: nn.Module, data: Any, *, budgets: Sequence[tuple[int, int]] = BUDGETS, nodes: Tensor | None = None
) -> BudgetCertificate:
    """Bound at how many nodes M injected nodes with E edges each can change the class at once.

    A linear program bounds the worst allocation of the edges, with any features. The `budgets` are pairs of M
    and E, both at least 1; `nodes`, bool [N], are those that count: by default the test nodes, or all without
    a test mask. See `certify_injection` for the models; raises `InputError` for an argument out of range.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.limit(fgai.train("GAT", data, epochs=20, progress=False), data)
        >>> certificate = certify_budget(model, data, budgets=[(1, 2)])
        >>> certificate.known, certificate.budgets[0]["nodes"]
        (True, 1)
    """
    began = perf_counter()
    sizes = [_budget(one) for one in budgets]
    if not sizes:
        raise InputError("`budgets` must name at least one pair of new nodes and edges")
    subject = _subject(model, data)
    graph, classes, reason = subject.graph, subject.classes, subject.problem
    counted = graph.test_mask if nodes is None else nodes.cpu()
    counted = torch.ones(graph.num_nodes, dtype=torch.bool) if counted is None else counted
    mask(counted, (graph.num_nodes,), "nodes")
    bounds: list[dict[str, int | None]] = [
        {"nodes": m, "edges": each, "changed": None, "right": None} for m, each in sizes
    ]
    radius = torch.full((graph.num_nodes,), -1)
    if reason is None:
        with torch.no_grad():
            proof = _InjectionBounds(subject)
            unproved = proof.imprecise_nodes(subject) | ~counted
            rows = _budget_constraints(proof, classes, counted, sorted({m for m, _ in sizes}))
        right = None if graph.y is None else counted & (classes == graph.y)
        for (m, each), bound in zip(sizes, bounds, strict=True):
            bound["changed"] = rows[m].max_changes(counted, unproved, m, m * each)
            if right is not None:
                bound["right"] = int(right.sum()) - rows[m].max_changes(right, unproved, m, m * each)
        largest = max(rows)
        reason, radius = rows[largest].reason, rows[largest].edge_radius(largest, unproved)
    return BudgetCertificate(
        budgets=bounds,
        counted=counted,
        edge_radius=radius,
        classes=classes,
        reason=reason,
        known=subject.problem is None,
        seconds=perf_counter() - began,
        **_record_fields(subject.model, graph, subject.original, "fgai.certify_budget"),
    )


def _budget(pair: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InputError(f"`budgets` must be pairs of new nodes and edges, like (20, 20), got {pair!r}")
    m, each = pair
    return whole(m, "nodes of a budget", 1, _LARGEST), whole(each, "edges of a budget", 1, _LARGEST)


@dataclass(frozen=True, eq=False)
class _Constraints:
    """`weights @ x ≥ 1`, a row for each node: a necessary condition for a change of its class."""

    weights: Any  # sparse [N, N]
    largest: Tensor  # [N], upper bound of the largest weight, the least one over all rows of the node
    unproved: Tensor  # bool [N], nodes without a proof
    reason: str  # the method

    def edge_radius(self, most: int, unproved: Tensor) -> Tensor:
        """Return how many injected edges change no class, int64 [N]; at most `most`, -1 if unproved."""
        # A class that changes needs Σ w x ≥ 1, so more than (1 − ε) / max w edges.
        count = ((1 - SLACK) / self.largest.clamp(min=1 / (2 * most))).clamp(max=most)
        return torch.where(self.unproved | unproved, -1, count.floor().long())

    def max_changes(self, nodes: Tensor, unproved: Tensor, most: int, edges: int) -> int:
        """Bound how many of the nodes, bool [N], change: `most` new neighbours each, `edges` in all."""
        unproved = self.unproved | unproved
        covered = _max_covered(self.weights[(nodes & ~unproved).numpy()], most, edges)
        return int((nodes & unproved).sum()) + floor(covered + COUNT_ROUNDING)


def _budget_constraints(
    proof: _InjectionBounds, classes: Tensor, nodes: Tensor, most: Sequence[int]
) -> dict[int, _Constraints]:
    """Return the constraints of `nodes`, bool [N], by how many new neighbours each node may gain (`most`)."""
    levels = _levels(most)
    if len(proof.layers) == 2 and proof.read_out is not None:
        bounds = {0: proof.clean[-1], **{t: proof.bounds(t)[-1] for t in levels}}
        return _additive_rows(proof, classes, bounds, nodes, most)
    certified = {t: proof.certified_classes(proof.bounds(t), t) for t in levels}
    return _threshold_rows(proof.adjacency, certified, len(proof.layers) - 1, most)


def _levels(most: Sequence[int]) -> list[int]:
    """Return increasing numbers of new neighbours to bound, by a factor of 1.5, with 1 and all of `most`."""
    levels, last = {1, *most}, 1
    while last < max(most):
        levels.add(last)
        last = -(-3 * last // 2)
    return sorted(levels)


def _threshold_rows(
    adjacency: Adjacency, certified: dict[int, Tensor], steps: int, most: Sequence[int]
) -> dict[int, _Constraints]:
    """Return rows of 1 / (t + 1) for nodes within `steps`, t the most that every node may gain."""
    nodes = adjacency.num_nodes
    near = _sparse(adjacency, torch.ones(adjacency.num_edges), torch.ones(nodes))
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


def _sparse(adjacency: Adjacency, weights: Tensor, own: Tensor) -> Any:
    entries = weights.numpy(), (adjacency.destination.numpy(), adjacency.source.numpy())
    out = sp.csr_matrix(entries, shape=(len(own), len(own))) + sp.diags(own.numpy(), format="csr")
    out.eliminate_zeros()
    return out


def _additive_rows(
    proof: _InjectionBounds,
    classes: Tensor,
    bounds: dict[int, LayerBounds],
    nodes: Tensor,
    most: Sequence[int],
) -> dict[int, _Constraints]:
    """Return rows of `α_v x_v + Σ_j w_vj x_j ≥ 1`, for each of `most` those of the best a.

    `bounds` are those of the last layer by number of new neighbours of every node, from 0 upwards.
    """
    adjacency = proof.adjacency
    rows: dict[int, list[tuple[Tensor, ...]]] = {m: [] for m in most}
    for a in sorted({*OWN, *most} & set(bounds)):
        own = bounds[a]
        clean = list(proof.margin_terms(own, bounds[0], classes, nodes, PIECES))
        margins = [piece.margins(adjacency, classes, a) for piece in clean]
        # More new neighbours never raise a margin, so a node without one has none for larger a.
        nodes = nodes & torch.stack([(margin > 0).all(1) for margin in margins]).all(0)
        weights, before = torch.zeros(adjacency.num_edges, dtype=torch.float64), 0
        for t in sorted(bounds)[1:]:
            behind = proof.margin_terms(own, bounds[t], classes, nodes, PIECES, clean[0].peak)
            for one, margin, other in zip(clean, margins, behind, strict=True):
                share = (one.edges - other.edges) / margin[adjacency.destination]
                share = share.nan_to_num(nan=1.0).clamp(0, 1).amax(1) / (before + 1)
                weights = torch.maximum(weights, share)
            before = t
            if t in rows and a <= t:
                own_weight = torch.full(classes.shape, 0.0 if a == t else 1 / (a + 1), dtype=torch.float64)
                rows[t].append((own_weight, weights, nodes))
    return {m: _best_rows(adjacency, parts) for m, parts in rows.items()}


def _best_rows(adjacency: Adjacency, rows: Sequence[tuple[Tensor, ...]]) -> _Constraints:
    """Return the row of each node with the least sum of weights; rows are own [N], others [E], nodes [N]."""
    own, weights, nodes = (torch.stack(part) for part in zip(*rows, strict=True))
    ends, every = adjacency.destination, torch.arange(adjacency.num_nodes)
    total = own.index_add(1, ends, weights).masked_fill(~nodes, torch.inf)
    largest = own.scatter_reduce(1, ends.expand_as(weights), weights, "amax").masked_fill(~nodes, 1.0)
    best, edges = total.argmin(0), torch.arange(adjacency.num_edges)
    matrix = _sparse(adjacency, weights[best[ends], edges], own[best, every])
    reason = "a linear program; damage of each neighbour's new neighbours, and of a node's own"
    return _Constraints(matrix, largest.amin(0).clamp(max=1.0), total.amin(0).isinf(), reason)


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
