"""Attention followed along paths: what an edge says to a node through all layers, after GAtt."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap
from fgai.attention.layer import REDUCTIONS
from fgai.checks import one_of
from fgai.explanations.pyg import AttentionAlgorithm, destined_keys, looked_up
from fgai.typed import typed


@typed
class PropagatedAttention(AttentionAlgorithm):
    """Explains a node by attention multiplied along the paths that lead to it, one number per edge.

    An edge is met once for every path from it to the node through the layers above; each meeting counts the
    edge's attention in its layer times the attention of the rest of the path, self-loops among them:

        mask[j → i] = Σ_l  w_l[j → i] · r_l[i],     r_L = 1 at the node,  r_{l−1}[j] = Σ_i w_l[j → i] · r_l[i]

    with `w_l` the heads reduced in layer l and `r_l[i]` how much of node i's state after layer l the node
    hears. All edges of all layers together sum to the number of layers. Edges outside the receptive field
    are 0. For several nodes, masks add up.

    Args:
        heads: `mean`, `log` for their geometric mean, `max`, or one head by number.

    Raises:
        InputError: unknown words; on use: heterogeneous graphs, node masks, phenomenon explanations.
        AttentionError: on use, the model has no attention that can be recorded.

    Example:
        >>> from torch_geometric.explain import Explainer
        >>> from torch_geometric.nn import GATConv
        >>> config = dict(mode="multiclass_classification", task_level="node", return_type="raw")
        >>> explainer = Explainer(
        ...     GATConv(3, 2), PropagatedAttention(), explanation_type="model", edge_mask_type="object",
        ...     model_config=config,
        ... )
        >>> explanation = explainer(torch.ones(4, 3), torch.tensor([[0, 1, 3], [2, 2, 3]]), index=2)
        >>> [round(value, 3) for value in explanation.edge_mask.tolist()]
        [0.333, 0.333, 0.0]

    Reference: Shin, Li, Cao, Shin, Faithful and Accurate Self-Attention Attribution for Message Passing
    Neural Networks via the Computation Tree Viewpoint, AAAI 2025. There, too, an edge's attention is weighed
    by the path above it; heads are averaged as by default here.
    """

    def __init__(self, heads: str | int = "mean") -> None:
        super().__init__()
        if isinstance(heads, str):
            one_of(heads, "heads", REDUCTIONS)
        self.heads = heads

    def mask(
        self,
        model: nn.Module,
        attention: AttentionMap,
        x: Tensor,
        edge_index: Tensor,
        index: int | Tensor | None,
    ) -> Tensor:
        """[E]: attention along the paths to the nodes `index`, or to all."""
        ends = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        ends[slice(None) if index is None else index] = 1.0
        return along_paths(attention, ends, destined_keys(edge_index, self._flow(model)), self.heads)


def along_paths(attention: AttentionMap, ends: Tensor, keys: Tensor, heads: str | int = "mean") -> Tensor:
    """Attention along the paths to `ends`, on the edges with the given keys; see `PropagatedAttention`.

    Args:
        attention: of all layers, loops among their edges.
        ends: [N], how much each node's output counts: 1 at the one to explain.
        keys: [E] of the wanted edges, each once.
        heads: how to reduce them.

    Returns:
        [E], 0 for edges no layer has.
    """
    total = ends.new_zeros(keys.numel())
    for layer in reversed(attention.layers):
        carried = layer.heads(heads) * ends[layer.destination]
        total = total + looked_up(layer.with_values(carried[:, None]), keys, "mean")
        ends = torch.zeros_like(ends).index_add(0, layer.source, carried)
    return total
