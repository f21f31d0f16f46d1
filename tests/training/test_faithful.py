"""`make_faithful`: what it leaves alone, what it returns, how it resumes and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv

from fgai.attacks import Budget
from fgai.attention import call_model, evaluating, observe, prepared
from fgai.datasets import planted, random_split
from fgai.errors import AttentionError, CheckpointError, DivergenceError, InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.training import (
    Adversarial,
    FaithfulConfig,
    faithful,
    lesson,
    make_faithful,
    preset,
    train,
    train_method,
)
from fgai.training.adversary import InjectionAdversary
from fgai.training.terms import _attention_distance, _margin_loss

QUICK = {"epochs": 6, "validate_every": 3, "nodes": 3, "edges": 4}


class Mine(nn.Module):
    """A user's own two-layer model."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first = GATConv(width, 4, heads=3)
        self.second = GATConv(12, classes, heads=1)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.elu(self.first(x, edge_index)), edge_index)


@pytest.fixture(scope="module")
def graph() -> Graph:
    bare = planted(seed=3, num_nodes=120)
    assert bare.y is not None
    split = random_split(bare.y, 3, train=0.3, val=0.2)
    return bare.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", [GAT, GATv2, GT, Mine])
def test_returns_another_model_and_leaves_the_vanilla_one(kind: type[nn.Module], graph: Graph) -> None:
    torch.manual_seed(0)
    fresh = Mine(graph.num_features, graph.num_classes) if kind is Mine else kind.for_data(graph)  # type: ignore[attr-defined]
    model = train(fresh, graph, epochs=5, progress=False)
    before, mode = weights(model), model.training
    state = torch.random.get_rng_state()
    faithful = make_faithful(model, graph, progress=False, cut=0.0, soften=0.0, **QUICK)
    assert type(faithful) is type(model) and faithful is not model and not faithful.training
    assert model.training == mode
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    after = faithful.state_dict()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert all(".limits." in name for name in set(after) - set(before))
    assert set(faithful.history.terms[0]) == {
        "closeness", "similarity", "margin", "sharpness",
        "prediction_stability", "explanation_stability", "total",
    }  # fmt: skip
    assert faithful.history.terms[0]["closeness"] == pytest.approx(0.0, abs=1e-6)
    assert faithful.history.terms[0]["similarity"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", [GAT, GT, Mine])
def test_the_margin_is_that_of_the_explanation_vector(kind: type[nn.Module], graph: Graph) -> None:
    torch.manual_seed(0)
    fresh = Mine(graph.num_features, graph.num_classes) if kind is Mine else kind.for_data(graph)  # type: ignore[attr-defined]
    model = train(fresh, graph, epochs=5, progress=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that heads differ
    options = {**QUICK, "cut": 0.0, "soften": 0.0, "dropout": False, "epochs": 1, "validate_every": 1}
    told = make_faithful(model, graph, progress=False, radius=0.3, **options).history.terms[0]["margin"]
    layers = observe(model, prepared(model, graph)).attention.layers
    rowptrs = [layer.rowptr for layer in layers]
    shown = _margin_loss([layer.explanation() for layer in layers], rowptrs, 5, 0.3)
    averaged = _margin_loss([layer.values.double().mean(1) for layer in layers], rowptrs, 5, 0.3)
    assert told == pytest.approx(float(shown), rel=1e-5)
    assert told != pytest.approx(float(averaged), rel=1e-4)


def test_seed_decides_everything(graph: Graph) -> None:
    model = train(GAT.for_data(graph), graph, epochs=5, progress=False)
    one, same, other = (make_faithful(model, graph, progress=False, seed=s, **QUICK) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(same).values(), strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True)
    )


@pytest.mark.parametrize("killed_after", [1, 2, 4])
def test_killed_and_resumed_is_bit_equal(killed_after: int, graph: Graph, tmp_path: object) -> None:
    model = train(GAT.for_data(graph), graph, epochs=5, progress=False)
    whole = make_faithful(model, graph, progress=False, **QUICK)

    class KilledError(Exception):
        pass

    original = faithful.Faithful.parts

    def dying(self: faithful.Faithful, net: nn.Module, epoch: int):  # type: ignore[no-untyped-def]
        if epoch == killed_after:
            raise KilledError
        yield from original(self, net, epoch)

    options = {"progress": False, "checkpoint": tmp_path, "checkpoint_every": 1, **QUICK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faithful.Faithful, "parts", dying)
        with pytest.raises(KilledError):
            make_faithful(model, graph, **options)
    resumed = make_faithful(model, graph, **options)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True)
    )
    with pytest.raises(CheckpointError, match="another training"):
        make_faithful(model, graph, **{**options, "similarity": 9.0})


def test_graphs_take_turns_and_every_epoch_has_every_term(graph: Graph) -> None:
    model = train(GAT.for_data(graph), graph, epochs=5, progress=False)
    terms = make_faithful(model, graph, progress=False, **QUICK).history.terms
    assert all(set(values) == set(terms[0]) for values in terms)
    for epoch in range(1, len(terms)):
        moved = {name for name in terms[0] if terms[epoch][name] != terms[epoch - 1][name]}
        clean, attacked = {"closeness", "similarity"}, {"prediction_stability", "explanation_stability"}
        assert moved.isdisjoint(clean if epoch % 2 else attacked)
        assert moved >= (attacked if epoch % 2 else clean)
    both = make_faithful(model, graph, progress=False, turns=False, **QUICK).history.terms
    assert both[1]["closeness"] > 0


