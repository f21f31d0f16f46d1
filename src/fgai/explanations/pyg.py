"""Attention as an explainer inside PyG: `FaithfulAttention`, and fgai's models called the way PyG calls."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.explain import ExplainerAlgorithm, Explanation
from torch_geometric.explain.config import ExplainerConfig, ExplanationType, ModelTaskLevel
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import k_hop_subgraph

from fgai.attention import AttentionMap, LayerAttention, evaluating, record
from fgai.attention.layer import REDUCTIONS
from fgai.checks import one_of
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.models import AttentionModel
from fgai.sparse import edge_keys
from fgai.tasks import get_task
from fgai.typed import typed

REDUCERS = ("mean", "max", "last")


class AttentionAlgorithm(ExplainerAlgorithm):  # type: ignore[misc]
    """What explainers by attention share: one recorded pass, and what they can answer.

    A subclass writes `mask`.
    """

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
        attention = recorded(model, x, edge_index, **kwargs)
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
        """Whether attention can answer what is asked.

        Raises:
            InputError: it cannot; says why.
        """
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
class FaithfulAttention(AttentionAlgorithm):
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
            one_of(layer, "layer", REDUCERS)
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
        mask = on_edges(attention, destined_keys(edge_index, flow), self.layer, self.heads)
        if index is not None and self.model_config.task_level == ModelTaskLevel.node:
            hops = max(self._num_hops(model), len(attention))
            *_, reached = k_hop_subgraph(index, hops, edge_index, num_nodes=x.shape[0], flow=flow)
            mask = mask * reached
        return mask


def recorded(model: nn.Module, x: Tensor, edge_index: Tensor, **kwargs: Any) -> AttentionMap:
    """The attention of one forward pass in evaluation mode.

    Raises:
        InputError: a heterogeneous graph.
        AttentionError: the model has no attention that can be recorded.
    """
    if not isinstance(x, Tensor) or not isinstance(edge_index, Tensor) or edge_index.dim() != 2:
        raise InputError("`x` and `edge_index` must be tensors: heterogeneous graphs are not supported")
    with evaluating(model), torch.no_grad(), record(model) as tape:
        model(x, edge_index, **kwargs)
    return tape.attention.detach()


def destined_keys(edge_index: Tensor, flow: str) -> Tensor:
    """[E], the keys of edges in the direction messages take."""
    source, destination = edge_index if flow == "source_to_target" else edge_index.flip(0)
    return edge_keys(source.long(), destination.long())


def on_edges(
    attention: AttentionMap, keys: Tensor, layer: str | int = "mean", heads: str | int = "log"
) -> Tensor:
    """[E]: heads and layers reduced, in the order of `keys`; see `FaithfulAttention`."""
    if isinstance(layer, int):
        return looked_up(attention.layer(layer), keys, heads)
    chosen = [attention.last] if layer == "last" else list(attention)
    stacked = torch.stack([looked_up(one, keys, heads) for one in chosen])
    return stacked.amax(0) if layer == "max" else stacked.mean(0)


@typed
class AsPyG(MessagePassing):  # type: ignore[misc]
    """One of fgai's models, called as PyG calls models: `model(x, edge_index, batch=None)`.

    Works with PyG's explainers, masks and metrics: an edge mask scales the attention of each edge, as it
    scales the messages of PyG's layers; self-loops the model adds itself are never masked.

    Args:
        model: a `GAT`, `GATv2` or `GT` for nodes or graphs.

    Raises:
        InputError: not one of fgai's models, or one for links.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.GAT.for_data(data).eval()
        >>> graph = data.to_data()
        >>> bool((AsPyG(model)(graph.x, graph.edge_index) == model(data)).all())
        True
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, AttentionModel) or get_task(model.task).needs_links:
            raise InputError(
                "`model` must be one of fgai's models for nodes or graphs; PyG's own can be used as they are"
            )
        self.model = model
        self.train(model.training)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Return logits [N, C], or [G, C] for a model of graphs.

        Args:
            x: [N, F].
            edge_index: [2, E]; duplicates are merged.
            batch: [N], the graph each node belongs to.
        """
        graph = Graph.from_edges(edge_index, x.shape[0], x, batch=batch)
        if self._edge_mask is None or not edge_index.numel():
            return self._logits(graph)
        mask = self._edge_mask.sigmoid() if self._apply_sigmoid else self._edge_mask
        keys, order = edge_keys(edge_index[0], edge_index[1]).sort(stable=True)
        mask = mask[order]

        def masked(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
            wanted = edge_keys(source, destination)
            spot, known = _positions(keys, wanted)
            return attention * torch.where(known, mask[spot], 1.0)[:, None]

        with record(self.model, perturb=masked):
            return self._logits(graph)

    def _logits(self, graph: Graph) -> Tensor:
        out: Tensor = self.model(graph)
        return out


def looked_up(layer: LayerAttention, keys: Tensor, heads: str | int = "log") -> Tensor:
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
