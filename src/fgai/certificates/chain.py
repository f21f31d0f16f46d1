"""A model as a chain of attention layers with row-by-row steps between them: declared by it, or traced.

fgai's own models declare that they are one (`Capabilities("layers")`). A user's model of PyG's layers is run
by `torch.fx` with symbols in place of features and edges. A branch on a feature, on an edge or on the number
of nodes cannot run with symbols, so the operations that are found are those of every graph. They must be
`GATConv` or `GATv2Conv` layers on the model's own edges, one after the other, and between them only steps
that `fgai.bounds.steps` bounds. Everything else is refused with a reason. A branch on the type of a
symbol shows in a run on the graph, and what FX cannot see, as a function that was replaced in PyG, in a
comparison of both in float64, on the graph and on one with new nodes (`same_as`).
"""

from __future__ import annotations

import copy
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from fgai.alone import seeded
from fgai.attention import Limits, duplicate, limits_of, observe
from fgai.attention.interface import Wrapped, uncompiled
from fgai.attention.limits import _ClipOutput
from fgai.bounds.steps import SMOOTH
from fgai.certificates.familiar import _change, unfamiliar
from fgai.certificates.following import _following, _same_constants
from fgai.graph import Graph
from fgai.models import AttentionLayer, body_of
from fgai.sparse import Adjacency, Features

# mypy: disable-error-code="no-untyped-call"

SAME = 1e-6
"""Relative distance of two computations in float64."""
_ASIDE = (getattr, operator.getitem, "size", "dim")
"""Operations that change nothing; allowed where nothing reads them."""
_LEFT_OUT = (nn.Dropout, nn.Identity)
_STEPS = (*SMOOTH, nn.Linear, nn.BatchNorm1d)


class Chain(nn.Module):
    """`steps[0]`, `layers[0]`, `steps[1]`, …, `layers[-1]`, `steps[-1]`; nodes interact in layers alone.

    Attributes:
        names: of the layers.
        layers: with limits or without.
        steps: row by row, one list more than layers.
        loops: whether layers add self-loops to the edges of a graph.
        normalised: whether a log-softmax follows, which changes no order of classes.
    """

    def __init__(
        self,
        names: list[str],
        layers: list[AttentionLayer],
        steps: list[list[nn.Module]],
        *,
        loops: bool = False,
        normalised: bool = False,
    ) -> None:
        super().__init__()
        self.names, self.loops, self.normalised = names, loops, normalised
        self._layers, self._steps = nn.ModuleList(layers), nn.ModuleList(map(nn.ModuleList, steps))

    @property
    def layers(self) -> list[AttentionLayer]:
        """The attention layers."""
        return list(cast(Any, self._layers))

    @property
    def steps(self) -> list[list[nn.Module]]:
        """What comes before each layer, and after the last."""
        return [list(cast(nn.ModuleList, part)) for part in self._steps]

    def adjacency(self, graph: Graph) -> Adjacency:
        """Return the edges that the layers read."""
        if self.loops and not graph.has_loops:
            graph = graph.derived("self-loops", lambda given: given.add_self_loops()[0])
        return graph.adjacency

    def runs(
        self, features: Features, adjacency: Adjacency
    ) -> Iterator[tuple[AttentionLayer, Tensor | Features, Tensor]]:
        """Yield each layer with its input and its output."""
        state: Tensor | Features = features
        for before, layer in zip(self.steps, self.layers, strict=False):
            state = _through(before, state)
            out = layer(state, adjacency)
            yield layer, state, out
            state = out

    def finish(self, out: Tensor) -> Tensor:
        """Return the logits from the output of the last layer."""
        logits = cast(Tensor, _through(self.steps[-1], out))
        return logits.log_softmax(1) if self.normalised else logits

    def fault(self) -> str | None:
        """Say why its layers or limits bound nothing; None where they do."""
        if not self._layers:
            return "it has no attention layer"
        for layer in self.layers:
            if not 0 <= layer.slope <= 1:
                return f"a slope of {layer.slope} is not in [0, 1]: bounds of scores hold for no other"
            if layer.limits is None or layer.input_norm is not None:
                return "a layer has no limits: one new neighbour may say anything; see `fgai.limit`"
            for one in limits_of(layer):
                if not one.derived and not bool(one.low.isfinite().all() & one.high.isfinite().all()):
                    return "limits were not measured; see `fgai.limit`"
                if (fault := one.fault()) is not None:
                    return f"{fault}; see `fgai.limit`"
        numbers = (*self._layers.parameters(), *self._steps.parameters(), *self._steps.buffers())
        if not all(bool(one.isfinite().all()) for one in numbers):
            return "weights that are not finite are not followed"
        return None


