"""One attention layer, forward and backward: fgai's kernels against PyG's layers.

Where a dataset is missing, a random graph of its size with skewed degrees takes its place (marked ~). On the
CPU every measurement runs in a process of its own, so that its peak memory is its own. On the GPU fgai's
layer is measured twice: kernel by kernel, as PyG's is, and captured in a CUDA graph, as training runs it.

Beside the layer stands its heart, the fused kernel: the bytes it moves forward (each edge fetches its
source's row) per second, and what share of the measured copy bandwidth that is; `compulsory` counts every
array once, as a perfect cache would. Run:

    python benchmarks/kernels.py --graphs photo physics arxiv --sizes 8x8 1x128 --device cpu
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

import torch
from common import PeakMemory, captured, copy_bandwidth, median_seconds, show
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
WAYS = ("fgai", "pyg")
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


def fused(score: str, heads: int, channels: int, adjacency: Adjacency) -> Callable[[], object]:
    """Return a call of the fused kernel alone; on the GPU the attention is not written, as in training."""
    nodes, device = adjacency.num_nodes, adjacency.device
    wide = [torch.randn(nodes, heads, channels, device=device) for _ in range(3)]
    if score == "additive":
        left, right = (t[..., 0].contiguous() for t in wide[:2])
        return lambda: ops.attend_additive(left, right, wide[2], adjacency, written=False)
    if score == "dynamic":
        weight = torch.randn(heads, channels, device=device)
        return lambda: ops.attend_dynamic(wide[0], wide[1], weight, wide[0], adjacency, written=False)
    return lambda: ops.attend_dot(wide[0], wide[1], wide[2], adjacency, written=False)


def bytes_moved(
    score: str, heads: int, channels: int, nodes: int, edges: int, written: bool
) -> tuple[int, int]:
    """Return (per-edge gathers + structure + output, every array once) of the fused forward, in bytes."""
    row = heads * channels
    gathered = {"additive": row + heads, "dynamic": row, "dot": 2 * row}[score]
    held = {"additive": row + 2 * heads, "dynamic": 2 * row, "dot": 3 * row}[score]
    structure, out = edges + nodes, written * edges * heads + nodes * (row + heads)
    own = {"additive": heads, "dynamic": row, "dot": row}[score]
    moved = edges * gathered + nodes * own + structure + out
    return 4 * moved, 4 * (nodes * held + structure + out)


def measure(args: argparse.Namespace, graph: str, size: str, way: str) -> dict[str, float]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    heads, channels = (int(n) for n in size.split("x"))
    edge_index, nodes, real = edges_of(graph)
    cuda = args.device.startswith("cuda")
    adjacency = Adjacency.build(edge_index, nodes)[0].to(args.device)
    layer = layer_of(way, args.score, heads, channels).to(args.device)
    x = torch.randn(nodes, INPUT_WIDTH, device=args.device, requires_grad=True)
    edges = adjacency if way == "fgai" else torch.stack([adjacency.source, adjacency.destination])
    target = torch.randn(nodes, heads * channels, device=args.device)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x, edges).backward(target)

    found = {"real": float(real), "nodes": nodes, "edges": adjacency.num_edges}
    if way == "fgai":
        step()  # the kernels' one-time compilation and the derived indices are no part of a step
        kernel = fused(args.score, heads, channels, adjacency)
        with torch.no_grad():
            seconds = median_seconds(captured(kernel) if cuda else kernel, args.repeats, args.device)
        moved, compulsory = bytes_moved(args.score, heads, channels, nodes, adjacency.num_edges, not cuda)
        found |= {"kernel": seconds, "moved": moved, "compulsory": compulsory}
        found["copy"] = copy_bandwidth(args.device)
    step()
    layer.zero_grad()
    x.grad = None
    with PeakMemory(args.device) as memory:
        found["seconds"] = median_seconds(step, args.repeats, args.device)
    if way == "fgai" and cuda:
        found["captured"] = median_seconds(captured(step), args.repeats, args.device)
    return found | {"bytes": memory.above}


def in_process(args: argparse.Namespace, graph: str, size: str, way: str) -> dict[str, float]:
    """Measure one way, on the CPU in a process of its own."""
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
        return measure(args, graph, size, way)
    command = [sys.executable, __file__, "--way", way, "--graphs", graph, "--sizes", size]
    command += ["--score", args.score, "--device", args.device]
    command += ["--threads", str(args.threads), "--repeats", str(args.repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row_of(name: str, ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    """Return one line of the table."""
    speed, best = ours["moved"] / ours["kernel"], ours.get("captured", ours["seconds"])
    cells = [f"{'' if ours['real'] else '~'}{name}", f"{ours['seconds'] * 1e3:.2f} ms"]
    if "captured" in ours:
        cells.append(f"{ours['captured'] * 1e3:.3f} ms")
    return [
        *cells,
        f"{theirs['seconds'] * 1e3:.2f} ms",
        f"{theirs['seconds'] / best:.1f}×",
        f"{ours['bytes'] / 2**20:.0f} MiB",
        f"{theirs['bytes'] / max(1, ours['bytes']):.1f}×",
        f"{ours['kernel'] * 1e3:.3f} ms",
        f"{speed / 1e9:.0f} GB/s",
        f"{speed / ours['copy']:.0%}",
        f"{ours['compulsory'] / ours['kernel'] / ours['copy']:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=GRAPHS)
    parser.add_argument("--sizes", nargs="+", default=["8x8", "1x128"], help="heads x channels")
    parser.add_argument("--score", default="additive", choices=["additive", "dynamic", "dot"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args, args.graphs[0], args.sizes[0], args.way)))
        return
    rows = []
    for graph in args.graphs:
        for size in args.sizes:
            ours, theirs = (in_process(args, graph, size, way) for way in WAYS)
            rows.append(row_of(f"{graph} {size}", ours, theirs))
    columns = ["graph, heads x channels", "fgai"]
    columns += ["fgai captured"] if args.device.startswith("cuda") else []
    columns += ["PyG", "PyG ÷ fgai", "peak memory", "PyG ÷ fgai"]
    columns += ["fused forward", "moved", "of copy bandwidth", "compulsory"]
    show(f"{args.score} attention layer, forward + backward, {args.device}", columns, rows)


if __name__ == "__main__":
    main()
