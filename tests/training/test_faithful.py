"""`make_faithful`: what it leaves alone, what it returns, how it resumes and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv

from fgai.attention import call_model, evaluating, observe, prepared
from fgai.datasets import planted, random_split
from fgai.errors import AttentionError, CheckpointError, InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.topk import swap_margin
from fgai.training import (
    AdversarialRecipe,
    FaithfulRecipe,
    FaithfulSettings,
    HardenSettings,
    StepContext,
    faithful,
    harden,
    make_faithful,
    term,
    train,
    train_method,
)
from fgai.training.faithful import StepAttack
from fgai.training.terms import sum_scalars

QUICK = {"epochs": 6, "nodes": 3, "edges": 4}


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


@pytest.fixture(scope="module")
def model(graph: Graph) -> nn.Module:
    return train(GAT.for_data(graph), graph, epochs=5, progress=False)  # type: ignore[no-any-return]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.many
@pytest.mark.parametrize("kind", [GAT, GATv2, GT, Mine])
def test_returns_another_model_and_leaves_the_vanilla_one(kind: type[nn.Module], graph: Graph) -> None:
    torch.manual_seed(0)
    fresh = Mine(graph.num_features, graph.num_classes) if kind is Mine else kind.for_data(graph)  # type: ignore[attr-defined]
    model = train(fresh, graph, epochs=5, progress=False)
    before, mode = weights(model), model.training
    state = torch.random.get_rng_state()
    faithful = make_faithful(model, graph, progress=False, clip_share=0.0, shrink=0.0, **QUICK)
    assert type(faithful) is type(model) and faithful is not model and not faithful.training
    assert model.training == mode
    assert torch.equal(state, torch.random.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    after = faithful.state_dict()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert all(".limits." in name for name in set(after) - set(before))
    assert set(faithful.history.terms[0]) == {
        "closeness", "similarity", "margin", "sharpness", "prediction_stability", "total",
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
    options = {**QUICK, "clip_share": 0.0, "shrink": 0.0, "epochs": 1}
    told = make_faithful(model, graph, progress=False, radius=0.3, **options).history.terms[0]["margin"]
    layers = observe(model, prepared(model, graph)).attention.layers
    rowptrs = [layer.rowptr for layer in layers]

    def summed(values: list[torch.Tensor]) -> torch.Tensor:
        return sum_scalars(
            [swap_margin(w, rowptr, 5, 0.3) for w, rowptr in zip(values, rowptrs, strict=True)]
        )

    shown = summed([layer.explanation() for layer in layers])
    averaged = summed([layer.values.double().mean(1) for layer in layers])
    assert told == pytest.approx(float(shown), rel=1e-5)
    assert told != pytest.approx(float(averaged), rel=1e-4)


def test_seed_decides_everything(model: nn.Module, graph: Graph) -> None:
    one, same, other = (make_faithful(model, graph, progress=False, seed=s, **QUICK) for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(same).values(), strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True)
    )


@pytest.mark.parametrize("killed_after", [2, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 4))])
def test_killed_and_resumed_is_bit_equal(
    killed_after: int, model: nn.Module, graph: Graph, tmp_path: object
) -> None:
    whole = make_faithful(model, graph, progress=False, **QUICK)

    class KilledError(Exception):
        pass

    original = faithful.FaithfulRecipe.losses

    def dying(self: faithful.FaithfulRecipe, net: nn.Module, epoch: int):  # type: ignore[no-untyped-def]
        if epoch == killed_after:
            raise KilledError
        yield from original(self, net, epoch)

    options = {"progress": False, "checkpoint": tmp_path, "checkpoint_every": 1, **QUICK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faithful.FaithfulRecipe, "losses", dying)
        with pytest.raises(KilledError):
            make_faithful(model, graph, **options)
    resumed = make_faithful(model, graph, **options)
    assert all(
        torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(resumed).values(), strict=True)
    )
    with pytest.raises(CheckpointError, match="another training"):
        make_faithful(model, graph, **{**options, "similarity": 9.0})


def test_graphs_take_turns_and_every_epoch_has_every_term(model: nn.Module, graph: Graph) -> None:
    terms = make_faithful(model, graph, progress=False, **QUICK).history.terms
    assert all(set(values) == set(terms[0]) for values in terms)
    for epoch in range(1, len(terms)):
        moved = {name for name in terms[0] if terms[epoch][name] != terms[epoch - 1][name]}
        clean, attacked = {"closeness", "similarity"}, {"prediction_stability"}
        assert moved.isdisjoint(clean if epoch % 2 else attacked)
        assert moved >= (attacked if epoch % 2 else clean)


@pytest.mark.parametrize("kind", [GAT, Mine])
def test_attention_under_attack_is_that_of_the_clean_edges(kind: type[nn.Module], graph: Graph) -> None:
    torch.manual_seed(2)
    model = Mine(graph.num_features, graph.num_classes) if kind is Mine else GAT.for_data(graph)
    model, seen = model.eval(), []

    @term(on="attacked", needs_attention=True)
    def noted(context: StepContext) -> torch.Tensor:
        seen.append(context)
        return context.attacked_attention[-1].sum()  # type: ignore[index]

    settings = FaithfulSettings(nodes=5, edges=7, limits=False)
    recipe = FaithfulRecipe(model, prepared(model, graph), settings, [noted])
    recipe.start(model, 0)
    nodes = StepAttack(
        recipe.adversary, recipe.adversary.draw(torch.Generator().manual_seed(2)), recipe.reach
    )
    recipe.loss.attacked_terms(model, nodes, recipe.loss.vanilla_context(model))
    attacked, _ = recipe.adversary.ascend_and_inject(recipe.graph, nodes.endpoints)
    before, after = (observe(model, each, heads="mean").attention for each in (recipe.graph, attacked))
    for one, two, found in zip(before, after, seen[-1].attacked_attention, strict=True):
        values = {
            (int(s), int(d)): float(w)
            for s, d, w in zip(two.source, two.destination, two.heads(), strict=True)
        }
        wanted = [values[int(s), int(d)] for s, d in zip(one.source, one.destination, strict=True)]
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("limits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_lowers_what_it_minimises(graph: Graph, limits: bool) -> None:
    model = train(GAT.for_data(graph), graph, epochs=30, progress=False)
    settings = {**QUICK, "epochs": 60, "lr": 0.01, "limits": limits}
    faithful = make_faithful(model, graph, check=False, progress=False, **settings)
    first, last = faithful.history.terms[0], faithful.history.terms[-1]
    if not limits:  # behind limits little moves from the start, and the adversary gets stronger
        assert last["prediction_stability"] < 0.5 * first["prediction_stability"]
    assert faithful.history.scores[-1][1] > faithful.history.scores[0][1]


def test_every_setting_changes_the_result(model: nn.Module, graph: Graph) -> None:
    changes: dict[str, object] = {
        "closeness": 1.0, "similarity": 1.0, "prediction_stability": 1.0, "margin": 1.0, "sharpness": 50.0,
        "limits": False, "clip_share": 0.1, "shrink": 0.1, "nodes": 4, "edges": 5, "box": (-9.0, 9.0),
        "steps": 1, "k": 2, "radius": 0.2, "epochs": 7, "lr": 0.01,
    }  # fmt: skip
    assert sorted(changes) == sorted(FaithfulSettings.names()) and len(changes) == 16
    short = {**QUICK, "epochs": 3}
    base = weights(make_faithful(model, graph, progress=False, **short))
    for name, value in changes.items():
        other = weights(make_faithful(model, graph, progress=False, **{**short, name: value}))
        assert any(not torch.equal(base[key], other[key]) for key in other if key in base), name


def test_the_name_of_a_graph_changes_nothing(graph: Graph) -> None:
    for verb in (make_faithful, harden):
        model = train("GAT", graph, epochs=3, progress=False)
        renamed = graph.replace(name="amazon-photo")
        one, two = (weights(verb(model, each, progress=False, **QUICK)) for each in (graph, renamed))
        assert all(torch.equal(one[name], two[name]) for name in one)
    same = weights(train("GAT", renamed, epochs=3, progress=False))
    assert all(torch.equal(value, same[name]) for name, value in weights(model).items())


def test_refuses_bad_settings() -> None:
    for change, message in (
        ({"k": 0}, "`k` must be at least 1, .* got 0"), ({"radius": -0.1}, "`radius` must be above 0"),
        ({"steps": 0}, "`steps`"), ({"nodes": -1}, "`nodes`"), ({"edges": 0}, "`edges`"),
        ({"box": (1.0, 0.0)}, "`box` must be"), ({"lr": 0.0}, "`lr`"), ({"epochs": 0}, "`epochs`"),
        ({"clip_share": 0.5}, "`clip_share` must be at least 0 and below 0.5, got 0.5"),
        ({"shrink": 1.0}, "`shrink`"), ({"margin": -1.0}, "`margin`"),
        ({"preset": None}, "`settings` must be one of"), ({"cut": 0.1}, "`settings` must be one of"),
        ({"similarty": 1.0}, "did you mean 'similarity'"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            FaithfulSettings().replace(**change)
    for bad in (0.0, 1.0):
        with pytest.raises(InputError, match="`attack_weight` must be above 0 and below 1"):
            HardenSettings(attack_weight=bad)


def test_refuses_models_and_graphs_that_do_not_fit(graph: Graph) -> None:
    class NoAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(graph.num_features, graph.num_classes)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.conv(x, edge_index)

    with pytest.raises(AttentionError, match="its modules are GCNConv"):
        make_faithful(NoAttention(), graph, progress=False, **QUICK)
    with pytest.raises(InputError, match="features"):
        make_faithful(GAT(graph.num_features + 1, 3), graph, progress=False, **QUICK)


def test_adversarial_training_runs_through_the_same_loop(model: nn.Module, graph: Graph) -> None:
    recipe = AdversarialRecipe(prepared(model, graph), HardenSettings(nodes=3, edges=4))
    hardened = train(model, graph, recipe=recipe, epochs=4, progress=False)
    assert set(hardened.history.terms[0]) == {"clean", "attacked", "total"}
    assert len(hardened.history.terms) == 4


def test_hardening_needs_labels(graph: Graph) -> None:
    model = GAT.for_data(graph)
    with pytest.raises(InputError, match="no labels"):
        harden(model, graph.replace(y=None), progress=False)
    with pytest.raises(InputError, match="`train_mask`"):
        harden(model, graph.replace(train_mask=None), progress=False)
    own = harden(Mine(graph.num_features, graph.num_classes), graph, progress=False, **QUICK)
    assert isinstance(own, Mine) and len(own.history.terms) == 6


@pytest.mark.parametrize("method", ["vanilla", "ln", "at", "harden", "fgai"])
def test_every_method_by_name(method: str, model: nn.Module, graph: Graph) -> None:
    small = {"epochs": 2}
    if method not in ("vanilla", "ln"):
        small |= {"nodes": 3, "edges": 4}
    trained = train_method(method, "GAT", graph, vanilla=model, progress=False, settings=small)
    with evaluating(trained), torch.no_grad():
        assert call_model(trained, graph).shape == (graph.num_nodes, graph.num_classes)
