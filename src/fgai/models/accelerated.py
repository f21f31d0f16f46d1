"""`accelerate`: run PyG's attention layers on fgai's kernels, with the same weights, call and numbers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import add_self_loops, remove_self_loops

from fgai.attention.interface import originals
from fgai.cache import cached_on
from fgai.errors import FgaiWarning, InputError, warn
from fgai.ops import (
    aggregate,
    attend_additive,
    attend_dot,
    attend_dynamic,
    dropout,
    edge_softmax,
    score_additive,
    score_dot,
    score_dynamic,
)
from fgai.sparse import Adjacency
from fgai.typed import typed

Model = TypeVar("Model", bound=nn.Module)


@dataclass(eq=False)
class _Edges:
    """The edges of one call. PyG's layers pass it on in place of `edge_index`."""

    edge_index: Tensor  # [2, E], with self-loops if the layer adds them
    adjacency: Adjacency
    order: Tensor  # [E] sorted position → column of `edge_index`
    with_attention: bool = False  # the call has `return_attention_weights`
    attention: Tensor | None = None  # if `with_attention`, in the order of `edge_index`


def _sorted_edges(edge_index: Tensor, num_nodes: int, add_loops: bool) -> tuple[Tensor, Adjacency, Tensor]:
    if add_loops:
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=num_nodes)
    adjacency, order = Adjacency.build(edge_index, num_nodes)
    adjacency.check_incoming()
    return edge_index, adjacency, order


class _Accelerated:
    """A PyG layer on fgai's kernels; calls that the kernels do not support run PyG's own code."""

    def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None, *args: Any, **options: Any) -> Any:
        size = args[0] if isinstance(self, GATConv) and args else options.get("size")
        returned = bool(options.get("return_attention_weights"))
        if len(args) > isinstance(self, GATConv):
            returned = bool(args[-1])
        forward = super().forward  # type: ignore[misc]
        if not self._is_supported(x, edge_index, edge_attr, size):
            return forward(x, edge_index, edge_attr, *args, **options)
        num_nodes = (x if isinstance(x, Tensor) else x[0]).shape[0]
        add_loops = bool(getattr(self, "add_self_loops", False))
        key = "fgai.accelerate", edge_index._version, num_nodes, add_loops
        parts = cached_on(edge_index, key, lambda: _sorted_edges(edge_index, num_nodes, add_loops))
        edges = _Edges(*parts, returned)
        out = forward(x, edges, None)
        return (out, (edges.edge_index, edges.attention)) if returned else out

    def _is_supported(self: Any, x: Any, edge_index: Any, edge_attr: Any, size: Any) -> bool:
        if not isinstance(x, Tensor):
            square = isinstance(x, tuple | list) and len(x) == 2 and all(isinstance(one, Tensor) for one in x)
            if not square or x[0].shape[0] != x[1].shape[0]:
                return False
        return (
            type(edge_index) is Tensor
            and edge_index.layout == torch.strided
            and edge_index.dtype == torch.int64
            and edge_index.dim() == 2
            and edge_index.shape[0] == 2
            and edge_index.shape[1] > 0
            and size is None
            and (edge_attr is None or not isinstance(self, TransformerConv))
            and not self.explain
            and not any(name in self.__dict__ for name in ("edge_updater", "propagate", "message"))
            and not any(getattr(self, name) for name in _HOOK_NAMES)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()  # type: ignore
        )

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Do nothing: PyG would overwrite `propagate` and `edge_updater` of a copy."""

    def edge_updater(self: Any, edge_index: Any, **kwargs: Any) -> Any:
        if not isinstance(edge_index, _Edges):
            return super().edge_updater(edge_index, **kwargs)  # type: ignore[misc]
        return kwargs.get("alpha")  # both terms of GATConv's score; other layers pass theirs to `propagate`

    def propagate(self: Any, edge_index: Any, **kwargs: Any) -> Any:
        if not isinstance(edge_index, _Edges):
            return super().propagate(edge_index, **kwargs)  # type: ignore[misc]
        with torch.autocast(edge_index.edge_index.device.type, enabled=False):
            return self._attend(edge_index, kwargs)

    def _attend(self: Any, edges: _Edges, tensors: dict[str, Any]) -> Tensor:
        """Return the weighted sums [N, H, C]; computes in float32 at least, like PyG's softmax."""
        values, *sides = self._values_and_sides(tensors)
        dtype = values.dtype
        precise = torch.promote_types(dtype, torch.float32)
        if edges.with_attention or not values.is_cuda:  # the fused kernels of the GPU read 16 bits themselves
            values, *sides = (part.to(precise) for part in (values, *sides))
        slope = (float(self.negative_slope),) if hasattr(self, "negative_slope") else ()
        p = float(self.dropout) if self.training else 0.0
        if not edges.with_attention:
            out, _ = self._fused(*sides, values, edges.adjacency, *slope, dropout=p, written=False)
        else:  # a loss on the attention needs its gradient
            attention = edge_softmax(self._scores(*sides, edges.adjacency, *slope), edges.adjacency)
            attention = dropout(attention, p)
            out = aggregate(attention, values, edges.adjacency)
            edges.attention = torch.empty_like(attention).index_copy(0, edges.order, attention)
        rounded: Tensor = out.to(dtype)
        return rounded


