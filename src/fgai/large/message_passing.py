"""Exact passes of PyG models over a stored graph: one message-passing layer after another, block by block.

The model's own forward pass runs on a block of nodes and their neighbours, once for each layer: earlier
layers return outputs from files, later ones zeros. That is exact if nodes read each other in one-hop layers
only, which `_plan_of` tries on a part of the graph.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attention import (
    GraphModel,
    LayerAttention,
    call_model,
    evaluating,
    find_layers,
    limits_of,
    model_name,
    prepared,
    record,
    unwrapped,
)
from fgai.attention.interface import _layout_of, override, uncompiled
from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large.arrays import Array, _ArrayFiles, map_array
from fgai.large.blocks import _ExactPass, _measure_layer, _PassOptions
from fgai.large.sampling import NeighbourSampler, _mini_batch
from fgai.large.sort import _row_blocks
from fgai.large.stored import StoredGraph
from fgai.large.write import write_store
from fgai.progress import stage as progress
from fgai.sparse import Adjacency

NUMBERS = 1 << 26  # entries of the features, or of a layer's outputs, of a block and its neighbours
SEEDS = 6  # nodes around which a model is tried
TOLERANCE = 1e-4  # relative difference of outputs that counts as rounding
_Call = Callable[..., Any]


class _LayerRun(NamedTuple):
    name: str  # of the layer in the model
    attends: bool  # whether its attention is recorded
    width: tuple[int, ...]  # shape of its output for one node


class _Plan(NamedTuple):
    runs: list[_LayerRun]
    attention: list[str]  # names of the runs whose attention is recorded
    loops: bool  # whether these read a self-loop at every node, which the model adds


def _is_own(model: nn.Module) -> bool:
    """Whether a model is fgai's; any other is computed as a PyG model."""
    return isinstance(uncompiled(unwrapped(model)), GraphModel)


def _plan_of(model: nn.Module, stored: StoredGraph) -> _Plan:
    """Return the layers of a model in the order they run, after trying it on a part of the graph, once."""
    plans: WeakKeyDictionary[nn.Module, _Plan] = cached_on(stored, __name__, WeakKeyDictionary)
    if model not in plans:
        plans[model] = _make_plan(model, stored)
    plan, layers = plans[model], _message_passing_layers(model)
    names = [run.name for run in plan.runs]
    for name in {name for name in names if names.count(name) > 1}:
        if limits_of(layers[name]):
            text = f"layer {name!r} of {model_name(model)} runs {names.count(name)} times, limits are"
            raise InputError(f"{text} measured for one; give `limits=False`, or a layer for each run")
    return plan


def _message_passing_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers, and the other layers in which nodes read each other, by name."""
    from torch_geometric.nn import MessagePassing

    bare = unwrapped(uncompiled(model))
    layers = dict(find_layers(bare))
    for path, module in bare.named_modules():
        inside = {id(part) for layer in layers.values() for part in layer.modules()}
        around = any(layer in module.modules() for layer in layers.values())
        if isinstance(module, MessagePassing) and id(module) not in inside and not around:
            layers[path] = module
    return layers


@contextmanager
def _replace_layers(layers: dict[str, nn.Module], call: Callable[[str, _Call], Any]) -> Iterator[None]:
    """Inside the block `call(name, run)` gives the output of a layer; `run()` computes it."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing can have been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, layer in layers.items():
            original: _Call = layer.forward

            @wraps(original)  # the arguments of a model are read from its signature
            def forward(*args: Any, _name: str = name, _run: _Call = original, **kwargs: Any) -> Any:
                return call(_name, partial(_run, *args, **kwargs))

            stack.enter_context(override(layer, "forward", forward))
        yield


def _check_output(value: Any, name: str, model: nn.Module, nodes: int) -> Tensor:
    """Return the output of a layer if it is a tensor with a row per node."""
    if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != nodes:
        kind = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        text = f"layer {name!r} of {model_name(model)} must return a tensor with {nodes} rows"
        raise InputError(f"{text}, one for each node, got {kind}; leave out `return_attention_weights`")
    return value


