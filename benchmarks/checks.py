"""What checking costs: calls of public operations on a graph of Cora's size that were checked before.

Run it on two versions to compare them; the first call of each, which compiles and checks, is not measured.

    python benchmarks/checks.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import median_seconds, show
from scipy.sparse import csr_matrix

from fgai import metrics, ops, topk
from fgai.graph import Graph
from fgai.models import GAT
from fgai.sparse import Adjacency

NODES, EDGES, WIDTH = 2_708, 10_556, 1_433


def graph_of(seed: int = 0) -> Graph:
    """A random undirected graph with sparse features."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES, (2, EDGES // 2), generator=generator)
    x = (torch.rand(NODES, WIDTH, generator=generator) < 0.0127).float()
    features = csr_matrix(x.numpy())
    y = torch.arange(NODES) % 7
    graph = Graph.from_edges(ends, NODES, features, undirected=True, y=y)
    return graph.add_self_loops()[0]


def cases(graph: Graph) -> dict[str, Callable[[], object]]:
    """Public calls by name, from the shortest kernel to a whole training step."""
    generator = torch.Generator().manual_seed(1)
    adjacency, model = graph.adjacency, GAT(WIDTH, 7).train()
    values = torch.randn(NODES, 8, 8, generator=generator)
    left, right = values[..., 0].contiguous(), values[..., 1].contiguous()
    w, v = (torch.rand(graph.num_edges, generator=generator) for _ in range(2))
    targets = torch.rand(60, NODES, generator=generator).topk(20).indices

    def cut() -> Adjacency:
        return graph.remove(torch.tensor([0]))[0].adjacency

    def step() -> None:
        model.zero_grad()
        model(graph).sum().backward()

    return {
        "score_additive": lambda: ops.score_additive(left, right, adjacency),
        "edge_softmax": lambda: ops.edge_softmax(torch.zeros(graph.num_edges, 1), adjacency),
        "attend_additive": lambda: ops.attend_additive(left, right, values, adjacency),
        "topk_mask": lambda: topk.topk_mask(w, adjacency.rowptr, 5),
        "topk_l1": lambda: topk.topk_l1(w, v, adjacency.rowptr, 5),
        "overlap": lambda: metrics.overlap(w, v, adjacency.rowptr, 5),
        "inject": lambda: graph.inject(targets),
        "a new graph, first used": lambda: ops.aggregate(w[1:, None], values[:, :1], cut()),
        "step of GAT": step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = {name: median_seconds(call, args.repeats, "cpu") for name, call in cases(graph_of()).items()}
    show("One call", ["call", "µs"], [[name, f"{1e6 * took:.1f}"] for name, took in measured.items()])


if __name__ == "__main__":
    main()
