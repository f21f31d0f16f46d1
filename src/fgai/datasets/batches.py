"""`batched`: from a list of small graphs to one block-diagonal graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fgai.datasets.splits import Split
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.fields import VALUES, refuse_edge_types
from fgai.typed import typed


@typed
def batched(
    graphs: Sequence[Any],
    y: Tensor | Sequence[int] | None = None,
    *,
    split: Split | None = None,
    name: str = "graphs",
) -> Graph:
    """Put small graphs side by side into one graph with `batch`, `graph_y` and masks constant in each.

    Args:
        graphs: PyG `Data` objects, fgai's graphs, or anything with `edge_index`, `num_nodes` and `x` [n, F].
            `edge_attr` and `edge_weight` are kept where all have them.
        y: [G] classes of the graphs; None reads each graph's own `y` of one entry, where all have one.
        split: masks over the graphs, e.g. of `fold_split`.
        name: for messages and records.

    Raises:
        InputError: no graphs, features of different widths, or values on the edges of some graphs alone.

    Example:
        >>> pair = Graph.from_edges(torch.tensor([[0, 1], [1, 0]]), 2, torch.ones(2, 3))
        >>> both = batched([pair, pair], y=[0, 1])
        >>> both.num_nodes, both.num_graphs, both.batch.tolist()
        (4, 2, [0, 0, 1, 1])
    """
    if not len(graphs):
        raise InputError("`graphs` must hold at least one graph, got none")
    for graph in graphs:
        if not isinstance(getattr(graph, "edge_index", None), Tensor) or graph.num_nodes is None:
            raise InputError(f"`graphs` must hold graphs with edges and nodes, got {type(graph).__name__}")
        refuse_edge_types(graph)
    features, sizes = [_features(graph) for graph in graphs], [int(graph.num_nodes) for graph in graphs]
    starts = [0, *accumulate(sizes)]
    edges = [graph.edge_index + start for graph, start in zip(graphs, starts, strict=False)]
    widths = sorted({x.shape[1] for x in features})
    if len(widths) > 1:
        raise InputError(f"`graphs` must have features of one width, got {widths}")
    labels = _labels(graphs) if y is None else torch.as_tensor(y, dtype=torch.long)
    if labels is not None and labels.numel() != len(graphs):
        raise InputError(f"`y` must have one entry per graph ({len(graphs)}), got {labels.numel()}")
    batch = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes))
    masks = {} if split is None else {f"{part}_mask": mask[batch] for part, mask in split._asdict().items()}
    fields = {"batch": batch, "graph_y": labels, **masks, **_edge_values(graphs)}
    return Graph.from_edges(torch.cat(edges, dim=1), starts[-1], torch.cat(features), name=name, **fields)


def _edge_values(graphs: Sequence[Any]) -> dict[str, Tensor]:
    joined = {}
    for name in VALUES:
        found = [value for graph in graphs if (value := getattr(graph, name, None)) is not None]
        if found and (len(found) < len(graphs) or len({value.shape[1:] for value in found}) > 1):
            raise InputError(f"all graphs or none must have `{name}`, of one width; {len(found)} have some")
        if found:
            joined[name] = torch.cat(found)
    return joined


def _features(graph: Any) -> Tensor:
    own = graph.features.to_dense() if isinstance(graph, Graph) and graph.features else None
    found = getattr(graph, "x", None) if own is None else own
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise InputError(
            "every small graph needs node features `x` [n, F]; give constant ones if it has none"
        )
    return found.float()


def _labels(graphs: Sequence[Any]) -> Tensor | None:
    found = [getattr(graph, "y", None) for graph in graphs]
    if any(not isinstance(label, Tensor) or label.numel() != 1 for label in found):
        return None
    return torch.stack([label.flatten()[0].long() for label in found])  # type: ignore[union-attr]
