"""Computing only what a change reaches equals computing everything, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fgai.attacks import Budget, FeaturePGD, Objective, PGDInjection, RandomEdges, draw_endpoints
from fgai.attacks.base import Judge, Ledger
from fgai.attacks.search.site import _PartialExplanation, _SiteOutput
from fgai.attention import observe, prepared, record, touched_rows
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.models import GAT, GT, GATv2
from fgai.objectives import Clean, TopKMargin
from fgai.recompute.local import Recompute, _Edit
from fgai.sparse import Features
from support import attack_cases as cases
from support.forward import seen_by
from support.graph_cases import build, edge_sets, small_data

SHAPES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gat-2": (GAT, {"hidden_channels": 4, "heads": 3, "num_layers": 2}),
    "gat-3-normed": (GAT, {"hidden_channels": 2, "heads": 5, "num_layers": 3, "norm": "layer"}),
    "gatv2-3": (GATv2, {"hidden_channels": 4, "heads": 3, "num_layers": 3}),
    "gt-2-layer-norm": (GT, {"hidden_channels": 12, "heads": (3, 1), "encodings": 4, "norm": "layer"}),
    "gt-3": (GT, {"hidden_channels": 12, "heads": (3, 1, 2), "encodings": 5}),
}


def doubled(graph: Graph) -> Graph:
    assert graph.features is not None
    return graph.replace(features=Features.dense(graph.features.to_dense().double()))


def network(shape: str, graph: Graph) -> nn.Module:
    kind, sizes = SHAPES[shape]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind.for_data(graph, **sizes).double()  # type: ignore[attr-defined]
        for module in model.modules():  # statistics that are not the identity
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    model.eval()
    return model  # type: ignore[no-any-return]


def draw(graph: Graph, nodes: int, each: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ends = draw_endpoints(torch.arange(graph.num_nodes), nodes, each, generator)
    rows = torch.randn(nodes, graph.num_features, generator=generator, dtype=torch.float64)
    return ends, rows.requires_grad_()


def assert_same(again: Recompute, model: nn.Module, change: GraphChange, moving: Tensor) -> None:
    """Logits everywhere, and gradients of a random function of them, through either door."""
    attacked, _ = change.apply(again.graph)
    full = model(attacked)
    pull = torch.randn(full.shape, generator=torch.Generator().manual_seed(3), dtype=full.dtype)
    (expected,) = torch.autograd.grad((full * pull).sum(), moving, materialize_grads=True)
    plan = again.plan(change, limit=float("inf"))
    assert plan is not None and attacked.features is not None
    encoded = None if attacked.positional is None else attacked.positional[plan.start]
    for touched in (again.forward(plan, attacked.features, encoded), again.logits(change)):
        kept = torch.cat([again.clean_logits, full.new_zeros(plan.edit.new, full.shape[1])])
        out = kept.index_copy(0, touched.nodes, touched.logits)
        torch.testing.assert_close(out, full, rtol=1e-10, atol=1e-12)
        (got,) = torch.autograd.grad((out * pull).sum(), moving, materialize_grads=True)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_injected_nodes(shape: str) -> None:
    graph = doubled(small_data(nodes=90))
    model = network(shape, graph)
    again = Recompute(model, prepared(model, graph))
    ends, rows = draw(again.graph, 2, 3)
    assert_same(again, model, GraphChange(endpoints=ends, features=rows), rows)


@pytest.mark.parametrize("shape", ["gatv2-3", "gt-3"])
def test_scores_that_no_source_could_get(shape: str) -> None:
    graph = doubled(small_data(nodes=90))
    model = network(shape, graph)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "score_weight" in name or ".query." in name:
                parameter.zero_()
    again = Recompute(model, prepared(model, graph))
    ends, rows = draw(again.graph, 2, 3)
    assert_same(again, model, GraphChange(endpoints=ends, features=rows), rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_changed_features_and_edges(shape: str) -> None:
    graph = doubled(small_data(nodes=70))
    model = network(shape, graph)
    again = Recompute(model, prepared(model, graph))
    delta = torch.randn(2, graph.num_features, dtype=torch.float64).requires_grad_()
    rows = torch.tensor([11, 4])
    assert_same(again, model, GraphChange(rows=rows, delta=delta), delta)
    edges = torch.tensor([[3, 8, 20], [9, 31, 6]])
    assert_same(again, model, GraphChange(rows=rows, delta=delta, edges=edges), delta)
    inner = (graph.adjacency.source < graph.adjacency.destination).nonzero().flatten()[[0, 7, 30]]
    gone = graph.edge_index[:, inner]
    assert_same(again, model, GraphChange(rows=rows, delta=delta, edges=edges, removed=gone), delta)
    ends, features = draw(again.graph, 3, 2)
    assert_same(
        again, model, GraphChange(endpoints=ends, features=features, rows=rows, delta=delta), features
    )


@given(edge_sets(min_nodes=2), st.sampled_from(sorted(SHAPES)), st.integers(0, 5))
@settings(max_examples=12, deadline=None)
def test_any_graph(given_edges: tuple[int, list[tuple[int, int]]], shape: str, seed: int) -> None:
    nodes, edges = given_edges
    graph = doubled(build(nodes, edges, width=4, y=torch.arange(nodes) % 2))
    if shape.startswith("gt"):  # encodings of their own: no eigensolver for tiny directed graphs
        generator = torch.Generator().manual_seed(seed)
        size = (nodes, SHAPES[shape][1]["encodings"])
        encodings = torch.rand(size, generator=generator, dtype=torch.float64)
        graph = graph.replace(positional=encodings, positional_values=encodings / 2 + 0.3)
    model = network(shape, graph)
    again = Recompute(model, prepared(model, graph))
    ends, rows = draw(again.graph, 2, min(nodes, 1 + seed % 3), seed)
    assert_same(again, model, GraphChange(endpoints=ends, features=rows), rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_rows_give_the_ranking(shape: str) -> None:
    graph = doubled(small_data(nodes=60))
    model = network(shape, graph)
    again = Recompute(model, prepared(model, graph))
    ends, rows = draw(again.graph, 2, 3)
    change = GraphChange(endpoints=ends, features=rows.detach())
    attacked, _ = change.apply(again.graph)
    logits, attention = seen_by(model, attacked)
    plan = again.plan(change, all_rows=True, limit=float("inf"))
    assert plan is not None and attacked.features is not None
    encoded = None if attacked.positional is None else attacked.positional[plan.start]
    touched = again.forward(plan, attacked.features, encoded)
    torch.testing.assert_close(touched.logits, logits[touched.nodes])
    torch.testing.assert_close(again.clean_logits, model(again.graph))
    for patch, ranks, layer, clean in zip(
        plan.patches, touched.ranks, attention.layers, again.clean_attention.layers, strict=True
    ):
        old = patch.positions >= 0
        spot = torch.searchsorted(layer.keys, clean.keys[patch.positions[old]])
        torch.testing.assert_close(ranks[old], layer.ranking()[spot])


@pytest.mark.parametrize(
    ("kind", "objective"),
    cases.first(
        3,
        cases.rotated([PGDInjection, FeaturePGD, RandomEdges], ["prediction", "explanation", "margin"]),
    ),
)
def test_attacks_find_the_same_either_way(kind: Any, objective: str) -> None:
    graph = doubled(small_data(nodes=300, seed=4))
    budget = Budget(nodes=2, edges=3, steps=3, step_size=0.3, restarts=2)
    if kind is FeaturePGD:
        budget = Budget(rows=0.01, radius=0.3, steps=3, step_size=0.1)
    elif kind is RandomEdges:
        budget = Budget(edges=4)
    attack = kind(budget, objective)
    model = network("gat-2", graph)
    with cases.quiet():
        full, part = (attack.run(model, graph, partial=partial) for partial in (False, True))
    assert full.ledger.partial == 0 and full.ledger.share == 1.0
    assert part.ledger.curve == pytest.approx(full.ledger.curve, rel=1e-10)
    assert torch.equal(part.graph.keys, full.graph.keys)
    for ours, theirs in zip(vars(part.change).values(), vars(full.change).values(), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and ours.is_floating_point():
            torch.testing.assert_close(ours, theirs)
    if kind is not RandomEdges:
        assert part.ledger.partial == part.ledger.forwards and part.ledger.share < 0.5


class Bent(GAT):
    """A subclass with a forward pass of its own."""

    def embed(self, graph: Graph) -> Tensor:
        return super().embed(graph) ** 2


def test_full_passes_where_parts_do_not_serve() -> None:
    graph = cases.tiny_graph()
    attack = cases.attack(PGDInjection, nodes=3, edges=12)
    bent = Bent.for_data(graph).eval()
    assert not Recompute.fits(bent, bent.prepare(graph))
    with pytest.raises(InputError, match="Bent"):
        Recompute(bent, bent.prepare(graph))
    with cases.quiet():
        assert attack.run(bent, graph).ledger.partial == 0
        assert attack.run(cases.untrained("pyg"), graph).ledger.partial == 0
        deep = GAT.for_data(graph, num_layers=3).eval()
        everywhere = attack.run(deep, graph, seed=1).ledger
    assert (everywhere.partial, everywhere.share) == (0, 1.0)


def test_taps_modes_and_weights_are_seen() -> None:
    graph = cases.tiny_graph()
    model = GAT.for_data(graph).eval()
    graph = model.prepare(graph)
    assert Recompute.fits(model, graph)
    with record(model):
        assert not Recompute.fits(model, graph)
    assert not Recompute.fits(model.train(), graph)
    model.eval()
    weighted = graph.replace(edge_weight=torch.ones(graph.num_edges))
    assert not Recompute.fits(model, weighted)
    handle = model.convs[0].register_forward_hook(lambda *_: None)
    assert not Recompute.fits(model, graph)
    handle.remove()
    assert Recompute.fits(model, graph)


def test_only_wanted_nodes_are_computed() -> None:
    graph = doubled(small_data(nodes=80))
    model = network("gat-3-normed", graph)
    again = Recompute(model, prepared(model, graph))
    ends, rows = draw(again.graph, 2, 3)
    change = GraphChange(endpoints=ends, features=rows)
    wanted = torch.arange(0, 80, 3)
    found = again.logits(change, wanted)
    assert set(found.nodes.tolist()) <= set(wanted.tolist())
    every = again.logits(change)
    both = torch.isin(every.nodes, wanted)
    assert sorted(found.nodes.tolist()) == sorted(every.nodes[both].tolist())
    torch.testing.assert_close(found.logits, model(change.apply(again.graph)[0])[found.nodes])


def test_an_edit_reads_the_same_from_change_and_graph() -> None:
    graph = small_data(nodes=50)
    graph, _ = graph.add_self_loops()
    pair = torch.tensor([[2, 17], [40, 30]])
    gone = graph.edge_index[:, (graph.adjacency.source < graph.adjacency.destination).nonzero()[:2, 0]]
    ends = torch.tensor([[1, 5, 9], [4, 5, 30]])
    for change in (
        GraphChange(endpoints=ends, features=torch.ones(2, graph.num_features)),
        GraphChange(edges=pair, removed=gone),
        GraphChange(edges=gone, removed=gone),
    ):
        made, attacked = _Edit.of(change, graph), change.apply(graph)[0]
        assert made.new == attacked.num_nodes - graph.num_nodes
        if change.edges is not gone:
            before, after = (set(map(tuple, one.edge_index.T.tolist())) for one in (graph, attacked))
            assert set(map(tuple, made.added.T.tolist())) == after - before
            assert set(map(tuple, graph.edge_index[:, made.removed].T.tolist())) == before - after


@pytest.mark.parametrize("objective", ["prediction", "margin", "explanation"])
@pytest.mark.parametrize("shape", ["gat-2", "gt-2-layer-norm"])
def test_objectives_when_edges_come_and_go(objective: str, shape: str) -> None:
    graph = doubled(small_data(nodes=200, seed=2))
    model = network(shape, graph)
    again = Recompute(model, prepared(model, graph))
    clean = Clean(again.clean_logits, again.clean_attention, torch.arange(0, 200, 3))
    wanted = Objective.of(objective, 2)
    inner = (graph.adjacency.source < graph.adjacency.destination).nonzero().flatten()[[2, 9]]
    change = GraphChange(edges=torch.tensor([[3], [9]]), removed=graph.edge_index[:, inner])
    full = wanted(*seen_by(model, change.apply(again.graph)[0]), clean)
    ledger = Ledger()
    found = Judge(model, again.graph, wanted, clean, ledger, again).value(change)
    assert ledger.partial == 1 and ledger.share < 0.6
    torch.testing.assert_close(found, full, rtol=1e-10, atol=0)


@pytest.mark.parametrize("shape", ["gat-2", "gatv2-3", "gt-2-layer-norm"])  # scores without ties
def test_outsiders_out_of_the_race_are_not_looked_at(shape: str) -> None:
    generator = torch.Generator().manual_seed(2)
    pairs = (torch.rand(60, 60, generator=generator) < 0.25).nonzero().tolist()
    graph = doubled(build(60, [(one, other) for one, other in pairs], width=6, y=torch.arange(60) % 2))
    model = network(shape, graph)
    again = Recompute(model, prepared(model, graph))
    ends, rows = draw(again.graph, 2, 2)
    change = GraphChange(endpoints=ends, features=rows)
    clean = Clean(again.clean_logits, again.clean_attention, torch.arange(60))
    plan = again.plan(change, all_rows=True, limit=float("inf"))
    assert plan is not None and again.graph.features is not None
    attacked = change.apply(again.graph)[0]
    for k in (1, 3):
        reduced = _PartialExplanation(TopKMargin(k), again, clean, plan, None)
        first = reduced._layers[0]
        assert len(first.spots) < int(again.graph.adjacency.degree[: len(first.rows)].sum()) // 2
        for copies in (1, 3):
            several = _PartialExplanation(TopKMargin(k), again, clean, plan, plan.copies(copies))
            encoded = again.encodings(plan, change)
            encoded = None if encoded is None else encoded.repeat(copies, 1)
            many = again.graph.features.append(rows.repeat(copies, 1))
            touched = again.forward(plan.copies(copies).plan, many, encoded, logits=False)
            made = several(_SiteOutput(touched.logits, None, touched))
            seen = observe(model, attacked, heads="mean", grad=True).attention
            near = touched_rows(clean.attention, seen)
            loss, lost = TopKMargin(k).shares(seen, clean, near)
            torch.testing.assert_close(made[0], loss.expand(copies))
            torch.testing.assert_close(made[1], lost.expand(copies))
            (got,) = torch.autograd.grad(made[0].sum(), rows)
            (expected,) = torch.autograd.grad(loss, rows)
            torch.testing.assert_close(got, copies * expected)
