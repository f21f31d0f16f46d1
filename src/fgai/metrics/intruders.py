"""What injected nodes take of the attention of the nodes they are joined to.

Overlap counts original neighbours only: it stays at 1 when a new neighbour takes the first place and all the
attention. These metrics count the new ones, on the attacked graph, at the original nodes that have any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks, topk
from fgai.metrics.given import check_attention, check_edge_mask
from fgai.metrics.nodes import mean_over
from fgai.metrics.spec import metric
from fgai.ops.segments import row_sum
from fgai.typed import typed


@typed
def intruder_places_per_node(w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5) -> Tensor:
    """Share of the places in the top-k that new neighbours take, float64 [N]; NaN at nodes without any.

    Args:
        w: [E] attention on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
        k: how many neighbours are shown; a node with fewer shows them all.
    """
    _check(w, injected, rowptr)
    checks.whole(k, "k", 1)
    taken = row_sum(topk.topk_mask(w, rowptr, k) & injected, rowptr).double()
    return _where_joined(taken / rowptr.diff().clamp(min=1, max=max(1, min(k, len(w)))), injected, rowptr)


@typed
def intruder_mass_per_node(w: Tensor, injected: Tensor, rowptr: Tensor) -> Tensor:
    """Attention on new neighbours, float64 [N]; NaN at nodes without any.

    Args:
        w: [E] attention on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
    """
    _check(w, injected, rowptr)
    return _where_joined(row_sum(w.detach().double() * injected, rowptr), injected, rowptr)


@metric(
    direction="lower",
    low=0,
    high=1,
    parameters=("k",),
    title="intruded nodes",
    paths=("intruders.*.nodes", "endpoints.*.*.intruders.nodes"),
    headings={
        "intruders.prediction.nodes.all": "intruded",
        "intruders.explanation.nodes.all": "intruded, expl.",
    },
)
@typed
def intruder_nodes(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the nodes with a new neighbour that show one in their top-k.

        mean over joined i of 1(T_k(i) ∩ new ≠ ∅)

    Ties are broken by edge order, as everywhere. A node with at most k neighbours, the new ones included,
    shows them all and counts.

    Args:
        w: [E], what neighbours are ranked by, on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
        k: how many neighbours are shown.
        nodes: bool [N] or indices; only these count, as the original nodes.

    Returns:
        In [0, 1]; NaN if no node has a new neighbour.

    Example:
        >>> w, new = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.9]), torch.tensor([False, False, True, True, False])
        >>> intruder_nodes(w, new, torch.tensor([0, 3, 5]), k=2)
        0.5
    """
    places = intruder_places_per_node(w, injected, rowptr, k)
    return mean_over(torch.where(places.isnan(), places, (places > 0).double()), nodes)


@metric(
    direction="lower",
    low=0,
    high=1,
    parameters=("k",),
    title="intruders' places",
    paths=("intruders.*.places", "endpoints.*.*.intruders.places"),
)
@typed
def intruder_places(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the places in the top-k that new neighbours take, mean over the nodes that have any.

        mean over joined i of |T_k(i) ∩ new| / min(k, degree_i)

    Args:
        w: [E], what neighbours are ranked by, on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
        k: how many neighbours are shown; a node with fewer has as many places as neighbours.
        nodes: bool [N] or indices; only these count, as the original nodes.

    Returns:
        In [0, 1]; NaN if no node has a new neighbour.

    Example:
        >>> w, new = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.9]), torch.tensor([False, False, True, True, False])
        >>> intruder_places(w, new, torch.tensor([0, 3, 5]), k=2)
        0.25
    """
    return mean_over(intruder_places_per_node(w, injected, rowptr, k), nodes)


@metric(
    direction="lower",
    low=0,
    high=1,
    title="intruders' mass",
    paths=("intruders.*.mass", "endpoints.*.*.intruders.mass"),
    headings={
        "intruders.prediction.mass.all": "their mass",
        "intruders.explanation.mass.all": "their mass, expl.",
    },
)
@typed
def intruder_mass(w: Tensor, injected: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Attention that new neighbours take, mean over the nodes that have any.

        mean over joined i of Σ_{j new} w_ij

    Args:
        w: [E], heads averaged, on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
        nodes: bool [N] or indices; only these count, as the original nodes.

    Returns:
        In [0, 1] for attention; NaN if no node has a new neighbour.

    Example:
        >>> w, new = torch.tensor([0.5, 0.25, 0.25, 1.0]), torch.tensor([False, True, True, False])
        >>> intruder_mass(w, new, torch.tensor([0, 3, 4]))
        0.5
    """
    return mean_over(intruder_mass_per_node(w, injected, rowptr), nodes)


def _where_joined(values: Tensor, injected: Tensor, rowptr: Tensor) -> Tensor:
    return torch.where(row_sum(injected, rowptr) > 0, values, float("nan"))


def _check(w: Tensor, injected: Tensor, rowptr: Tensor) -> None:
    check_attention(w, rowptr)
    check_edge_mask(injected, w, "injected")
