"""Exact passes over a stored graph, layer by layer and block by block: model outputs, ranges of limits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import (
    Layerwise,
    Stage,
    adapter_of,
    evaluating,
    find_layers,
    model_name,
    unwrapped,
)
from fgai.attention.calls import HEADS
from fgai.errors import InputError, RanksError
from fgai.graph import Graph
from fgai.large.arrays import _ArrayFiles, map_array
from fgai.large.blocks import _attend, _Block, _BlockPass, _PassOptions, _read_ahead, _SidesFile, _write_rows
from fgai.large.message_passing import _is_own, _MessagePassingPass, _plan_of
from fgai.large.observation import StoredObservation, _write_manifest
from fgai.large.ranges import _LeftOut, _measure_layer
from fgai.large.sort import _row_blocks
from fgai.large.stored import StoredGraph
from fgai.large.write import _building, _feature_blocks
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
    ranks: ProcessGroup = SINGLE,
) -> StoredObservation:
    """Compute logits, states and attention of all nodes of a stored graph, into files.

    The numbers are those of `fgai.attention.observe` on the same graph in memory, up to the order of
    summation. Features are read once, from front to back, and projected; edges read the projections of their
    sources, gathered block by block. In memory are the blocks being computed and gathered, and the scores of
    a node with more edges than a block.

    A PyG model is computed by its own forward pass on one block of nodes after another, for each of its
    message-passing layers in turn: the layers before it give the outputs they gave for these nodes.

    Args:
        model: fgai's GAT or GATv2 for nodes, or its GT without positional encodings, on the CPU; or a PyG
            model, on any device, whose nodes meet in message-passing layers of one hop alone.
        stored: the graph, with features.
        path: the new folder; it appears when it is whole.
        heads: `each`, or `mean` for the attention averaged over them.
        ranked: also write the scores neighbours are ranked by.
        block_edges: edges that are in memory together.
        ranks: processes that share the blocks; all of them must see the folder. The numbers are those of one
            process, bit by bit.

    Raises:
        InputError: another model, or one that does not read this graph.
        AttentionError: a PyG model without attention that can be recorded.
        RanksError: a rank does not see the folder, or one failed.
        DataError: there is something at `path` already, or the graph is damaged.
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
    plan = _exact_pass(model, stored)
    stored.verify()
    options = _PassOptions(heads == "mean", bool(ranked), block_edges, None, ranks)
    with _shared_folder(Path(path), ranks) as folder, evaluating(model), torch.no_grad():
        if ranks.leads:
            _write_rows(folder, stored, plan.loops, block_edges, weighted=plan.weighted)
        ranks.wait()
        plan.run(folder, options)
        if ranks.leads:
            _write_manifest(folder, model_name(model), stored.fingerprint, plan.layers)
    return StoredObservation(path)


class _ExactPass(NamedTuple):
    """How a model is computed on a stored graph."""

    layers: list[str]  # names of its attention layers, in the order they run
    loops: bool  # whether it reads a self-loop at every node
    weighted: bool  # whether the softmax reads the weights of edges
    run: Callable[[Path, _PassOptions], None]


def _exact_pass(model: nn.Module, stored: StoredGraph, *, anywhere: bool = False) -> _ExactPass:
    """Return how a model is computed, after checking that it can be; fgai's own on the CPU, or `anywhere`."""
    if _is_own(model):
        bare, stages = _readable(model, stored, anywhere=anywhere)
        layers = list(find_layers(bare))
        return _ExactPass(layers, bare.self_loops, True, lambda *how: _LayerPass(stored, stages, *how).run())
    plan = _plan_of(model, stored)
    return _ExactPass(
        plan.attention,
        plan.loops,
        False,
        lambda *how: _MessagePassingPass(stored, model, plan, *how).run(),
    )


