"""A user's model of PyG's layers as a `Chain`: traced by `torch.fx`, or refused with a reason.

`GATConv` or `GATv2Conv` layers follow each other, between them steps that `fgai.bounds.steps` bounds. A
branch on the type of a symbol shows in a run on the graph, what FX does not see in a comparison
(`_same_outputs`).
"""

from __future__ import annotations

import copy
import inspect
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, Linear, MessagePassing
from torch_geometric.nn.aggr import SumAggregation

from fgai.attention import Limits, duplicate
from fgai.attention.interface import Wrapped, uncompiled
from fgai.attention.limits import _ClipOutput
from fgai.attention.pyg import PYG_LINEARS
from fgai.bounds.steps import ACTIVATIONS
from fgai.certificates.chain import _Chain
from fgai.certificates.integrity import _module_alteration
from fgai.certificates.linearity import _changed_constant, _track_linearity
from fgai.graph import Graph
from fgai.models import AttentionLayer
from fgai.threads import exclusive, seeded

# mypy: disable-error-code="no-untyped-call"

_NO_EFFECT = (getattr, operator.getitem, "size", "dim")  # allowed where nothing uses the result
_IDENTITIES = (nn.Dropout, nn.Identity)
_STEPS = (*ACTIVATIONS, nn.Linear, nn.BatchNorm1d, Linear)
_FUNCTIONS = (
    *(functional.elu, functional.relu, functional.leaky_relu, torch.relu),
    *(functional.dropout, functional.log_softmax, torch.log_softmax),
)
_METHODS = ("relu", "relu_", "log_softmax")


class _NotAChainError(Exception):
    """A model that is no chain; the text is the reason."""


def _trace(model: nn.Module, graph: Graph) -> _Chain | str:
    """Return a model as a chain, or why it is none; it is left as it was."""
    try:
        return _ChainBuilder(model).chain(graph)
    except _NotAChainError as error:
        return str(error)


