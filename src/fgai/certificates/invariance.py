"""Layers whose ranking of old neighbours no injection can change.

Neighbours are ranked by the mean over the heads of `log w = score − log Z` (`LayerAttention.ranking`). The
normaliser Z is the same for all neighbours of a node, so their order is the order of their mean scores. Where
both sides of the score read inputs that an injection leaves alone, it leaves the order alone: any number of
new nodes, any features, any wiring.

That holds for the first attention layer of GAT, GATv2 and GT as long as nothing between nodes comes before
it: features, and encodings of old nodes, which stay when nodes are injected. It says nothing about where new
neighbours rank themselves (`fgai.metrics.intruder_nodes` does), nor about later layers, whose inputs change.
"""

from __future__ import annotations

from torch import nn

from fgai.attention import find_layers
from fgai.certificates.familiar import unfamiliar
from fgai.errors import AttentionError
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.typed import typed

INVARIANT = (
    "scores of old edges read nothing but features, which stay; new neighbours only change the normaliser"
)
_ENCODED = "features and encodings of old nodes stay; new neighbours only change the normaliser"


@typed
def invariant_layers(model: nn.Module, graph: Graph) -> dict[str, str | None]:
    """Say of every attention layer why no injection can reorder old neighbours there; None where it may.

    Args:
        model: any.
        graph: prepared for it.

    Returns:
        By the layer's name, in the order of the modules.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.GAT.for_data(data)
        >>> [why is not None for why in invariant_layers(model, model.prepare(data)).values()]
        [True, False]
    """
    try:
        names = list(find_layers(model))
    except AttentionError:
        return {}
    found: dict[str, str | None] = dict.fromkeys(names)
    plain = type(model) in (GAT, GATv2, GT) and unfamiliar(model) is None
    if names and plain and getattr(model, "guard", None) is None and graph.edge_weight is None:
        found[names[0]] = INVARIANT if graph.positional is None else _ENCODED
    return found
