"""The Triton kernels against the reference: on a GPU where there is one, and in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, so it runs in a process of its own: this file as a
script, on tiny graphs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from fgai.ops import reference
from fgai.sparse import Adjacency, Features, SparseRows
from fgai.topk import topk_mask
from support.ops_cases import (
    FUSED,
    INPUTS,
    SEED,
    TOLERANCE,
    assert_same,
    call,
    inputs,
    results_and_gradients,
    skewed,
)
from support.reach_cases import compare_patches, compare_reach
from support.rival_cases import compare_rivals

SIZES = [(1, 1), (1, 13), (8, 8), (3, 5), (16, 3), (1, 256), (4, 33), (4, 64), (8, 64)]
gpu_only = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def compare(name: str, adjacency: Adjacency, size: tuple[int, int], dtype: torch.dtype, p: float) -> None:
    """One operation and its gradients on the device of `adjacency`, against the reference there."""
    from fgai.ops import gpu

    made = [t.detach().to(adjacency.device).requires_grad_() for t in inputs(name, adjacency, *size, dtype)]
    ours = results_and_gradients(lambda given: call(gpu, name, given, adjacency, p), made)
    exact = [t.detach().double().requires_grad_() for t in made]  # float32 sums lose as much as is compared
    theirs = results_and_gradients(lambda given: call(reference, name, given, adjacency, p), exact)
    assert_same(ours, [t.to(dtype) for t in theirs], TOLERANCE[dtype])


def compare_averaged(name: str, adjacency: Adjacency, size: tuple[int, int], dtype: torch.dtype) -> None:
    """The mean of the attention over heads, and its gradients, against the reference's."""
    from fgai.ops import gpu

    made = [t.detach().to(adjacency.device).requires_grad_() for t in inputs(name, adjacency, *size, dtype)]

    def theirs(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out, attention = call(reference, name, given, adjacency, 0.3)
        return out, attention.mean(1, keepdim=True)

    ours = results_and_gradients(lambda g: call(gpu, name, g, adjacency, 0.3, averaged=True), made)
    exact = [t.detach().double().requires_grad_() for t in made]
    assert_same(ours, [t.to(dtype) for t in results_and_gradients(theirs, exact)], TOLERANCE[dtype])


def compare_bias(name: str, adjacency: Adjacency, dtype: torch.dtype) -> None:
    """The fused operation with a bias, and all gradients, against the reference's."""
    from fgai.ops import gpu

    made = [t.detach().to(adjacency.device).requires_grad_() for t in inputs(name, adjacency, 3, 5, dtype)]
    bias = torch.linspace(-2, 2, 15, dtype=dtype, device=adjacency.device).view(3, 5).requires_grad_()
    ours, theirs = (
        results_and_gradients(
            lambda g, of=of: call(of, name, g[:-1], adjacency, 0.3, bias=g[-1]), [*made, bias]
        )
        for of in (gpu, reference)
    )
    assert_same(ours, theirs, TOLERANCE[dtype])


def compare_clip(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    """Clipped numbers and rows, and their gradients, against the CPU's kernel."""
    from fgai.ops import cpu, gpu

    generator = torch.Generator().manual_seed(4)
    x, gradient = (2 * torch.randn(rows, width, generator=generator, dtype=dtype) for _ in range(2))
    high = torch.rand(width, generator=generator, dtype=dtype) + 0.5
    low, x[0, 0] = -high.flip(0), torch.nan
    low[-1] = high[-1]
    for radius in (torch.tensor(0.8 * width**0.5, dtype=dtype), torch.tensor(torch.inf, dtype=dtype)):
        for masked in (False, True):
            there, *bounds = (t.to(device) for t in (x, low, high, radius))
            ours, inside, scale = gpu.clip_rows(there, bounds, torch.empty_like(there), masked)
            back = gpu.clip_rows_back(gradient.to(device), inside, scale, ours, bounds)
            theirs, inside, scale = cpu.clip_rows(x, (low, high, radius), torch.empty_like(x), masked)
            torch.testing.assert_close(ours.cpu(), theirs)
            expected = cpu.clip_rows_back(gradient, inside, scale, theirs, (low, high, radius))
            torch.testing.assert_close(back.cpu(), expected)


def compare_projection(device: str, dtype: torch.dtype, width: int) -> None:
    """The sparse projection and both gradients, gathered and dense."""
    from fgai.ops import gpu
    from fgai.ops.gpu import project

    generator = torch.Generator().manual_seed(4)
    dense = torch.randn(19, 11, generator=generator, dtype=torch.float64)
    dense[torch.rand(19, 11, generator=generator) > 0.3] = 0
    csr = dense.to_sparse_csr()
    parts = csr.crow_indices(), csr.col_indices(), csr.values().to(dtype)
    base = Features.sparse(*parts, num_columns=11).to(device).base
    assert isinstance(base, SparseRows)
    values = base.values.detach().requires_grad_()
    weight = (
        torch.randn(11, width, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    )
    rows = base.with_values(values)
    theirs = results_and_gradients(lambda _: (reference.project_sparse(rows, weight),), [values, weight])
    usual = project.DENSE
    for share in (0.1, 2.0):
        project.DENSE = share
        fresh = replace(base, values=values)  # nothing is known of its pattern yet
        ours = results_and_gradients(lambda _, x=fresh: (gpu.project_sparse(x, weight),), [values, weight])
        assert_same(ours, theirs, TOLERANCE[dtype])
    project.DENSE = usual


def simple(nodes: int, edges: int, loops: bool, hub: int = 0) -> Adjacency:
    """A graph without parallel edges; `hub` edges more into node 2."""
    generator = torch.Generator().manual_seed(11)
    index = torch.randint(nodes, (2, edges), generator=generator)
    into = torch.stack([torch.arange(hub), torch.full((hub,), 2)])
    own = torch.arange(nodes if loops else 0).expand(2, -1)
    return Adjacency.build(torch.unique(torch.cat([index, into, own], 1), dim=1), nodes)[0]


def compare_attached(device: str, loops: bool, hub: int = 0) -> None:
    """New nodes on the device against the CPU's merge: structure, pieces, and attention over them."""
    from fgai.ops import gpu
    from fgai.ops.attach import attach as attach_anywhere
    from fgai.ops.gpu.attach import attach
    from fgai.ops.gpu.plan import incoming, outgoing

    nodes = max(23, hub)
    cpu = simple(nodes, 7 * nodes, loops, hub)
    rows = [torch.randperm(nodes, generator=torch.Generator().manual_seed(s))[:5] for s in range(3)]
    wanted, moved = attach_anywhere(cpu, torch.stack(rows), loops)
    found, ours = attach(cpu.to(device), torch.stack(rows).to(device), loops)
    assert torch.equal(ours.cpu(), moved)
    for name in ("source", "destination", "rowptr", "colptr", "csc"):
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
    for one, two in zip(found.index32, wanted.index32, strict=True):
        assert one.dtype == two.dtype and torch.equal(one.cpu(), two)
    for view in (incoming, outgoing):
        work, plain = view(found), view(wanted.to(device))
        assert torch.equal(work.node, plain.node) and torch.equal(work.edge, plain.edge)
        pairs = zip(work.first.tolist(), work.last.tolist(), strict=True)
        assert sorted(e for low, high in pairs for e in range(low, high)) == list(range(wanted.num_edges))
    given = [
        t.detach().to(device).requires_grad_() for t in inputs("attend_dot", wanted, 2, 3, torch.float64)
    ]
    one, two = (
        results_and_gradients(lambda made, of=kernels, on=on: call(of, "attend_dot", made, on), given)
        for kernels, on in ((gpu, found), (reference, wanted.to(device)))
    )
    assert_same(one, two, TOLERANCE[torch.float64])


def compare_top(device: str, long: int) -> None:
    """Leaders, masks, distance and margin of rows from empty to `long`, with ties, against the CPU."""
    from fgai.topk import gpu, leaders, swap_margin, topk_l1
    from fgai.topk.sets import _with_gradient

    degree = torch.tensor([0, 1, 3, 4, 5, long, 0, 9, 2])
    rowptr = torch.nn.functional.pad(degree.cumsum(0), (1, 0))
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.float64):
        one, two = (torch.rand(int(rowptr[-1]), generator=generator).to(dtype) for _ in range(2))
        two = torch.where(torch.rand(one.shape, generator=generator) < 0.4, (one * 3).round() / 3, two)
        rows, w, v = rowptr.to(device), one.to(device).requires_grad_(), two.to(device).requires_grad_()
        w_cpu, v_cpu = one.requires_grad_(), two.requires_grad_()
        for k in (1, 2, 5, 10):
            assert torch.equal(gpu.pick_leaders(v.detach(), rows, k).cpu(), leaders(two.detach(), rowptr, k))
            assert torch.equal(gpu.pick_mask(v.detach(), rows, k).cpu(), topk_mask(two.detach(), rowptr, k))
        for k in (None, 1, 3, 5):
            found, wanted = (
                [3 * loss.detach().cpu(), *(slope.cpu() for slope in torch.autograd.grad(3 * loss, inputs))]
                for loss, inputs in (
                    (topk_l1(w, v, rows, k), [w, v]),
                    (topk_l1(w_cpu, v_cpu, rowptr, k), [w_cpu, v_cpu]),
                )
            )
            assert_same(found, wanted, 1e-5)
        for k, radius in ((1, 0.3), (2, 0.01), (5, 3.0)):
            ours = _with_gradient(gpu.margins, w, rows, k, radius)
            theirs = swap_margin(w_cpu, rowptr, k, radius)
            gradients = torch.autograd.grad(3 * ours, [w]), torch.autograd.grad(3 * theirs, [w_cpu])
            assert_same([ours.cpu(), gradients[0][0].cpu()], [theirs.detach(), *gradients[1]], 1e-5)
        # A diverged training brings values that are no numbers: the margin is none, and nothing else is hurt.
        lost = w.detach().clone()
        lost[int(rowptr[5]) : int(rowptr[6])] = float("nan")
        assert _with_gradient(gpu.margins, lost.requires_grad_(), rows, 2, 0.3).isnan()


def interpret() -> None:
    """Every operation once on tiny graphs, with rows in several pieces; fails by raising."""
    from fgai.ops.gpu import plan

    plan.PIECE = 16
    adjacency = skewed(hub_degree=24)
    empty = Adjacency.build(torch.zeros(2, 0, dtype=torch.long), 3)[0]
    for name in INPUTS:
        fused = name in FUSED
        compare(name, adjacency, (3, 5), torch.float64, 0.4 if fused else 0.0)
        if fused:
            compare(name, empty, (2, 3), torch.float64, 0.0)
        if name != "node_scores":
            compare_reach(name, "cpu", (3, 5), torch.float64, 24)
    compare("attend_additive", adjacency, (8, 8), torch.float32, 0.0)
    for name in ("attend_dynamic", "attend_dot"):  # three heads, two at a time
        compare(name, adjacency, (3, 64), torch.float64, 0.4)
    for name in FUSED:
        compare_averaged(name, adjacency, (3, 5), torch.float64)
        compare_bias(name, adjacency, torch.float64)
        compare(name, adjacency, (2, 8), torch.bfloat16, 0.4)
    compare_projection("cpu", torch.float64, 5)
    compare_clip("cpu", torch.float64, 40, 5)
    compare_attached("cpu", loops=True)
    compare_attached("cpu", loops=False)
    from fgai.topk import gpu as top

    top.SHORT, top.LONG = 4, 8
    compare_top("cpu", 17)
    compare_rivals("cpu", 17, top.swap_gaps)
    from fgai.ops import backend, functional, gpu

    def kernels(values: Tensor, *, narrow: bool = False) -> ModuleType:
        return reference if backend._backend.get() == "reference" else gpu

    functional._kernels_for = kernels  # type: ignore[attr-defined]
    compare_patches("cpu")
    ones = torch.ones(2100, dtype=torch.float64)
    assert torch.equal(gpu.dropout(ones, 0.3, SEED), reference.dropout(ones, 0.3, SEED))


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    if done.returncode and "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stderr[-3000:]


class TestOnTheDevice:
    """All sizes, and what only a device can show."""

    pytestmark = gpu_only

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("name", INPUTS)
    def test_kernels_equal_the_reference(self, name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
        if dtype == torch.bfloat16 and name not in FUSED:
            pytest.skip("only the fused kernels take 16 bits")
        adjacency = skewed(hub_degree=3000).to("cuda")
        compare(name, adjacency, size, dtype, 0.0)
        if name in FUSED:
            compare(name, adjacency, size, dtype, 0.4)

    @pytest.mark.parametrize("size", [(8, 8), (1, 13)])
    @pytest.mark.parametrize("name", [name for name in INPUTS if name != "node_scores"])
    def test_what_moves_alone(self, name: str, size: tuple[int, int]) -> None:
        compare_reach(name, "cuda", size, torch.float32, 3000)

    def test_patches(self) -> None:
        compare_patches("cuda")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("name", FUSED)
    def test_averaged_attention(self, name: str, dtype: torch.dtype) -> None:
        compare_averaged(name, skewed(hub_degree=3000).to("cuda"), (8, 8), dtype)

    @pytest.mark.parametrize("loops", [True, False])
    @pytest.mark.parametrize("hub", [0, 900])
    def test_new_nodes_equal_the_merge(self, loops: bool, hub: int) -> None:
        compare_attached("cuda", loops, hub)

    @pytest.mark.parametrize("long", [17, 64, 65, 3000])
    def test_top_of_rows(self, long: int) -> None:
        compare_top("cuda", long)
        from fgai.topk.gpu import swap_gaps

        compare_rivals("cuda", long, swap_gaps)

    def test_top_of_the_graph(self) -> None:
        generator = torch.Generator().manual_seed(3)
        rowptr, values = torch.tensor([0, 40, 40, 300]), torch.rand(300, generator=generator)
        tied = (values * 9).round() / 9
        signed = torch.where(values < 0.5, -0.0, 0.0)
        for case in (values, tied, signed, tied.double()):
            for k in (1, 30, 299, 300):
                found = topk_mask(case.cuda(), rowptr.cuda(), k, "graph").cpu()
                assert torch.equal(found, topk_mask(case, rowptr, k, "graph"))

    @pytest.mark.parametrize("width", [1, 8, 70, 2048])
    def test_limits(self, width: int) -> None:
        compare_clip("cuda", torch.float32, 300, width)
        compare_clip("cuda", torch.float64, 300, width)

    @pytest.mark.parametrize("width", [1, 5, 64, 100])
    def test_projection(self, width: int) -> None:
        compare_projection("cuda", torch.float32, width)
        compare_projection("cuda", torch.float64, width)

    @pytest.mark.parametrize("name", INPUTS)
    def test_identical_run_to_run(self, name: str) -> None:
        from fgai.ops import gpu

        adjacency = skewed(hub_degree=3000).to("cuda")
        made = [t.detach().cuda().requires_grad_() for t in inputs(name, adjacency, 8, 8, torch.float32)]
        runs = [
            results_and_gradients(lambda given: call(gpu, name, given, adjacency, 0.3), made)
            for _ in range(3)
        ]
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))

    @pytest.mark.parametrize("name", FUSED)
    def test_attention_is_written_only_when_asked_for(self, name: str) -> None:
        from fgai.ops import gpu

        adjacency = skewed().to("cuda")
        made = [t.detach().cuda().requires_grad_() for t in inputs(name, adjacency, 2, 8, torch.float32)]
        out, attention = call(gpu, name, made, adjacency, written=False)
        full, _ = call(gpu, name, made, adjacency)
        assert attention.numel() == 0 and torch.equal(out, full)
        ours, theirs = (torch.autograd.grad(o.square().sum(), made) for o in (out, full))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    interpret()