def _through(steps: list[nn.Module], state: Tensor | Features) -> Tensor | Features:
    if steps and isinstance(state, Features):
        state = state.to_dense()
    for step in steps:
        state = step(state)
    return state


class _RefusedError(Exception):
    """A structure that proofs do not describe; its text is the reason."""


def chain_of(model: nn.Module, graph: Graph) -> Chain | str:
    """Return a model in evaluation mode as a chain, or why it is none.

    Args:
        model: fgai's, or the user's of PyG's layers; left as it was.
        graph: prepared for it.
    """
    if graph.features is None:
        return "the graph has no features"
    if graph.edge_weight is not None or graph.edge_attr is not None or graph.entry_values is not None:
        return "values on edges, guards and replaced values are not followed"
    if graph.batch is not None or graph.links is not None:
        return "only node-level read-outs are followed"
    if body_of(model) == "layers":
        return _declared(model)
    if "torch_geometric.nn" not in sys.modules:  # then no layer is PyG's
        return "only GAT, GATv2 and models of PyG's GATConv and GATv2Conv are followed"
    try:
        return _Reader(model).chain(graph)
    except _RefusedError as refused:
        return str(refused)


def _declared(model: Any) -> Chain | str:
    change = unfamiliar(model)
    if change is not None:
        return f"{change}; only GAT and GATv2 as they are can be followed"
    if model.guard is not None:
        return "weights on edges, guards and replaced values are not followed"
    if not model.is_rowwise:
        return "only node-level read-outs are followed"
    layers = list(model.convs)
    between: list[list[nn.Module]] = [[nn.ELU()] for _ in layers[1:]]
    return Chain([f"convs.{place}" for place in range(len(layers))], layers, [[], *between, []])


class _Tracer(fx.Tracer):
    """Calls attention layers and PyTorch's modules as one operation each."""

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        from torch_geometric.nn import Linear, MessagePassing

        return isinstance(module, MessagePassing | Linear) or super().is_leaf_module(module, path)