def test_rows_are_compared_in_place_as_if_matched_edge_by_edge(graph: Graph) -> None:
    torch.manual_seed(2)
    model = GAT.for_data(graph).eval()
    ready = prepared(model, graph)
    adversary = InjectionAdversary(ready, Budget(nodes=5, edges=7, targets="fit"))
    adversary.start(torch.Generator().manual_seed(1))
    attacked, edge_map = adversary.attacked(torch.Generator().manual_seed(2))
    before, after = (observe(model, shown, heads="mean").attention for shown in (ready, attacked))
    old, new, grown = lesson._paired(before.layers, after, ready, attacked, edge_map)
    assert grown is not None and all(len(w) == attacked.num_edges for w in new)
    matched = [w.index_select(0, edge_map.after) for w in new]
    for k in (None, 2):
        rows = [layer.rowptr for layer in before]
        ours = _attention_distance(old, new, rows, k, "node", grown=grown)
        assert ours.item() == pytest.approx(
            _attention_distance(old, matched, rows, k, "node").item(), rel=1e-6
        )


@pytest.mark.parametrize("limits", [False, True])
def test_it_lowers_what_it_minimises(graph: Graph, limits: bool) -> None:
    model = train(GAT.for_data(graph), graph, epochs=30, progress=False)
    settings = {**QUICK, "epochs": 60, "lr": 0.01, "ramp": 0.1, "limits": limits}
    faithful = make_faithful(model, graph, check=False, progress=False, **settings)
    first, last = faithful.history.terms[0], faithful.history.terms[-1]
    if not limits:  # behind limits little moves from the start, and the adversary gets stronger
        assert last["prediction_stability"] < 0.5 * first["prediction_stability"]
    assert faithful.history.scores[-1][1] > faithful.history.scores[0][1]


def test_refuses_bad_settings(graph: Graph) -> None:
    for change, word in (
        ({"k1": 0}, "k1"), ({"k2": -3}, "k2"), ({"radius": -0.1}, "radius"), ({"scope": "edge"}, "scope"),
        ({"layers": "first"}, "layers"), ({"adversary": "none"}, "adversary"),
        ({"divergence": "wasserstein"}, "divergence"),
        ({"steps": 0}, "steps"), ({"nodes": -1}, "nodes"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            FaithfulConfig().replace(**change)
    zero = dict.fromkeys(
        ("closeness", "similarity", "prediction_stability", "explanation_stability", "margin"), 0.0
    )
    with pytest.raises(InputError, match="all weights are zero"):
        FaithfulConfig().replace(**zero)


def test_refuses_models_and_graphs_that_do_not_fit(graph: Graph) -> None:
    class NoAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(graph.num_features, graph.num_classes)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv(x, edge_index)

    with pytest.raises(AttentionError, match="looked at: GCNConv"):
        make_faithful(NoAttention(), graph, progress=False, **QUICK)
    with pytest.raises(InputError, match="features"):
        make_faithful(GAT(graph.num_features + 1, 3), graph, progress=False, **QUICK)


def test_divergence_names_the_term_and_keeps_the_weights(graph: Graph) -> None:
    model = train(GAT.for_data(graph), graph, epochs=3, progress=False)
    original = lesson.Lesson.clean

    def broken(self: lesson.Lesson, *args: object) -> dict[str, torch.Tensor]:
        terms = original(self, *args)  # type: ignore[arg-type]
        return {**terms, "similarity": terms["similarity"] * float("nan")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lesson.Lesson, "clean", broken)
        with pytest.raises(DivergenceError, match="similarity"):
            make_faithful(model, graph, progress=False, **QUICK)


def test_adversarial_training_runs_through_the_same_loop(graph: Graph) -> None:
    model = train(GAT.for_data(graph), graph, epochs=5, progress=False)
    budget = Budget(nodes=3, edges=4, step_size=0.1, targets="fit")
    recipe = Adversarial(prepared(model, graph), budget)
    hardened = train(model, graph, recipe=recipe, epochs=4, progress=False)
    assert set(hardened.history.terms[0]) == {"clean", "attacked", "total"}
    assert len(hardened.history.terms) == 4


@pytest.mark.parametrize("method", ["vanilla", "ln", "at", "fgai"])
def test_every_method_by_name(method: str, graph: Graph) -> None:
    vanilla = train(GAT.for_data(graph), graph, epochs=3, progress=False)
    small = {"epochs": 2, "validate_every": 1}
    if method not in ("vanilla", "ln"):
        small |= {"nodes": 3, "edges": 4}
    model = train_method(method, "GAT", graph, vanilla=vanilla, progress=False, settings=small)
    with evaluating(model), torch.no_grad():
        assert call_model(model, graph).shape == (graph.num_nodes, graph.num_classes)


def test_presets_lay_special_over_general() -> None:
    assert preset("vanilla", "GAT", "unknown")["epochs"] == preset("vanilla", "X", "unknown")["epochs"]
    assert preset("nothing", "GAT", "unknown") == {}
