"""Certificates against injection: no attack of the threat changes a certified class; bounds are attained."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fgai
from fgai.attention import call_model, entry_limits, observe, prepared
from fgai.bounds.intervals import StateBounds, _Ball, layer_ranges
from fgai.bounds.scores import _ScoreBounds, _sectors
from fgai.certificates import InjectionCertificate, certify_injection, invariant_layers
from fgai.certificates.kernels import _mean_bounds
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.metrics import overlap_per_node
from fgai.metrics.views import AttentionPair
from fgai.models import GAT, GT, GATv2
from fgai.sparse import Adjacency

MODELS = (GAT, GATv2)
GRAPHS = ("clique", "star", "random", "isolated", "ties")


def graph_of(kind: str) -> Graph:
    """Graphs of 24 nodes on which certificates may go wrong."""
    generator = torch.Generator().manual_seed(5)
    nodes = 24
    pairs = {
        "clique": torch.combinations(torch.arange(nodes)).t(),
        "star": torch.stack([torch.zeros(nodes - 1, dtype=torch.long), torch.arange(1, nodes)]),
        "random": torch.randint(nodes, (2, 90), generator=generator),
        "isolated": torch.randint(nodes // 2, (2, 60), generator=generator),
        "ties": torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)]),
    }[kind]
    features = torch.randn(nodes, 6, generator=generator)
    if kind == "ties":
        features = features[:1].repeat(nodes, 1)
    both = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    return Graph.from_edges(both[:, both[0] != both[1]], nodes, features)


def model_of(kind: type[Any], graph: Graph, layers: int, shrink: float) -> nn.Module:
    """A model behind limits whose classes are apart by the bias, so that some can be certified."""
    torch.manual_seed(2)
    model = kind(graph.num_features, 3, hidden_channels=3, heads=2, num_layers=layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.6)
        model.convs[-1].bias.copy_(torch.tensor([0.6, 0.0, -0.2]))
    return fgai.limit(model.eval(), graph, 0.05, shrink=shrink)


def injections(graph: Graph, model: nn.Module, t: int, node: int | None, seed: int) -> Graph:
    """New nodes with loud features or values of the box's corners; every node gains at most t of them."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.arange(graph.num_nodes) if node is None else torch.tensor([node])
    ends = torch.stack([pool[torch.randperm(pool.numel(), generator=generator)] for _ in range(t)])
    if node is None and seed % 3 == 0:  # a few nodes of many edges, or many of few
        ends = torch.cat([row.view(-1, 4) for row in ends])
    size = 10.0 ** float(torch.randint(-1, 5, (), generator=generator))
    features = size * torch.randn(len(ends), graph.num_features, generator=generator)
    attacked = graph.inject(ends, features)[0]
    if seed % 2:
        width = sum(limits.low.numel() for limits in entry_limits(model))
        corners = torch.rand(len(ends), width, generator=generator).round()
        attacked = attacked.replace(entry_values=corners)
    return attacked