class _Called(nn.Module):
    """A model, called as fgai calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, edge_index: Any) -> Any:
        if not isinstance(self.model, Wrapped):
            return self.model(x, edge_index)
        from torch_geometric.data import Data

        return self.model(Data(x=x, edge_index=edge_index, num_nodes=x.shape[0]))


class _Reader:
    """Reads a chain off the operations of a user's model."""

    def __init__(self, model: nn.Module) -> None:
        model = uncompiled(model)
        self.prefix = "model.model" if isinstance(model, Wrapped) else "model"
        # A copy: a forward pass may keep symbols in the model.
        self.root = _Called(duplicate(model).cpu())
        self.names: list[str] = []
        self.layers: list[AttentionLayer] = []
        self.loops: list[bool] = []
        self.steps: list[list[nn.Module]] = [[]]
        self.normalised = False

    def chain(self, graph: Graph) -> Chain:
        """Return the chain, after a run with symbols and one on the graph that took the same way."""
        found = self._traced()
        aside: set[fx.Node] = set()
        for node in reversed(found.nodes):
            if node.target in _ASIDE and aside.issuperset(node.users):
                aside.add(node)
        x, edges = (node for node in found.nodes if node.op == "placeholder")
        at, passed = x, {x, edges}
        while True:
            following = [node for node in at.users if node not in aside]
            if len(following) != 1:
                raise _RefusedError(f"{self._called(at)} is read more than once, as by a residual connection")
            node = following[0]
            passed.add(node)
            if node.op == "output":
                break
            self._follow(node, at, edges)
            at = node
        if at not in node.args:
            raise _RefusedError("the model returns more than its logits")
        others = [node for node in found.nodes if node not in passed and node not in aside]
        if others:
            raise _RefusedError(f"{self._called(others[0])} is not part of a chain of attention layers")
        if len(set(self.loops)) > 1:
            raise _RefusedError("some layers add self-loops and others do not")
        self._same_way(found, graph)
        loops = {"loops": any(self.loops), "normalised": self.normalised}
        return Chain(self.names, self.layers, self.steps, **loops)

    def _traced(self) -> fx.Graph:
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            raise _RefusedError("a hook on all modules may change what they return")
        try:
            return _Tracer().trace(self.root)
        except Exception as error:  # whatever the user's code raises when it meets a symbol
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise _RefusedError(
                f"the forward pass depends on more than its operations and cannot be traced: {first}"
            ) from error

    def _called(self, node: fx.Node) -> str:
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            return f"{self._path(node)} ({type(module).__name__})"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
        return f"`{name}`" if node.op != "placeholder" else f"the input `{name}`"

    def _same_way(self, found: fx.Graph, graph: Graph) -> None:
        """Raise unless the model runs the operations that were found: symbols are no tensors by type."""
        assert graph.features is not None
        runs = []
        for model in (self.root, fx.GraphModule(self.root, found)):
            x = graph.features.to("cpu").to_dense().clone()
            with _following() as followed:
                followed.start(x)
                model(x, graph.edge_index.cpu())
            runs.append(followed)
        culprit = _same_constants(*runs)
        if culprit is not None:
            raise _RefusedError(
                f"the forward pass branches on what cannot be followed, before `{culprit.strip('_')}`"
            )

    def _path(self, node: fx.Node) -> str:
        inside = str(node.target).removeprefix(self.prefix).removeprefix(".")
        return inside or type(self.root.get_submodule(self.prefix)).__name__

    def _follow(self, node: fx.Node, at: fx.Node, edges: fx.Node) -> None:
        """Take one operation on what the chain computed so far into it."""
        if self.normalised:
            raise _RefusedError(f"{self._called(node)} follows a log-softmax")
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            if _is_layer(module):
                self._take_layer(node, module, at, edges)
                return
            change = _change(module, {*_STEPS, *_LEFT_OUT, nn.LogSoftmax, _linear_of_pyg()})
            if change is not None:
                raise _RefusedError(f"{self._path(node)} {change}")
            step: nn.Module | None = module if node.args == (at,) and not node.kwargs else None
        else:
            step = _step_of(node, at)
        if isinstance(step, nn.LogSoftmax) and step.dim in (1, -1):
            self.normalised = True
        elif isinstance(step, _LEFT_OUT):
            if isinstance(step, nn.Dropout) and step.training:
                raise _RefusedError(f"{self._called(node)} drops out in evaluation mode, too")
        elif isinstance(step, (*_STEPS, _linear_of_pyg())):
            self.steps[-1].append(_plain(cast(nn.Module, step), self._called(node)))
        else:
            raise _RefusedError(
                f"{self._called(node)} is not followed: between attention layers there may be dropout, ELU,"
                " ReLU, leaky ReLU, batch norm and linear layers"
            )

    def _take_layer(self, node: fx.Node, layer: Any, at: fx.Node, edges: fx.Node) -> None:
        name = self._path(node)
        if name in self.names:
            raise _RefusedError(f"layer {name!r} runs more than once")
        given = {**dict(zip(("x", "edge_index", "edge_attr"), node.args, strict=False)), **node.kwargs}
        if len(node.args) > 3 or given.get("x") is not at:
            raise _RefusedError(
                f"layer {name!r} is called with something else than the features of all nodes, as on a"
                " bipartite graph"
            )
        if given.get("edge_index") is not edges:
            raise _RefusedError(f"layer {name!r} does not read the edges that the model is given")
        extra = [key for key, value in given.items() if key not in ("x", "edge_index") and value is not None]
        if extra:
            raise _RefusedError(f"layer {name!r} is called with `{extra[0]}`, which is not followed")
        fault = _layer_fault(layer)
        if fault is not None:
            raise _RefusedError(f"layer {name!r} {fault}")
        self.names.append(name)
        self.layers.append(_converted(layer))
        self.loops.append(layer.add_self_loops)
        self.steps.append([])


def _is_layer(module: nn.Module) -> bool:
    from torch_geometric.nn import MessagePassing

    return isinstance(module, MessagePassing)


