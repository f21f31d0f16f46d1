"""Kernels that are written by hand for speed against the plain way, one at a time.

- `tiles`: one GAT layer of 8 heads with 8 channels, with its sums held in registers and without.
- `lanes`: the fused kernel forward and backward on one thread, against plain numba loops.
- `threads`: the blocks of the layer's kernels on torch's threads, against numba's `prange` at as many.
- `rivals`: on a GPU, outsiders against members of every top-k in one kernel, against PyTorch's operations;
  forward and backward, captured in a CUDA graph as an attack's step is.

Both ways take turns and the fastest run of each counts, so that a busy machine disturbs both alike. Run:

    python benchmarks/alternatives.py tiles lanes threads --graph photo
    python benchmarks/alternatives.py rivals --device cuda
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from common import arguments, captured, show
from kernels import GRAPHS, INPUT_WIDTH, edges_of
from numba import njit, prange

from fgai import ops
from fgai.models.layer import AttentionLayer
from fgai.ops.cpu import parallel
from fgai.ops.cpu.rows import FAST
from fgai.sparse import Adjacency
from fgai.topk import sets, swaps

attend = importlib.import_module("fgai.ops.cpu.attend")  # the package has a function of this name
Work = Callable[[], object]


def fastest(ways: dict[str, Work], repeats: int, device: str = "cpu") -> dict[str, float]:
    """Return the seconds of the fastest run of each way; they take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(repeats + 2):
        for name, work in ways.items():
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn > 1:  # the first runs compile, and fill caches
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def layer_step(adjacency: Adjacency, heads: int, channels: int) -> Work:
    """Return one GAT layer forward and backward."""
    torch.manual_seed(0)
    layer = AttentionLayer(INPUT_WIDTH, channels, heads, score="additive")
    x = torch.randn(adjacency.num_nodes, INPUT_WIDTH, requires_grad=True)
    pull = torch.randn(adjacency.num_nodes, heads * channels)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x, adjacency).backward(pull)

    return step


def tiles(adjacency: Adjacency, repeats: int) -> list[list[str]]:
    """Eight heads of eight channels in registers, and as any other size."""
    step = layer_step(adjacency, 8, 8)

    def without() -> None:
        attend.TILES = False
        step()
        attend.TILES = True

    return [row("tiles: layer 8x8", fastest({"ours": step, "plain": without}, repeats))]


@njit(fastmath=FAST, nogil=True)
def plain_forward(rowptr, source, near, far, values, slope, attention, out):  # type: ignore[no-untyped-def]
    nodes, heads, channels = values.shape
    top, total = np.empty(heads, values.dtype), np.empty(heads, values.dtype)
    for i in range(nodes):
        out[i] = 0
        top[:], total[:] = -np.inf, 0
        for e in range(rowptr[i], rowptr[i + 1]):
            for h in range(heads):
                z = far[source[e], h] + near[i, h]
                attention[e, h] = z if z > 0 else slope * z
                top[h] = max(top[h], attention[e, h])
        for e in range(rowptr[i], rowptr[i + 1]):
            for h in range(heads):
                attention[e, h] = np.exp(attention[e, h] - top[h])
                total[h] += attention[e, h]
        for e in range(rowptr[i], rowptr[i + 1]):
            for h in range(heads):
                attention[e, h] /= total[h]
                for c in range(channels):
                    out[i, h, c] += attention[e, h] * values[source[e], h, c]


@njit(fastmath=FAST, nogil=True)
def plain_backward(  # type: ignore[no-untyped-def]
    colptr, edge, target, near, far, values, slope, attention, d_out, means, d_values, d_scores, d_far
):
    nodes, heads, channels = values.shape
    for j in range(nodes):
        d_values[j], d_far[j] = 0, 0
        for p in range(colptr[j], colptr[j + 1]):
            e, i = edge[p], target[p]
            for h in range(heads):
                a, g = attention[e, h], values.dtype.type(0)
                for c in range(channels):
                    g += d_out[i, h, c] * values[j, h, c]
                    d_values[j, h, c] += a * d_out[i, h, c]
                ds = a * (g - means[i, h])
                ds = ds if far[j, h] + near[i, h] > 0 else slope * ds
                d_scores[e, h] = ds
                d_far[j, h] += ds


