"""The unit of a feature does not matter: attacks on rescaled data with rescaled weights do the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.nn import GATConv

import fgai
from fgai.attacks import (
    THREATS,
    Attack,
    Budget,
    EnsembleInjection,
    FeaturePGD,
    PGDInjection,
    make_attack,
)
from fgai.attention import evaluating, prepared
from fgai.graph import Graph
from fgai.training.adversary import InjectionAdversary
from support import attack_cases as cases
from support.graph_cases import small_data

NODES, WIDTH = 60, 6
SIZE = {"nodes": 4, "edges": 4}


class Net(nn.Module):
    """A user's model: a linear layer, then attention."""

    def __init__(self, width: int = WIDTH, classes: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(width, 8)
        self.first, self.second = GATConv(8, 4, heads=2), GATConv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = torch.nn.functional.elu(self.first(torch.tanh(self.into(x)), edge_index))
        return self.second(hidden, edge_index)


@cache
def plain() -> tuple[Net, Graph]:
    """A trained model and its data, in double precision."""
    graph = small_data(seed=5, nodes=NODES)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = fgai.train(Net(), graph, epochs=40, lr=0.02, progress=False)
    return model.double(), graph.replace(features=graph.features.to("cpu", torch.float64))  # type: ignore[union-attr]


def changed(scale: Tensor, shift: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Net, Graph]:
    """The same model and data with features `scale * x + shift`."""
    model, graph = plain()
    other = Net().double()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.into.weight.div_(scale)
        other.into.bias.sub_(other.into.weight @ shift)
    features = graph.features.map(lambda x: scale * x + shift)  # type: ignore[union-attr]
    return other.to(dtype).eval(), graph.replace(features=features.to("cpu", dtype))


def units(seed: int, size: float = 3.0, offset: float = 5.0) -> tuple[Tensor, Tensor]:
    """Positive scales over `size` powers of ten, and shifts of a few widths."""
    draws = torch.Generator().manual_seed(seed)
    scale = 10 ** (size * (2 * torch.rand(WIDTH, generator=draws, dtype=torch.float64) - 1))
    return scale, scale * offset * torch.randn(WIDTH, generator=draws, dtype=torch.float64)


def attacks() -> dict[str, Attack]:
    """The threats with a size for a small graph."""
    found = {name: make_attack(THREATS[name].sized(**SIZE)) for name in ("standard", "tdgia", "adaptive")}
    found["natural"] = make_attack(THREATS["natural"].sized(**SIZE))
    found["modify"] = FeaturePGD(Budget(rows=0.3, radius=0.3, steps=8, step_size=0.05, restarts=2))
    found["ensemble"] = EnsembleInjection(
        Budget(**SIZE, steps=6), rules=("random",), baselines=((4, 0.1, 1),)
    )
    found["ensemble, explanations"] = EnsembleInjection(
        Budget(**SIZE, steps=4), "explanation", k=2, rules=("random",), baselines=()
    )
    return found


def score(model: nn.Module, graph: Graph, attacked: Graph) -> float:
    """F1 on test nodes."""
    with evaluating(model), torch.no_grad():
        classes = model(attacked.features.to_dense(), attacked.edge_index)[: graph.num_nodes].argmax(1)  # type: ignore[union-attr]
    rows = graph.test_mask
    return float((classes[rows] == graph.y[rows]).double().mean())  # type: ignore[index]


def run(name: str, model: nn.Module, graph: Graph) -> tuple[float, Any]:
    with cases.quiet():
        result = attacks()[name].run(model, graph, seed=1)
    return score(model, graph, result.graph), result


@pytest.mark.many
@pytest.mark.parametrize("name", list(attacks()))
def test_attacks_do_not_depend_on_the_unit(name: str) -> None:
    before, one = run(name, *plain())
    if "explanations" not in name:
        assert before < score(*plain(), plain()[1])
    scale, shift = units(0)
    after, two = run(name, *changed(scale, shift))
    assert after == pytest.approx(before, abs=1e-6)
    assert two.value == pytest.approx(one.value, rel=1e-6)
    if one.change.features is not None:
        torch.testing.assert_close(
            two.change.features, scale * one.change.features + shift, rtol=1e-6, atol=1e-6
        )
    else:
        torch.testing.assert_close(two.change.delta, scale * one.change.delta, rtol=1e-6, atol=1e-9)


@pytest.mark.many
@pytest.mark.parametrize("name", cases.first(3, list(attacks())))
def test_nor_in_single_precision(name: str) -> None:
    one, zero = torch.ones(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
    before, _ = run(name, *changed(one, zero, torch.float32))
    after, _ = run(name, *changed(*units(0, size=2.0, offset=2.0), torch.float32))
    assert after == pytest.approx(before, abs=0.01)


def test_climbs_do_not_depend_on_the_sign() -> None:
    """Random draws are mirrored with a feature; a climb from the middle is the same."""
    scale, shift = units(1)
    scale = scale * torch.tensor([1, -1, 1, -1, -1, 1])
    before, one = run("standard", *plain())
    after, two = run("standard", *changed(scale, shift))
    assert after == pytest.approx(before, abs=1e-6) and two.value == pytest.approx(one.value, rel=1e-6)
    torch.testing.assert_close(two.change.features, scale * one.change.features + shift, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_adversary_of_a_training_does_not_depend_on_the_unit(seed: int) -> None:
    scale, shift = units(seed)
    budget = Budget(**SIZE, step_size=0.1, targets="fit")
    ends = []
    for model, graph in (plain(), changed(scale, shift)):
        ready, draws = prepared(model, graph), torch.Generator().manual_seed(7)
        adversary = InjectionAdversary(ready, budget)
        adversary.start(draws)
        other, endpoints = adversary.validation_attack(draws)
        rows = graph.train_mask.nonzero().flatten()  # type: ignore[union-attr]
        for _ in range(4):
            for attacked in (
                adversary.ascend_and_inject(ready, adversary.draw(draws))[0],
                other.ascend_and_inject(ready, endpoints)[0],
            ):
                logits = model(attacked.features.to_dense(), attacked.edge_index)
                cross_entropy(logits[rows], graph.y[rows]).backward()  # type: ignore[index]
        adversary.ascend()
        other.ascend()
        ends.append((adversary.features.detach(), other.features.detach()))
    for one, two in zip(*ends, strict=True):
        assert not torch.equal(one, one[:1].expand_as(one))
        torch.testing.assert_close(two, scale * one + shift, rtol=1e-8, atol=1e-8)


class Scaled(nn.Module):
    """A user's model for raw features: it normalises them first."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first, self.second = GATConv(width, 8, heads=4), GATConv(32, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(self.norm(x), edge_index).relu(), edge_index)


@pytest.mark.parametrize("unit", cases.first(1, ["dollars", "thousands"]))
def test_a_search_does_more_than_noise_whatever_the_unit(unit: str) -> None:
    scale, shift = (500.0, 2000.0) if unit == "dollars" else (0.5, 2.0)
    graph = small_data(seed=5, nodes=300)
    graph = graph.replace(features=graph.features.map(lambda x: scale * x + shift))  # type: ignore[union-attr]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = fgai.train(Scaled(WIDTH, 3), graph, epochs=40, lr=0.02, progress=False)
    clean = score(model, graph, graph)
    found = {
        name: make_attack(THREATS[name].sized(nodes=10, edges=10)).run(model, graph)
        for name in ("random", "standard")
    }
    scores = {name: score(model, graph, result.graph) for name, result in found.items()}
    assert scores["standard"] <= scores["random"] and scores["standard"] < clean - 0.1
    assert found["standard"].noise == pytest.approx(found["random"].value, rel=1e-6)


@pytest.mark.many
@pytest.mark.parametrize("kind", [PGDInjection, EnsembleInjection])
def test_noise_in_the_range_of_the_data_is_a_candidate(kind: type[Attack]) -> None:
    model, graph = changed(*units(0))
    budget = Budget(**SIZE, steps=2, step_size=0.1)
    with cases.quiet():
        noise = make_attack(THREATS["random"].sized(**SIZE)).run(model, graph, seed=1)
        search = kind(budget).run(model, graph, seed=1)
    assert search.noise == pytest.approx(noise.value, rel=1e-9)
