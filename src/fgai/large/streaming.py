"""Exact passes over a stored graph, layer by layer and block by block: model outputs, ranges of limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import evaluating, find_layers, model_name, stages_of, unwrapped
from fgai.attention.calls import HEADS
from fgai.errors import InputError, RanksError
from fgai.graph import Graph
from fgai.large.arrays import _ArrayFiles, map_array
from fgai.large.blocks import (
    _attend,
    _Block,
    _ExactPass,
    _measure_layer,
    _PassOptions,
    _RangeOptions,
    _read_ahead,
    _Sides,
)
from fgai.large.message_passing import _is_own, _MessagePassingPass
from fgai.large.observation import StoredObservation, _write_manifest
from fgai.large.sort import _row_blocks
from fgai.large.stored import DTYPES, StoredGraph
from fgai.large.write import _feature_blocks, _new_folder
from fgai.models import AttentionModel
from fgai.processes import SINGLE, ProcessGroup
from fgai.progress import stage as progress
from fgai.sparse import Adjacency, Features
from fgai.sparse.valid import LARGEST
from fgai.typed import typed

BLOCK_EDGES = 1 << 18


@typed
def observe_store(
    model: nn.Module,
    stored: StoredGraph,
    path: Path | str,
    *,
    heads: str = "each",
    ranked: bool = False,
    block_edges: int = BLOCK_EDGES,
    group: ProcessGroup = SINGLE,
) -> StoredObservation:
    """Compute logits, states and attention of all nodes of a stored graph, into files.

    The numbers are those of `fgai.attention.observe` on the same graph in memory, up to the order of
    summation. In memory are a few blocks, and the scores of a node with more edges than a block.

    Args:
        model: fgai's GAT or GATv2 for nodes, or its GT without positional encodings, on the CPU; or a PyG
            model, on any device, whose nodes meet in message-passing layers of one hop alone.
        stored: the graph, with features.
        path: the new folder; it appears when it is complete.
        heads: `each`, or `mean` for the attention averaged over them.
        ranked: also write the scores neighbours are ranked by.
        block_edges: edges that are in memory together.
        group: processes that share the blocks, see `process_group`; all of them must see the folder. The
            numbers are those of one process, bit by bit.

    Raises:
        InputError: another model, or one that does not read this graph.
        DataError: `path` exists already, or the graph is damaged.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> stored, model = fgai.large.write_store(data, "planted"), fgai.GAT.for_data(data)
        >>> observation = observe_store(model, stored, "observation")
        >>> observation.logits.shape, observation.attention(0).shape
        ((2000, 5), (17914, 8))
    """
    checks.one_of(heads, "heads", HEADS)
    checks.whole(block_edges, "block_edges", 1, 2**30)
    exact = _exact_pass(model, stored, on_cpu=True)
    stored.verify()
    options = _PassOptions(heads == "mean", bool(ranked), block_edges, None, group)
    with ExitStack() as stack:
        own = str(stack.enter_context(_new_folder(Path(path))).folder) if group.is_main else ""
        folder = Path(group.broadcast(own))
        if not min(group.gather(folder.is_dir())):
            raise RanksError(f"all processes must see {folder}; set TMPDIR to a shared disk")
        with evaluating(model), torch.no_grad():
            exact.run(folder, options)
        if group.is_main:
            _write_manifest(folder, model_name(model), stored.fingerprint, exact.layers)
    group.barrier()
    return StoredObservation(path)


def _exact_pass(model: nn.Module, stored: StoredGraph, *, on_cpu: bool = False) -> _ExactPass:
    """Return how a model is computed on a stored graph; `InputError` if it cannot be."""
    if not _is_own(model):
        return _MessagePassingPass(model, stored)
    if on_cpu and any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise InputError(f"`model` must be fgai's GAT, GATv2 or GT on the CPU, got {model_name(model)}")
    return _LayerPass(model, stored)


def _measure_store(
    model: nn.Module,
    stored: StoredGraph,
    *,
    clip_share: float = 0.0,
    shrink: float = 0.0,
    sampled: bool = False,
    folder: Path | None = None,
    block_edges: int = BLOCK_EDGES,
) -> None:
    """Do what `fgai.attention.measuring` does around a pass in memory; `folder` is for temporary files."""
    exact = _exact_pass(model, stored, on_cpu=True)
    stored.verify()
    options = _PassOptions(True, False, block_edges, _RangeOptions(clip_share, shrink, sampled))
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        _new_folder(Path(scratch) / "pass") as work,
        evaluating(model),
        torch.no_grad(),
    ):
        exact.run(work.folder, options)


class _LayerPass(_ExactPass):
    """The pass of fgai's own models: edges read the projections, or sides, of their ends from files."""

    weighted = True

    def __init__(self, model: nn.Module, stored: StoredGraph) -> None:
        super().__init__(stored)
        bare = unwrapped(model)
        if not isinstance(bare, AttentionModel):
            raise InputError(f"`model` must be fgai's GAT, GATv2 or GT, got {model_name(model)}")
        if not bare.streams:
            remedy = "use GAT, GATv2, or GT with `encodings=0`"
            raise InputError(f"{model_name(model)} reads the whole graph, never a stored one; {remedy}")
        none = torch.zeros(0, dtype=torch.long)
        fields: dict[str, Any] = dict(stored.edge_fields(slice(0, 0)))
        one = Adjacency.from_sorted(none, none, 1)
        bare.check_graph(Graph(one, stored.features(slice(0, 1)), name=stored.name, **fields))
        with evaluating(model):
            layerwise = stages_of(model)
        if layerwise is None:
            text = f"{model_name(model)} cannot be computed row by row: it has hooks, is not for nodes, or"
            raise InputError(f"{text} mixes nodes elsewhere than in attention")
        self.layerwise, self.stages = layerwise, layerwise.stages
        self.layers, self.loops = list(find_layers(bare)), bare.self_loops
        self.num_hops = len(self.layers)

    def _run(self) -> None:
        """Compute layer after layer; each reads the sides that the one before has written."""
        weight = self._folder / "edge_weight.npy"
        self._weight = map_array(weight) if weight.exists() else None
        measures = self._options.ranges is not None
        self._write_sides(0)
        for number in range(len(self.stages)):
            if measures and number + 1 == len(self.stages):
                return
            with progress(f"layer {number + 1} of {len(self.stages)}", self._num_nodes):
                self._write_layer(number)
            self._group.barrier()
            self._remove(f"sides.{number}.*")
            if measures:
                self._write_sides(number + 1)
        for name in ("entry.npy", "edge_weight.npy"):
            self._remove(name)

    def _remove(self, pattern: str) -> None:
        for path in self._folder.glob(pattern) if self._group.is_main else ():
            path.unlink()

    def _write_sides(self, number: int) -> None:
        """Write the sides of a layer from its inputs; before that measure its limits, if asked for."""
        layer = self.stages[number].layer
        if self._options.ranges is not None:

            def run() -> Iterator[slice]:
                for _, state in self._inputs(number):
                    yield slice(None)
                    layer.sides(state)

            _measure_layer(layer, run, self._folder, self._options.ranges, self._num_nodes)
        with _ArrayFiles(self._folder) as files:
            for first, state in self._inputs(number):
                self._append_sides(files, number, state, first)
                if number == 0 and self.layerwise.keeps_state and isinstance(state, Tensor):
                    files.append("entry", state.numpy(), self._node_share(first))
        self._group.barrier()

    def _append_sides(self, files: _ArrayFiles, number: int, state: Tensor | Features, first: int) -> None:
        """Compute and write the sides of a layer for a block of rows; a side that is `values` has no file."""
        sides = self.stages[number].layer.sides(state)
        for name, side in zip(_Sides._fields, sides, strict=True):
            if side is not sides[2] or name == "values":
                files.append(f"sides.{number}.{name}", side.detach().cpu().numpy(), self._node_share(first))

    def _map_sides(self, number: int) -> _Sides:
        paths = [self._folder / f"sides.{number}.{name}.npy" for name in _Sides._fields]
        source, destination, values = (map_array(path) if path.exists() else None for path in paths)
        assert values is not None and destination is not None
        return _Sides(values if source is None else source, destination, values)

    def _inputs(self, number: int) -> Iterator[tuple[int, Tensor | Features]]:
        """Yield the inputs of a layer, features or states, in blocks with their first rows."""
        if number == 0:
            for first, features in _feature_blocks(self._stored, self._group.share):
                yield first, self.layerwise.enter(features, None)
            return
        states = map_array(self._folder / f"state.{number - 1}.npy")
        step = self._options.block_edges
        for first in range(0, len(states), step):
            yield first, torch.from_numpy(np.array(states[first : first + step]))

    def _write_layer(self, number: int) -> None:
        """Write the results of a layer, and the sides of the next one if its limits are set."""
        stage, sides = self.stages[number], self._map_sides(number)
        with _ArrayFiles(self._folder) as files:
            threads = max(1, torch.get_num_threads() // 4)  # gather beside the computation
            blocks = _read_ahead(sides, self._blocks(), self._options.block_edges, threads)
            for block, inputs in files.enter_context(closing(blocks)):
                out, attention, scores = _attend(stage.layer, sides, block, inputs, self._options)
                state = stage.update(self._state_before(number, block), stage.layer.join(out))
                nodes, edges = self._node_share(block.first), self._edge_share(block.first)
                files.append(f"state.{number}", state.numpy(), nodes)
                if self._options.ranges is not None:
                    continue
                files.append(f"attention.{number}", attention.numpy(), edges)
                if scores is not None:
                    files.append(f"scores.{number}", scores.numpy(), edges)
                if number + 1 < len(self.stages):
                    self._append_sides(files, number + 1, state, block.first)
                else:
                    files.append("logits", self.layerwise.leave(state).numpy(), nodes)

    def _state_before(self, number: int, block: _Block) -> Tensor | None:
        """Return the inputs of a layer in the rows of a block, for models that add them to its output."""
        if not self.layerwise.keeps_state:
            return None
        name = "entry" if number == 0 else f"state.{number - 1}"
        return torch.from_numpy(np.array(map_array(self._folder / f"{name}.npy")[block.first : block.last]))

    def _blocks(self) -> Iterator[_Block]:
        (rowptr, source), most = self._edges, self._options.block_edges
        for first, last in self._group.share(_row_blocks(rowptr, most)):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            weight = None if self._weight is None else torch.from_numpy(np.array(self._weight[edges]))
            yield _Block(first, last, rowptr[first : last + 1] - rowptr[first], source[edges], weight)


CONVERSION_MEMORY = 270 << 20  # bytes that a conversion needs for one block of edges or features


class GraphSize(NamedTuple):
    """Bytes of a graph, without the headers of files, a hundred bytes each."""

    disk: int  # of the folder
    conversion_disk: int  # peak while an edge list is converted, without its sources
    conversion_memory: int  # peak meanwhile
    memory: int  # as a `Graph`; kernels add 12 for each edge and 8 for each node


@typed
def graph_size(
    num_nodes: int, num_edges: int, num_features: int = 0, *, labels: bool = False, weights: bool = False
) -> GraphSize:
    """Return how many bytes a graph with dense features takes; edges include reverses of undirected ones.

    Example:
        >>> graph_size(10, 50, 4).disk, graph_size(10, 50, 4).memory
        (448, 1536)
    """
    nodes = checks.whole(num_nodes, "num_nodes", 1, LARGEST)
    edges = checks.whole(num_edges, "num_edges", 0)
    width = {name: np.dtype(kind).itemsize for name, kind in DTYPES.items()}
    of_nodes = nodes * (checks.whole(num_features, "num_features", 0) * width["x"] + labels * width["y"])
    of_edges = edges * weights * width["edge_weight"]
    pointers, ends = (nodes + 1) * width["rowptr"], edges * width["source"]
    return GraphSize(
        disk=of_nodes + pointers + ends + of_edges,
        # Spooled edges, source and destination, beside the same edges in rows.
        conversion_disk=of_nodes + pointers + 3 * ends + 2 * of_edges,
        conversion_memory=CONVERSION_MEMORY + 2 * pointers,
        # Pointers, source, destination and the order of outgoing edges are int64.
        memory=of_nodes + 2 * pointers + 3 * edges * 8 + of_edges,
    )


class PassSize(NamedTuple):
    """Bytes that `observe_store` writes, without headers of files: of the `result`, and at the `peak`."""

    result: int
    peak: int


@typed
def pass_size(
    model: nn.Module, num_nodes: int, num_edges: int, num_features: int, *, heads: str = "each"
) -> PassSize:
    """Return how many bytes `observe_store` writes for a graph without edge weights.

    The edges include self-loops that the model adds. `InputError` if it cannot be computed row by row.
    """
    checks.one_of(heads, "heads", HEADS)
    nodes, edges = checks.whole(num_nodes, "num_nodes", 1), checks.whole(num_edges, "num_edges", 0)
    checks.memory(checks.whole(num_features, "num_features", 0), 4, "num_features")
    with evaluating(model), torch.no_grad():
        plan = stages_of(model)
        if plan is None:
            raise InputError(f"`model` must be one that `observe_store` takes, got {model_name(model)}")
        device = next(model.parameters()).device
        state = plan.enter(Features.dense(torch.zeros(1, num_features, device=device)), None)
        entry = _row(state) if plan.keeps_state and isinstance(state, Tensor) else 0
        sides, states = [], []
        for stage in plan.stages:
            projections = stage.layer.sides(state)
            sides.append(sum({id(side): _row(side) for side in projections}.values()))
            before = state if plan.keeps_state and isinstance(state, Tensor) else None
            state = after = stage.update(before, stage.layer.join(projections[2]))
            states.append(_row(after))
        states[-1] += _row(plan.leave(after))
    result = peak = 8 * (nodes + 1) + 4 * edges
    for number, stage in enumerate(plan.stages):
        result += nodes * states[number] + 4 * edges * (1 if heads == "mean" else stage.layer.heads)
        own_and_next = sum(sides[number : number + 2])
        peak = max(peak, result + nodes * (entry + own_and_next))
    return PassSize(result, peak)


def _row(block: Tensor) -> int:
    return block[0].numel() * block.element_size()
