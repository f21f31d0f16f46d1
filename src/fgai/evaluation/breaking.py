"""`breaking_point`: a number of injected nodes that breaks explanations while one fewer does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from fgai.attacks import Threat, threat_of
from fgai.attacks.budget import LARGEST
from fgai.attention import observe, prepared, touched_rows, warn_coupled, warn_unread
from fgai.checks import one_of, whole
from fgai.checks import seed as check_seed
from fgai.errors import InputError
from fgai.metrics import AttentionPair, mean_of_defined
from fgai.metrics.ranking import overlap_layers
from fgai.models import as_graph
from fgai.records import Column, Table, Tabled, plain
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.topk import check_k
from fgai.typed import typed


@typed
@dataclass(frozen=True)
class BreakingPoint(Tabled):
    """The measured breaking point of explanations."""

    nodes: int | None  # that break the threshold while one fewer do not; None if no number tried does
    threshold: float  # overlap below which explanations count as broken
    limit: int  # largest number of nodes tried
    edges: int  # of each injected node
    overlap: dict[int, float]  # mean of touched nodes, by number of injected nodes
    threat: str  # name of the threat
    k: int  # size of a node's explanation
    seed: int  # of endpoints and starts
    seconds: float  # of all attacks

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for records; undefined overlaps are None."""
        return plain({**asdict(self), "overlap": dict(sorted(self.overlap.items()))})  # type: ignore[no-any-return]

    def tables(self) -> list[Table]:
        """Return the overlap by number of injected nodes."""
        where = "not reached" if self.nodes is None else f"{self.nodes} nodes × {self.edges} edges"
        note = (
            f"top-{self.k} overlap of touched nodes under the explanation attack ({self.threat}, seed"
            f" {self.seed}), threshold {self.threshold:g}, at most {self.limit} nodes; {self.seconds:.1f} s"
        )
        rows = [[n, value] for n, value in sorted(self.overlap.items())]
        return [Table(f"breaking point: {where}", [Column("nodes", "d"), Column("overlap")], rows, [note])]


@typed
@with_gradients
def breaking_point(
    model: nn.Module,
    data: Any,
    threat: str | Threat = "standard",
    *,
    threshold: float = 0.5,
    limit: int = 160,
    k: int = 5,
    seed: int = 0,
    targets: str = "test",
) -> BreakingPoint:
    """Find a number of injected nodes that breaks explanations while one fewer does not.

    The explanation attack is run with 1, 2, 4, ... nodes, at most `limit`, until the overlap (mean over
    layers, touched nodes) is below `threshold`, in (0, 1]; then the number is bisected. A larger attack has
    the nodes and edges of every smaller one. The overlap need not fall with every node, so a smaller number
    that was not tried may break the threshold, too. The `threat` is an injection threat by name or of your
    own, whose `nodes` are replaced; `targets` are `test` or `val` nodes. Raises `InputError` for other
    threats, and for a model that is no node classifier.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=20, progress=False)
        >>> sorted(breaking_point(model, data, "random", threshold=0.9, limit=4).overlap)[0]
        1
    """
    check_k(k)
    whole(limit, "limit", 1, LARGEST)
    check_seed(seed)
    if not 0 < threshold <= 1:
        raise InputError(f"`threshold` is an overlap, above 0 and at most 1, got {threshold}")
    one_of(targets, "targets", ("test", "val"))
    chosen = threat_of(threat)
    original = as_graph(data)
    if not (task := task_of(original)).row_per_node:
        raise InputError(f"a breaking point is for node tasks, {original.name!r} holds a {task.name} task")
    if not chosen.budget.nodes:
        raise InputError(f"a breaking point needs a threat that injects nodes, {chosen.name!r} does not")
    graph = prepared(model, original)
    warn_unread(model)
    clean, seconds = observe(model, graph).averaged(), [0.0]

    def measure(nodes: int) -> float:
        budget = replace(chosen.budget, nodes=nodes, targets=targets)
        result = chosen.attack(budget, "explanation", k=k).run(model, graph, seed=seed)
        seconds[0] += result.ledger.seconds
        view = observe(model, result.graph).averaged()
        warn_coupled(model, clean, view, result.change.rows)
        touched = touched_rows(clean.attention, view.attention, result.change.rows)
        pair = AttentionPair(clean.attention, view.attention, k, touched)
        return mean_of_defined(overlap_layers(pair)["overlap_touched"])

    nodes, overlap = bisect_below(measure, threshold, limit)
    return BreakingPoint(
        nodes, threshold, limit, chosen.budget.edges, overlap, chosen.name, k, seed, seconds[0]
    )


def bisect_below(
    measure: Callable[[int], float], threshold: float, limit: int
) -> tuple[int | None, dict[int, float]]:
    """Return an n with measure(n) below the threshold and measure(n - 1) not, or None, and all measures.

    By doubling, then bisection; measure(0) and NaN count as not below.
    """
    measures: dict[int, float] = {}

    def below(n: int) -> bool:
        measures[n] = measure(n)
        return measures[n] < threshold

    low, high = 0, 1
    while not below(high):
        if high == limit:
            return None, measures
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(middle) else (middle, high)
    return high, measures
