"""Link prediction: a row of logits for every pair of nodes in `graph.links`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fgai.checks import edge_index, one_of, whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.change import both_ways
from fgai.graph.fields import Links
from fgai.sparse import edge_keys, key_ends
from fgai.tasks.base import Task
from fgai.typed import typed

DECODERS = ("dot", "cosine")
SHARPNESS = 10.0  # factor of the cosine of two embeddings, so that scores reach both sides of certainty
EMBEDDING = 64  # width of the embeddings of a model for links


class LinkTask(Task):
    """Pairs of nodes are classified into links and others.

    The edges of a graph with links are those known at test time: training and validation links. While
    validation links are still predicted (training, choice of settings) messages pass along training links
    only. Other pairs than links are drawn anew every epoch; those of validation and test are fixed.
    """

    name: ClassVar[str] = "link"
    rows_are: ClassVar[str] = "links"
    scores: ClassVar[Mapping[str, str]] = {"roc_auc": "link_auc", "average_precision": "link_precision"}
    selected_by: ClassVar[str | None] = "roc_auc"
    fixed_graph: ClassVar[bool] = False
    needs_links: ClassVar[bool] = True
    linear_read_out: ClassVar[str] = "product"
    split_function: ClassVar[str] = "fgai.datasets.link_split"
    class_names: ClassVar[tuple[str, ...] | None] = ("no link", "link")

    def fits(self, graph: Graph) -> bool:
        """A graph with links to predict."""
        return graph.links is not None

    def view(self, graph: Graph, targets: str) -> Graph:
        """The graph without validation links, unless test links are predicted."""
        if targets == "test":
            return graph
        links = _links_of(graph)
        validation = links.take(links.rows("val"))
        edges = both_ways(graph, validation.pairs[:, validation.y == 1])
        return graph.remove(edges)[0] if edges.numel() else graph

    def epoch(self, graph: Graph, generator: torch.Generator) -> Graph:
        """Training links, as many fresh pairs without a link, and the validation pairs."""
        links = _links_of(graph)
        positives = links.take(links.rows("train"))
        positives = positives.take((positives.y == 1).nonzero().flatten())
        pairs = negative_pairs(graph, len(positives), generator)
        zeros = torch.zeros(pairs.shape[1], dtype=torch.long, device=graph.device)
        fresh = Links(pairs, zeros, zeros)
        return graph.replace(links=positives.join(fresh).join(links.take(links.rows("val"))))

    def count(self, graph: Graph) -> int:
        """Pairs."""
        return len(_links_of(graph))

    def rows(self, graph: Graph, targets: str) -> Tensor:
        """The pairs of a part, links and others."""
        return _links_of(graph).rows(targets)

    def labels(self, graph: Graph) -> Tensor | None:
        """1 for a link, 0 for another pair."""
        return _links_of(graph).y

    def nodes(self, graph: Graph, targets: str) -> Tensor:
        """The ends of the pairs of a part."""
        return _links_of(graph).ends(targets)

    def rows_predicted_from(self, graph: Graph, nodes: Tensor) -> Tensor:
        """Pairs of which at least one end is among `nodes`."""
        return nodes[_links_of(graph).pairs].any(0)

    def row_of(self, graph: Graph) -> Tensor:
        """The first pair the node is an end of: a test link, else another test pair, else any."""
        links = _links_of(graph)
        order = torch.argsort(links.part * 2 + links.y, descending=True, stable=True)
        row = torch.full((graph.num_nodes,), len(links), device=graph.device)
        spots = torch.arange(len(links), device=graph.device)
        for end in links.pairs[:, order]:
            row = row.scatter_reduce(0, end, spots, "amin")
        return torch.where(row < len(links), order[row.clamp(max=len(links) - 1)], -1)

    def has_part(self, graph: Graph, targets: str) -> bool:
        """Always: every link knows its part."""
        return True

    def out_channels(self, graph: Graph) -> int:
        """Width of the embeddings, whatever the classes."""
        return EMBEDDING

    def read_out(
        self, nodes: Tensor, graph: Graph, *, decoder: str = "dot", links: Tensor | None = None, **_: Any
    ) -> Tensor:
        """[L, 2] for the graph's pairs; scores [L] of `links`; the embeddings of a graph without links."""
        if links is not None:
            return _link_scores(nodes, links, decoder)
        return nodes if graph.links is None else link_logits(nodes, graph.links.pairs, decoder)

    def explanation_values(self, values: Tensor, graph: Graph, rows: Tensor) -> dict[str, Tensor]:
        """`links` and other `pairs`: the mean of the two ends, those without a value left out."""
        links = _links_of(graph)
        scores, truth = values[:, links.pairs[:, rows]].nanmean(1), links.y[rows]
        return {"links": scores[:, truth == 1], "pairs": scores[:, truth == 0]}