def _make_plan(model: nn.Module, stored: StoredGraph) -> _Plan:
    """Make a plan, and compare its pass over a part of the graph with the model's own forward pass."""
    if _layout_of(model) is not None:
        raise InputError("mini-batches and stored graphs are for models of one type of nodes and edges")
    layers = _message_passing_layers(model)
    with tempfile.TemporaryDirectory(prefix="fgai-") as name, evaluating(model), torch.no_grad():
        part = prepared(model, _small_part(stored, len(layers)))
        runs: list[_LayerRun] = []
        attending = find_layers(unwrapped(uncompiled(model)))

        def note(name: str, run: _Call) -> Tensor:
            out = _check_output(run(), name, model, part.num_nodes)
            runs.append(_LayerRun(name, name in attending, tuple(out.shape[1:])))
            return out

        with _replace_layers(layers, note), record(model, ranked=False) as tape:
            logits = call_model(model, part)
        attention = tape.attention.layers
        plan = _Plan(runs, [layer.name for layer in attention], _reads_loops(model, part, attention))
        small = write_store(part.to("cpu"), Path(name) / "part")
        folder, most = Path(name) / "pass", max(1, part.num_edges // 4)
        folder.mkdir()
        _MessagePassingPass(model, small, plan).run(folder, _PassOptions(True, False, most))
        pairs = [(logits, "logits")]
        pairs += [(layer.heads()[:, None], f"attention.{number}") for number, layer in enumerate(attention)]
        for expected, file in pairs:
            error = (torch.from_numpy(np.array(map_array(folder / f"{file}.npy"))) - expected.cpu()).abs()
            if expected.numel() and not bool(error.max() <= TOLERANCE * expected.abs().max()):
                others = [f"{n} ({type(layers[n]).__name__})" for n in layers if n not in attending]
                beside = f"; beside attention it has {', '.join(others)}" if others else ""
                text = f"{model_name(model)} cannot be computed layer by layer from the neighbours of each"
                text += f" node: on a part of {stored.name!r} that gives other outputs. Nodes may read each"
                text += " other in attention and one-hop message passing alone"
                raise InputError(f"{text}{beside}; leave out `batch_size` and train on the whole graph")
    return plan


def _small_part(stored: StoredGraph, hops: int) -> Graph:
    """Return a part of the graph around a few nodes, without self-loops; no node has many neighbours."""
    rowptr = stored.rows().rowptr
    many = np.unique(np.linspace(0, stored.num_nodes - 1, 1000).astype(np.int64))
    with_edges = many[rowptr[many + 1] > rowptr[many]]
    nodes = with_edges if len(with_edges) else many
    seeds = torch.from_numpy(nodes[:: max(1, len(nodes) // SEEDS)][:SEEDS])
    sample = NeighbourSampler(stored, [max(1, 4 - hop) for hop in range(max(2, hops))]).sample(seeds)
    part = _mini_batch(stored, sample).graph
    return part.remove(part.adjacency.source == part.adjacency.destination)[0]


def _reads_loops(model: nn.Module, part: Graph, attention: tuple[Any, ...]) -> bool:
    """Whether all attention layers read the edges of a graph with a self-loop at every node."""
    looped = []
    for edges, loops in ((part.keys, False), (part.add_self_loops()[0].keys, True)):
        looped += [loops for layer in attention if torch.equal(layer.keys, edges)]
    if len(looped) != len(attention) or len(set(looped)) > 1:
        text = f"the attention layers of {model_name(model)} must all read the graph's edges"
        raise InputError(f"{text}, or all of them with a self-loop at every node (`add_self_loops=True`)")
    return looped[0]


class _MessagePassingPass(_ExactPass):
    """The pass of PyG models; if ranges of limits are measured, in the order of the layers."""

    def __init__(self, model: nn.Module, stored: StoredGraph, plan: _Plan | None = None) -> None:
        super().__init__(stored)
        plan = plan or _plan_of(model, stored)
        self._model, self._runs = model, plan.runs
        self.layers, self.loops, self.num_hops = plan.attention, plan.loops, len(plan.runs)
        self._modules = _message_passing_layers(model)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._rows = stored.rows()

    def _run(self) -> None:
        """Compute layer after layer; each reads the outputs of those before it from files."""
        widest = max(self._stored.num_features, *(int(np.prod(run.width)) for run in self._runs), 1)
        most = max(1, min(self._options.block_edges, NUMBERS // (2 * widest)))
        self._spans = self._group.share(_row_blocks(self._rows.rowptr, most))
        last = len(self._runs) - 1
        for number, run in enumerate(self._runs):
            if self._options.ranges is not None:
                layer = self._modules[run.name]
                if limits_of(layer):
                    blocks = partial(self._run_blocks, number)
                    _measure_layer(layer, blocks, self._folder, self._options.ranges, self._num_nodes)
                if number == last:
                    return
            with progress(f"layer {number + 1} of {last + 1}", self._num_nodes):
                self._write_layer(number)
            self._group.barrier()
        if not self._group.is_main:
            return
        layers = iter(range(len(self.layers)))
        for number, run in enumerate(self._runs):
            path = self._folder / f"output.{number}.npy"
            if run.attends and len(run.width) == 1:
                path.rename(self._folder / f"state.{next(layers)}.npy")
            else:
                path.unlink()

    def _run_blocks(self, number: int) -> Iterator[slice]:
        """Run a layer on all blocks; before each, yield the block's rows in its part of the graph."""
        for first, last in self._spans:
            part, nodes, own = self._part(first, last)
            yield own
            self._forward(number, part, nodes)

    def _write_layer(self, number: int) -> None:
        """Write the outputs of a layer, its attention, and after the last one the logits."""
        layer = sum(run.attends for run in self._runs[:number])
        with _ArrayFiles(self._folder) as files:
            for first, last in self._spans:
                part, nodes, own = self._part(first, last)
                out, attention, logits = self._forward(number, part, nodes)
                rows = self._node_share(first)
                files.append(f"output.{number}", out[own].cpu().numpy(), rows)
                if attention is not None:
                    for name, values in self._attention(attention, nodes, own, first, last).items():
                        files.append(f"{name}.{layer}", values.cpu().numpy(), self._edge_share(first))
                if number + 1 == len(self._runs):
                    files.append("logits", logits[own].cpu().numpy(), rows)

    def _part(self, first: int, last: int) -> tuple[Graph, Array, slice]:
        """Return a block and all sources of its edges as a graph, its nodes by number, and its own rows."""
        edges = slice(int(self._rows.rowptr[first]), int(self._rows.rowptr[last]))
        source = np.asarray(self._rows.source[edges], np.int64)
        nodes = np.union1d(source, np.arange(first, last))  # ascending: edges come in the order of the graph
        begin = int(np.searchsorted(nodes, first))
        own = slice(begin, begin + last - first)
        ends = np.repeat(np.arange(own.start, own.stop), np.diff(self._rows.rowptr[first : last + 1]))
        local = torch.from_numpy(np.searchsorted(nodes, source))
        adjacency = Adjacency.from_sorted(local, torch.from_numpy(ends), len(nodes))
        fields: dict[str, Any] = dict(self._stored.edge_fields(edges))
        part = Graph(adjacency, self._stored.features(nodes), name=self._stored.name, **fields)
        return part.to(self._device), nodes, own

    def _forward(
        self, number: int, part: Graph, nodes: Array
    ) -> tuple[Tensor, LayerAttention | None, Tensor]:
        """Run the model with one layer computing; return its output, its attention if any, and the logits."""
        runs = iter(enumerate(self._runs))
        computed: list[tuple[Tensor, LayerAttention | None]] = []

        def call(name: str, compute: _Call) -> Tensor:
            position, run = next(runs, (-1, None))
            if run is None or run.name != name:
                raise InputError(f"{model_name(self._model)} runs its layers in an order that varies")
            if position == number:
                records = run.attends and self._options.ranges is None
                tap = record(self._modules[name], ranked=self._options.ranked) if records else nullcontext()
                with tap as tape:
                    out = _check_output(compute(), name, self._model, len(nodes))
                computed.append((out, None if tape is None else tape.attention.last))
                return out
            if position < number:
                file = map_array(self._folder / f"output.{position}.npy")
                return torch.from_numpy(file.take(nodes, 0)).to(self._device)
            dtype = part.features.dtype  # type: ignore[union-attr]
            return torch.zeros(len(nodes), *run.width, dtype=dtype, device=self._device)

        with _replace_layers(self._modules, call):
            logits = call_model(self._model, part)
        return *computed[0], logits

    def _attention(
        self, layer: LayerAttention, nodes: Array, own: slice, first: int, last: int
    ) -> dict[str, Tensor]:
        """Return the attention, and the scores if asked for, of the edges into a block, by name."""
        edges = slice(int(layer.rowptr[own.start]), int(layer.rowptr[own.stop]))
        rowptr, source = self._edges
        expected = source[int(rowptr[first]) : int(rowptr[last])]
        if not np.array_equal(nodes[layer.source[edges].cpu().numpy()], expected):
            raise InputError(f"an attention layer of {model_name(self._model)} reads other edges")
        values = layer.heads()[:, None] if self._options.averaged else layer.values
        scores = {"scores": layer.ranking()[edges]} if self._options.ranked else {}
        return {"attention": values[edges], **scores}