@pytest.mark.many
@pytest.mark.parametrize("where", ["any", "direct"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_no_injection_changes_a_certified_class(kind: type[Any], layers: int, where: str) -> None:
    certified = 0
    for number, name in enumerate(GRAPHS):
        given, t = graph_of(name), 1 + number % 2
        model = model_of(kind, given, layers, 0.4 if t == 1 else 0.0)
        graph = prepared(model, given)
        found = certify_injection(model, given, neighbours=t, where=where)
        assert found.known and 0 <= found.share() <= 1
        nodes = found.certified.nonzero().flatten().tolist()
        certified += len(nodes)
        with torch.no_grad():
            assert torch.equal(call_model(model, graph).argmax(1), found.classes)
            for seed in range(4):
                chosen: list[int | None] = [None] if where == "any" else list(nodes[:2])
                for node in chosen:
                    classes = call_model(model, injections(graph, model, t, node, seed)).argmax(1)
                    mine = nodes if node is None else [node]
                    assert torch.equal(classes[: graph.num_nodes][mine], found.classes[mine])
    assert certified > 0


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_injected_keeps_everything_and_more_keeps_less(kind: type[Any]) -> None:
    given = graph_of("clique")
    model = model_of(kind, given, 2, 0.2)
    shares = [certify_injection(model, given, neighbours=t).share() for t in (0, 1, 2, 8)]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True)
    for t in (1, 3):
        wide = certify_injection(model, given, neighbours=t, where="direct").certified
        assert bool((wide | ~certify_injection(model, given, neighbours=t).certified).all())


def test_a_climb_through_the_limits_breaks_nothing() -> None:
    given = graph_of("clique")
    model = model_of(GAT, given, 2, 0.2)
    graph = prepared(model, given)
    found = certify_injection(model, given, neighbours=2)
    assert bool(found.certified.any())
    ends = torch.stack([torch.arange(24), torch.arange(24).roll(3)])
    features = torch.randn(2, graph.num_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for _ in range(15):
        logits = call_model(model, graph.inject(ends, features)[0])[: graph.num_nodes]
        lead = logits.gather(1, found.classes[:, None]) - logits
        assert torch.equal(logits.argmax(1)[found.certified], found.classes[found.certified])
        (slope,) = torch.autograd.grad(lead.sum(), features)
        features = (features - 0.5 * slope.sign()).detach().requires_grad_()


def test_the_mean_over_intervals_is_the_brute_force_one() -> None:
    generator = torch.Generator().manual_seed(1)
    adjacency = Adjacency.build(torch.tensor([[0, 1, 2, 1], [0, 0, 0, 1]]), 3)[0]
    low = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    high = low + torch.rand(4, 1, generator=generator, dtype=torch.float64)
    new = torch.randn(3, 1, generator=generator, dtype=torch.float64)
    values = torch.randn(3, 1, 1, generator=generator, dtype=torch.float64)
    box = torch.tensor([[-2.0]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    scores = _ScoreBounds(low, high, new[:, :, None], new)
    least, most = _mean_bounds(adjacency, scores, (values, values), (values, values), box, 1)

    def mean(scores: Tensor, said: Tensor) -> float:
        return float((scores.softmax(0) * said).sum())

    edges = slice(0, 3)
    neighbours = adjacency.source[edges]
    tried = []
    for picks in itertools.product((0, 1), repeat=3):
        old = torch.where(torch.tensor(picks, dtype=torch.bool), high[edges, 0], low[edges, 0])
        said = values[neighbours, 0, 0]
        tried.append(mean(old, said))
        louder = torch.cat([old, new[0]])
        tried += [mean(louder, torch.cat([said, torch.tensor([end])])) for end in (-2.0, 2.0)]
    assert float(least[0]) == pytest.approx(min(tried), abs=1e-7) and float(least[0]) <= min(tried) + 1e-12
    assert float(most[0]) == pytest.approx(max(tried), abs=1e-7) and float(most[0]) >= max(tried) - 1e-12
    # What counts for a node itself may lie in other intervals than what it is to its neighbours.
    own = values - 0.5, values + 0.7
    scores = _ScoreBounds(low, low, new[:, :, None], new)
    least, most = _mean_bounds(adjacency, scores, (values, values), own, box, 0)
    for ends, mine in ((least, own[0]), (most, own[1])):
        said = torch.where(neighbours == 0, mine[neighbours, 0, 0], values[neighbours, 0, 0])
        assert float(ends[0]) == pytest.approx(mean(low[edges, 0], said), abs=1e-7)


def test_what_cannot_be_followed_is_unknown() -> None:
    given = graph_of("random")
    model = model_of(GAT, given, 2, 0.0)
    hooked = model_of(GAT, given, 2, 0.0)
    hooked.convs[-1].register_forward_hook(lambda module, inputs, output: 3 * output)  # type: ignore[union-attr,index]
    others = (GAT(6, 3), fgai.limit(GT.for_data(given, out_channels=3), given, 0.0, shrink=0.0), hooked)
    for other in others:
        found = certify_injection(other.eval(), given)
        assert not found.known and found.share() == 0.0 and found.reason
    with pytest.raises(InputError, match="`neighbours`"):
        certify_injection(model, given, neighbours=-1)
    with pytest.raises(InputError, match="`where`"):
        certify_injection(model, given, where="elsewhere")


def two_camps() -> Graph:
    """Two cliques of 24 that say opposite things, and four nodes that hear two of one, all of the other."""
    first, second = torch.arange(24), torch.arange(24, 48)
    pairs = [torch.combinations(first), torch.combinations(second)]
    pairs += [torch.tensor([[node, other] for other in (0, 1, *range(24, 48))]) for node in range(48, 52)]
    edges = torch.cat(pairs).t()
    generator = torch.Generator().manual_seed(0)
    side = torch.ones(52, 1)
    side[24:] = -1
    features = side * torch.tensor([[1.0, -1.0, 0.5, 0.0]]) + 0.05 * torch.randn(52, 4, generator=generator)
    return Graph.from_edges(torch.cat([edges, edges.flip(0)], dim=1), 52, features)


@pytest.mark.parametrize("where", ["any", "direct"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_injection_reorders_a_certified_explanation(kind: type[Any], where: str) -> None:
    given, k, listeners = two_camps(), 2, torch.arange(48, 52)
    torch.manual_seed(1)
    model = kind(given.num_features, 3, hidden_channels=3, heads=2).eval()
    last = model.convs[-1]
    weight = last.source_weight if kind is GAT else last.score_weight
    first = observe(model, prepared(model, given)).attention[1]
    mine = first.destination == 48
    if int(first.source[mine][first.ranking()[mine].argmax()]) >= 24:
        weight.data.neg_()  # the smaller camp on top
    model = fgai.limit(model, given, 0.0, shrink=0.0)
    graph = prepared(model, given)
    found = certify_injection(model, given, neighbours=1, where=where, k=k)
    assert [layer.status for layer in found.layers] == ["invariant", "bound"]
    held = found.layers[1].certified
    assert held is not None and bool(held[listeners].any())
    clean = observe(model, graph).averaged().attention
    for seed in range(20):
        node = None if where == "any" else int(listeners[seed % 4])
        after = observe(model, injections(graph, model, 1, node, seed)).averaged().attention
        for layer, pair in zip(found.layers, AttentionPair(clean, after, 5).layers, strict=True):
            assert layer.certified is not None
            kept = overlap_per_node(*pair.ranks, pair.rowptr, k)
            counted = layer.certified & ~kept.isnan()
            if node is not None:
                counted &= torch.arange(len(kept)) == node
            assert bool((kept[counted] == 1).all())


def test_the_ball_is_tighter_than_the_box_and_still_true() -> None:
    generator = torch.Generator().manual_seed(0)
    base, drift = (torch.randn(50, 6, generator=generator).double() for _ in range(2))
    spread = torch.rand(50, 6, generator=generator).double()
    radius = torch.tensor(1.2).double()
    low = base + drift.clamp(max=0) - spread
    high = base + drift.clamp(min=0) + spread
    weight = torch.randn(6, 9, generator=generator).double()
    box = StateBounds(low, high).linear(weight)
    both = StateBounds(low, high, _Ball(base, drift, spread, radius)).linear(weight)
    assert bool((both[0] >= box[0]).all() & (both[1] <= box[1]).all() & (both[1] < box[1]).any())
    for _ in range(200):
        share = torch.rand(50, 6, generator=generator).double()
        point = torch.randn(50, 6, generator=generator).double()
        point = (point / point.norm(dim=1, keepdim=True) * radius).clamp(-1, 1)
        moved = (base + share * drift + spread * point) @ weight
        assert bool((moved >= both[0] - 1e-9).all() & (moved <= both[1] + 1e-9).all())


def test_sectors_hold_every_voice() -> None:
    given = graph_of("random")
    model = model_of(GAT, given, 2, 0.6).double()
    layer = model.convs[-1]
    with torch.no_grad():
        ceilings, words = _sectors(layer, layer_ranges(layer))
    limits = layer.limits["value"]
    points = torch.rand(20_000, *limits.low.shape, generator=torch.Generator().manual_seed(3)).double()
    values = limits(limits.from_unit_box((1.6 * (points - 0.5) + 0.5).round(decimals=1)))
    scores = layer.limits["source"]((values * layer.source_weight).sum(2))[:, 0]
    said = values[:, 0] + layer.bias
    lead = said[:, :, None] - said[:, None, :]
    for a, b in itertools.permutations(range(3), 2):
        covered = (scores[:, None] <= ceilings[0] + 1e-9) & (lead[:, a, b, None] >= words[:, a, b] - 1e-9)
        assert bool(covered.any(1).all())
    assert len(words) > 1 and float(ceilings.min()) < float(ceilings.max())


def test_a_certificate_is_saved_shown_and_checked(tmp_path: Path) -> None:
    given = graph_of("clique")
    model = model_of(GAT, given, 2, 0.2)
    found = fgai.certify_injection(model, given, neighbours=2, where="direct", k=3)
    same = certify_injection(model, given, neighbours=2, where="direct", k=3)
    assert torch.equal(found.certified, same.certified) and found.k == 3
    again = InjectionCertificate.load(found.save(tmp_path / "proof.json"))
    assert torch.equal(again.certified, found.certified) and again.layers[0].status == "invariant"
    assert again.to_dict() == found.to_dict()
    old = json.loads(json.dumps(found.to_dict()).replace('"certified"', '"holds"'))  # as in older records
    assert InjectionCertificate.from_dict(old).to_dict() == found.to_dict()
    assert "t = 2 injected neighbours, direct" in str(again) and "normaliser" in str(again)
    with pytest.raises(TypeError, match="threat"):
        fgai.certify_attention(model, given, threat="injection", radius=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="radius"):
        fgai.certify_injection(model, given, radius=0.1)  # type: ignore[call-arg]
    wrong: list[dict[str, Any]] = [{"neighbours": -1}, {"where": "elsewhere"}, {"k": 0}]
    for options in wrong:
        with pytest.raises(InputError, match=next(iter(options))):
            fgai.certify_injection(model, given, **options)


def test_invariant_layers_are_named_for_models_without_limits_too() -> None:
    given = graph_of("clique")
    for kind in (GAT, GATv2, GT):
        model = kind.for_data(given, out_channels=3).eval()
        why = list(invariant_layers(model, prepared(model, given)).values())
        assert why[0] and why[1:] == [None] * (len(why) - 1)
        found = certify_injection(model, given)
        assert not found.known and found.layers[0].status == "invariant" and found.order_share(0) == 1.0
        assert found.layers[1].status == "unknown" and found.order_share(1) is None
        model.register_forward_hook(lambda module, inputs, output: output)
        assert set(invariant_layers(model, prepared(model, given)).values()) == {None}
