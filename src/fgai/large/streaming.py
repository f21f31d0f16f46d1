"""Exact passes over a stored graph, layer by layer and block by block: model outputs, ranges of limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import Stage, evaluating, find_layers, model_name, stages_of, unwrapped
from fgai.attention.calls import HEADS
from fgai.errors import InputError, RanksError
from fgai.graph import Graph
from fgai.large.arrays import _ArrayFiles, map_array
from fgai.large.blocks import _attend, _Block, _ExactPass, _PassOptions, _read_ahead, _SidesFile
from fgai.large.message_passing import _is_own, _MessagePassingPass
from fgai.large.observation import StoredObservation, _write_manifest
from fgai.large.ranges import _measure_layer, _RangeOptions
from fgai.large.sort import _row_blocks
from fgai.large.stored import StoredGraph
from fgai.large.write import _feature_blocks, _new_folder
from fgai.models import AttentionModel
from fgai.processes import SINGLE, ProcessGroup
from fgai.progress import stage as progress
from fgai.sparse import Adjacency, Features
from fgai.typed import typed


@typed
def observe_store(
    model: nn.Module,
    stored: StoredGraph,
    path: Path | str,
    *,
    heads: str = "each",
    ranked: bool = False,
    block_edges: int = 1 << 18,
    group: ProcessGroup = SINGLE,
) -> StoredObservation:
    """Compute logits, states and attention of all nodes of a stored graph, into files.

    The numbers are those of `fgai.attention.observe` on the same graph in memory, up to the order of
    summation. Features are read once, from front to back, and projected; edges read the projections of their
    sources, block by block. In memory are a few blocks, and the scores of a node with more edges than a
    block.

    A PyG model is computed by its own forward pass on one block of nodes after another, for each of its
    message-passing layers in turn; the layers before it return their outputs from files.

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
        AttentionError: a PyG model without attention that can be recorded.
        RanksError: a rank does not see the folder, or one failed.
        DataError: `path` exists already, or the graph is damaged.
        FgaiError: the folder cannot be written, or the disk is full.

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
    """Return how a model is computed on a stored graph, after checking that it can be.

    A PyG model is tried on a small part of the graph, once: its outputs from one-hop neighbourhoods, layer by
    layer, must be those of its own forward pass. Passes of fgai's own models read files `on_cpu` alone.

    Raises:
        InputError: it cannot.
    """
    if not _is_own(model):
        return _MessagePassingPass(model, stored)
    if on_cpu and any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise InputError(f"`model` must be fgai's GAT, GATv2 or GT on the CPU, got {model_name(model)}")
    return _LayerPass(model, stored)


