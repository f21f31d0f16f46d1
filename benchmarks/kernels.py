"""One attention layer, forward and backward: fgai's kernels against PyG's layers, eager and compiled.

Where a dataset is missing, a random graph of its size with skewed degrees takes its place (marked ~). On the
CPU every measurement runs in a process of its own, so that its peak memory is its own. On the GPU fgai's
layer and PyG's compiled one are also captured in a CUDA graph, as training runs them; the faster way counts.

Beside the layer stands its heart, the fused kernel: the bytes it moves forward (each edge fetches its
source's row) per second, and what share of the measured copy bandwidth that is. Run:

    python benchmarks/kernels.py --graphs photo physics arxiv --sizes 8x8 4x64 --device cpu
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Peak, arguments, captured, copy_bandwidth, median_seconds, run_alone, show
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fgai
from fgai import ops
from fgai.errors import DataError
from fgai.models.layer import AttentionLayer
from fgai.sparse import Adjacency

GRAPHS = {
    "photo": ("amazon-photo", 7_650, 238_162),
    "physics": ("coauthor-physics", 34_493, 495_924),
    "arxiv": ("arxiv-tape", 169_343, 2_315_598),
}
Case = tuple[str, ...]
WAYS = ("fgai", "eager", "compiled")
INPUT_WIDTH = 64


def edges_of(name: str) -> tuple[Tensor, int, bool]:
    """Return the edges with self-loops, the number of nodes, and whether they are the real ones."""
    dataset, nodes, count = GRAPHS[name]
    try:
        graph = fgai.load_dataset(dataset)
    except DataError:
        generator = torch.Generator().manual_seed(0)
        # Squares of uniform numbers crowd at the low end: a few nodes get thousands of edges.
        ends = (torch.rand(2, count // 2, generator=generator) ** 2 * nodes).long()
        loops = torch.arange(nodes).expand(2, nodes)
        return torch.cat([ends, ends.flip(0), loops], 1), nodes, False
    if not graph.has_loops:
        graph = graph.add_self_loops()[0]
    return graph.edge_index, graph.num_nodes, True


def layer_of(way: str, score: str, heads: int, channels: int) -> nn.Module:
    """Return the layer of one side of the comparison."""
    if way == "fgai":
        return AttentionLayer(INPUT_WIDTH, channels, heads, score=score)
    if score == "additive":
        return GATConv(INPUT_WIDTH, channels, heads, add_self_loops=False)
    if score == "dynamic":
        return GATv2Conv(INPUT_WIDTH, channels, heads, add_self_loops=False)
    return TransformerConv(INPUT_WIDTH, channels, heads, root_weight=False)


def fused(
    score: str, heads: int, channels: int, adjacency: Adjacency, dtype: torch.dtype
) -> Callable[[], object]:
    """Return a call of the fused kernel alone; on the GPU the attention is not written, as in training."""
    nodes, options = adjacency.num_nodes, {"device": adjacency.device, "dtype": dtype}
    wide = [torch.randn(nodes, heads, channels, **options) for _ in range(3)]
    if score == "additive":
        left, right = (t[..., 0].contiguous() for t in wide[:2])
        return lambda: ops.attend_additive(left, right, wide[2], adjacency, written=False)
    if score == "dynamic":
        weight = torch.randn(heads, channels, **options)
        return lambda: ops.attend_dynamic(wide[0], wide[1], weight, wide[0], adjacency, written=False)
    return lambda: ops.attend_dot(wide[0], wide[1], wide[2], adjacency, written=False)


def bytes_moved(
    score: str, heads: int, channels: int, nodes: int, edges: int, written: bool, item: int
) -> int:
    """Return the bytes of per-edge gathers, structure and output of the fused forward."""
    row = heads * channels
    gathered = {"additive": row + heads, "dynamic": row, "dot": 2 * row}[score]
    structure, out = 4 * (edges + nodes), written * edges * heads + nodes * (row + heads)
    own = {"additive": heads, "dynamic": row, "dot": row}[score]
    return item * (edges * gathered + nodes * own + out) + structure


def measure(args: argparse.Namespace, case: Case, way: str) -> dict[str, Any]:
    """Measure one way; on a GPU plain and captured in a CUDA graph."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch._dynamo.reset()
    graph, size, score, kind = case
    heads, channels, dtype = *(int(n) for n in size.split("x")), getattr(torch, kind)
    edge_index, nodes, real = edges_of(graph)
    cuda = args.device.startswith("cuda")
    adjacency = Adjacency.build(edge_index, nodes)[0].to(args.device)
    layer = layer_of(way, score, heads, channels).to(args.device, dtype)
    run = torch.compile(layer) if way == "compiled" else layer
    x = torch.randn(nodes, INPUT_WIDTH, device=args.device, dtype=dtype, requires_grad=True)
    edges = adjacency if way == "fgai" else torch.stack([adjacency.source, adjacency.destination])
    target = torch.randn(nodes, heads * channels, device=args.device, dtype=dtype)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        run(x, edges).backward(target)

    found = {"real": float(real), "nodes": nodes, "edges": adjacency.num_edges}
    step()  # the one-time compilation and the derived indices are no part of a step
    if args.warm:
        return found
    if way == "fgai":
        kernel = fused(score, heads, channels, adjacency, dtype)
        with torch.no_grad():
            kernel()
            seconds = median_seconds(captured(kernel) if cuda else kernel, args.repeats, args.device)
        size_of, counted = dtype.itemsize, adjacency.num_edges
        moved = bytes_moved(score, heads, channels, nodes, counted, not cuda, size_of)
        found |= {"kernel": seconds, "moved": moved}
        found["copy"] = copy_bandwidth(args.device)
        del kernel
    layer.zero_grad()
    x.grad = None
    with Peak(args.device) as memory:
        found["seconds"] = median_seconds(step, args.repeats, args.device)
    if cuda and way != "eager":
        found["captured"] = median_seconds(captured(step), args.repeats, args.device)
    return found | {"bytes": memory.above}