@contextmanager
def _shared_folder(path: Path, ranks: ProcessGroup) -> Iterator[Path]:
    """Give all ranks the folder that the first one builds; it is moved to `path` at the end."""
    with ExitStack() as stack:
        own = str(stack.enter_context(_building(path)).folder) if ranks.leads else ""
        folder = Path(ranks.first(own))
        if not min(ranks.gather(folder.is_dir())):
            raise RanksError(f"all processes must see {folder}; set TMPDIR to a shared disk")
        yield folder
    ranks.wait()


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
    """Take the ranges of a model's limits from all nodes of a stored graph; in place.

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
    plan = _exact_pass(model, stored)
    stored.verify()
    options = _PassOptions(True, False, block_edges, _LeftOut(clip_share, shrink, sampled))
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        _building(Path(scratch) / "pass") as work,
        evaluating(model),
        torch.no_grad(),
    ):
        _write_rows(work.folder, stored, plan.loops, block_edges, weighted=plan.weighted)
        plan.run(work.folder, options)


@typed
def check_streamed(model: nn.Module, stored: StoredGraph) -> None:
    """Raise `InputError` unless a model, on any device, can be computed on a stored graph block by block.

    A PyG model is tried on a small part of the graph, once: its outputs from one-hop neighbourhoods, layer by
    layer, must be those of its own forward pass.
    """
    _exact_pass(model, stored, anywhere=True)


def _reads_loops(model: nn.Module, stored: StoredGraph) -> bool:
    """Whether the attention layers of a model read a self-loop at every node."""
    return _exact_pass(model, stored, anywhere=True).loops


def _hops_of(model: nn.Module, stored: StoredGraph) -> int:
    """Return over how many hops a model reads neighbours: the length of `fan_out`."""
    if _is_own(model):
        return len(find_layers(unwrapped(model)))
    return len(_plan_of(model, stored).runs)


def _readable(
    model: nn.Module, stored: StoredGraph, *, anywhere: bool = False
) -> tuple[AttentionModel, Layerwise]:
    """The model without wrappers and its stages, if it reads such graphs without seeing them as a whole."""
    bare = unwrapped(model)
    away = not anywhere and any(p.device.type != "cpu" for p in model.parameters())
    if not isinstance(bare, AttentionModel) or away:
        raise InputError(f"`model` must be fgai's GAT, GATv2 or GT on the CPU, got {model_name(model)}")
    if not bare.streams:
        raise InputError(
            f"{model_name(model)} reads the whole graph, so it does not take a stored one; use GAT,"
            " GATv2, or GT with `encodings=0`"
        )
    if not stored.has_features:
        raise InputError(f"{stored.name!r} has no node features; convert it with some")
    none = torch.zeros(0, dtype=torch.long)
    fields: dict[str, Any] = dict(stored.edge_fields(slice(0, 0)))
    bare.check_graph(
        Graph(Adjacency.from_sorted(none, none, 1), stored.features(slice(0, 1)), name=stored.name, **fields)
    )
    with evaluating(model):
        stages = adapter_of(model).layerwise()
    if stages is None:
        raise InputError(
            f"{model_name(model)} cannot be computed row by row: it has hooks, is not for nodes, or mixes"
            " nodes elsewhere than in attention"
        )
    return bare, stages


class _LayerPass(_BlockPass):
    """The pass of fgai's own models: edges read the projections, or sides, of their ends from files."""

    def __init__(self, stored: StoredGraph, stages: Layerwise, folder: Path, options: _PassOptions) -> None:
        super().__init__(folder, stored, options)
        self._stages = stages
        weight = folder / "edge_weight.npy"
        self._weight = map_array(weight) if weight.exists() else None

    def run(self) -> None:
        """Compute layer after layer; each reads the sides that the one before has written."""
        stages = self._stages.stages
        sides = self._sides(0)
        for number, stage in enumerate(stages):
            last = number + 1 == len(stages)
            if last and self._left_out is not None:
                return
            after = None
            if not last and self._left_out is None:  # else its limits must be known first
                after = self._new_sides(number + 1)
            with progress(f"layer {number + 1} of {len(stages)}", self._stored.num_nodes):
                self._layer(number, stage, sides, after)
            self._ranks.wait()
            if self._ranks.leads:
                sides.remove()
            if not last:
                sides = after or self._sides(number + 1)
        for name in ("entry", "edge_weight") if self._ranks.leads else ():
            (self._folder / f"{name}.npy").unlink(missing_ok=True)

    def _new_sides(self, number: int) -> _SidesFile:
        rows = self._stored.num_nodes if self._ranks.several else None
        return _SidesFile(self._folder, f"sides.{number}", self._stages.stages[number].layer, rows)

    def _sides(self, number: int) -> _SidesFile:
        """Write the sides of a layer; before that its limits are measured, if this pass is for them."""
        layer = self._stages.stages[number].layer
        if self._left_out is not None:

            def run() -> Iterator[slice]:
                for _, state in self._inputs(number):
                    yield slice(None)
                    layer.sides(state)

            _measure_layer(layer, run, self._folder, self._left_out, self._stored.num_nodes)
        sides = self._new_sides(number)
        with _ArrayFiles(self._folder) as files:
            for first, state in self._inputs(number):
                sides.append(state, first)
                if number == 0 and self._stages.keeps_state and isinstance(state, Tensor):
                    files.append("entry", state.numpy(), self._share(first, self._stored.num_nodes))
        sides.close()
        self._ranks.wait()
        return sides

    def _inputs(self, number: int) -> Iterator[tuple[int, Tensor | Features]]:
        """The inputs of a layer, block by block with their first rows: features, or states."""
        if number == 0:
            for first, features in _feature_blocks(self._stored, self._ranks.share):
                yield first, self._stages.enter(features, None)
            return
        states = map_array(self._folder / f"state.{number - 1}.npy")
        step = self._options.block_edges
        for first in range(0, len(states), step):
            yield first, torch.from_numpy(np.array(states[first : first + step]))

    def _layer(self, number: int, stage: Stage, sides: _SidesFile, after: _SidesFile | None) -> None:
        layer, opened = stage.layer, sides.opened()
        with _ArrayFiles(self._folder) as files:
            threads = max(1, torch.get_num_threads() // 4)  # gather beside the computation
            blocks = _read_ahead(opened, self._blocks(), self._options.block_edges, threads)
            for block, inputs in files.enter_context(closing(blocks)):
                out, attention, scores = _attend(layer, opened, block, inputs, self._options)
                state = stage.update(self._before(number, block), layer.join(out))
                nodes = self._share(block.first, self._stored.num_nodes)
                edges = self._share(int(self._edges.rowptr[block.first]), len(self._edges.source))
                files.append(f"state.{number}", state.numpy(), nodes)
                if self._left_out is None:
                    files.append(f"attention.{number}", attention.numpy(), edges)
                if scores is not None:
                    files.append(f"scores.{number}", scores.numpy(), edges)
                if after is not None:
                    after.append(state, block.first)
                elif number + 1 == len(self._stages.stages):
                    files.append("logits", self._stages.leave(state).numpy(), nodes)
            if after is not None:
                after.close()

    def _before(self, number: int, block: _Block) -> Tensor | None:
        """The states that the layer read, for models that keep them."""
        if not self._stages.keeps_state:
            return None
        name = "entry" if number == 0 else f"state.{number - 1}"
        return torch.from_numpy(np.array(map_array(self._folder / f"{name}.npy")[block.first : block.last]))

    def _blocks(self) -> Iterator[_Block]:
        (rowptr, source), most = self._edges, self._options.block_edges
        for first, last in self._ranks.share(list(_row_blocks(rowptr, most, most))):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            weight = None if self._weight is None else torch.from_numpy(np.array(self._weight[edges]))
            yield _Block(first, last, rowptr[first : last + 1] - rowptr[first], source[edges], weight)