def _linear_of_pyg() -> type[nn.Module]:
    from torch_geometric.nn import Linear

    kind: type[nn.Module] = Linear
    return kind


def _step_of(node: fx.Node, at: fx.Node) -> nn.Module | None:
    """Return a function or method call as a module; None if it is no known step of its first argument."""
    if node.args[:1] != (at,) or any(
        isinstance(one, fx.Node) for one in (*node.args[1:], *node.kwargs.values())
    ):
        return None
    name = _FUNCTIONS.get(node.target) if callable(node.target) else _METHODS.get(node.target)
    if name is None:
        return None
    try:
        given = inspect.signature(getattr(functional, name)).bind(*node.args, **node.kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    options = given.arguments
    if name == "dropout":
        return nn.Dropout(0.0).train(bool(options["training"]))
    if name == "log_softmax":
        return nn.LogSoftmax(options["dim"]) if options["dtype"] is None else None
    if name == "relu":
        return nn.ReLU()
    return nn.ELU(options["alpha"]) if name == "elu" else nn.LeakyReLU(options["negative_slope"])


_FUNCTIONS: dict[Callable[..., Any], str] = {
    functional.elu: "elu",
    functional.relu: "relu",
    torch.relu: "relu",
    functional.leaky_relu: "leaky_relu",
    functional.dropout: "dropout",
    functional.log_softmax: "log_softmax",
    torch.log_softmax: "log_softmax",
}
_METHODS = {"relu": "relu", "relu_": "relu", "log_softmax": "log_softmax"}


def _plain(step: nn.Module, called: str) -> nn.Module:
    """Return a step as the bounds read it, without in-place operations."""
    if isinstance(step, nn.BatchNorm1d):
        if step.training or step.running_mean is None:
            raise _RefusedError(f"{called} uses the statistics of all nodes, which new ones change")
        return copy.deepcopy(step)
    if isinstance(step, nn.Linear):
        return copy.deepcopy(step)
    if isinstance(step, _linear_of_pyg()):
        weight, bias = cast(Any, step).weight, cast(Any, step).bias
        linear: nn.Linear = nn.utils.skip_init(nn.Linear, *reversed(weight.shape), bias=bias is not None)
        linear.weight, linear.bias = weight, bias
        return linear
    if isinstance(step, nn.ReLU):
        return nn.ReLU()
    if isinstance(step, nn.ELU):
        if not 0 < step.alpha <= 1:
            raise _RefusedError(f"{called} has an alpha of {step.alpha}; up to 1 it is followed")
        return nn.ELU(step.alpha)
    assert isinstance(step, nn.LeakyReLU)
    if not 0 <= step.negative_slope <= 1:
        raise _RefusedError(f"{called} has a slope of {step.negative_slope}; from 0 to 1 it is followed")
    return nn.LeakyReLU(step.negative_slope)


def _layer_fault(layer: Any) -> str | None:
    """Say why a PyG layer is none that the proof describes; None if it is."""
    from torch_geometric.nn import GATConv, GATv2Conv
    from torch_geometric.nn.aggr import SumAggregation

    kind, slope = type(layer), layer.__dict__.get("negative_slope")
    if kind not in (GATConv, GATv2Conv):
        return f"is a {kind.__name__}; only GATConv and GATv2Conv are followed"
    if kind is GATConv and layer.lin is None:
        return "has weights of its own for destinations, as for bipartite graphs"
    if layer.res is not None:
        return "has a residual connection, which is not followed"
    if layer.edge_dim is not None:
        return "reads attributes of edges, which are not followed"
    if layer.flow != "source_to_target" or type(layer.aggr_module) is not SumAggregation:
        return "must sum messages from source to target"
    if layer.decomposed_layers != 1 or layer._explain or layer._edge_mask is not None:
        return "runs decomposed or masked"
    if not isinstance(slope, int | float) or not 0 <= slope <= 1:
        return f"has a slope of {slope}, which is not in [0, 1]: bounds of scores hold for no other"
    return _parts_fault(layer, {kind, _linear_of_pyg(), SumAggregation})


def _parts_fault(layer: Any, declared: set[type[nn.Module]]) -> str | None:
    """Say which part of a PyG layer may compute something else than its class; the clips of limits may."""
    hooked = "has a hook, which may change what it reads or returns"
    if any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks") and "_forward_" in name):
        return hooked
    maps, limits = _maps(layer), cast(nn.ModuleDict | None, layer._modules.get("limits"))
    for path, part in layer.named_modules():
        name = next((name for name, one in maps.items() if one is part), None)
        clips = name is not None and limits is not None
        if name is not None and limits is not None:
            hooks = list(part._forward_hooks.values())
            if [type(hook) for hook in hooks] != [_ClipOutput] or hooks[0].limits is not limits[name]:
                return hooked
        change = _change(part, declared, hooked=clips)
        if change is not None:
            return f"{path} {change}".strip()
    return None


def _maps(layer: Any) -> dict[str, nn.Module]:
    from fgai.attention.pyg import PYG_MAPS

    return PYG_MAPS[type(layer)](layer)


def _converted(layer: Any) -> AttentionLayer:
    """Return a PyG layer, which `_layer_fault` allows, as one of fgai's."""
    maps, heads, channels = _maps(layer), layer.heads, layer.out_channels
    value = maps["value"]
    weight = cast(Tensor, value.weight)
    additive = hasattr(layer, "att_src")
    with seeded(0, torch.device("cpu")):  # weights are drawn, and replaced
        own = AttentionLayer(
            weight.shape[1],
            channels,
            heads,
            score="additive" if additive else "dynamic",
            concat=layer.concat,
            slope=float(layer.negative_slope),
            bias=layer.bias is not None,
        ).to(weight.dtype)
    found: dict[str, Limits] = {}
    for name in ("value",) if additive else ("value", "right"):
        source = maps.get(name, value)  # a GATv2Conv may share the weights of both sides
        projection = getattr(own, name)
        projection.weight.data = cast(Tensor, source.weight).detach().t().clone()
        projection.bias = copy.deepcopy(cast(Any, source.bias))
        if layer._modules.get("limits") is not None:
            given = layer.limits[name if name in maps else "value"]
            found[name] = Limits(heads, channels).to(weight.dtype)
            size = heads, channels
            found[name].set(given.low.view(size), given.high.view(size), given.radius, given.usual)
    if additive:
        own.source_weight.data = layer.att_src.detach()[0].clone()
        own.destination_weight.data = layer.att_dst.detach()[0].clone()
    else:
        own.score_weight.data = layer.att.detach()[0].clone()
    own.bias = copy.deepcopy(layer.bias)
    if found:
        # The limits of the values bound both sides of the score.
        sides = ("source", "destination") if additive else ()
        found |= {name: Limits(heads, derived=True).to(weight.dtype) for name in sides}
        own.limits = nn.ModuleDict(found)
    return own.eval()


def same_as(model: nn.Module, chain: Chain, graph: Graph) -> bool:
    """Whether a model and its chain, both in float64, give the same attention and the same logits.

    On the graph and on one with three new nodes, whose features are usual, large and very large.
    """
    count = min(3, graph.num_nodes)
    generator = torch.Generator().manual_seed(0)
    assert graph.features is not None
    dense = graph.features.to_dense()
    new = torch.randn(3, dense.shape[1], generator=generator, dtype=dense.dtype) * dense.std(0, correction=0)
    new = dense.mean(0) + new * torch.tensor([[1.0], [30.0], [1000.0]], dtype=dense.dtype)
    ends = torch.randint(graph.num_nodes, (3, count), generator=generator)
    for given in (graph, graph.inject(ends, new)[0]):
        assert given.features is not None
        adjacency, seen = chain.adjacency(given), observe(model, given)
        if len(seen.attention) != len(chain.layers):
            return False
        out = dense
        for mine, (layer, state, after) in zip(
            seen.attention, chain.runs(given.features, adjacency), strict=True
        ):
            same_edges = mine.num_edges == adjacency.num_edges and bool((mine.keys == adjacency.keys).all())
            if not same_edges or not _near(mine.values, layer.attend(state, adjacency)[0]):
                return False
            out = after
        if not _near(seen.logits, chain.finish(out)):
            return False
    return True


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one - other).abs() <= SAME * other.abs().max()).all()) if one.numel() else True
