"""`_Resident`: a stored graph in the memory of a GPU that has room for it, and exact passes over it there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attention import call_model, evaluating, find_layers, limits_of, measuring, model_name, observe
from fgai.graph import Graph
from fgai.large.arrays import _write_array, map_array
from fgai.large.blocks import _write_rows
from fgai.large.observation import StoredObservation, _write_manifest
from fgai.large.size import pass_size
from fgai.large.stored import StoredGraph
from fgai.large.streaming import _readable
from fgai.large.write import _building, _feature_blocks
from fgai.sparse import Adjacency, Features
from fgai.sparse.adjacency import Index32

BLOCK = 1 << 22  # edges, or rows of a result, that are in the memory of the machine together
ROOM = 0.5
"""Share of the free memory of a GPU that a graph and a pass over it may take; the rest is for training."""
EDGE = 16  # bytes that an edge takes beside its attention: both of its ends, its weight, and room to sum in


class _Resident:
    """A stored graph on a GPU: does what `observe_store` and `measure_store` do from disk, in seconds."""

    def __init__(self, model: nn.Module, stored: StoredGraph, folder: Path) -> None:
        self._stored = stored
        self._loops = _readable(model, stored, anywhere=True)[0].self_loops
        self.device = next(model.parameters()).device
        with tempfile.TemporaryDirectory(dir=folder) as name:
            _write_rows(Path(name), stored, self._loops, BLOCK)
            self.graph = _loaded(Path(name), stored, self.device)

    @staticmethod
    def fits(model: nn.Module, stored: StoredGraph) -> bool:
        """Whether a model is on a GPU with room for the graph, a pass over it, and as much again."""
        device = next(model.parameters()).device
        if device.type != "cuda" or not _countable(model, stored):
            return False
        return _needed(model, stored) <= ROOM * torch.cuda.mem_get_info(device)[0]

    def serves(self, model: nn.Module) -> bool:
        """Whether another model reads the same edges on the same device."""
        loops = _readable(model, self._stored, anywhere=True)[0].self_loops
        return loops == self._loops and next(model.parameters()).device == self.device

    def observe(self, model: nn.Module, path: Path, *, ranked: bool = False) -> StoredObservation:
        """Write logits and attention, heads averaged, as `observe_store` does, but no states."""
        observation = observe(model, self.graph, heads="mean", ranked=ranked)
        with _building(path) as work:
            index = self.graph.adjacency.index32
            arrays = {"rowptr": index.rowptr.long(), "source": index.source, "logits": observation.logits}
            for number, layer in enumerate(observation.attention.layers):
                arrays[f"attention.{number}"] = layer.values
                if ranked:
                    arrays[f"scores.{number}"] = layer.ranking()
            for name, values in arrays.items():
                _write(work.folder / f"{name}.npy", values)
            layers = list(find_layers(_readable(model, self._stored, anywhere=True)[0]))
            _write_manifest(work.folder, model_name(model), self._stored.fingerprint, layers)
        return StoredObservation(path)

    def measure(self, model: nn.Module, clip_share: float, shrink: float, *, sampled: bool = False) -> int:
        """Take the ranges of a model's limits from all nodes, see `measure_store`; return how many it has."""
        limits = limits_of(model)
        if limits:
            with (
                evaluating(model),
                torch.no_grad(),
                measuring(model, clip_share, shrink=shrink, sampled=sampled),
            ):
                call_model(model, self.graph)
        return len(limits)


def _needed(model: nn.Module, stored: StoredGraph) -> int:
    """Bytes on the device of a stored graph and a pass over it, on the safe side."""
    nodes, edges, width = stored.num_nodes, stored.num_edges + stored.num_nodes, stored.num_features
    running = pass_size(model, nodes, edges, width, heads="each").running
    return 4 * nodes * width + 2 * running + EDGE * edges


def _countable(model: nn.Module, stored: StoredGraph) -> bool:
    """Whether 32 bits number all entries of every tensor of a pass, as the kernels count them."""
    nodes, edges = stored.num_nodes, stored.num_edges + stored.num_nodes
    layers = [stage.layer for stage in _readable(model, stored, anywhere=True)[1].stages]
    widest = max(stored.num_features, *(layer.heads * layer.channels for layer in layers))
    return bool(max(nodes * widest, edges * max(layer.heads for layer in layers)) < 2**31)


def _loaded(folder: Path, stored: StoredGraph, device: torch.device) -> Graph:
    """The graph with the rows of a folder; dense features pass the machine's memory block by block."""
    rowptr, source = (
        torch.from_numpy(np.array(map_array(folder / f"{name}.npy"), np.int32)).to(device)
        for name in ("rowptr", "source")
    )
    nodes = torch.arange(stored.num_nodes, dtype=torch.int32, device=device)
    destination = torch.repeat_interleave(nodes, rowptr.diff(), output_size=len(source))
    none = torch.zeros(0, dtype=torch.int32, device=device)  # nothing runs backward here
    adjacency = Adjacency.from_index32(stored.num_nodes, Index32(rowptr, source, none, none, destination))
    weight = folder / "edge_weight.npy"
    weights = torch.from_numpy(np.array(map_array(weight))).to(device) if weight.exists() else None
    return Graph(adjacency, _features(stored, device), name=stored.name, edge_weight=weights)


def _features(stored: StoredGraph, device: torch.device) -> Features:
    if stored.array("x") is None:
        features = stored.features(slice(None))
        assert features is not None
        return features.to(device)
    x = torch.empty(stored.num_nodes, stored.num_features, device=device)
    for first, features in _feature_blocks(stored):
        block = features.to_dense()
        x[first : first + len(block)] = block
    return Features.dense(x)


def _write(path: Path, values: Tensor) -> None:
    blocks = (values[first : first + BLOCK].cpu().numpy() for first in range(0, max(1, len(values)), BLOCK))
    kind = values.new_zeros(0).cpu().numpy().dtype
    _write_array(path, blocks, kind, tuple(values.shape[1:]))
