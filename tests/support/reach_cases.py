"""The GPU's operations where few nodes matter, against the reference that does not know."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.attention import AttentionMap, observe, prepared
from fgai.graph import Graph, GraphChange
from fgai.models import GAT, GT, GATv2
from fgai.ops import reference, use_backend
from fgai.recompute.local import PartialOutput, Plan, Recompute
from fgai.sparse.adjacency import set_active_rows
from support.ops_cases import INPUTS, TOLERANCE, assert_same, call, inputs, skewed

MOVING, FILLED = 6, 19


def compare_reach(name: str, device: str, size: tuple[int, int], dtype: torch.dtype, hub: int) -> None:
    """Results, and gradients of what moves: with weights that learn and with none."""
    from fgai.ops import gpu

    adjacency, plain = skewed(hub).to(device), skewed(hub).to(device)
    assert not adjacency.rowptr.diff()[FILLED:].any()
    set_active_rows(adjacency, MOVING, FILLED)
    for learn in (False, True):
        given = [t.detach().to(device) for t in inputs(name, adjacency, *size, dtype)]
        exact = [t.double() for t in given]
        asked = [k for k, letters in enumerate(INPUTS[name]) if learn or letters != "HC"]
        for every in (given, exact):
            for k in asked:
                every[k].requires_grad_()
        ours, theirs = call(gpu, name, given, adjacency), call(reference, name, exact, plain)
        found = [ours[0], *_slopes(ours[0], given, asked)]
        wanted = [theirs[0], *_slopes(theirs[0], exact, asked)]
        for place, k in enumerate(asked, 1):
            if INPUTS[name][k].startswith("N"):
                beyond = found[place][MOVING:]
                assert bool(((beyond == 0) | (beyond - wanted[place][MOVING:]).abs().lt(1e-4)).all())
                found[place], wanted[place] = found[place][:MOVING], wanted[place][:MOVING]
        assert_same([t.detach() for t in found], [t.detach().to(dtype) for t in wanted], TOLERANCE[dtype])


def _slopes(out: Tensor, given: list[Tensor], asked: list[int]) -> tuple[Tensor, ...]:
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out)
    wanted = [given[k] for k in asked]
    return torch.autograd.grad((out * pull).sum(), wanted, materialize_grads=True, retain_graph=True)


def compare_patches(device: str) -> None:
    """Parts of small models by the GPU's kernels, against whole passes of the reference."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.randint(24, (2, 60), generator=generator)
    x, y = torch.randn(24, 7, generator=generator, dtype=torch.float64), torch.arange(24) % 3
    graph = Graph.from_edges(edges, 24, x, undirected=True, y=y).to(device)
    ends = torch.tensor([[0, 1], [2, 3]], device=device)
    rows = torch.randn(2, 7, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    change = GraphChange(endpoints=ends, features=rows)
    for kind, sizes in (
        (GAT, {}),
        (GATv2, {}),
        (GT, {"hidden_channels": 12, "heads": (3, 1), "encodings": 4}),
    ):
        model = kind.for_data(graph, **sizes).double().to(device).eval().requires_grad_(False)
        whole = prepared(model, graph)
        with use_backend("reference"):
            again, attacked = Recompute(model, whole), change.apply(whole)[0]
            wanted, maps = model(attacked), observe(model, attacked, heads="mean", grad=True).attention
        for full in (False, True):
            plan = again.plan(change, all_rows=full, limit=float("inf"))
            assert plan is not None and attacked.features is not None
            encoded = again.encodings(plan, change)
            touched = again.forward(plan.copies(1).plan, attacked.features, encoded)
            assert_same([touched.logits.detach()], [wanted[touched.nodes].detach()], 1e-10)
            assert_same(
                _slopes(touched.logits, [rows], [0]), _slopes(wanted[touched.nodes], [rows], [0]), 1e-10
            )
            if full:
                _compare_ranks(whole, plan, touched, maps, rows)


def _compare_ranks(
    graph: Graph, plan: Plan, touched: PartialOutput, maps: AttentionMap, rows: Tensor
) -> None:
    """Of old edges, told apart by their places in the clean graph."""
    for patch, ranks, layer in zip(plan.patches, touched.ranks, maps, strict=True):
        old = patch.positions >= 0
        keys = graph.adjacency.keys[patch.positions[old]]
        theirs = layer.ranking()[torch.searchsorted(layer.keys, keys)]
        assert_same([ranks[old].detach()], [theirs.detach()], 1e-10)
        assert_same(_slopes(ranks[old], [rows], [0]), _slopes(theirs, [rows], [0]), 1e-10)
