"""An attacker's objective from the rows a perturbation touches; the rest of it is a constant."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.attacks.edit import Edit
from fgai.attacks.local import Plan, Recompute
from fgai.attacks.objectives import Clean, Objective, margin, prediction
from fgai.attention import AttentionMap
from fgai.graph import Graph

STRIKES = 3
"""Plans dropped after a single use, after which an attack is judged by full passes only."""

NODE_MEANS: tuple[Objective, ...] = (prediction, margin)
"""Objectives that are means over the attacked nodes and read nothing but their logits."""


class PartialObjective:
    """The objective on perturbed graphs, computed from the touched rows where that pays.

    Perturbed graphs of one attack mostly share their edges and differ in features; what depends on the edges
    is found once. The values equal those of a full pass up to the order of summation.

    Args:
        again: the attacked model on the clean graph.
        objective: what the attacker maximises.
        clean: what the model said before.
    """

    def __init__(self, again: Recompute, objective: Objective, clean: Clean) -> None:
        self._again, self._objective, self._clean = again, objective, clean
        self._graph: Graph | None = None
        self._plan: Plan | None = None
        self._constant: Tensor = clean.logits.new_zeros(())
        self._uses, self._strikes = STRIKES, 0

    def __call__(self, attacked: Graph) -> tuple[Tensor, float] | None:
        """Return the objective and the share of a full pass it took, or None where a full pass is needed."""
        if self._objective not in NODE_MEANS or self._strikes >= STRIKES or not self._comparable(attacked):
            return None
        if not self._known(attacked):
            self._strikes = self._strikes + 1 if self._uses < 2 else 0
            self._uses = 0
            self._prepare(attacked)
        self._uses += 1
        plan = self._plan
        if plan is None or attacked.features is None:
            return None
        positional = None if attacked.positional is None else attacked.positional[plan.start]
        touched = self._again.forward(plan, attacked.features, positional)
        total = self._constant + self._sum(touched.logits, touched.nodes)
        return total / self._clean.nodes.numel(), plan.share

    def _sum(self, logits: Tensor, nodes: Tensor) -> Tensor:
        """Return the sum of the objective over some attacked nodes [T] with these logits [T, C]."""
        if not nodes.numel():
            return logits.sum()
        few = Clean(
            self._clean.logits[nodes], AttentionMap(()), torch.arange(len(nodes), device=nodes.device)
        )
        return len(nodes) * self._objective(logits, few.attention, few)

    def _comparable(self, attacked: Graph) -> bool:
        """Whether `attacked` is the clean graph but for edges, new nodes and some features."""
        ours, theirs = self._again.graph.features, attacked.features
        return (
            ours is not None
            and theirs is not None
            and ours.base is theirs.base
            and attacked.edge_weight is None
            and attacked.num_nodes >= self._again.graph.num_nodes
        )

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

    def _prepare(self, attacked: Graph) -> None:
        clean, graph = self._clean, self._again.graph
        self._graph, self._plan = attacked, None
        if graph.positional is not None:
            moved = attacked.positional
            if moved is None or not torch.equal(moved[: graph.num_nodes], graph.positional):
                return
        self._plan = self._again.plan(Edit.between(graph, attacked), clean.nodes)
        if self._plan is None:
            return
        rest = torch.zeros(attacked.num_nodes, dtype=torch.bool, device=graph.device)
        rest[clean.nodes] = True
        rest[self._plan.nodes] = False
        rows = rest.nonzero().flatten()
        self._constant = self._sum(clean.logits[rows], rows).detach()
