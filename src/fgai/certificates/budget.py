"""`certify_budget`: at how many nodes a budget of injected nodes and edges can change the class at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fgai.certificates.base import BOOL, _Certificate
from fgai.certificates.injection import _InjectionBounds
from fgai.certificates.linear_program import _budget_constraints
from fgai.certificates.subject import _subject
from fgai.checks import mask, whole
from fgai.errors import InputError
from fgai.records import Column, Table, data_frame
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


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetCertificate(_Certificate):
    """How many nodes can change their class at once, by budget, and how many edges each node withstands.

    Attributes:
        budgets: `nodes`, `edges` of each, `changed` (most counted nodes that can change at once) and `right`
            (fewest counted nodes that stay right; None without labels); both None where nothing is known.
        counted: bool [N], the nodes that count.
        edge_radius: int64 [N], no such number of injected edges, or fewer, changes a counted node's class,
            wherever they go; at most the largest number of new nodes. -1 where nothing is known, and for
            other nodes.
        classes: int64 [N], that class; -1 where nothing is known.
        reason: why nothing is certified, or the method.
        known: whether a bound could be computed at all.
        model, data, version, seconds, promise, provenance: see `CertificateRecord`.
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
    model: nn.Module,
    data: Any,
    *,
    budgets: Sequence[tuple[int, int]] = BUDGETS,
    nodes: Tensor | None = None,
) -> BudgetCertificate:
    """Bound at how many nodes M injected nodes with E edges each can change the class at once.

    Every allocation of the edges is covered, and any features. A linear program bounds the worst one, see
    `fgai.certificates.linear_program`.

    Args:
        model: see `certify_injection`.
        data: a `Graph` or PyG `Data`.
        budgets: pairs of M and E, both at least 1.
        nodes: bool [N], which nodes count; the test nodes by default, or all without a test mask.

    Raises:
        InputError: an argument out of range.

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
            proof = _InjectionBounds(subject, 0)
            unproved = proof.imprecise_nodes(subject) | ~counted
            rows = _budget_constraints(proof, classes, counted, sorted({m for m, _ in sizes}))
        rows = {m: one.without(unproved) for m, one in rows.items()}
        right = None if graph.y is None else counted & (classes == graph.y)
        for (m, each), bound in zip(sizes, bounds, strict=True):
            bound["changed"] = rows[m].max_changes(counted, m, m * each)
            if right is not None:
                bound["right"] = int(right.sum()) - rows[m].max_changes(right, m, m * each)
        largest = max(rows)
        reason, radius = rows[largest].reason, rows[largest].edge_radius(largest)
    return BudgetCertificate(
        budgets=bounds,
        counted=counted,
        edge_radius=radius,
        classes=classes,
        reason=reason,
        known=subject.problem is None,
        seconds=perf_counter() - began,
        **subject.fields("fgai.certify_budget"),
    )


def _budget(pair: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InputError(f"`budgets` must be pairs of new nodes and edges, like (20, 20), got {pair!r}")
    m, each = pair
    return whole(m, "nodes of a budget", 1, _LARGEST), whole(each, "edges of a budget", 1, _LARGEST)
