"""Certificates against a budget: no allocation of the edges, and no features, change more nodes at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy.optimize import linprog
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import call_model, entry_limits, prepared
from fgai.certificates import BudgetCertificate, certify_budget, certify_injection
from fgai.certificates.budget import _coverable, _dual_bound, _levels, _max_covered
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GCN, GT, GATv2

MODELS = (GAT, GATv2)
NODES = 7


def tiny(seed: int, nodes: int = NODES) -> Graph:
    """A graph of two classes of features; of some seeds with few edges, so that nodes stand alone."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(nodes, (2, (2 * nodes, nodes, nodes // 3)[seed % 3]), generator=generator)
    both = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    y = torch.arange(nodes) % 2
    features = torch.randn(nodes, 4, generator=generator) + 2 * y[:, None]
    return Graph.from_edges(both[:, both[0] != both[1]], nodes, features, y=y)


def model_of(kind: type[Any], graph: Graph, layers: int = 2, seed: int = 0, size: float = 1.0) -> nn.Module:
    """A model behind limits, some of whose nodes are at the edge of what can be certified."""
    torch.manual_seed(seed)
    model = kind(graph.num_features, 2, hidden_channels=3, heads=2, num_layers=layers).eval()
    with torch.no_grad():
        for parameter in model.convs[-1].parameters():
            parameter.mul_(size)
        logits = call_model(model, prepared(model, graph))
        spread = (logits[:, 0] - logits[:, 1]).median()
        model.convs[-1].bias.copy_(torch.tensor([-float(spread) + 0.3, 0.0]))
    return fgai.limit(model, graph, 0.05, shrink=0.3)


def allocations(nodes: int, most: int, edges: int) -> Iterator[tuple[int, ...]]:
    """All numbers of new neighbours of each node, at most `most` and `edges` in all."""
    for counts in itertools.product(range(most + 1), repeat=nodes):
        if sum(counts) <= edges:
            yield counts


def endpoints_of(counts: tuple[int, ...], most: int, generator: torch.Generator) -> list[list[int]]:
    """Nodes that each new one is joined to, so that every node gains its number of them."""
    ends: list[list[int]] = [[] for _ in range(most)]
    for node, count in enumerate(counts):
        for new in torch.randperm(most, generator=generator)[:count].tolist():
            ends[new].append(node)
    return ends


def attacked(graph: Graph, model: nn.Module, ends: list[list[list[int]]], seed: int) -> Graph:
    """Many attacked copies of a graph as one graph that falls apart; new nodes say the loudest things."""
    assert graph.features is not None
    copies, most, nodes = len(ends), len(ends[0]), graph.num_nodes
    size = nodes + most
    generator = torch.Generator().manual_seed(seed)
    shift = torch.arange(copies) * size
    old = (graph.edge_index[:, :, None] + shift).flatten(1)
    pairs = [
        (copy * size + nodes + new, copy * size + node)
        for copy, rows in enumerate(ends)
        for new, row in enumerate(rows)
        for node in row
    ]
    # New nodes may also be joined to each other; such edges cost nothing.
    joined = [(copy * size + nodes, copy * size + nodes + 1) for copy in range(0, copies, 2) if most > 1]
    new_edges = torch.tensor(pairs + joined).t()
    scale = 10.0 ** torch.randint(-1, 4, (copies, 1, 1), generator=generator)
    loud = scale * torch.randn(copies, most, graph.num_features, generator=generator)
    features = torch.cat([graph.features.to_dense().expand(copies, -1, -1), loud], 1).flatten(0, 1)
    edges = torch.unique(torch.cat([old, new_edges, new_edges.flip(0)], 1), dim=1)
    return Graph.from_edges(edges, copies * size, features)


def changed(model: nn.Module, graph: Graph, copies: Graph, nodes: int, size: int) -> Tensor:
    """Which old node of each copy changed its class, bool [copies, nodes]."""
    with torch.no_grad():
        clean = call_model(model, prepared(model, graph)).argmax(1)
        after = call_model(model, prepared(model, copies)).argmax(1).view(-1, size)[:, :nodes]
    return after != clean


