"""Attacks that recompute only what they touch, against full forward passes, side by side.

The same `standard` attack runs both ways, in turns, on the same model, endpoints and kernels; the model is
untrained, which changes no cost. The ceiling is the work of a full pass divided by that of the rows in reach
of the injected nodes, layer by layer, with all their edges: edges times width. Because edges whose score and
value stay are not computed again either, the ceiling can be passed. Run:

    python benchmarks/attacks.py --dataset arxiv-tape --layers 3 2 --device cpu
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import arguments, show
from torch import Tensor, nn

import fgai
from fgai.attacks import Attack, AttackResult, draw_endpoints, make_attack
from fgai.graph import Graph, GraphChange
from fgai.recompute.local import _Edit


def network(name: str, graph: Graph, layers: int) -> nn.Module:
    """Return the paper's large architecture: three layers of 8 heads × 16 channels, or other depths."""
    torch.manual_seed(0)
    if name == "GT":
        return fgai.GT.for_data(graph, heads=(8,) * (layers - 1) + (1,)).eval()
    model: nn.Module = (
        getattr(fgai, name).for_data(graph, hidden_channels=16, heads=8, num_layers=layers).eval()
    )
    return model


def ceiling(model: nn.Module, graph: Graph, endpoints: Tensor) -> float:
    """Return full work ÷ work of the rows in reach, all their edges counted."""
    stages = model.layerwise()  # type: ignore[operator]
    attacked, _ = graph.inject(endpoints)
    edit, degree = _Edit.of(GraphChange(endpoints=endpoints), graph), attacked.adjacency.degree
    reached, all_work, work = edit.start(graph.num_nodes), 0, 0
    for layer, _ in stages.stages:
        width = layer.heads * layer.channels
        reached = torch.cat([reached, edit.affected(graph.adjacency, reached)])
        all_work += width * attacked.num_edges
        work += width * int(degree[reached].sum())
    return all_work / work


def timed(
    attack: Attack, model: nn.Module, graph: Graph, repeats: int
) -> tuple[list[AttackResult], list[float]]:
    """Run both ways in turns; return the last results and the median seconds, full pass first."""
    times: tuple[list[float], list[float]] = ([], [])
    results: list[AttackResult] = []
    for index in range(repeats + 1):
        results = [attack.run(model, graph, partial=partial) for partial in (False, True)]
        if index:  # the first run compiles kernels and derives indices
            for seconds, result in zip(times, results, strict=True):
                seconds.append(result.ledger.seconds)
    return results, [statistics.median(seconds) for seconds in times]


def row(args: argparse.Namespace, graph: Graph, layers: int) -> list[str]:
    """Measure one depth."""
    model = network(args.model, graph, layers).to(args.device)
    prepared = model.prepare(graph).to(args.device)
    attack = make_attack(args.threat, args.objective)
    (full, partial), seconds = timed(attack, model, prepared, args.repeats)
    nodes = attack.budget.target_nodes(prepared)
    endpoints = draw_endpoints(
        nodes, attack.budget.nodes, attack.budget.edges, torch.Generator().manual_seed(0)
    )
    top, speed = ceiling(model, prepared, endpoints), seconds[0] / seconds[1]
    pairs = zip(full.ledger.curve, partial.ledger.curve, strict=True)
    apart = max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)
    return [
        f"{args.model} × {layers}",
        f"{seconds[0] * 1e3:.1f} ms",
        f"{seconds[1] * 1e3:.1f} ms",
        f"{speed:.1f}×",
        f"{top:.1f}×",
        f"{speed / top:.0%}",
        f"{partial.ledger.share:.1%}",
        f"{partial.ledger.partial} of {partial.ledger.forwards}",
        f"{apart:.1e}",
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dataset", default="arxiv-tape")
    parser.add_argument("--model", default="GAT", choices=["GAT", "GATv2", "GT"])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 2])
    parser.add_argument("--threat", default="standard")
    parser.add_argument("--objective", default="prediction")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    graph = fgai.load_dataset(args.dataset)
    rows = [row(args, graph, layers) for layers in args.layers]
    columns = ["model", "full", "in reach", "speedup", "ceiling", "of ceiling", "work", "passes", "apart"]
    show(f"{args.threat} attack, {args.objective}, {args.dataset}, {args.device}", columns, rows)


if __name__ == "__main__":
    main()
