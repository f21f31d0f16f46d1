"""What injected nodes take of the attention of the nodes they are joined to.

Overlap counts original neighbours only: it stays at 1 when a new neighbour takes the first place and all the
attention. These metrics count the new ones, on the attacked graph, at the original nodes that have any.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fgai import checks, topk
from fgai.metrics.common import _check_attention, _check_edge_mask, mean_over
from fgai.metrics.spec import _under_attacks, metric
from fgai.metrics.views import View, Views
from fgai.ops.segments import row_sum
from fgai.typed import typed


def _intruders(views: Views) -> dict[str, Any]:
    """The three numbers of new neighbours under each attack, and by rule of endpoints."""
    originals = views.attention["clean"].layers[0].num_nodes

    def numbers(view: View) -> dict[str, Any]:
        rows = []
        for layer in view.output.attention:
            w, ranks, new = layer.values[:, 0], layer.ranking(), layer.source >= originals
            old = torch.arange(layer.num_nodes, device=w.device) < originals
            nodes = intruder_nodes(ranks, new, layer.rowptr, views.k, nodes=old)
            places = intruder_places(ranks, new, layer.rowptr, views.k, nodes=old)
            rows.append((nodes, places, intruder_mass(w, new, layer.rowptr, nodes=old)))
        names = ("nodes", "places", "mass")
        return {name: views.by_layer(v) for name, v in zip(names, zip(*rows, strict=True), strict=True)}

    out = {"intruders": views.by_attack(numbers)}
    for rule, by_attack in views.by_rule.items():
        rules = out.setdefault("endpoints", {})
        rules[rule] = {name: {"intruders": numbers(view)} for name, view in by_attack.items()}
    return out


def _null_intruders(views: Views) -> dict[str, Any]:
    row = _intruders(views)["intruders"]["prediction"]
    if views.null == "random":
        del row["mass"]  # random scores are no distribution
    return {"intruders": row}


@metric(
    direction="lower",
    parameters=("k",),
    title="intruded nodes",
    paths=("intruders.*.nodes", "endpoints.*.*.intruders.nodes"),
    section="explanation",
    shown=_under_attacks(
        "intruders.{}.nodes.all",
        "intruded",
        "Nodes that show an intruder",
        "Of the nodes a new node was joined to, the share with a new one among their top k.",
    ),
    measure=_intruders,
    null=_null_intruders,
)
@typed
def intruder_nodes(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the nodes with a new neighbour that show one in their top-k.

        mean over joined i of 1(T_k(i) ∩ new ≠ ∅)

    Ties are broken by edge order, as everywhere. A node with at most k neighbours, the new ones included,
    shows them all and counts. NaN if no node has a new neighbour.

    Args:
        w: [E], what neighbours are ranked by, on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
        k: how many neighbours are shown.
        nodes: bool [N] or indices; only these count, as the original nodes.

    Example:
        >>> w, new = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.9]), torch.tensor([False, False, True, True, False])
        >>> intruder_nodes(w, new, torch.tensor([0, 3, 5]), k=2)
        0.5
    """
    shares = _shares(w, injected, rowptr, k)
    return mean_over(torch.where(shares.isnan(), shares, (shares > 0).double()), nodes)


@metric(
    direction="lower",
    parameters=("k",),
    title="intruders' places",
    paths=("intruders.*.places", "endpoints.*.*.intruders.places"),
    section="explanation",
    shown=(),
    measure=_intruders,
    null=_null_intruders,
)
@typed
def intruder_places(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the places in the top-k that new neighbours take, mean over the nodes that have any.

        mean over joined i of |T_k(i) ∩ new| / min(k, degree_i)

    Arguments as in `intruder_nodes`; a node with fewer than k neighbours has as many places.

    Example:
        >>> w, new = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.9]), torch.tensor([False, False, True, True, False])
        >>> intruder_places(w, new, torch.tensor([0, 3, 5]), k=2)
        0.25
    """
    return mean_over(_shares(w, injected, rowptr, k), nodes)


@metric(
    direction="lower",
    title="intruders' mass",
    paths=("intruders.*.mass", "endpoints.*.*.intruders.mass"),
    section="explanation",
    shown=_under_attacks(
        "intruders.{}.mass.all",
        "their mass",
        "Attention on intruders",
        "Attention that new nodes take at the nodes they were joined to.",
    ),
    measure=_intruders,
    null=_null_intruders,
)
@typed
def intruder_mass(w: Tensor, injected: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Attention that new neighbours take, mean over the nodes that have any.

        mean over joined i of Σ_{j new} w_ij

    Arguments as in `intruder_nodes`, `w` with heads averaged.

    Example:
        >>> w, new = torch.tensor([0.5, 0.25, 0.25, 1.0]), torch.tensor([False, True, True, False])
        >>> intruder_mass(w, new, torch.tensor([0, 3, 4]))
        0.5
    """
    _check_attention(w, rowptr)
    _check_edge_mask(injected, w, "injected")
    return mean_over(_where_joined(row_sum(w.detach().double() * injected, rowptr), injected, rowptr), nodes)


def _shares(w: Tensor, injected: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """Share of the places in the top-k that new neighbours take, float64 [N]; NaN at nodes without any."""
    _check_attention(w, rowptr)
    _check_edge_mask(injected, w, "injected")
    checks.whole(k, "k", 1)
    taken = row_sum(topk.topk_mask(w, rowptr, k) & injected, rowptr).double()
    return _where_joined(taken / rowptr.diff().clamp(min=1, max=max(1, min(k, len(w)))), injected, rowptr)


def _where_joined(values: Tensor, injected: Tensor, rowptr: Tensor) -> Tensor:
    return torch.where(row_sum(injected, rowptr) > 0, values, float("nan"))