class _Tracer(fx.Tracer):
    """Traces attention layers and PyTorch's modules as one operation each."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self.thread:  # FX patches modules for all threads
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return isinstance(module, MessagePassing | Linear) or super().is_leaf_module(module, path)


class _ModelCall(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, edge_index: Any) -> Any:
        if not isinstance(self.model, Wrapped):
            return self.model(x, edge_index)
        return self.model(Data(x=x, edge_index=edge_index, num_nodes=x.shape[0]))


class _ChainBuilder:
    def __init__(self, model: nn.Module) -> None:
        model = uncompiled(model)
        self.prefix = "model.model" if isinstance(model, Wrapped) else "model"
        # A copy: a forward pass may keep symbols in the model.
        self.root = _ModelCall(duplicate(model).cpu())
        self.names: list[str] = []
        self.layers: list[AttentionLayer] = []
        self.loops: list[bool] = []
        self.steps: list[list[nn.Module]] = [[]]
        self.log_softmax = False

    def chain(self, graph: Graph) -> _Chain:
        """Return the chain, after a run with symbols and one on the graph with the same operations."""
        trace = self._traced()
        unused: set[fx.Node] = set()
        for node in reversed(trace.nodes):
            if node.target in _NO_EFFECT and unused.issuperset(node.users):
                unused.add(node)
        x, edges = (node for node in trace.nodes if node.op == "placeholder")
        current, used = x, {x, edges}
        while current.op != "output":
            following = [node for node in current.users if node not in unused]
            if len(following) != 1:
                name = self._describe(current)
                raise _NotAChainError(f"{name} is used more than once, as by a residual connection")
            before, current = current, following[0]
            used.add(current)
            if current.op != "output":
                self._add_operation(current, before, edges)
            elif before not in current.args:
                raise _NotAChainError("the model returns more than its logits")
        others = [node for node in trace.nodes if node not in used and node not in unused]
        if others:
            raise _NotAChainError(f"{self._describe(others[0])} is not part of a chain of attention layers")
        if len(set(self.loops)) > 1:
            raise _NotAChainError("some layers add self-loops and others do not")
        self._require_same_operations(trace, graph)
        loops = any(self.loops)
        return _Chain(self.names, self.layers, self.steps, loops=loops, log_softmax=self.log_softmax)

    def _traced(self) -> fx.Graph:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            raise _NotAChainError("a hook on all modules may change what they return")
        try:
            with exclusive():  # FX replaces `nn.Module.__call__` meanwhile
                return _Tracer().trace(self.root)
        except Exception as error:  # whatever the user's code raises when it meets a symbol
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise _NotAChainError(
                f"the forward pass depends on more than its operations and cannot be traced: {first}"
            ) from error

    def _require_same_operations(self, trace: fx.Graph, graph: Graph) -> None:
        """Raise unless the model runs the operations of the trace; it may branch on the type of a symbol."""
        assert graph.features is not None
        runs = []
        for model in (self.root, fx.GraphModule(self.root, trace)):
            x = graph.features.to("cpu").to_dense().clone()
            with _track_linearity() as mode:
                mode.track(x)
                model(x, graph.edge_index.cpu())
            runs.append(mode)
        if (operation := _changed_constant(*runs)) is not None:
            raise _NotAChainError(
                f"the forward pass branches on what cannot be followed, before `{operation.strip('_')}`"
            )

    def _path(self, node: fx.Node) -> str:
        inside = str(node.target).removeprefix(self.prefix).removeprefix(".")
        return inside or type(self.root.get_submodule(self.prefix)).__name__

    def _describe(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{self._path(node)} ({type(self.root.get_submodule(str(node.target))).__name__})"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
        return f"`{name}`" if node.op != "placeholder" else f"the input `{name}`"

    def _add_operation(self, node: fx.Node, current: fx.Node, edges: fx.Node) -> None:
        name = self._describe(node)
        if self.log_softmax:
            raise _NotAChainError(f"{name} follows a log-softmax")
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if isinstance(module, MessagePassing):
                self._add_layer(node, module, current, edges)
                return
            if (alteration := _module_alteration(module, {*_STEPS, *_IDENTITIES, nn.LogSoftmax})) is not None:
                raise _NotAChainError(f"{self._path(node)} {alteration}")
            step: nn.Module | None = module if node.args == (current,) and not node.kwargs else None
        else:
            step = _step_of(node, current)
        if isinstance(step, nn.LogSoftmax) and step.dim in (1, -1):
            self.log_softmax = True
        elif isinstance(step, _IDENTITIES):
            if isinstance(step, nn.Dropout) and step.training:
                raise _NotAChainError(f"{name} is active in evaluation mode, too")
        elif isinstance(step, _STEPS):
            self.steps[-1].append(_copy_step(step, name))
        else:
            raise _NotAChainError(
                f"{name} is not followed: between attention layers there may be dropout, ELU,"
                " ReLU, leaky ReLU, batch norm and linear layers"
            )

    def _add_layer(self, node: fx.Node, layer: Any, current: fx.Node, edges: fx.Node) -> None:
        name = self._path(node)
        if name in self.names:
            raise _NotAChainError(f"layer {name!r} runs more than once")
        arguments = {**dict(zip(("x", "edge_index", "edge_attr"), node.args, strict=False)), **node.kwargs}
        problem = _layer_problem(layer)
        others = [key for key in arguments.keys() - {"x", "edge_index"} if arguments[key] is not None]
        if len(node.args) > 3 or arguments.get("x") is not current:
            problem = "is called with something else than the features of all nodes, as on a bipartite graph"
        elif arguments.get("edge_index") is not edges:
            problem = "does not use the edges that the model is called with"
        elif others:
            problem = f"is called with `{min(others)}`, which is not followed"
        if problem is not None:
            raise _NotAChainError(f"layer {name!r} {problem}")
        self.names.append(name)
        self.layers.append(_convert(layer))
        self.loops.append(layer.add_self_loops)
        self.steps.append([])


def _step_of(node: fx.Node, current: fx.Node) -> nn.Module | None:
    """Return a function or method call as a module; None if it is no step with `current` as its input."""
    others = (*node.args[1:], *node.kwargs.values())
    if node.args[:1] != (current,) or any(isinstance(one, fx.Node) for one in others):
        return None
    if node.target not in (_METHODS if isinstance(node.target, str) else _FUNCTIONS):
        return None
    name = str(getattr(node.target, "__name__", node.target)).strip("_")
    try:
        bound = inspect.signature(getattr(functional, name)).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    options = bound.arguments
    if name == "log_softmax":
        return nn.LogSoftmax(options["dim"]) if options["dtype"] is None else None
    if name == "dropout":
        return nn.Dropout(0.0).train(bool(options["training"]))
    if name == "elu":
        return nn.ELU(options["alpha"])
    return nn.ReLU() if name == "relu" else nn.LeakyReLU(options["negative_slope"])


def _copy_step(step: Any, name: str) -> nn.Module:
    if isinstance(step, nn.BatchNorm1d) and (step.training or step.running_mean is None):
        raise _NotAChainError(f"{name} uses the statistics of all nodes, which new ones change")
    if isinstance(step, nn.ELU) and not 0 < step.alpha <= 1:
        raise _NotAChainError(f"{name} has an alpha of {step.alpha}; up to 1 it is followed")
    if isinstance(step, nn.LeakyReLU) and not 0 <= step.negative_slope <= 1:
        raise _NotAChainError(f"{name} has a slope of {step.negative_slope}; from 0 to 1 it is followed")
    if isinstance(step, Linear):
        weight, bias = step.weight, step.bias
        linear: nn.Linear = nn.utils.skip_init(nn.Linear, *reversed(weight.shape), bias=bias is not None)
        linear.weight, linear.bias = weight, bias
        return linear
    own: nn.Module = copy.deepcopy(step)
    if isinstance(own, nn.ReLU | nn.ELU | nn.LeakyReLU):
        own.inplace = False
    return own


def _layer_problem(layer: Any) -> str | None:
    kind, slope = type(layer), layer.__dict__.get("negative_slope")
    if kind not in (GATConv, GATv2Conv):
        return f"is a {kind.__name__}; only GATConv and GATv2Conv are followed"
    if kind is GATConv and layer.lin is None:
        return "has other weights for destinations, as for bipartite graphs"
    if layer.res is not None:
        return "has a residual connection, which is not followed"
    if layer.edge_dim is not None:
        return "uses edge attributes, which are not followed"
    if layer.flow != "source_to_target" or type(layer.aggr_module) is not SumAggregation:
        return "must sum messages from source to target"
    if layer.decomposed_layers != 1 or layer._explain or layer._edge_mask is not None:
        return "runs decomposed or masked"
    if not isinstance(slope, int | float) or not 0 <= slope <= 1:
        return f"has a slope of {slope}, which is not in [0, 1]: bounds of scores hold for no other"
    return _parts_problem(layer)


def _parts_problem(layer: Any) -> str | None:
    """Say which part may compute something else than its class, but for the hooks of limits."""
    hooked = "has a hook, which may change its input or output"
    if any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks") and "_forward_" in name):
        return hooked
    limits: Any = layer._modules.get("limits")
    names = {} if limits is None else {part: name for name, part in PYG_LINEARS[type(layer)](layer).items()}
    for path, part in layer.named_modules():
        if part in names:
            hooks = list(part._forward_hooks.values())
            if [type(hook) for hook in hooks] != [_ClipOutput] or hooks[0].limits is not limits[names[part]]:
                return hooked
        known = {type(layer), Linear, SumAggregation}
        if (alteration := _module_alteration(part, known, known_hook=part in names)) is not None:
            return f"{path} {alteration}".strip()
    return None


def _convert(layer: Any) -> AttentionLayer:
    """Return a PyG layer without a `_layer_problem` as one of fgai's."""
    maps, heads, channels = PYG_LINEARS[type(layer)](layer), layer.heads, layer.out_channels
    value: Any = maps["value"]
    weight: Tensor = value.weight
    additive = type(layer) is GATConv
    with seeded(0, torch.device("cpu")):  # initial weights, replaced below
        own = AttentionLayer(
            weight.shape[1],
            channels,
            heads,
            score="additive" if additive else "dynamic",
            concat=layer.concat,
            slope=float(layer.negative_slope),
            bias=layer.bias is not None,
        ).to(weight.dtype)
    limits: dict[str, nn.Module] = {}
    for name in ("value",) if additive else ("value", "right"):
        source: Any = maps.get(name, value)  # a GATv2Conv may share the weights of both sides
        projection = getattr(own, name)
        projection.weight.data = source.weight.detach().t().clone()
        projection.bias = copy.deepcopy(source.bias)
        if layer._modules.get("limits") is not None:
            theirs, size = layer.limits[name if name in maps else "value"], (heads, channels)
            mine = limits[name] = Limits(heads, channels).to(weight.dtype)
            mine.set(theirs.low.view(size), theirs.high.view(size), theirs.radius, theirs.usual)
    if additive:
        own.source_weight.data = layer.att_src.detach()[0].clone()
        own.destination_weight.data = layer.att_dst.detach()[0].clone()
    else:
        own.score_weight.data = layer.att.detach()[0].clone()
    own.bias = copy.deepcopy(layer.bias)
    if limits:
        # The limits of the values bound both sides of the score.
        sides = ("source", "destination") if additive else ()
        limits |= {name: Limits(heads, derived=True).to(weight.dtype) for name in sides}
        own.limits = nn.ModuleDict(limits)
    return own.eval()
