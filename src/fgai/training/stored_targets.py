"""`StoredTargets`: the vanilla model's exact answers on disk, looked up by node and edge for a mini-batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fgai.attention import LayerAttention
from fgai.graph import Graph
from fgai.store.sort import row_blocks
from fgai.streaming import StoredObservation
from fgai.topk import frozen_topk
from fgai.training.settings import FaithfulConfig
from fgai.training.targets import Targets, relative
from fgai.training.terms import contrast, sharp, spread
from fgai.training.whole import Part

BLOCK = 1 << 18
"""Edges and nodes that are in memory together."""


class StoredTargets:
    """What the vanilla model says of all nodes and edges, frozen; computed once and never from a batch.

    What terms are measured in (the spread of the logits, contrast and sharpness of each layer) is that of the
    whole graph, too.

    Args:
        found: heads averaged.
        config: which layers count, and what of them.
    """

    def __init__(self, found: StoredObservation, config: FaithfulConfig) -> None:
        self.found, self.config = found, config
        count = len(found.layers)
        self.layers = range(count) if config.layers == "all" else range(count - 1, count)
        nodes, many = 0, 0
        total, contrasts, sharpness = 0.0, [0.0] * len(self.layers), [0.0] * len(self.layers)
        for logits, rowptr, attention in self._blocks():
            rows, several = len(logits), int((rowptr.diff() >= 2).sum())
            destination = torch.repeat_interleave(torch.arange(rows), rowptr.diff())
            total += rows * float(spread(logits))
            for index, w in enumerate(attention):
                contrasts[index] += rows * contrast(w, rowptr)
                sharpness[index] += several * float(sharp(w, rowptr, destination))
            nodes, many = nodes + rows, many + several
        self.scale = total / nodes
        self.contrasts = relative([value / nodes for value in contrasts], config.contrast)
        self.sharpness = [value / max(1, many) for value in sharpness]

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Logits, row pointers and attention per layer, of blocks of rows."""
        rowptr = self.found.rows.rowptr
        for first, last in row_blocks(rowptr, BLOCK, BLOCK):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            attention = [np.array(self.found.attention(layer)[edges, 0]) for layer in self.layers]
            yield (
                torch.from_numpy(np.array(self.found.logits[first:last])),
                torch.from_numpy(np.array(rowptr[first : last + 1]) - rowptr[first]),
                [torch.from_numpy(w) for w in attention],
            )

    def of(self, part: Part) -> Targets:
        """Return the targets of a mini-batch.

        Where not all neighbours were drawn, the attention of those that were is divided by their sum: a
        softmax over them would give that.
        """
        graph, seeds, config = part.graph, part.seeds, self.config
        logits = torch.from_numpy(self.found.logits[part.nodes.numpy()]).to(graph.device)
        layers = self._attention(part)
        rowptr = graph.adjacency.rowptr
        into = int(rowptr[seeds])
        values = [layer.heads()[:into] for layer in layers]
        rowptrs = [rowptr[: seeds + 1]] * len(layers)
        return Targets(
            logits=logits[:seeds],
            classes=logits.argmax(1),
            layers=layers,
            attention=values,
            rowptrs=rowptrs,
            leaders=[frozen_topk(w, rowptrs[0], config.k2, config.scope) for w in values],
            contrasts=self.contrasts,
            sharpness=self.sharpness,
            scale=self.scale,
            depths=list(range(len(self.found.layers))),
        )

    def _attention(self, part: Part) -> tuple[LayerAttention, ...]:
        """The attention on all edges of a batch, layer by layer."""
        graph: Graph = part.graph
        adjacency = graph.adjacency
        ends = [part.nodes[end.cpu()].numpy() for end in (adjacency.source, adjacency.destination)]
        places = self.found.positions(*ends)
        layers = []
        for layer in self.layers:
            w = torch.from_numpy(self.found.attention(layer)[places, 0]).to(graph.device)
            sums = w.new_zeros(graph.num_nodes).index_add(0, adjacency.destination, w)
            w = w / sums[adjacency.destination].clamp(min=torch.finfo(w.dtype).tiny)
            layers.append(LayerAttention.on(adjacency, w[:, None], self.found.layers[layer]))
        return tuple(layers)