def in_process(args: argparse.Namespace, case: Case, way: str) -> dict[str, Any]:
    """Measure one way, on the CPU in a process of its own."""
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
        return measure(args, case, way)
    words = [__file__, "--way", way, "--device", args.device]
    for name, value in zip(("graphs", "sizes", "scores", "dtypes"), case, strict=True):
        words += [f"--{name}", value]
    found: dict[str, Any] = run_alone(*words, "--threads", str(args.threads), "--repeats", str(args.repeats))
    return found


def best(found: dict[str, Any]) -> float:
    """Return the seconds of a step, captured if that is faster."""
    return min(found["seconds"], found.get("captured", math.inf))


def row_of(case: Case, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return one line of the table."""
    ours = found["fgai"]
    cells = [f"{'' if ours['real'] else '~'}{' '.join(case)}", f"{best(ours) * 1e3:.3f} ms"]
    others = [found.get(way, {"seconds": math.nan, "bytes": math.nan}) for way in WAYS[1:]]
    cells += [f"{best(other) / best(ours):.1f}×" for other in others]
    cells.append(f"{ours['bytes'] / 2**20:.0f} MiB")
    cells += [f"{other['bytes'] / max(1, ours['bytes']):.1f}×" for other in others]
    speed = ours["moved"] / ours["kernel"]
    return [*cells, f"{ours['kernel'] * 1e3:.3f} ms", f"{speed / ours['copy']:.0%}"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=GRAPHS)
    parser.add_argument("--sizes", nargs="+", default=["8x8", "4x64", "8x64"], help="heads x channels")
    parser.add_argument("--scores", nargs="+", default=["additive"], choices=["additive", "dynamic", "dot"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="fgai and what beside it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--warm", action="store_true", help="compile only, into the caches on disk")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = list(itertools.product(args.graphs, args.sizes, args.scores, args.dtypes))
    if args.way:
        print(json.dumps(measure(args, cases[0], args.way)))
        return
    rows, results = [], []
    for case in cases:
        found = {way: in_process(args, case, way) for way in args.ways}
        results.append({"case": case, **found})
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
        if not args.warm:
            rows.append(row_of(case, found))
            print(*rows[-1], sep=" | ", flush=True)
    columns = ["graph, heads x channels", "fgai", "eager ÷", "compiled ÷", "memory", "eager ÷", "compiled ÷"]
    columns += ["fused forward", "of copy bandwidth"]
    show(f"attention layer, forward + backward, {args.device}", columns, rows)


if __name__ == "__main__":
    main()
