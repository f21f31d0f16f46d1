"""`link_split`: from a graph to a link prediction task on it."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.datasets.splits import _check_shares, _cut, _generator
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.links import Links
from fgai.sparse import edge_keys
from fgai.tasks import negative_pairs
from fgai.typed import typed


@typed
def link_split(
    graph: Graph,
    seed: int = 0,
    *,
    train: float = 0.85,
    val: float = 0.05,
    generator: torch.Generator | None = None,
) -> Graph:
    """Hide some links of an undirected graph and ask for them: by default 85 / 5 / 10 % of the links.

    The result keeps the edges known at test time, those of training and validation links; while training,
    validation links are taken out as well (see `fgai.tasks.LinkTask`). For validation and test, as many pairs
    that are joined nowhere in the graph are drawn beside the links; for training they are drawn every epoch.
    Labels and masks of nodes are dropped, self-loops are no links.

    Args:
        graph: with edges in both directions, as `fgai.load_dataset` returns it.
        seed: draws the parts and the pairs.
        train: share of the links for training.
        val: share for validation; the rest is for test.
        generator: used instead of `seed` when given.

    Returns:
        The graph with `links`.

    Raises:
        InputError: the shares are not positive or leave nothing for test, the graph has too few links, or an
            edge has no reverse.

    Example:
        >>> from fgai.datasets import planted
        >>> graph = link_split(planted(), seed=1)
        >>> links = graph.links
        >>> [int(links.rows(part).numel()) for part in ("train", "val", "test")]
        [6763, 796, 1592]
    """
    _check_shares(train, val)
    source = _generator(seed, generator)
    graph = graph.to("cpu")
    one, two = graph.adjacency.source, graph.adjacency.destination
    once = one < two
    if 2 * int(once.sum()) + int((one == two).sum()) != graph.num_edges or not _symmetric(graph):
        raise InputError(f"{graph.name!r} has edges without a reverse; links are undirected")
    pairs = torch.stack([one[once], two[once]])
    parts = _cut(torch.randperm(pairs.shape[1], generator=source), train, val)
    if not all(part.numel() for part in parts):
        raise InputError(f"{pairs.shape[1]} links are too few to split {train} / {val} / rest")
    hidden = parts[1].numel() + parts[2].numel()
    others = negative_pairs(graph, hidden, source)
    y, part, ends = [], [], []
    cut = parts[1].numel()
    for index, (links, fill) in enumerate(
        zip(parts, (others[:, :0], others[:, :cut], others[:, cut:]), strict=True)
    ):
        ends += [pairs[:, links], fill]
        y += [torch.ones(links.numel(), dtype=torch.long), torch.zeros(fill.shape[1], dtype=torch.long)]
        part.append(torch.full((links.numel() + fill.shape[1],), index))
    held = pairs[:, parts[2]]
    known = graph.remove(_positions(graph, torch.cat([held, held.flip(0)], dim=1)))[0]
    return known.replace(
        links=Links(torch.cat(ends, dim=1), torch.cat(y), torch.cat(part)),
        y=None,
        train_mask=None,
        val_mask=None,
        test_mask=None,
        positional=None,
        positional_values=None,
    )


def _positions(graph: Graph, edges: Tensor) -> Tensor:
    return torch.searchsorted(graph.keys, edge_keys(edges[0], edges[1]))


def _symmetric(graph: Graph) -> bool:
    turned = edge_keys(graph.adjacency.destination, graph.adjacency.source).sort().values
    return bool(torch.equal(turned, graph.keys))