def lanes(adjacency: Adjacency, repeats: int) -> list[list[str]]:
    """The fused additive kernel and plain loops, one thread each."""
    rows, columns, slope, found = (
        parallel._incoming(adjacency),
        parallel._outgoing(adjacency),
        np.float32(0.2),
        [],
    )
    torch.set_num_threads(1)
    for heads, channels in ((8, 8), (4, 16), (1, 128)):
        near, far = (torch.randn(adjacency.num_nodes, heads) for _ in range(2))
        values, d_out = (torch.randn(adjacency.num_nodes, heads, channels) for _ in range(2))
        n, f, v, d = (t.numpy() for t in (near, far, values, d_out))
        attention, out = np.empty((adjacency.num_edges, heads), np.float32), np.empty_like(v)
        plain_forward(rows.pointer, rows.node, n, f, v, slope, attention, out)
        means, made = (d * out).sum(-1), (np.empty_like(v), np.empty_like(attention), np.empty_like(f))
        given = attend._score_arguments(0, near, far, None, 0.2)
        drop, space = (
            (0, np.uint32(0), np.float32(1)),
            parallel._workspace(columns.blocks, attention, channels),
        )
        back = (*(parallel._flat(a) for a in (attention, d, means)), np.empty(0, np.float32), heads)
        results = [parallel._flat(a) for a in made]

        def ours_back(  # type: ignore[no-untyped-def]
            sizes=(heads, channels), given=given, v=v, drop=drop, back=back, results=results, space=space
        ) -> None:
            first = *sizes, *given, v.reshape(-1), drop, True, back
            parallel._over(attend._sources, columns, *first, *results, space)

        ways = {
            "ours": lambda near=near, far=far, values=values: ops.attend_additive(
                far, near, values, adjacency
            ),
            "plain": lambda n=n, f=f, v=v, a=attention, out=out: plain_forward(
                rows.pointer, rows.node, n, f, v, slope, a, out
            ),
        }
        back = {
            "ours": ours_back,
            "plain": lambda n=n, f=f, v=v, a=attention, d=d, means=means, made=made: plain_backward(
                columns.pointer, columns.entry, columns.node, n, f, v, slope, a, d, means, *made
            ),
        }
        found.append(row(f"lanes: forward {heads}x{channels}", fastest(ways, repeats)))
        found.append(row(f"lanes: backward {heads}x{channels}", fastest(back, repeats)))
    return found


def _spell(value: object, names: list[str], flat: list[object]) -> str:
    """Return a nested tuple as source text, which `prange` cannot take; its entries are added to `flat`."""
    if isinstance(value, tuple):
        return f"({''.join(_spell(entry, names, flat) + ', ' for entry in value)})"
    names.append(f"a{len(names)}")
    flat.append(value)
    return names[-1]


def _in_prange(kernel: Any) -> Any:
    """Return a kernel that runs its blocks in numba's `prange`."""
    compiled: dict[str, Any] = {}

    def over(threads: int, count: int, *arguments: Any) -> None:
        names, flat = list[str](), list[object]()
        words = _spell(arguments, names, flat)
        if words not in compiled:
            scope = {"prange": prange, "block": kernel.block}
            exec(f"def over(count, {', '.join(names)}):\n for b in prange(count): block(b, *{words})", scope)
            compiled[words] = njit(parallel=True, nogil=True, fastmath=FAST)(scope["over"])
        compiled[words](count, *flat)

    return over


PRANGE = {
    name: _in_prange(getattr(attend, name)) for name in ("_forward", "_deltas", "_sources", "_sum_rows")
}


def threads(adjacency: Adjacency, repeats: int) -> list[list[str]]:
    """Blocks on torch's threads, and in `prange`."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    ours, found = {name: getattr(attend, name) for name in PRANGE}, []
    for heads, channels in ((8, 8), (1, 128)):
        step = layer_step(adjacency, heads, channels)

        def switched(step: Work = step) -> None:
            for name, kernel in PRANGE.items():
                setattr(attend, name, kernel)
            step()
            for name, kernel in ours.items():
                setattr(attend, name, kernel)

        label = f"threads: layer {heads}x{channels}, {torch.get_num_threads()} threads"
        found.append(row(label, fastest({"ours": step, "plain": switched}, repeats)))
    return found


def rivals(adjacency: Adjacency, repeats: int) -> list[list[str]]:
    """Pairs of outsiders and members at 200 nodes, as an attack on explanations compares them."""
    device, found = str(adjacency.device), []
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randperm(adjacency.num_nodes, generator=generator)[:200].to(device)
    values = torch.rand(adjacency.num_edges, generator=generator).to(device)
    there = torch.ones(adjacency.num_edges, dtype=torch.bool, device=device)
    for k in (5, 10):
        members = sets.topk_mask(values.flip(0), adjacency.rowptr, k)
        now = values.clone().requires_grad_()

        def step(members=members, now=now, k=k) -> None:  # type: ignore[no-untyped-def]
            now.grad = None
            gaps, _ = swaps.swap_gaps(now, there, members, adjacency.rowptr, nodes, k)
            gaps.sum().backward()

        def without(step: Work = step) -> None:
            kernels, swaps._row_kernels = swaps._row_kernels, lambda _: None
            step()
            swaps._row_kernels = kernels

        ways = {"ours": captured(step), "plain": captured(without)}
        found.append(row(f"rivals: k = {k}, captured", fastest(ways, repeats, device)))
    return found


def row(label: str, best: dict[str, float]) -> list[str]:
    """Return one line of the table."""
    ours, plain = best["ours"], best["plain"]
    return [label, f"{ours * 1e3:.3f} ms", f"{plain * 1e3:.3f} ms", f"{plain / ours:.2f}×"]


CASES = {"tiles": tiles, "lanes": lanes, "threads": threads, "rivals": rivals}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--graph", default="photo", choices=GRAPHS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    edge_index, nodes, real = edges_of(args.graph)
    adjacency = Adjacency.build(edge_index, nodes)[0].to(args.device)
    rows = []
    for name in args.cases:
        torch.set_num_threads(args.threads)
        rows += CASES[name](adjacency, args.repeats)
    title = f"{'' if real else '~'}{args.graph}, {args.device}: by hand against the plain way"
    show(title, ["case", "by hand", "plain", "plain ÷ by hand"], rows)


if __name__ == "__main__":
    main()
