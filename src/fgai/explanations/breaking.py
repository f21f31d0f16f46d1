"""How many injected neighbours a node's class stands: proved, and broken by an attack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fgai.attacks import Budget
from fgai.attacks.injection import PGDInjection
from fgai.attention import AttentionMap, call_model, evaluating
from fgai.certificates import certify_budget
from fgai.evaluation.breaking import _smallest_below
from fgai.graph import Graph
from fgai.objectives import Clean, Objective

MOST = 16
"""Injected neighbours tried at most."""
STEPS, RESTARTS = 20, 2


def _node_breaking_point(model: nn.Module, graph: Graph, node: int, seed: int) -> dict[str, int | None]:
    """Return how many injected neighbours provably leave a node's class, and how many were seen to change it.

    The proof (`harmless`) holds for so many injected edges anywhere, so for as many neighbours too; None
    where nothing is known. The attack (`sufficient`) joins new nodes to this node alone and climbs their
    features; None if up to `limit` of them changed nothing.
    """
    mask = torch.zeros(graph.num_nodes, dtype=torch.bool)
    mask[node] = True
    harmless = int(certify_budget(model, graph, budgets=[(MOST, 1)], nodes=mask).holds[node])
    one = graph.replace(test_mask=mask.to(graph.device), train_mask=None, val_mask=None)
    with evaluating(model), torch.no_grad():
        own = int(call_model(model, graph)[node].argmax())

    def lead(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        row = logits[node]
        itself = torch.arange(len(row), device=row.device) == own
        return row.masked_fill(itself, -torch.inf).amax() - row[own]

    def left(count: int) -> float:
        if count <= harmless:
            return 1.0
        budget = Budget(nodes=count, edges=1, steps=STEPS, step_size=0.1, restarts=RESTARTS)
        found = PGDInjection(budget, Objective("lead of one node", lead, reads="logits"))
        with evaluating(model), torch.no_grad():
            attacked = call_model(model, found.run(model, one, seed=seed).graph)[node]
        return float(int(attacked.argmax()) == own)

    sufficient = _smallest_below(left, 0.5, MOST)[0]
    return {"harmless": None if harmless < 0 else harmless, "sufficient": sufficient, "limit": MOST}