@typed
def measure_store(
    model: nn.Module,
    stored: StoredGraph,
    *,
    clip_share: float = 0.0,
    shrink: float = 0.0,
    sampled: bool = False,
    folder: Path | str | None = None,
    block_edges: int = 1 << 18,
) -> None:
    """Set the ranges of a model's limits from all nodes of a stored graph, in place.

    They are those of `fgai.attention.measuring` around a pass in memory, up to the order of summation.

    Args:
        model: with limits; otherwise as of `observe_store`.
        stored: the graph, with features.
        clip_share: share of the nodes left out at either end of each channel.
        shrink: share of the nodes, those of largest norm, that are shrunk to the norm of the rest.
        sampled: take order statistics from at most a few thousand nodes, evenly spread.
        folder: for intermediate files; that of temporary files by default.
        block_edges: edges that are in memory together.

    Raises:
        InputError: another model, or one that does not read this graph.
        AttentionError: a PyG model without attention that can be recorded.
        FgaiError: the disk is full.
    """
    checks.whole(block_edges, "block_edges", 1, 2**30)
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
            raise InputError(
                f"{model_name(model)} reads the whole graph, so it does not take a stored one; use GAT,"
                " GATv2, or GT with `encodings=0`"
            )
        if not stored.has_features:
            raise InputError(f"{stored.name!r} has no node features; convert it with some")
        none = torch.zeros(0, dtype=torch.long)
        fields: dict[str, Any] = dict(stored.edge_fields(slice(0, 0)))
        one = Adjacency.from_sorted(none, none, 1)
        bare.check_graph(Graph(one, stored.features(slice(0, 1)), name=stored.name, **fields))
        with evaluating(model):
            layerwise = stages_of(model)
        if layerwise is None:
            raise InputError(
                f"{model_name(model)} cannot be computed row by row: it has hooks, is not for nodes, or mixes"
                " nodes elsewhere than in attention"
            )
        self.layerwise, self.stages = layerwise, layerwise.stages
        self.layers, self.loops = list(find_layers(bare)), bare.self_loops
        self.num_hops = len(self.layers)

    def _run(self) -> None:
        """Compute layer after layer; each reads the sides that the one before has written."""
        weight = self._folder / "edge_weight.npy"
        self._weight = map_array(weight) if weight.exists() else None
        sides = self._sides(0)
        for number, stage in enumerate(self.stages):
            is_last = number + 1 == len(self.stages)
            if is_last and self._options.ranges is not None:
                return
            next_sides = None
            if not is_last and self._options.ranges is None:  # else its limits must be known first
                next_sides = self._new_sides(number + 1)
            with progress(f"layer {number + 1} of {len(self.stages)}", self._stored.num_nodes):
                self._layer(number, stage, sides, next_sides)
            self._group.barrier()
            if self._group.is_main:
                sides.remove()
            if not is_last:
                sides = next_sides or self._sides(number + 1)
        for name in ("entry", "edge_weight") if self._group.is_main else ():
            (self._folder / f"{name}.npy").unlink(missing_ok=True)

    def _new_sides(self, number: int) -> _SidesFile:
        rows = self._stored.num_nodes if self._group.is_distributed else None
        return _SidesFile(self._folder, f"sides.{number}", self.stages[number].layer, rows)

    def _sides(self, number: int) -> _SidesFile:
        """Write the sides of a layer; before that measure its limits, if this pass is for them."""
        layer = self.stages[number].layer
        if self._options.ranges is not None:

            def run() -> Iterator[slice]:
                for _, state in self._inputs(number):
                    yield slice(None)
                    layer.sides(state)

            _measure_layer(layer, run, self._folder, self._options.ranges, self._stored.num_nodes)
        sides = self._new_sides(number)
        with _ArrayFiles(self._folder) as files:
            for first, state in self._inputs(number):
                sides.append(state, first)
                if number == 0 and self.layerwise.keeps_state and isinstance(state, Tensor):
                    files.append("entry", state.numpy(), self._share(first, self._stored.num_nodes))
        sides.close()
        self._group.barrier()
        return sides

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

    def _layer(self, number: int, stage: Stage, sides: _SidesFile, next_sides: _SidesFile | None) -> None:
        """Write the results of a layer, and the sides of the next one."""
        layer, mapped = stage.layer, sides.map()
        with _ArrayFiles(self._folder) as files:
            threads = max(1, torch.get_num_threads() // 4)  # gather beside the computation
            blocks = _read_ahead(mapped, self._blocks(), self._options.block_edges, threads)
            for block, inputs in files.enter_context(closing(blocks)):
                out, attention, scores = _attend(layer, mapped, block, inputs, self._options)
                state = stage.update(self._state_before(number, block), layer.join(out))
                nodes = self._share(block.first, self._stored.num_nodes)
                edges = self._share(int(self._edges.rowptr[block.first]), len(self._edges.source))
                files.append(f"state.{number}", state.numpy(), nodes)
                if self._options.ranges is None:
                    files.append(f"attention.{number}", attention.numpy(), edges)
                if scores is not None:
                    files.append(f"scores.{number}", scores.numpy(), edges)
                if next_sides is not None:
                    next_sides.append(state, block.first)
                elif number + 1 == len(self.stages):
                    files.append("logits", self.layerwise.leave(state).numpy(), nodes)
            if next_sides is not None:
                next_sides.close()

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
