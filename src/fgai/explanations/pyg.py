"""Attention as an explainer inside PyG: `FaithfulAttention`, and along paths `PropagatedAttention`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.explain import ExplainerAlgorithm, Explanation
from torch_geometric.explain.config import ExplainerConfig, ExplanationType, ModelTaskLevel
from torch_geometric.utils import k_hop_subgraph

from fgai.attention import AttentionMap, LayerAttention, evaluating, record
from fgai.attention.layer import REDUCTIONS
from fgai.checks import one_of
from fgai.errors import AttentionError, InputError
from fgai.sparse import edge_keys
from fgai.typed import typed

_REDUCERS = ("mean", "max", "last")


class _AttentionAlgorithm(ExplainerAlgorithm):  # type: ignore[misc]
    """Base of explainers by attention: one recorded pass. A subclass defines `mask`."""

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
        """Return the explanation of one forward pass; `target` has no say in attention.

        Args:
            model: to explain.
            x: [N, F].
            edge_index: [2, E].
            target: unused.
            index: the outputs to explain; all by default.
            **kwargs: further arguments of the model, e.g. `batch`.
        """
        attention = _recorded(model, x, edge_index, **kwargs)
        return Explanation(edge_mask=self.mask(model, attention, x, edge_index, index))

    @abstractmethod
    def mask(
        self,
        model: nn.Module,
        attention: AttentionMap,
        x: Tensor,
        edge_index: Tensor,
        index: int | Tensor | None,
    ) -> Tensor:
        """[E]: what the attention of the pass says of every edge; arguments as of `forward`."""

    def supports(self) -> bool:
        """Return True, or raise `InputError` for explanations that attention cannot give."""
        config: ExplainerConfig = self.explainer_config
        if config.explanation_type != ExplanationType.model:
            raise InputError(
                "attention explains what the model did, whatever the truth is: use explanation_type='model'"
            )
        if config.node_mask_type is not None:
            raise InputError(
                "attention stands on edges: use edge_mask_type='object' and leave node_mask_type out"
            )
        return True


@typed
class FaithfulAttention(_AttentionAlgorithm):
    """Explains a prediction by the model's attention, one number per edge of the user's own `edge_index`.

    Attention is taken before dropout, its heads are reduced by their geometric mean, matched to the given
    edges by (source, destination) and then reduced over layers, so that self-loops a layer adds or re-orders
    cannot shift it:

        mask[e] = reduce_l  reduce_h  w_l[source(e), destination(e), h]

    An edge a layer did not use counts 0 there. Parallel edges keep their own values. For node tasks with an
    `index`, edges outside the receptive field are 0. How far the numbers can be trusted is the model's
    affair: `fgai.make_faithful` trains one whose attention stays put.

    Args:
        layer: `mean`, `max` or `last` over layers, or one layer by number.
        heads: `log` for their geometric mean, made to sum to one at every node, `mean`, `max`, or one head by
            number.

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
        if isinstance(layer, str):
            one_of(layer, "layer", _REDUCERS)
        if isinstance(heads, str):
            one_of(heads, "heads", REDUCTIONS)
        self.layer, self.heads = layer, heads

    def mask(
        self,
        model: nn.Module,
        attention: AttentionMap,
        x: Tensor,
        edge_index: Tensor,
        index: int | Tensor | None,
    ) -> Tensor:
        """[E]: heads and layers reduced, 0 outside the receptive field of `index`."""
        flow = self._flow(model)
        mask = _on_edges(attention, _message_keys(edge_index, flow), self.layer, self.heads)
        if index is not None and self.model_config.task_level == ModelTaskLevel.node:
            hops = max(self._num_hops(model), len(attention))
            *_, reached = k_hop_subgraph(index, hops, edge_index, num_nodes=x.shape[0], flow=flow)
            mask = mask * reached
        return mask


def _recorded(model: nn.Module, x: Tensor, edge_index: Tensor, **kwargs: Any) -> AttentionMap:
    """The attention of one forward pass in evaluation mode."""
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor) or edge_index.dim() != 2:
        raise InputError("`x` and `edge_index` must be tensors: heterogeneous graphs are not supported")
    with evaluating(model), torch.no_grad(), record(model) as tape:
        model(x, edge_index, **kwargs)
    return tape.attention.detach()


def _message_keys(edge_index: Tensor, flow: str) -> Tensor:
    """[E], the keys of edges in the direction messages take."""
    source, destination = edge_index if flow == "source_to_target" else edge_index.flip(0)
    return edge_keys(source.long(), destination.long())


def _on_edges(
    attention: AttentionMap, keys: Tensor, layer: str | int = "mean", heads: str | int = "log"
) -> Tensor:
    """[E]: heads and layers reduced, in the order of `keys`; see `FaithfulAttention`."""
    if isinstance(layer, int):
        return _looked_up(attention.layer(layer), keys, heads)
    chosen = [attention.last] if layer == "last" else list(attention)
    stacked = torch.stack([_looked_up(one, keys, heads) for one in chosen])
    return stacked.amax(0) if layer == "max" else stacked.mean(0)


def _looked_up(layer: LayerAttention, keys: Tensor, heads: str | int = "log") -> Tensor:
    """Attention of edges in any order, 0 for those the layer does not have; parallel edges one by one.

    Args:
        layer: the attention.
        keys: [E] of the wanted edges. The n-th occurrence of a key gets the layer's n-th entry, or its last.
        heads: how to reduce them.

    Returns:
        [E].

    Raises:
        AttentionError: the layer stands on another device.
    """
    if layer.keys.device != keys.device:
        raise AttentionError(f"attention is on {layer.keys.device}, the edges on {keys.device}")
    values = layer.heads(heads)
    if values.numel() == 0:
        return values.new_zeros(keys.numel())
    first, known = _positions(layer.keys, keys)
    last = torch.searchsorted(layer.keys, keys, right=True) - 1
    ordered, order = keys.sort(stable=True)
    occurrence = torch.empty_like(keys)
    steps = torch.arange(keys.numel(), device=keys.device)
    occurrence[order] = steps - torch.searchsorted(ordered, ordered)
    spot = torch.minimum(first + occurrence, last.clamp(min=0))
    return torch.where(known, values[spot], 0.0)


def _positions(ordered: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """First position of each wanted key in a sorted vector, and whether it is there."""
    if ordered.numel() == 0:
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    spot = torch.searchsorted(ordered, wanted).clamp(max=ordered.numel() - 1)
    return spot, ordered[spot] == wanted


@typed
class PropagatedAttention(_AttentionAlgorithm):
    """Explains a node by attention multiplied along the paths that lead to it, one number per edge.

    An edge is met once for every path from it to the node through the layers above; each meeting counts the
    edge's attention in its layer times the attention of the rest of the path, self-loops among them:

        mask[j → i] = Σ_l  w_l[j → i] · r_l[i],     r_L = 1 at the node,  r_{l−1}[j] = Σ_i w_l[j → i] · r_l[i]

    with `w_l` the heads reduced in layer l and `r_l[i]` the share of node i's state after layer l in the
    node's output. All edges of all layers together sum to the number of layers. Edges outside the receptive
    field are 0. For several nodes, masks add up.

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
        return _along_paths(attention, ends, _message_keys(edge_index, self._flow(model)), self.heads)


def _along_paths(attention: AttentionMap, ends: Tensor, keys: Tensor, heads: str | int = "mean") -> Tensor:
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
        total = total + _looked_up(layer.with_values(carried[:, None]), keys, "mean")
        ends = torch.zeros_like(ends).index_add(0, layer.source, carried)
    return total