@pytest.mark.many
@pytest.mark.parametrize("kind", MODELS)
def test_no_allocation_of_the_edges_changes_more(kind: type[Any]) -> None:
    """Brute force: every allocation of B edges, with several features each."""
    informative = reached = 0
    for seed in range(3):
        graph = tiny(seed)
        model = model_of(kind, graph, seed=seed)
        sizes = [(1, 1), (1, 2), (2, 1), (2, 2)]
        found = certify_budget(model, graph, budgets=sizes)
        assert found.known
        for one in found.budgets:
            most, each, bound = one["nodes"], one["edges"], one["changed"]
            assert most is not None and each is not None and bound is not None
            generator = torch.Generator().manual_seed(seed)
            ends = [
                endpoints_of(counts, most, generator)
                for counts in allocations(NODES, most, most * each)
                for _ in range(4)
            ]
            fell = changed(model, graph, attacked(graph, model, ends, seed), NODES, NODES + most)
            assert int(fell.sum(1).max()) <= bound
            spent = torch.tensor([sum(map(len, rows)) for rows in ends])
            assert not bool(
                (fell & (found.edge_radius[None] >= spent[:, None]) & (found.edge_radius[None] <= 2)).any()
            )
            informative += bound < NODES
            reached += int(fell.sum(1).max())
    assert informative > 3 and reached > 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_models_of_any_depth_are_covered(kind: type[Any], layers: int) -> None:
    graph = tiny(1, 12)
    model = model_of(kind, graph, layers, size=0.2)
    found = certify_budget(model, graph, budgets=[(1, 2), (2, 3)])
    assert found.known and found.reason.startswith("a linear program")
    generator = torch.Generator().manual_seed(0)
    for one in found.budgets:
        most, each = one["nodes"], one["edges"]
        assert most is not None and each is not None and one["changed"] is not None
        ends = [
            [torch.randperm(12, generator=generator)[:each].tolist() for _ in range(most)] for _ in range(500)
        ]
        fell = changed(model, graph, attacked(graph, model, ends, 1), 12, 12 + most)
        assert int(fell.sum(1).max()) <= one["changed"]
    # What holds if every node gains one new neighbour holds if one node does.
    every = certify_injection(model, graph, neighbours=1).certified
    if layers != 2:
        assert bool((found.edge_radius[every] >= 1).all())


