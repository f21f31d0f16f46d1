"""What injected nodes take of the attention of the nodes they are joined to.

Overlap counts original neighbours only: it stays at 1 when a new neighbour takes the first place and all the
attention. These metrics count the new ones, on the attacked graph, at the original nodes that have any.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fgai import checks, topk
from fgai.metrics.common import _check_attention, _check_edge_mask, mean_over
from fgai.metrics.spec import _under_attacks, metric
from fgai.metrics.views import View, Views
from fgai.ops.segments import row_sum


def _intruders(views: Views) -> dict[str, Any]:
    """The three numbers of new neighbours under each attack, and by rule of endpoints."""
    originals = views.attention["clean"].layers[0].num_nodes

    def numbers(view: View) -> dict[str, Any]:
        values: dict[str, list[float]] = {"nodes": [], "places": [], "mass": []}
        for layer in view.output.attention:
            new, old = layer.source >= originals, torch.arange(originals, device=layer.source.device)
            ranks = layer.ranking()
            values["nodes"].append(intruder_nodes(ranks, new, layer.rowptr, views.k, nodes=old))
            values["places"].append(intruder_places(ranks, new, layer.rowptr, views.k, nodes=old))
            values["mass"].append(intruder_mass(layer.values[:, 0], new, layer.rowptr, nodes=old))
        if views.null == "random":
            del values["mass"]  # random scores are no distribution
        return {name: views.by_layer(layers) for name, layers in values.items()}

    return {"intruders": views.by_attack(numbers), **views.by_endpoints("intruders", numbers)}


_metric = partial(metric, direction="lower", section="explanation", measure=_intruders, null=_intruders)


@_metric(
    title="intruded nodes",
    paths=("intruders.*.nodes", "endpoints.*.*.intruders.nodes"),
    shown=_under_attacks(
        "intruders.{}.nodes.all",
        "intruded",
        "Nodes that show an intruder",
        "Of the nodes a new node was joined to, the share with a new one among their top k.",
    ),
)
def intruder_nodes(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the nodes with a new neighbour that show one in their top-k.

        mean over joined i of 1(T_k(i) ∩ new ≠ ∅)

    Of a node with at most k neighbours, the new ones included, all are shown. NaN if no node has a new one.

    Args:
        w: [E], what neighbours are ranked by, on the attacked graph.
        injected: bool [E], the edges from new nodes.
        rowptr: [N+1].
        k: how many neighbours are shown; ties are broken by edge order.
        nodes: bool [N] or indices; only these count, as the original nodes.

    Example:
        >>> w, new = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.9]), torch.tensor([False, False, True, True, False])
        >>> intruder_nodes(w, new, torch.tensor([0, 3, 5]), k=2)
        0.5
    """
    shares = _shares(w, injected, rowptr, k)
    return mean_over(torch.where(shares.isnan(), shares, (shares > 0).double()), nodes)


@_metric(title="intruders' places", paths=("intruders.*.places", "endpoints.*.*.intruders.places"), shown=())
def intruder_places(
    w: Tensor, injected: Tensor, rowptr: Tensor, k: int = 5, *, nodes: Tensor | None = None
) -> float:
    """Share of the places in the top-k that new neighbours take, mean over the nodes that have any.

        mean over joined i of |T_k(i) ∩ new| / min(k, degree_i)

    Arguments as in `intruder_nodes`; a node with fewer than k neighbours has as many places.
    """
    return mean_over(_shares(w, injected, rowptr, k), nodes)


@_metric(
    title="intruders' mass",
    paths=("intruders.*.mass", "endpoints.*.*.intruders.mass"),
    shown=_under_attacks(
        "intruders.{}.mass.all",
        "their mass",
        "Attention on intruders",
        "Attention that new nodes take at the nodes they were joined to.",
    ),
)
def intruder_mass(w: Tensor, injected: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Attention that new neighbours take, mean over the nodes that have any.

        mean over joined i of Σ_{j new} w_ij

    Arguments as in `intruder_nodes`, `w` with heads averaged.
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
