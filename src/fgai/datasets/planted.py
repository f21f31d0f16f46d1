"""The built-in graph, made from a seed in milliseconds, with known informative edges."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch

from fgai import checks
from fgai.graph import Graph
from fgai.typed import typed

TOPIC_WORDS = 40  # per class
COMMON_WORDS = 100
MARKER_WORDS = 8
LENGTH = 12  # words a node draws
RELIABLE = 0.5  # share of nodes
TOPICAL = 0.5  # share of a node's words from the topic of a class
MARKED = (0.02, 0.45)  # share of marker words, reliable and unreliable nodes
DEGREE = 8.0
BYTES = 1000  # of memory per node while the graph is made
SAME_CLASS = 0.62  # share of edges drawn inside a class; the others join any two nodes


@typed
def planted(seed: int = 0, num_nodes: int = 2000, num_classes: int = 5) -> Graph:
    """Make a graph with informative and misleading neighbours, and the truth about each edge.

    Nodes have classes and draw 12 words each (features are 0 or 1). Half of the words of a *reliable* node
    (half of all) belong to its class. An *unreliable* node draws them from another class, and is marked by
    marker words (45 % of its words; reliable nodes draw them by chance only). 62 % of the edges join nodes of
    one class, the others any two nodes. An edge j → i is informative (`edge_truth`) if j is reliable and of
    i's class. Words alone classify about two fifths of the nodes, averaging all neighbours four fifths.

    The graph is undirected, with sparse features, without loops, duplicates and masks. In
    `fgai.load_dataset("planted", seed)` the seed draws masks alone: the graph is always that of seed 0.

    Example:
        >>> graph = planted(seed=0)
        >>> graph.num_nodes, graph.num_classes, 0.3 < float(graph.edge_truth.float().mean()) < 0.4
        (2000, 5, True)
    """
    checks.whole(num_classes, "num_classes", 2)
    checks.memory(checks.whole(num_nodes, "num_nodes", num_classes, 10_000_000), BYTES, "num_nodes")
    checks.seed(seed)
    draw = np.random.Generator(np.random.PCG64(seed))
    y = draw.permutation(np.arange(num_nodes) % num_classes)
    reliable = draw.random(num_nodes) < RELIABLE
    features = _words(y, reliable, num_classes, draw)
    pairs, labels = torch.from_numpy(_pairs(y, num_classes, draw)), torch.from_numpy(y)
    graph = Graph.from_edges(pairs, num_nodes, features, undirected=True, y=labels, name="planted")
    source, destination = graph.edge_index
    truth = torch.from_numpy(reliable)[source] & (labels[source] == labels[destination])
    return graph.replace(edge_truth=truth)


def _words(y: np.ndarray, reliable: np.ndarray, num_classes: int, draw: np.random.Generator) -> sp.csr_matrix:
    """[N, words] 0/1: topics of all classes first, then marker words, then common words."""
    n, shape = y.size, (y.size, LENGTH)
    word_class = np.where(reliable, y, (y + draw.integers(1, num_classes, n)) % num_classes)
    topics = num_classes * TOPIC_WORDS
    topical = word_class[:, None] * TOPIC_WORDS + draw.integers(0, TOPIC_WORDS, shape)
    marker = topics + draw.integers(0, MARKER_WORDS, shape)
    chance = draw.integers(0, topics + COMMON_WORDS, shape)
    chance += MARKER_WORDS * (chance >= topics)
    kind = draw.random(shape)
    marked = TOPICAL + np.where(reliable, MARKED[0], MARKED[1])[:, None]
    word = np.where(kind < TOPICAL, topical, np.where(kind < marked, marker, chance))
    rows = np.repeat(np.arange(n), LENGTH)
    width = topics + MARKER_WORDS + COMMON_WORDS
    matrix = sp.csr_matrix((np.ones(word.size, dtype=np.float32), (rows, word.ravel())), shape=(n, width))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def _pairs(y: np.ndarray, num_classes: int, draw: np.random.Generator) -> np.ndarray:
    """[2, K] pairs of nodes to join, perhaps with duplicates, without loops."""
    n, count = y.size, round(y.size * DEGREE / 2)
    members, first = np.argsort(y, kind="stable"), np.searchsorted(np.sort(y), np.arange(num_classes))
    sizes = np.bincount(y, minlength=num_classes)
    one = draw.integers(0, n, count)
    alike = members[first[y[one]] + (draw.random(count) * sizes[y[one]]).astype(np.int64)]
    other = np.where(draw.random(count) < SAME_CLASS, alike, draw.integers(0, n, count))
    return np.stack([one, other])[:, one != other]