def test_a_users_model_is_covered() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = GATConv(4, 3, heads=2), GATConv(6, 5, heads=1)
            self.out = nn.Linear(5, 2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.out(self.two(self.one(x, edge_index).relu(), edge_index))

    graph = tiny(2, 12)
    torch.manual_seed(1)
    model = fgai.limit(Own().eval(), graph, 0.05, shrink=0.6)
    found = certify_budget(model, graph, budgets=[(2, 2)])
    assert found.known
    generator = torch.Generator().manual_seed(0)
    ends = [[torch.randperm(12, generator=generator)[:2].tolist() for _ in range(2)] for _ in range(500)]
    fell = changed(model, graph, attacked(graph, model, ends, 1), 12, 14)
    bound = found.budgets[0]["changed"]
    assert bound is not None and int(fell.sum(1).max()) <= bound


def test_more_of_everything_changes_more() -> None:
    graph = tiny(4, 20)
    model = model_of(GAT, graph, size=0.5)
    sizes = [(1, 1), (1, 3), (2, 3), (4, 3), (8, 20)]
    bounds = [one["changed"] for one in certify_budget(model, graph, budgets=sizes).budgets]
    assert bounds == sorted(bounds, key=lambda bound: bound or 0) and 0 < bounds[-1] <= 20  # type: ignore[operator]
    part = torch.arange(20) < 7
    fewer = certify_budget(model, graph, budgets=sizes, nodes=part).budgets
    assert all(one["changed"] <= min(7, all_ or 0) for one, all_ in zip(fewer, bounds, strict=True))  # type: ignore[operator]
    assert graph.y is not None
    right = certify_budget(model, graph, budgets=[(1, 1)])
    correct = int((right.classes == graph.y).sum())
    assert correct - right.budgets[0]["changed"] <= right.budgets[0]["right"] <= correct  # type: ignore[operator]


def test_the_program_bounds_every_integer_allocation() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        weights = sp.csr_matrix(generator.random((5, 4)) * (generator.random((5, 4)) < 0.7))
        for most, edges in ((1, 1), (2, 3), (3, 5)):
            best = max(int((weights @ np.array(counts) >= 1).sum()) for counts in allocations(4, most, edges))
            loose = _max_covered(weights, most, edges)
            assert best <= loose + 1e-9 <= 5 + 1e-9
    assert _max_covered(sp.csr_matrix((3, 4)), 2, 3) == 0.0
    assert 4 <= _max_covered(sp.identity(6, format="csr"), 1, 4) < 4.3
    assert _max_covered(sp.csr_matrix(np.full((6, 2), 0.5)), 1, 1) == 0.0  # one edge brings none to 1


def optimum(weights: sp.csr_matrix, most: int, edges: int) -> float:
    """The linear program, solved by HiGHS."""
    rows, columns = weights.shape
    gains = sp.hstack([sp.identity(rows), -weights])
    spent = sp.hstack([sp.csr_matrix((1, rows)), np.ones((1, columns))])
    solved = linprog(
        np.concatenate([-np.ones(rows), np.zeros(columns)]),
        A_ub=sp.vstack([gains, spent]).tocsr(),
        b_ub=np.append(np.zeros(rows), edges),
        bounds=[(0, 1)] * rows + [(0, most)] * columns,
    )
    return -float(solved.fun)


@pytest.mark.many
@pytest.mark.parametrize("size", [(6, 5), (300, 200)])
def test_the_bound_is_the_optimum_of_the_program(size: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    for density in (0.1, 0.6):
        weights = sp.csr_matrix(generator.random(size) * (generator.random(size) < density))
        for most, edges in ((1, 2), (3, 4), (2, 40)):
            reached = weights[_coverable(weights, most, edges)]
            found, exact = _max_covered(weights, most, edges), optimum(reached, most, edges)
            assert exact - 1e-6 <= found <= exact + 0.25 + 1e-3 * exact + 1e-6


def test_any_prices_bound_the_program() -> None:
    """So a search that ends early, or errs, only loosens the bound."""
    generator = np.random.default_rng(1)
    weights = sp.csr_matrix(generator.random((6, 5)))
    exact = optimum(weights, 2, 3)
    for _ in range(50):
        assert _dual_bound(weights, generator.random(6), 2, 3) >= exact - 1e-9


def test_levels_end_in_what_is_asked() -> None:
    assert _levels([20]) == [1, 2, 3, 5, 8, 12, 18, 20]
    assert _levels([1]) == [1] and {5, 20} <= set(_levels([1, 5, 20]))


def test_models_the_proof_does_not_cover_are_refused() -> None:
    graph = tiny(0, 12)
    hooked = model_of(GAT, graph)
    hooked.convs[-1].register_forward_hook(lambda module, inputs, output: 3 * output)  # type: ignore[union-attr,index]
    bare = GAT(4, 2).eval()
    transformer = fgai.limit(GT.for_data(graph, out_channels=2).eval(), graph, 0.0, shrink=0.0)
    for model in (hooked, bare, transformer, GCN(4, 2).eval()):
        found = certify_budget(model, graph, budgets=[(1, 1)])
        assert not found.known and found.reason
        assert found.budgets == [{"nodes": 1, "edges": 1, "changed": None, "right": None}]
        assert bool((found.edge_radius == -1).all()) and "–" in str(found)


@pytest.mark.parametrize(
    "options",
    [{"budgets": []}, {"budgets": [(0, 1)]}, {"budgets": [(1, 2, 3)]}, {"nodes": torch.ones(3) > 0}],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any]) -> None:
    graph = tiny(0)
    with pytest.raises(InputError, match=r"budget|nodes"):
        certify_budget(model_of(GAT, graph), graph, **options)


def test_a_certificate_is_saved_and_shown(tmp_path: Path) -> None:
    graph = tiny(0)
    found = fgai.certify_budget(model_of(GAT, graph), graph, budgets=[(1, 2), (2, 2)])
    again = BudgetCertificate.load(found.save(tmp_path / "budget.json"))
    assert again.to_dict() == found.to_dict() and torch.equal(again.edge_radius, found.edge_radius)
    old = {"holds" if name == "edge_radius" else name: value for name, value in found.to_dict().items()}
    assert BudgetCertificate.from_dict(old).to_dict() == found.to_dict()  # as older records name it
    assert "1 × 2" in str(found) and "however they are spent" in str(found)
    assert len(found.to_pandas()) == graph.num_nodes


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_hundred_thousand_attacks_change_no_more(kind: type[Any]) -> None:
    """Random wirings, features of five sizes, and values at the corners of the limits."""
    tried = 0
    for seed in range(10):
        graph = tiny(seed, 24)
        model = model_of(kind, graph, seed=seed, size=0.5)
        sizes = [(1, 2), (2, 3), (4, 4)]
        found = certify_budget(model, graph, budgets=sizes)
        generator = torch.Generator().manual_seed(seed)
        for one, (most, each) in zip(found.budgets, sizes, strict=True):
            width = sum(limits.low.numel() for limits in entry_limits(model))
            for turn in range(4):
                pool = torch.randperm(24, generator=generator)[: 24 if turn % 2 else 2 * each]
                ends = [
                    [
                        pool[torch.randperm(len(pool), generator=generator)[:each]].tolist()
                        for _ in range(most)
                    ]
                    for _ in range(500)
                ]
                copies = attacked(graph, model, ends, turn)
                assert one["changed"] is not None
                assert int(changed(model, graph, copies, 24, 24 + most).sum(1).max()) <= one["changed"]
                tried += len(ends)
            # Values of new nodes behind the first layer's limits, where every feature ends up.
            ends_of = torch.stack([torch.randperm(24, generator=generator)[:each] for _ in range(most)])
            joined = prepared(model, graph.inject(ends_of, torch.zeros(most, 4))[0])
            for _ in range(40):
                corners = torch.rand(most, width, generator=generator).round()
                with torch.no_grad():
                    after = call_model(model, joined.replace(entry_values=corners)).argmax(1)[:24]
                assert int((after != found.classes).sum()) <= one["changed"]
                tried += 1
    assert tried > 50_000
