"""`observe_store`: the exact forward pass over a stored graph, layer by layer and block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import Layerwise, Stage, adapter_of, evaluating, find_layers, model_name, unwrapped
from fgai.attention.forward import HEADS
from fgai.errors import InputError
from fgai.files import write_atomic
from fgai.graph import Graph
from fgai.models import GT
from fgai.models.base import AttentionModel
from fgai.progress import stage as progress
from fgai.sparse import Adjacency
from fgai.store import StoredGraph
from fgai.store.arrays import ArrayFile, map_array
from fgai.store.sort import row_blocks
from fgai.store.stored import Rows
from fgai.store.write import building, feature_blocks
from fgai.streaming.blocks import Block, SidesFile, attend
from fgai.streaming.result import MANIFEST, VERSION, Manifest, StoredObservation, encode
from fgai.streaming.rows import write_rows
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
) -> StoredObservation:
    """Compute logits, states and attention of all nodes of a stored graph, into files.

    The numbers are those of `fgai.attention.observe` on the same graph in memory, up to the order of
    summation; no neighbour is left out. Features are read once, from front to back, and projected; what edges
    read of their sources are the projections, gathered block by block. In memory is one block: its edges and
    the projections of its sources, and of a node with more edges than a block their scores.

    Args:
        model: fgai's GAT or GATv2 for nodes, or its GT without positional encodings; on the CPU.
        stored: the graph, with features.
        path: the new folder; it appears when it is whole.
        heads: `each`, or `mean` for the attention averaged over them.
        ranked: also write what neighbours are ranked by.
        block_edges: edges that are in memory together.

    Returns:
        The result, mapped.

    Raises:
        InputError: another model, or one that does not read this graph.
        DataError: there is something at `path` already, or the graph is damaged.
        FgaiError: the folder cannot be written, or the disk is full.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> stored, model = fgai.store.write_store(data, "planted"), fgai.GAT.for_data(data)
        >>> found = observe_store(model, stored, "seen")
        >>> found.logits.shape, found.attention(0).shape
        ((2000, 5), (17914, 8))
    """
    checks.one_of(heads, "heads", HEADS)
    checks.whole(block_edges, "block_edges", 1, 2**30)
    bare = _readable(model, stored)
    place = Path(path)
    with building(place) as work, evaluating(model), torch.no_grad():
        folder = work.folder
        stages = adapter_of(model).layerwise()
        if stages is None:
            raise InputError(
                f"{model_name(model)} cannot be computed row by row: it is hooked or tapped, is not for nodes"
                ", or mixes them elsewhere than in attention"
            )
        write_rows(folder, stored, bare.self_loops, block_edges)
        _Pass(folder, stored, stages, heads == "mean", bool(ranked), block_edges).run()
        _write_manifest(folder, model_name(model), stored.fingerprint, list(find_layers(bare)))
    return StoredObservation(place)


def _readable(model: nn.Module, stored: StoredGraph) -> AttentionModel:
    """The model without wrappers, if it reads graphs like this one without seeing them as a whole."""
    bare = unwrapped(model)
    if not isinstance(bare, AttentionModel) or any(p.device.type != "cpu" for p in bare.parameters()):
        raise InputError(f"`model` must be fgai's GAT, GATv2 or GT on the CPU, got {model_name(model)}")
    encoded = isinstance(bare, GT) and bare.encodings > 0
    if encoded or type(bare).prepare not in (AttentionModel.prepare, GT.prepare):
        raise InputError(
            f"{model_name(model)} prepares graphs as a whole, which a stored one is not read as; use GAT,"
            " GATv2, or GT with `encodings=0`"
        )
    if not stored.has_features:
        raise InputError(f"{stored.name!r} has no node features; convert it with some")
    none = torch.zeros(0, dtype=torch.long)
    fields: dict[str, Any] = dict(stored.edge_fields(slice(0, 0)))
    bare.check_graph(
        Graph(Adjacency.from_sorted(none, none, 1), stored.features(slice(0, 1)), name=stored.name, **fields)
    )
    return bare


class _Pass:
    """One pass through all layers.

    Args:
        folder: with the edges the model reads; everything is written there.
        stored: gives the features.
        stages: the model.
        averaged: average the attention over heads.
        ranked: also write scores.
        block_edges: edges of a block.
    """

    def __init__(
        self,
        folder: Path,
        stored: StoredGraph,
        stages: Layerwise,
        averaged: bool,
        ranked: bool,
        block_edges: int,
    ) -> None:
        self._folder, self._stored, self._stages = folder, stored, stages
        self._averaged, self._ranked, self._most = averaged, ranked, block_edges
        self._rows = Rows(map_array(folder / "rowptr.npy"), map_array(folder / "source.npy"))
        weight = folder / "edge_weight.npy"
        self._weight = map_array(weight) if weight.exists() else None

    def run(self) -> None:
        """Go through the layers; each is read from the sides the one before has written."""
        sides = self._enter()
        count = len(self._stages.stages)
        for number, stage in enumerate(self._stages.stages):
            after = None
            if number + 1 < count:
                after = SidesFile(self._folder, f"sides.{number + 1}", self._stages.stages[number + 1].layer)
            with progress(f"layer {number + 1} of {count}", self._stored.num_nodes):
                self._layer(number, stage, sides, after)
            sides.remove()
            sides = after or sides
        for name in ("entry", "edge_weight"):
            (self._folder / f"{name}.npy").unlink(missing_ok=True)

    def _enter(self) -> SidesFile:
        """Read the features once and write the first layer's sides, and its states where they are kept."""
        sides = SidesFile(self._folder, "sides.0", self._stages.stages[0].layer)
        with ExitStack() as stack:
            entry = None
            for _, features in feature_blocks(self._stored):
                state = self._stages.enter(features, None)
                sides.append(state)
                if self._stages.keeps_state and isinstance(state, Tensor):
                    if entry is None:
                        file = ArrayFile(self._folder / "entry.npy", state.numpy().dtype, state.shape[1:])
                        entry = stack.enter_context(file)
                    entry.append(state.numpy())
        return sides

    def _layer(self, number: int, stage: Stage, sides: SidesFile, after: SidesFile | None) -> None:
        layer, opened = stage.layer, sides.opened()
        with ExitStack() as stack:
            files: dict[str, ArrayFile] = {}

            def write(name: str, block: Tensor) -> None:
                if name not in files:
                    path = self._folder / f"{name}.npy"
                    files[name] = stack.enter_context(ArrayFile(path, block.numpy().dtype, block.shape[1:]))
                files[name].append(block.numpy())

            for block in self._blocks():
                found = attend(layer, opened, block, self._most, averaged=self._averaged, ranked=self._ranked)
                state = stage.update(self._before(number, block), layer.join(found.out))
                write(f"attention.{number}", found.attention)
                write(f"state.{number}", state)
                if found.scores is not None:
                    write(f"scores.{number}", found.scores)
                if after is not None:
                    after.append(state)
                else:
                    write("logits", self._stages.leave(state))

    def _before(self, number: int, block: Block) -> Tensor | None:
        """The states that the layer read, for models that keep them."""
        if not self._stages.keeps_state:
            return None
        name = "entry" if number == 0 else f"state.{number - 1}"
        return torch.from_numpy(np.array(map_array(self._folder / f"{name}.npy")[block.first : block.last]))

    def _blocks(self) -> Iterator[Block]:
        rowptr, source = self._rows
        for first, last in row_blocks(rowptr, self._most, self._most):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            weight = None if self._weight is None else torch.from_numpy(np.array(self._weight[edges]))
            yield Block(first, last, rowptr[first : last + 1] - rowptr[first], source[edges], weight)


def _write_manifest(folder: Path, model: str, graph: str, layers: list[str]) -> None:
    arrays = {file.stem: map_array(file) for file in sorted(folder.glob("*.npy"))}
    manifest: Manifest = {
        "format": "fgai observation",
        "version": VERSION,
        "model": model,
        "graph": graph,
        "layers": layers,
        "arrays": {
            name: {"shape": list(found.shape), "dtype": found.dtype.str} for name, found in arrays.items()
        },
    }
    write_atomic(folder / MANIFEST, encode(manifest))
