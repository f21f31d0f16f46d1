"""`certify_budget`: at how many nodes a budget of injected nodes and edges can change the class at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fgai.certificates.arrays import BOOL, _ArrayDocument
from fgai.certificates.chain import Chain
from fgai.certificates.collective import _collective_rows
from fgai.certificates.injection import _Proof
from fgai.certificates.subject import _subject
from fgai.checks import mask, whole
from fgai.errors import CheckpointError, InputError
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
class BudgetCertificate(_ArrayDocument):
    """How many nodes can change their class at once, by budget, and how many edges leave each as it is.

    Attributes:
        budgets: `nodes`, `edges` of each, `changed` (counted nodes that can change at once, at most) and
            `right` (counted nodes that stay right, at least; None without labels); both None where nothing
            is known.
        counted: bool [N], the nodes that count.
        holds: int64 [N], injected edges, wherever they go, that provably leave a counted node's class; at
            most the largest number of new nodes, -1 where nothing is known and of other nodes.
        classes: int64 [N], that class; -1 where nothing is known.
        reason: why nothing is certified, or how it was.
        known: whether a bound could be computed at all.
        model: class and settings.
        data: name and sizes.
        version: of fgai and torch.
        seconds: it took.
        promise: what is certified, in a sentence.
        provenance: see `fgai.records.provenance`.
    """

    KIND: ClassVar[str] = "budget-certificate"
    ARRAYS: ClassVar[dict[str, tuple[str, int]]] = {
        "counted": (BOOL, 1),
        "holds": ("<i8", 1),
        "classes": ("<i8", 1),
    }

    budgets: list[dict[str, int | None]]
    counted: Tensor
    holds: Tensor
    classes: Tensor
    reason: str
    known: bool
    model: dict[str, Any]
    data: dict[str, Any]
    version: dict[str, str]
    seconds: float
    promise: str = BUDGET_PROMISE
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

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
        values = {"class": self.classes, "edges tolerated": self.holds, "counted": self.counted}
        return data_frame({name: tensor.numpy() for name, tensor in values.items()})

    def _check_lengths(self) -> None:
        sizes = {len(self.counted), len(self.holds), len(self.classes)}
        if len(sizes) != 1:
            raise CheckpointError(f"the values of the record are of {sorted(sizes)} nodes")


@typed
def certify_budget(
    model: nn.Module,
    data: Any,
    *,
    budgets: Sequence[tuple[int, int]] = BUDGETS,
    nodes: Tensor | None = None,
) -> BudgetCertificate:
    """Bound at how many nodes M injected nodes with E edges each can change the class at once.

    Every allocation of the edges is covered, and any features. A linear program bounds the worst one; its
    rows are explained in `fgai.certificates.collective`.

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
    graph = subject.graph
    counted = graph.test_mask if nodes is None else nodes.cpu()
    counted = torch.ones(graph.num_nodes, dtype=torch.bool) if counted is None else counted
    mask(counted, (graph.num_nodes,), "nodes")
    holds, classes, reason = torch.full((graph.num_nodes,), -1), subject.classes, str(subject.doubt)
    found: list[dict[str, int | None]] = []
    if subject.doubt is None:
        assert isinstance(subject.chain, Chain)
        chain = copy.deepcopy(subject.chain).double()
        with torch.no_grad():
            proof = _Proof(chain, graph, 0, "any")
            lost = subject.rounded(proof) | ~counted
            rows = _collective_rows(proof, classes, counted, sorted({m for m, _ in sizes}))
        reason = next(iter(rows.values())).reason
        right = None if graph.y is None else counted & (classes == graph.y)
        for m, each in sizes:
            mine = rows[m].without(lost)
            correct = None
            if right is not None:
                correct = int(right.sum()) - mine.most_changed(right, m, m * each)
            changed = mine.most_changed(counted, m, m * each)
            found.append({"nodes": m, "edges": each, "changed": changed, "right": correct})
        largest = max(rows)
        holds = rows[largest].without(lost).harmless(largest)
    else:
        classes = torch.full((graph.num_nodes,), -1)
        found = [{"nodes": m, "edges": each, "changed": None, "right": None} for m, each in sizes]
    return BudgetCertificate(
        budgets=found,
        counted=counted,
        holds=holds,
        classes=classes,
        reason=reason,
        known=subject.doubt is None,
        seconds=perf_counter() - began,
        **subject.about("fgai.certify_budget"),
    )


def _budget(pair: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise InputError(f"`budgets` must be pairs of new nodes and edges, like (20, 20), got {pair!r}")
    m, each = pair
    return whole(m, "nodes of a budget", 1, _LARGEST), whole(each, "edges of a budget", 1, _LARGEST)
