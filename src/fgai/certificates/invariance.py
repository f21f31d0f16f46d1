"""Layers whose ranking of old neighbours no injection can change.

Neighbours are ranked by the mean over the heads of `log w = score − log Z` (`LayerAttention.ranking`). The
normaliser Z is the same for all neighbours of a node, so their order is the order of their mean scores. Where
both sides of the score read inputs that an injection leaves alone, it leaves the order alone: any number of
new nodes, any features, any wiring.

That holds for the first attention layer of GAT and GATv2, which reads features alone. GT also reads
positional encodings: there it holds if those of the old nodes are kept as computed on the original graph, as
`Graph.inject` does. Encodings computed anew on the larger graph can reorder every node. It says nothing
about where new neighbours rank themselves (`fgai.metrics.intruder_nodes` does), nor about later layers, whose
inputs change.
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
    "scores of old edges read nothing that an injection changes; new neighbours only change the normaliser"
)
KEPT = "if positional encodings are kept as computed on the original graph"
"""What has to hold in models that read such encodings."""


@typed
def invariant_layers(model: nn.Module, graph: Graph) -> dict[str, str | None]:
    """Say of every attention layer why no injection can reorder old neighbours there; None where it may.

    In models that read positional encodings that has a condition, `KEPT`, which is then the reason.

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
        found[names[0]] = INVARIANT if graph.positional is None else KEPT
    return found
