"""Exact passes over a stored graph in the memory of a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fgai.attention import call_model, evaluating, limits_of, measuring, model_name, observe
from fgai.graph import Graph
from fgai.large.arrays import _blocks, _write_array, map_array
from fgai.large.blocks import _forward_adjacency, _write_rows
from fgai.large.observation import StoredObservation, _write_manifest
from fgai.large.size import pass_size
from fgai.large.stored import StoredGraph
from fgai.large.streaming import _LayerPass
from fgai.large.write import _feature_blocks, _new_folder
from fgai.sparse import Features

BLOCK = 1 << 22  # edges, or rows of a result, that are in the memory of the machine together
MEMORY_SHARE = 0.5
"""Share of the free memory of a GPU that a graph and a pass over it may take; the rest is for training."""
EDGE_BYTES = 16  # memory of an edge beside its attention: both of its ends, its weight, and sums


class _GpuGraph:
    """A stored graph in the memory of a GPU, where passes take seconds."""

    def __init__(self, model: nn.Module, stored: StoredGraph, folder: Path) -> None:
        self._stored, self._loops = stored, _LayerPass(model, stored).loops
        self.device = next(model.parameters()).device
        with tempfile.TemporaryDirectory(dir=folder) as name:
            _write_rows(Path(name), stored, self._loops, BLOCK)
            self.graph = _load(Path(name), stored, self.device)

    @staticmethod
    def fits(model: nn.Module, stored: StoredGraph) -> bool:
        """Whether a model is on a GPU with room for the graph, a pass over it, and as much again."""
        device = next(model.parameters()).device
        if device.type != "cuda" or not _has_small_tensors(model, stored):
            return False
        return _needed_bytes(model, stored) <= MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]

    def matches(self, model: nn.Module) -> bool:
        """Whether another model reads the same edges on the same device."""
        loops = _LayerPass(model, self._stored).loops
        return loops == self._loops and next(model.parameters()).device == self.device

    def observe(self, model: nn.Module, path: Path, *, ranked: bool = False) -> StoredObservation:
        """Write logits and attention, heads averaged, as `observe_store` does, but no states."""
        observation = observe(model, self.graph, heads="mean", ranked=ranked)
        index = self.graph.adjacency.index32
        arrays = {"rowptr": index.rowptr.long(), "source": index.source, "logits": observation.logits}
        for number, layer in enumerate(observation.attention.layers):
            arrays[f"attention.{number}"] = layer.values
            if ranked:
                arrays[f"scores.{number}"] = layer.ranking()
        with _new_folder(path) as work:
            for name, values in arrays.items():
                blocks = (block.cpu().numpy() for block in _blocks(values, BLOCK))
                kind = values.new_zeros(0).cpu().numpy().dtype
                _write_array(work.folder / f"{name}.npy", blocks, kind, tuple(values.shape[1:]))
            layers = _LayerPass(model, self._stored).layers
            _write_manifest(work.folder, model_name(model), self._stored.fingerprint, layers)
        return StoredObservation(path)

    def measure(self, model: nn.Module, clip_share: float, shrink: float, *, sampled: bool = False) -> None:
        """Set the ranges of a model's limits from all nodes, see `_measure_store`."""
        if limits_of(model):
            ranges = measuring(model, clip_share, shrink=shrink, sampled=sampled)
            with evaluating(model), torch.no_grad(), ranges:
                call_model(model, self.graph)


def _needed_bytes(model: nn.Module, stored: StoredGraph) -> int:
    """Return the GPU memory that a stored graph and a pass over it need at most."""
    nodes, edges, width = stored.num_nodes, stored.num_edges + stored.num_nodes, stored.num_features
    peak = pass_size(model, nodes, edges, width, heads="each").peak
    return 4 * nodes * width + 2 * peak + EDGE_BYTES * edges


def _has_small_tensors(model: nn.Module, stored: StoredGraph) -> bool:
    """Whether every tensor of a pass has fewer than 2³¹ entries, as the kernels require."""
    nodes, edges = stored.num_nodes, stored.num_edges + stored.num_nodes
    layers = [stage.layer for stage in _LayerPass(model, stored).stages]
    widest = max(stored.num_features, *(layer.heads * layer.channels for layer in layers))
    return bool(max(nodes * widest, edges * max(layer.heads for layer in layers)) < 2**31)


def _load(folder: Path, stored: StoredGraph, device: torch.device) -> Graph:
    """Return the graph with the rows of a folder; dense features are copied block by block."""
    rowptr, source = (
        torch.from_numpy(np.array(map_array(folder / f"{name}.npy"), np.int32)).to(device)
        for name in ("rowptr", "source")
    )
    weight = folder / "edge_weight.npy"
    weights = torch.from_numpy(np.array(map_array(weight))).to(device) if weight.exists() else None
    if stored.array("x") is None:
        features = stored.features(slice(None))
        assert features is not None
        features = features.to(device)
    else:
        x = torch.empty(stored.num_nodes, stored.num_features, device=device)
        for first, rows in _feature_blocks(stored):
            block = rows.to_dense()
            x[first : first + len(block)] = block
        features = Features.dense(x)
    return Graph(_forward_adjacency(rowptr, source), features, name=stored.name, edge_weight=weights)
