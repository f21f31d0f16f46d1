"""An attacker's objective from the rows a perturbation touches; the rest of it is a constant."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.graph import Graph, GraphChange
from fgai.graph.change import SeenEdges
from fgai.objectives import Clean, Objective
from fgai.recompute.edit import Edit
from fgai.recompute.local import Plan, Recompute
from fgai.recompute.reduced import Reduced, ReducedMean, can_reduce, reduced_objective
from fgai.sparse import Features
from fgai.typed import typed

STRIKES = 3
"""Plans dropped after a single use, after which an attack is judged by full passes only."""


@typed
class PartialObjective:
    """The objective on perturbed graphs, computed from the touched rows where that pays.

    Perturbed graphs of one attack mostly share their edges and differ in features; what depends on the edges
    is found once. The values equal those of a full pass up to the order of summation.

    Args:
        recompute: the attacked model on the clean graph.
        objective: what the attacker maximises.
        clean: what the model said before.
    """

    def __init__(self, recompute: Recompute, objective: Objective, clean: Clean) -> None:
        self._recompute, self._objective, self._clean = recompute, objective, clean
        self._graph: Graph | None = None
        self._change: SeenEdges | None = None
        self._plan: Plan | None = None
        self._encodings: Tensor | None = None
        self._reduced: Reduced | None = None
        self._uses, self._strikes = STRIKES, 0

    def after(self, change: GraphChange) -> tuple[Tensor, float] | None:
        """Return the objective after a change and the share of a full pass it took; None: take a full pass.

        The perturbed graph is never put together.
        """
        if not self._willing():
            return None
        if self._change is None or not self._change.same(change):
            self._start(Edit.of(change, self._recompute.graph))
            self._change, self._graph = SeenEdges(change), None
            self._encodings = None if self._plan is None else self._recompute.encodings(self._plan, change)
        self._uses += 1
        return self._value(change.features_on(self._recompute.graph))

    def on(self, attacked: Graph) -> tuple[Tensor, float] | None:
        """Return the same on a perturbed graph."""
        if not self._willing() or not self._comparable(attacked):
            return None
        if not self._known(attacked):
            self._start(Edit.between(self._recompute.graph, attacked))
            self._change, self._graph = None, attacked
            if self._plan is not None and attacked.positional is not None:
                self._encodings = attacked.positional[self._plan.start]
        self._uses += 1
        return self._value(attacked.features)

    def _willing(self) -> bool:
        return can_reduce(self._objective) and self._strikes < STRIKES

    def _start(self, edit: Edit) -> None:
        """Plan for other edges than before."""
        self._strikes = self._strikes + 1 if self._uses < 2 else 0
        self._uses, self._encodings = 0, None
        self._reduced = None
        whole = self._objective.reads != "logits"
        self._plan = self._recompute.plan(edit, None if whole else self._clean.nodes, whole=whole)
        if self._plan is not None:
            with torch.no_grad():
                self._reduced = reduced_objective(self._objective, self._recompute, self._clean, self._plan)

    def _value(self, features: Features | None) -> tuple[Tensor, float] | None:
        if self._plan is None or self._reduced is None or features is None:
            return None
        logits = isinstance(self._reduced, ReducedMean)
        touched = self._recompute.forward(self._plan, features, self._encodings, logits=logits)
        return self._reduced(touched), self._plan.share

    def _comparable(self, attacked: Graph) -> bool:
        """Whether `attacked` is the clean graph but for edges, new nodes and some features."""
        graph = self._recompute.graph
        ours, theirs = graph.features, attacked.features
        if ours is None or theirs is None or ours.base is not theirs.base:
            return False
        if attacked.edge_weight is not None or attacked.num_nodes < graph.num_nodes:
            return False
        old, new = graph.positional, attacked.positional
        if old is new:
            return True
        return old is not None and new is not None and torch.equal(new[: graph.num_nodes], old)

    def _known(self, attacked: Graph) -> bool:
        """Whether the last plan is for these edges and these changed rows."""
        last = self._graph
        if last is None or last.features is None or attacked.features is None:
            return False
        rows, before = attacked.features.rows, last.features.rows
        if rows is not before and (rows is None or before is None or not torch.equal(rows, before)):
            return False
        if attacked.adjacency is last.adjacency:
            return True
        sizes = (attacked.num_nodes, attacked.num_edges) == (last.num_nodes, last.num_edges)
        return sizes and torch.equal(attacked.keys, last.keys)
