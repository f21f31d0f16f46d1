"""DICE: disconnect internally, connect externally; edges by label, without gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.existing import draw_edges
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange


class DICE(Attack):
    """Random edges between target nodes of one class go, edges between classes come, half of each.

    The labels are those an attacker at test time can have: the true ones of training nodes, the clean model's
    predictions everywhere else. No test label is read. Where fewer edges join equals than half the budget,
    the rest is spent on new edges; where all nodes look alike, no edge is added.

    There is no search and no gradient, so the objective only measures. Self-loops stay.

    Reference: Waniek, Michalak, Wooldridge, Rahwan, Hiding individuals and communities in a social network,
    2018. Theirs flips a coin for every edge; we split the budget evenly.
    """

    name = "dice"
    chooses = True
    removes = True

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield one random set of edges."""
        labels = known_labels(graph, judge.clean.logits)
        inside = same_label_pairs(graph, nodes, labels)
        count = min(self.budget.edges // 2, inside.shape[1])
        order = torch.randperm(inside.shape[1], generator=generator)[:count]
        rest = self.budget.edges - count if torch.unique(labels[nodes]).numel() > 1 else 0
        added = draw_edges(graph, nodes, rest, generator, labels=labels)
        yield GraphChange(edges=added, removed=inside[:, order.to(inside.device)])


def known_labels(graph: Graph, logits: Tensor) -> Tensor:
    """Labels [N] an evasion attacker has: true ones of training nodes, predictions elsewhere.

    Args:
        graph: with `y` and `train_mask`, if known.
        logits: [N, C] of the clean model.

    Raises:
        InputError: the logits are not those of nodes.
    """
    if logits.dim() != 2 or logits.shape[0] != graph.num_nodes or graph.batch is not None:
        raise InputError(f"the attack needs a class for every node; {graph.name!r} asks for something else")
    labels = logits.argmax(1)
    if graph.y is None or graph.train_mask is None:
        return labels
    return torch.where(graph.train_mask & (graph.y >= 0), graph.y, labels)


def same_label_pairs(graph: Graph, nodes: Tensor, labels: Tensor) -> Tensor:
    """Undirected edges [2, K] (low, high), both ends in `nodes` and of one label; no self-loops."""
    source, destination = graph.adjacency.source, graph.adjacency.destination
    member = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.device)
    member[nodes] = True
    same = member[source] & member[destination] & (labels[source] == labels[destination])
    pairs = torch.stack([torch.minimum(source, destination), torch.maximum(source, destination)])
    found: Tensor = torch.unique(pairs[:, same & (source != destination)], dim=1)
    return found
