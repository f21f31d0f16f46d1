"""What the page tells of certificates against injection: shares of nodes, and every node it carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fgai.certificates import Injection, InjectionCertificate, certify
from fgai.graph import Graph

NEIGHBOURS = 1
"""Injected neighbours that the page's certificates are about."""

Injections = Mapping[str, Sequence[InjectionCertificate]]
"""By model: against new neighbours of the node alone, and of every node."""


def certify_injections(models: Mapping[str, nn.Module], graph: Graph, k: int) -> Injections:
    """Certify models against new neighbours of one node, and of all where that can be bounded at all."""
    out = {}
    for name, model in models.items():
        found = [certify(model, graph, threat=Injection(NEIGHBOURS, "direct"), k2=k)]
        if found[0].known:
            found.append(certify(model, graph, threat=Injection(NEIGHBOURS, "any"), k2=k))
        out[name] = found
    return out


def summary(certificates: Sequence[InjectionCertificate], scored: Tensor | None) -> list[dict[str, Any]]:
    """Shares of the scored nodes, threat by threat, without what is known of single nodes.

    Args:
        certificates: of one model.
        scored: bool [N], the nodes that count; all by default.
    """
    return [
        {
            "neighbours": one.neighbours,
            "where": one.where,
            "k": one.k,
            "known": one.known,
            "reason": one.reason,
            "share": one.share(scored),
            "layers": [
                {"name": layer.name, "status": layer.status, "share": one.order_share(place, scored)}
                for place, layer in enumerate(one.layers)
            ],
            "promise": one.promise,
        }
        for one in certificates
    ]


def of_nodes(certificates: Sequence[InjectionCertificate], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """What holds at each node, threat by threat: 1 and 0, or None where nothing is known.

    Args:
        certificates: of one model.
        nodes: which.
    """
    index = torch.from_numpy(np.asarray(nodes, dtype=np.int64))

    def flags(holds: Tensor | None) -> list[int] | None:
        return None if holds is None else holds[index].int().tolist()

    return [
        {
            "neighbours": one.neighbours,
            "where": one.where,
            "k": one.k,
            "class": flags(one.holds) if one.known else None,
            "layers": [
                {"status": layer.status, "reason": layer.reason, "holds": flags(layer.holds)}
                for layer in one.layers
            ],
        }
        for one in certificates
    ]
