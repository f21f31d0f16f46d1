"""The CPU's own ways: attention averaged over heads, new nodes in one pass, top-k distance and margin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fgai.ops import attend_additive, attend_dot, attend_dynamic, use_backend
from fgai.ops.attach import attach
from fgai.ops.cpu import parallel
from fgai.sparse import Adjacency
from fgai.topk import topk_l1, topk_mask
from fgai.topk.swaps import swap_costs, swap_margin
from support.ops_cases import adjacencies, skewed


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("heads_channels", [(8, 8), (3, 5), (1, 7), (4, 16), (16, 2)])
@pytest.mark.parametrize("score", ["additive", "dynamic", "dot"])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_averaged_attention_and_gradients(heads_channels: tuple[int, int], score: str, p: float) -> None:
    adjacency, (heads, channels) = skewed(), heads_channels
    nodes = adjacency.num_nodes
    one, two, values = (randn(nodes, heads, channels, seed=s) for s in range(3))
    weight = randn(heads, channels, seed=4)
    calls: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], list[Tensor]]] = {
        "additive": (
            lambda: attend_additive(
                one[..., 0], two[..., 0], values, adjacency, dropout=p, seed=5, averaged=True
            ),
            [one, two, values],
        ),
        "dynamic": (
            lambda: attend_dynamic(one, two, weight, values, adjacency, dropout=p, seed=5, averaged=True),
            [one, two, weight, values],
        ),
        "dot": (
            lambda: attend_dot(one, two, values, adjacency, dropout=p, seed=5, averaged=True),
            [one, two, values],
        ),
    }
    call, inputs = calls[score]
    found = []
    for backend in ("numba", "reference"):
        with use_backend(backend):
            out, attention = call()
        pulls = randn(*out.shape, seed=7).detach(), randn(*attention.shape, seed=8).detach()
        loss = (out * pulls[0]).sum() + (attention * pulls[1]).sum()
        found.append([out, attention, *torch.autograd.grad(loss, inputs)])
    assert found[0][1].shape == (adjacency.num_edges, 1)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@given(adjacencies(), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.integers(0, 9))
def test_attached_nodes_equal_a_merge(
    adjacency: Adjacency, count: int, width: int, loops: bool, seed: int
) -> None:
    generator, nodes = torch.Generator().manual_seed(seed), adjacency.num_nodes
    width = min(width, nodes)
    drawn = [torch.randperm(nodes, generator=generator)[:width] for _ in range(count)]
    ends = torch.stack(drawn).long().reshape(count, width)
    new = torch.arange(nodes, nodes + count)
    near, far = new[:, None].expand(count, width).flatten(), ends.flatten()
    edges = torch.stack([torch.cat([near, far]), torch.cat([far, near])])
    if loops:
        edges = torch.cat([edges, new.expand(2, count)], dim=1)
    expected, places = adjacency.merge(edges, nodes + count)
    found, ours = attach(adjacency, ends, loops)
    assert torch.equal(ours, places)
    for name in ("source", "destination", "rowptr", "colptr", "csc", "keys"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    # Through the kernels, which read other arrays.
    values = randn(nodes + count, 2, 3, seed=1)
    results = [attend_dot(values, values, values, a)[0] for a in (found, expected)]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(r.square().sum(), values)[0] for r in results]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 5, 7, 30, None])
def test_distance_and_gradient_equal_the_formula(k: int | None, dtype: torch.dtype) -> None:
    adjacency = skewed()
    generator = torch.Generator().manual_seed(k or 0)
    w, v = (
        torch.randint(0, 6, (adjacency.num_edges,), generator=generator).to(dtype) / 7 for _ in range(2)
    )  # many ties
    v.requires_grad_()
    first, second = (topk_mask(t, adjacency.rowptr, k).to(dtype) for t in (w, v))
    nodes = (adjacency.degree > 0).sum()
    expected = ((first + second) * (w - v).abs()).sum() / (4 * nodes)
    for mask in (None, first.bool()):
        found = topk_l1(w, v, adjacency.rowptr, k, known=mask)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, v), torch.autograd.grad(expected, v, retain_graph=True)
        )


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_margin_and_gradient_equal_the_formula(k: int) -> None:
    adjacency, radius = skewed(), 0.31
    generator = torch.Generator().manual_seed(k)
    drawn = torch.randint(0, 9, (adjacency.num_edges,), generator=generator).double() / 20
    values = drawn.requires_grad_()
    costs = swap_costs(values, adjacency.rowptr, k)
    real, steps = torch.isfinite(costs), torch.arange(1, costs.shape[1] + 1)
    short = (radius - torch.where(real, costs, radius * steps) / steps).clamp(min=0) / radius
    expected = short.sum() / real.sum()
    found = swap_margin(values, adjacency.rowptr, k, radius)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, values), torch.autograd.grad(expected, values))


def test_threads_do_not_change_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    adjacency = skewed()
    values = torch.rand(adjacency.num_edges, generator=torch.Generator().manual_seed(1))
    found = []
    for work, threads in ((10**9, 1), (5, 3)):
        monkeypatch.setattr(parallel, "BLOCK_WORK", work)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        moving = values.clone().requires_grad_()
        value = swap_margin(moving, adjacency.rowptr, 4, 0.3)
        found.append((value, *torch.autograd.grad(value, moving)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