def _links_of(graph: Graph) -> Links:
    if graph.links is None:
        raise InputError(f"{graph.name!r} has no links to predict; use `fgai.datasets.link_split`")
    return graph.links


@typed
def negative_pairs(
    graph: Graph, count: int, generator: torch.Generator, taken: Tensor | None = None
) -> Tensor:
    """Draw [2, count] distinct pairs of nodes that no edge of an undirected graph joins.

    The generator is one of the CPU. `taken` are keys of further pairs, in both directions, to leave out.
    Raises `InputError` if there are too few pairs.
    """
    whole(count, "count")
    possible = graph.num_nodes * (graph.num_nodes - 1) // 2
    if count > possible:
        raise InputError(f"`count` must be at most {possible}, all pairs of {graph.name!r}, got {count}")
    if taken is not None and (taken.dim() != 1 or taken.dtype != torch.int64):
        raise InputError(f"`taken` must be a vector of edge keys (torch.long), got {tuple(taken.shape)}")
    pair_keys = torch.zeros(0, dtype=torch.long, device=graph.device)
    for _ in range(64):
        drawn = torch.randint(graph.num_nodes, (2, count + count // 4 + 16), generator=generator)
        pairs = drawn.to(graph.device)
        low, high = pairs.amin(0), pairs.amax(0)
        keys = edge_keys(low, high)[low != high]
        for excluded in (graph.keys, taken):
            keys = keys if excluded is None else keys[~torch.isin(keys, excluded)]
        pair_keys = _first_of_each(torch.cat([pair_keys, keys]))
        if pair_keys.numel() >= count:
            return torch.stack(key_ends(pair_keys[:count]))
    raise InputError(f"{count} pairs without a link were asked for; {graph.name!r} has too few")


def _first_of_each(values: Tensor) -> Tensor:
    """Drop repeated values, keeping the order of first appearance."""
    unique, inverse = torch.unique(values, return_inverse=True)
    first = torch.full((unique.numel(),), values.numel(), dtype=torch.long, device=values.device)
    spots = torch.arange(values.numel(), device=values.device)
    return values[first.scatter_reduce(0, inverse, spots, "amin").sort().values]


def _link_scores(embedding: Tensor, pairs: Tensor, decoder: str = "dot") -> Tensor:
    """Score pairs [2, L] by embeddings [N, D]: `⟨z_u, z_v⟩`, or ten times the cosine; a link above 0."""
    one_of(decoder, "decoder", DECODERS)
    if decoder == "cosine":
        embedding = torch.nn.functional.normalize(embedding, dim=1) * SHARPNESS**0.5
    return (embedding[pairs[0]] * embedding[pairs[1]]).sum(-1)


@typed
def link_logits(embedding: Tensor, pairs: Tensor, decoder: str = "dot") -> Tensor:
    """Return [L, 2] logits `(−s/2, s/2)` of no link and link, whose cross-entropy is the binary one of s.

    Example:
        >>> link_logits(torch.tensor([[1.0, 1.0], [3.0, 1.0]]), torch.tensor([[0], [1]]))
        tensor([[-2.,  2.]])
    """
    if embedding.dim() != 2 or not embedding.is_floating_point():
        got = f"{embedding.dtype} {tuple(embedding.shape)}"
        raise InputError(f"`embedding` must be floating-point of shape [nodes, width], got {got}")
    edge_index(pairs, len(embedding), "pairs")
    half = _link_scores(embedding, pairs, decoder) / 2
    return torch.stack([-half, half], dim=1)
