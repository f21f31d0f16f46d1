"""PyG explainers that return attention: `FaithfulAttention`, and along paths `PropagatedAttention`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.explain import ExplainerAlgorithm, Explanation
from torch_geometric.explain.config import ExplanationType, ModelTaskLevel
from torch_geometric.utils import k_hop_subgraph

from fgai.attention import AttentionMap, LayerAttention, evaluating, record
from fgai.attention.layer import REDUCTIONS
from fgai.checks import one_of
from fgai.errors import AttentionError, InputError
from fgai.sparse import edge_keys
from fgai.typed import typed


class _AttentionAlgorithm(ExplainerAlgorithm):  # type: ignore[misc]
    """Base of explainers that record attention in one pass. A subclass defines `_mask`."""

    def forward(
        self,
        model: nn.Module,
        x: Tensor,
        edge_index: Tensor,
        *,
        target: Tensor,
        index: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Explanation:
        if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor) or edge_index.dim() != 2:
            raise InputError("`x` and `edge_index` must be tensors: heterogeneous graphs are not supported")
        with evaluating(model), torch.no_grad(), record(model) as tape:
            model(x, edge_index, **kwargs)
        flow = self._flow(model)
        source, destination = edge_index if flow == "source_to_target" else edge_index.flip(0)
        mask = self._mask(tape.attention.detach(), edge_keys(source.long(), destination.long()), x, index)
        if index is not None and self.model_config.task_level == ModelTaskLevel.node:
            hops = max(self._num_hops(model), len(tape.attention))
            *_, reached = k_hop_subgraph(index, hops, edge_index, num_nodes=x.shape[0], flow=flow)
            mask = mask * reached
        return Explanation(edge_mask=mask)

    @abstractmethod
    def _mask(self, attention: AttentionMap, keys: Tensor, x: Tensor, index: int | Tensor | None) -> Tensor:
        """[E]: a value for every edge, in the order of `keys`."""

    def supports(self) -> bool:
        """Return True, or raise `InputError` for explanations that attention cannot give."""
        if self.explainer_config.explanation_type != ExplanationType.model:
            raise InputError("attention explains the model, not the phenomenon; use explanation_type='model'")
        if self.explainer_config.node_mask_type is not None:
            raise InputError("attention explains edges, not nodes; use edge_mask_type='object' alone")
        return True


@typed
class FaithfulAttention(_AttentionAlgorithm):
    """PyG explainer that returns the attention of any model, as it is, as edge mask; it trains nothing.

        mask[e] = reduce_l  reduce_h  w_l[source(e), destination(e), h]

    Attention is taken before dropout and matched to the edges of `edge_index` by (source, destination), so
    that self-loops a layer adds or re-orders cannot shift it. An edge a layer did not use counts 0 there;
    parallel edges keep their own values. For node tasks with an `index`, edges outside the receptive field
    are 0. `layer` is `mean`, `max` or `last`, or one layer by number; `heads` is `log` (the geometric mean,
    normalised at every node), `mean`, `max` or a head's number.

    Raises:
        InputError: unknown words; on use: heterogeneous graphs, node masks, phenomenon explanations.
        AttentionError: on use, the model has no attention that can be recorded.

    Example:
        >>> import torch
        >>> from torch_geometric.explain import Explainer
        >>> from torch_geometric.nn import GATConv
        >>> config = dict(mode="multiclass_classification", task_level="node", return_type="raw")
        >>> explainer = Explainer(
        ...     GATConv(3, 2), FaithfulAttention(), explanation_type="model", edge_mask_type="object",
        ...     model_config=config,
        ... )
        >>> explanation = explainer(torch.ones(4, 3), torch.tensor([[0, 1, 3], [2, 2, 3]]), index=2)
        >>> [round(value, 3) for value in explanation.edge_mask.tolist()], explanation.validate()
        ([0.333, 0.333, 0.0], True)
    """

    def __init__(self, layer: str | int = "mean", heads: str | int = "log") -> None:
        super().__init__()
        self.heads = one_of(heads, "heads", REDUCTIONS) if isinstance(heads, str) else heads
        self.layer = one_of(layer, "layer", ("mean", "max", "last")) if isinstance(layer, str) else layer

    def _mask(self, attention: AttentionMap, keys: Tensor, x: Tensor, index: int | Tensor | None) -> Tensor:
        return _on_edges(attention, keys, self.layer, self.heads)


def _on_edges(
    attention: AttentionMap, keys: Tensor, layer: str | int = "mean", heads: str | int = "log"
) -> Tensor:
    """[E]: heads and layers reduced, in the order of `keys`; see `FaithfulAttention`."""
    if layer not in ("mean", "max"):
        return _at_edges(attention.last if layer == "last" else attention[int(layer)], keys, heads)
    stacked = torch.stack([_at_edges(one, keys, heads) for one in attention])
    return stacked.amax(0) if layer == "max" else stacked.mean(0)


def _at_edges(layer: LayerAttention, keys: Tensor, heads: str | int = "log") -> Tensor:
    """[E]: attention of edges in any order, 0 for others; the n-th of parallel edges gets the n-th entry."""
    if layer.keys.device != keys.device:
        raise AttentionError(f"attention is on {layer.keys.device}, the edges on {keys.device}")
    values = layer.heads(heads)
    if values.numel() == 0:
        return values.new_zeros(keys.numel())
    first, present = _positions(layer.keys, keys)
    last = torch.searchsorted(layer.keys, keys, right=True) - 1
    ordered, order = keys.sort(stable=True)
    occurrence = torch.empty_like(keys)
    steps = torch.arange(keys.numel(), device=keys.device)
    occurrence[order] = steps - torch.searchsorted(ordered, ordered)
    return torch.where(present, values[torch.minimum(first + occurrence, last.clamp(min=0))], 0.0)


def _positions(ordered: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """First position of each key in a sorted vector, and whether it is there."""
    if ordered.numel() == 0:
        return torch.zeros_like(keys), torch.zeros_like(keys, dtype=torch.bool)
    index = torch.searchsorted(ordered, keys).clamp(max=ordered.numel() - 1)
    return index, ordered[index] == keys


class PropagatedAttention(_AttentionAlgorithm):
    """PyG explainer that returns attention multiplied along the paths that lead to a node, as edge mask.

        mask[j → i] = Σ_l  w_l[j → i] · r_l[i],     r_L = 1 at the node,  r_{l−1}[j] = Σ_i w_l[j → i] · r_l[i]

    with `w_l` the mean over heads in layer l and `r_l[i]` the share of node i's state after layer l in the
    node's output. Edges outside the receptive field are 0. For several nodes, masks add up. It is used, and
    raises errors, as `FaithfulAttention`. Reference: Shin, Li, Cao, Shin, Faithful and Accurate
    Self-Attention Attribution for Message Passing Neural Networks via the Computation Tree Viewpoint, AAAI
    2025.
    """

    def _mask(self, attention: AttentionMap, keys: Tensor, x: Tensor, index: int | Tensor | None) -> Tensor:
        ends = torch.zeros(x.shape[0], dtype=x.dtype, device=x.device)
        ends[slice(None) if index is None else index] = 1.0
        return _along_paths(attention, ends, keys)


def _along_paths(attention: AttentionMap, ends: Tensor, keys: Tensor) -> Tensor:
    """[E]: attention along the paths to `ends` [N] on edges with unique keys; see `PropagatedAttention`."""
    total = ends.new_zeros(keys.numel())
    for layer in reversed(attention.layers):
        carried = layer.heads("mean") * ends[layer.destination]
        total = total + _at_edges(layer.with_values(carried[:, None]), keys, "mean")
        ends = torch.zeros_like(ends).index_add(0, layer.source, carried)
    return total