_HOOK_NAMES = tuple(
    f"_{step}_forward{when}_hooks"
    for step in ("propagate", "message", "aggregate", "edge_update")
    for when in ("", "_pre")
)


class AcceleratedGATConv(_Accelerated, GATConv):  # type: ignore[misc]
    """`GATConv` on fgai's kernels; made by `accelerate`."""

    _scores, _fused = staticmethod(score_additive), staticmethod(attend_additive)

    def _values_and_sides(self, tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        return tensors["x"][0], *tensors["alpha"]


class AcceleratedGATv2Conv(_Accelerated, GATv2Conv):  # type: ignore[misc]
    """`GATv2Conv` on fgai's kernels; made by `accelerate`."""

    _scores, _fused = staticmethod(score_dynamic), staticmethod(attend_dynamic)

    def _values_and_sides(self, tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        return tensors["x"][0], *tensors["x"], self.att[0]


class AcceleratedTransformerConv(_Accelerated, TransformerConv):  # type: ignore[misc]
    """`TransformerConv` on fgai's kernels; made by `accelerate`."""

    _scores, _fused = staticmethod(score_dot), staticmethod(attend_dot)

    def _values_and_sides(self, tensors: dict[str, Any]) -> tuple[Tensor, ...]:
        return tensors["value"], tensors["query"], tensors["key"]


_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    GATConv: AcceleratedGATConv,
    GATv2Conv: AcceleratedGATv2Conv,
    TransformerConv: AcceleratedTransformerConv,
}


def _unsupported(layer: Any) -> str:
    """Return the reason why the kernels cannot compute this layer; empty if they can."""
    if type(layer) not in _REPLACEMENTS:
        return "is a subclass"
    if getattr(layer, "lin_edge", None) is not None:
        return "has edge features"
    if layer.aggr not in ("add", "sum"):
        return f"has aggr={layer.aggr!r}"
    if layer.flow != "source_to_target":
        return f"has flow={layer.flow!r}"
    if layer.decomposed_layers != 1:
        return f"has decomposed_layers={layer.decomposed_layers}"
    return ""


@typed
def accelerate(model: Model) -> Model:
    """Return a copy of a PyG model whose attention layers run on fgai's kernels.

    `GATConv`, `GATv2Conv` and `TransformerConv` are called as before and give the same numbers up to
    rounding, several times faster and with less memory: no tensor of edges × channels is created. Parameters
    keep their names, so `model.load_state_dict(fast.state_dict())` works, as does `return_attention_weights`.
    Edges are sorted once per `edge_index` tensor, so pass the same tensor in every epoch. Gradients of
    gradients are not supported, and dropout draws other random numbers than in PyG.

    Calls on bipartite graphs or sparse matrices, inside `torch.compile` or in PyG's `Explainer` run PyG's own
    code. Layers that cannot be accelerated (subclasses, edge features, another aggregation or direction) stay
    as they are, with one `FgaiWarning`; `InputError` if no layer can be accelerated.

    Example:
        >>> from torch_geometric.nn import GAT
        >>> fast = accelerate(GAT(16, 8, num_layers=2, out_channels=3))
        >>> type(fast.convs[0]).__name__
        'AcceleratedGATConv'
    """
    fast: Model = copy.deepcopy(originals(model)[0])
    unchanged, count = {}, 0
    for name, layer in fast.named_modules():
        if not isinstance(layer, tuple(_REPLACEMENTS)) or isinstance(layer, _Accelerated):
            continue
        reason = _unsupported(layer)
        if reason:
            unchanged[f"{name or 'the model'} ({type(layer).__name__})"] = reason
        else:
            layer.__class__ = _REPLACEMENTS[cast(type[nn.Module], type(layer))]
            count += 1
    reasons = "; ".join(f"{name} {reason}" for name, reason in unchanged.items())
    if not count:
        why = f": {reasons}" if unchanged else "; it needs PyG's GATConv, GATv2Conv or TransformerConv"
        raise InputError(f"no layer of {type(model).__name__} can be accelerated{why}")
    if unchanged:
        warn(FgaiWarning(f"these layers stay as they are: {reasons}"))
    return fast
