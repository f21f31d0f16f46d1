"""Splits into training, validation and test: of nodes, of small graphs, and of links to predict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.change import both_ways
from fgai.graph.fields import Links
from fgai.sparse import edge_keys
from fgai.tasks import negative_pairs
from fgai.typed import typed


class Split(NamedTuple):
    """Three disjoint boolean masks of one length."""

    train: Tensor
    val: Tensor
    test: Tensor


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(checks.seed(seed))


def _check_shares(train: float, val: float) -> None:
    if not (train > 0 and val >= 0 and train + val < 1):
        raise InputError(f"`train` and `val` must be shares that leave some for test, got {train} and {val}")


def _divide(order: Tensor, train: float, val: float) -> tuple[Tensor, ...]:
    first = round(train * order.numel())
    return order.tensor_split((first, first + round(val * order.numel())))


@typed
def random_split(y: Any, seed: int = 0, *, train: float = 0.1, val: float = 0.1) -> Split:
    """Draw a split uniformly among the labelled nodes: by default 10 % training, 10 % validation, 80 % test.

    Nodes without a label (-1) are in no mask. `y` are labels [N], or a `Graph` or PyG `Data` that has some.

    Example:
        >>> split = random_split(torch.arange(20) % 2, seed=3)
        >>> [int(mask.sum()) for mask in split]
        [2, 2, 16]
    """
    _check_shares(train, val)
    labels = y if isinstance(y, Tensor) else getattr(y, "y", None)
    if not isinstance(labels, Tensor) or labels.dim() != 1:
        raise InputError(f"`y` must be labels [N], or a graph with labels `y`, got {type(y).__name__}")
    _check_labels(labels)
    labelled = (labels >= 0).nonzero().flatten().cpu()
    order = labelled[torch.randperm(labelled.numel(), generator=_generator(seed))]
    return _masks(_divide(order, train, val), labels.numel())


@typed
def stratified_split(y: Tensor, seed: int = 0, *, train: float = 0.8, val: float = 0.1) -> Split:
    """Draw a split of labels [G] in which every class has the same shares: by default 80 / 10 / 10 %."""
    _check_shares(train, val)
    _check_labels(y)
    classes = [_divide(order, train, val) for order in _shuffled(y, _generator(seed))]
    parts = zip((torch.zeros(0, dtype=torch.long),) * 3, *classes, strict=True)
    return _masks([torch.cat(part) for part in parts], y.numel())


def _shuffled(y: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the members of each class, in random order."""
    for label in torch.unique(y[y >= 0]).tolist():
        members = (y == label).nonzero().flatten().cpu()
        yield members[torch.randperm(members.numel(), generator=generator)]


@typed
def fold_split(y: Tensor, fold: int = 0, *, folds: int = 10, seed: int = 0) -> Split:
    """Return one of several folds in which every class has the same share: for cross-validation.

    The graphs (or nodes) of each class, but for the label -1, are shuffled once and distributed in turn;
    `fold` is for test, the next one for validation, the others for training. All folds of a seed are disjoint
    and cover everything. From `fold` = `folds` on, another shuffle is used.

    Example:
        >>> y = torch.arange(40) % 2
        >>> [int(mask.sum()) for mask in fold_split(y, 3)]
        [32, 4, 4]
    """
    checks.whole(folds, "folds", 3)
    checks.whole(fold, "fold")
    _check_labels(y)
    source = _generator(checks.seed(seed) + fold // folds)
    order = torch.cat([torch.zeros(0, dtype=torch.long), *_shuffled(y, source)])
    fold_of = torch.full((y.numel(),), -1)
    fold_of[order] = torch.arange(order.numel()) % folds
    test, val = fold_of == fold % folds, fold_of == (fold + 1) % folds
    return Split((fold_of >= 0) & ~test & ~val, val, test)


def _check_labels(y: Tensor) -> None:
    if y.dim() != 1 or y.is_floating_point() or y.is_complex():
        raise InputError(f"`y` must be a vector of class numbers, got {y.dtype} {tuple(y.shape)}")


def _masks(parts: Iterable[Tensor], size: int) -> Split:
    none = torch.zeros(size, dtype=torch.bool)
    return Split(*(none.index_fill(0, part.long(), True) for part in parts))


@typed
def link_split(graph: Graph, seed: int = 0, *, train: float = 0.85, val: float = 0.05) -> Graph:
    """Hide some links of an undirected graph, to be predicted: by default 85 / 5 / 10 % of the links.

    The result keeps the edges of training and validation links; while training, validation links are removed
    as well (see `fgai.tasks.LinkTask`). For validation and test, as many unconnected pairs are drawn as there
    are links; for training they are drawn every epoch. Labels and masks of nodes are dropped.

    Example:
        >>> from fgai.datasets import planted
        >>> graph = link_split(planted(), seed=1)
        >>> links = graph.links
        >>> [int(links.rows(part).numel()) for part in ("train", "val", "test")]
        [6763, 796, 1592]
    """
    _check_shares(train, val)
    source = _generator(seed)
    graph = graph.to("cpu")
    one, two = graph.adjacency.source, graph.adjacency.destination
    if not torch.equal(edge_keys(two, one).sort().values, graph.keys):
        raise InputError(f"{graph.name!r} has edges without a reverse; links are undirected")
    pairs = torch.stack([one, two])[:, one < two]
    parts = _divide(torch.randperm(pairs.shape[1], generator=source), train, val)
    if not all(part.numel() for part in parts):
        raise InputError(f"{pairs.shape[1]} links are too few to split {train} / {val} / rest")
    sizes = [0, parts[1].numel(), parts[2].numel()]
    others = torch.split(negative_pairs(graph, sum(sizes), source), sizes, dim=1)
    groups = [group for links, fill in zip(parts, others, strict=True) for group in (pairs[:, links], fill)]
    counts = torch.tensor([group.shape[1] for group in groups])
    y, part = (torch.tensor(of).repeat_interleave(counts) for of in ([1, 0] * 3, [0, 0, 1, 1, 2, 2]))
    visible = graph.remove(both_ways(graph, pairs[:, parts[2]]))[0]
    dropped = ("y", "train_mask", "val_mask", "test_mask", "positional", "positional_values")
    hidden = Links(torch.cat(groups, dim=1), y, part)
    return visible.replace(links=hidden, **dict.fromkeys(dropped))
