"""`Budget` and `Box`: how much an attack may spend, and the one place where it is checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.cache import cached_on
from fgai.errors import BudgetError, InputError, ReliabilityWarning, warn
from fgai.graph import Graph, GraphChange
from fgai.sparse import edge_keys
from fgai.tasks import task_of
from fgai.typed import typed

BEYOND = 0.1  # how far a box from the data reaches beyond each feature's range, as a share of its width
SLACK = 1e-6  # rounding that a check of a box forgives, as a share of half the width


@dataclass(frozen=True, eq=False)
class Box:
    """An interval for every feature [F]; `low, high = box` unpacks it.

    A search moves points in [-1, 1], where ±1 are the ends, so that a feature's unit does not matter.
    """

    low: Tensor
    high: Tensor
    middle: Tensor = field(init=False)
    half: Tensor = field(init=False)  # half the width; 0 where a feature has one value only

    def __post_init__(self) -> None:
        middle = ((self.low.double() + self.high.double()) / 2).to(self.low.dtype)
        half = torch.minimum(self.high - middle, middle - self.low)  # exact where it is small
        for _ in range(2):  # the corners stay inside, whatever rounding does
            outside = (middle + half > self.high) | (middle - half < self.low)
            half = torch.where(outside, half * (1 - torch.finfo(half.dtype).eps), half)
        object.__setattr__(self, "middle", middle)
        object.__setattr__(self, "half", half)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.low, self.high))

    @classmethod
    def of(cls, low: float, high: float, like: Tensor) -> Box:
        """Return one interval for all features; `like` [F] gives their number, type and device."""
        return cls(torch.full_like(like, low), torch.full_like(like, high))

    @classmethod
    def around(cls, low: Tensor, high: Tensor) -> Box:
        """Return the box of data between `low` and `high` [F], a share `BEYOND` of each width wider."""
        more = BEYOND * (high.double() - low.double())
        return cls((low.double() - more).to(low.dtype), (high.double() + more).to(low.dtype))

    def features(self, points: Tensor) -> Tensor:
        """Map points [..., F] in [-1, 1] to features; differentiable."""
        return self.middle + self.half * points

    def points(self, features: Tensor) -> Tensor:
        """Map features [..., F] to points in [-1, 1]; 0 where a feature has one value only."""
        return torch.where(self.half > 0, (features - self.middle) / self.half, 0.0)

    def outside(self, features: Tensor) -> Tensor:
        """Whether features [..., F] leave the box by more than rounding; NaN does."""
        size = torch.maximum(self.low.abs(), self.high.abs())
        slack = SLACK * self.half + 16 * torch.finfo(size.dtype).eps * size
        return ~((features >= self.low - slack) & (features <= self.high + slack))


def data_range(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return each feature's range, [F] twice, of `Graph.peers` if any; `InputError` if it is infinite."""
    if graph.features is None:
        return torch.zeros(0, device=graph.device), torch.zeros(0, device=graph.device)
    low, high = graph.features.range(graph.peers)

    def check_range() -> None:
        wide = Box.around(low, high)
        bad = (~(torch.isfinite(wide.low) & torch.isfinite(wide.high))).nonzero()
        if bad.numel():
            raise InputError(
                f"features of {graph.name!r} must be finite, and so must their range: {len(bad)} of"
                f" {low.numel()} are not (the first is feature {int(bad[0])}); replace or rescale them"
            )

    cached_on(low, "fgai.attacks.budget", check_range)
    return low, high


def warn_if_narrow(interval: tuple[float, float] | None, low: Tensor, high: Tensor) -> None:
    """Warn where an interval leaves out values of the data, which lie between `low` and `high` [F]."""
    if interval is None:
        return
    left = ((low < interval[0]) | (high > interval[1])).nonzero().flatten()
    if left.numel():
        first = int(left[0])
        inside = f"feature {first} lies in [{float(low[first]):.4g}, {float(high[first]):.4g}]"
        text = (
            f"`box` [{interval[0]:.4g}, {interval[1]:.4g}] is narrower than the data: {left.numel()} of"
            f" {low.numel()} features leave it ({inside}); widen it, or leave it out"
        )
        warn(ReliabilityWarning("box-narrower-than-data", text))


LARGEST = 1_000_000  # new nodes, edges, steps and restarts at most: more would not end
MOST_NODES = 1000  # new nodes at most in a graph that has fewer itself


@typed
@dataclass(frozen=True, kw_only=True)
class Budget:
    """What an attack may change, and how hard it may search.

    On a batch of small graphs, `nodes` and `edges` are those of each attacked graph.

    Attributes:
        nodes: new nodes.
        edges: edges of each new node; where `nodes` is 0, edges added and removed between existing nodes.
        box: interval for the features of new nodes, one for all; None takes each feature's range in
            the data, widened by a tenth on both sides. A feature that never varies stays as it is.
        radius: largest change of an existing feature, in units of half its box (0: existing features stay).
        rows: share of the target nodes whose features may change.
        steps: gradient steps.
        step_size: of each, in units of half the box.
        restarts: independent starts; the best result counts.
        targets: the nodes that are attacked and joined to: `test`, `val` or `fit` (train + val).
    """

    nodes: int = 0
    edges: int = 0
    box: tuple[float, float] | None = None
    radius: float = 0.0
    rows: float = 0.0
    steps: int = 0
    step_size: float = 0.0
    restarts: int = 1
    targets: str = "test"

    def __post_init__(self) -> None:
        for name in ("nodes", "edges", "steps", "restarts"):
            value, least = getattr(self, name), int(name == "restarts")
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
                most = f"whole and at most {LARGEST}"
                raise BudgetError(f"`{name}` must be at least {least}, {most}, got {value!r}")
        for name in ("radius", "rows", "step_size"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise BudgetError(f"`{name}` must be finite and not negative, got {value}")
        if self.rows > 1:
            raise BudgetError(f"`rows` is a share of the targets, at most 1, got {self.rows}")
        if self.box is not None:
            pair = isinstance(self.box, Sequence) and len(self.box) == 2
            numbers = pair and all(isinstance(end, Real) for end in self.box)
            if not numbers or not -math.inf < self.box[0] < self.box[1] < math.inf:
                raise BudgetError(f"`box` must be (low, high) with low < high, got {self.box}")
        if self.targets not in ("test", "val", "fit"):
            raise BudgetError(f"`targets` must be test, val or fit, got {self.targets!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for records."""
        return asdict(self)

    def feature_box(self, graph: Graph) -> Box:
        """Return the interval of each new feature; `BudgetError` if it is empty or outside the data."""
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to attack")
        low, high = data_range(graph)  # kept with the features: one `high` for each `low`
        return cached_on(low, ("fgai.attacks.budget", self.box), lambda: self.box_in(low, high))

    def noise_box(self, graph: Graph) -> Box:
        """Return where random features of new nodes lie: in `box`, or else in the data's range."""
        low, high = data_range(graph)
        return Box(low, high) if self.box is None else self.box_in(low, high)

    def box_in(self, low: Tensor, high: Tensor) -> Box:
        """Return `feature_box` for data between `low` and `high`, [F] each."""
        if self.box is None:
            if low.numel() and bool((low == high).all()):
                raise BudgetError(
                    "every feature of the data is constant, so its range is no box; give `box`, the smallest"
                    " and the largest value of new features"
                )
            return Box.around(low, high)
        least, most = (float(low.min()), float(high.max())) if low.numel() else (0.0, 0.0)
        if self.box[1] < least or self.box[0] > most:
            raise BudgetError(
                f"`box` must overlap the features, which lie in [{least:.4g}, {most:.4g}], got {self.box}"
            )
        return Box.of(*self.box, low)

    def target_nodes(self, graph: Graph) -> Tensor:
        """Return the nodes that may be joined or changed: of the targets, or at the ends of target links.

        `BudgetError` if there are none, fewer than the edges of one new node, or too many new nodes.
        """
        if self.nodes > max(MOST_NODES, graph.num_nodes):
            raise BudgetError(
                f"`nodes` must be at most {MOST_NODES} or the number of nodes of the graph,"
                f" {graph.num_nodes}, got {self.nodes}; lower `nodes`"
            )
        nodes = task_of(graph).nodes(graph, self.targets)
        if nodes.numel() == 0:
            raise BudgetError(f"there are no {self.targets} nodes to attack in {graph.name!r}")
        checks.memory(self.nodes * max(self.edges, graph.num_features), 8, "nodes")
        room = smallest_pool(graph, nodes)
        if self.nodes and self.edges > room:
            where = "" if graph.batch is None else " in the smallest attacked graph"
            raise BudgetError(
                f"`edges` must be at most {room}, the number of {self.targets} nodes to join{where},"
                f" got {self.edges}; lower `edges`"
            )
        return nodes


def smallest_pool(graph: Graph, nodes: Tensor) -> int:
    """How many of `nodes` one new node can join: all, or those of the smallest graph of a batch."""
    if graph.batch is None:
        return int(nodes.numel())
    counts = torch.bincount(graph.batch[nodes])
    return int(counts[counts > 0].min())


@typed
def check_budget(change: GraphChange, budget: Budget, graph: Graph) -> None:
    """Raise `BudgetError` if `change` spends more than `budget` allows on `graph`; NaN fails, too."""
    targets = budget.target_nodes(graph)
    for name, nodes in (
        ("injected edges", change.endpoints),
        ("new edges", change.edges),
        ("removed edges", change.removed),
        ("changed rows", change.rows),
    ):
        outside = 0 if nodes is None else int((~torch.isin(nodes, targets)).sum())
        if outside:
            raise BudgetError(f"{outside} ends of {name} lie outside the {budget.targets} nodes")
    shares = 1 if graph.batch is None else int(torch.unique(graph.batch[targets]).numel())
    _check_inside(change.endpoints, budget.nodes, graph, "new nodes")
    _check_inside(None if change.edges is None else change.edges.T, budget.edges, graph, "new edges")
    if change.endpoints is not None:
        new_nodes, each = change.endpoints.shape
        if new_nodes > budget.nodes * shares or each > budget.edges:
            raise BudgetError(
                f"injected {new_nodes} × {each}, allowed {budget.nodes * shares} × {budget.edges}"
            )
    if change.features is not None and change.features.numel():
        box = budget.feature_box(graph)
        if (left := box.outside(change.features).nonzero()).numel():
            row, column = left[0].tolist()
            low, high = (float(end[column]) for end in box)
            raise BudgetError(
                f"{len(left)} injected features leave the box: feature {column} must be in [{low:.4g},"
                f" {high:.4g}], got {float(change.features[row, column]):.4g}"
            )
    _check_edges(change, budget, graph, shares)
    if change.delta is not None and change.delta.numel():
        reach = budget.radius * budget.feature_box(graph).half
        if (far := Box(-reach, reach).outside(change.delta).nonzero()).numel():
            row, column = far[0].tolist()
            moved, most = float(change.delta[row, column].abs()), float(reach[column])
            raise BudgetError(f"feature {column} moved by {moved:.4g}, allowed {most:.4g}")
        limit = max(1, round(budget.rows * targets.numel()))
        if change.delta.shape[0] > limit:
            raise BudgetError(f"changed {change.delta.shape[0]} nodes' features, allowed {limit}")


def _check_inside(ends: Tensor | None, limit: int, graph: Graph, name: str) -> None:
    """Raise if a row of `ends` leaves its small graph, or one small graph gets more than its share."""
    if graph.batch is None or ends is None or not ends.numel():
        return
    groups = graph.batch[ends]
    if bool((groups != groups[:, :1]).any()):
        raise BudgetError(f"{name} join nodes of different small graphs")
    most = int(torch.bincount(groups[:, 0]).max())
    if most > limit:
        raise BudgetError(f"one small graph got {most} {name}, allowed {limit} each")


def _check_edges(change: GraphChange, budget: Budget, graph: Graph, shares: int) -> None:
    added, removed = (0 if pairs is None else pairs.shape[1] for pairs in (change.edges, change.removed))
    allowed = 0 if budget.nodes else budget.edges * shares
    if added + removed > allowed:
        raise BudgetError(f"added {added} edges and removed {removed}, allowed {allowed} in all")
    if change.removed is None or not removed:
        return
    one, two = change.removed
    there = torch.isin(edge_keys(one, two), graph.keys) | torch.isin(edge_keys(two, one), graph.keys)
    missing = int((~there | (one == two)).sum())
    if missing:
        raise BudgetError(f"{missing} of the removed edges are not there, or join a node to itself")
