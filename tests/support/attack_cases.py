"""What the attack suites share: models × recipes × attacks × objectives on a graph of 30 nodes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from experiments.defences import DEFENCES, Regularised
from fgai.attacks import (
    DICE,
    PRBCD,
    PREDICTION_MEMBERS,
    TDGIA,
    THREATS,
    AdaptiveInjection,
    Attack,
    Budget,
    EnsembleInjection,
    FeaturePGD,
    NaturalInjection,
    PGDInjection,
    RandomEdges,
    RandomInjection,
    ShortEnsemble,
    ValueInjection,
)
from fgai.attacks.base import _DamageAttack
from fgai.attention import prepared
from fgai.errors import ReliabilityWarning
from fgai.graph import Graph
from fgai.models import GAT, GCN, GT, GATv2
from fgai.training import AdversarialRecipe, HardenSettings, make_faithful, train
from support.graph_cases import small_data

K = 2


class SmallEnsemble(EnsembleInjection):
    """Every member of the objective, few steps, random endpoints and one set of chosen ones."""

    name = "small-ensemble"

    def __init__(self, budget: Budget, objective: Any = "prediction", *, k: int = K) -> None:
        super().__init__(budget, objective, k=k, rules=("random", "cover"), baselines=((2, 0.2, 1),))


_SHORT = (
    *("sign", "momentum", "adam small margin", "adam others reach"),
    *("straight small margin", "straight momentum"),
)
SHORT_MEMBERS = tuple(member for member in PREDICTION_MEMBERS if member.name in _SHORT)
"""Members of an ensemble that find most of the damage in few steps."""
INJECTION = Budget(nodes=3, edges=4, steps=4, step_size=0.25, restarts=2)
BUDGETS: dict[type[Attack], Budget] = {
    RandomInjection: INJECTION,
    PGDInjection: INJECTION,
    RandomEdges: Budget(edges=7),
    FeaturePGD: Budget(rows=0.3, radius=0.2, steps=4, step_size=0.06, restarts=2),
    TDGIA: Budget(nodes=3, edges=4, steps=7, step_size=0.3, restarts=2),
    DICE: Budget(edges=7),
    AdaptiveInjection: Budget(nodes=3, edges=4, steps=3, step_size=0.3, restarts=4),
    PRBCD: Budget(edges=7, steps=4, step_size=100.0, restarts=2),
    SmallEnsemble: Budget(nodes=3, edges=4, steps=2),
    NaturalInjection: Budget(nodes=3, edges=4, steps=4, step_size=0.3, restarts=2),
}
for threat in THREATS.values():  # a new attack is tested without an entry here
    if threat.attack not in (EnsembleInjection, ShortEnsemble, ValueInjection):  # see `SmallEnsemble`
        small = {"nodes": 3, "edges": 4 if threat.budget.nodes else 7, "steps": 4}
        small = {name: min(most, getattr(threat.budget, name)) for name, most in small.items()}
        BUDGETS.setdefault(threat.attack, replace(threat.budget, **small))
REPORTED = tuple(kind for kind in BUDGETS if issubclass(kind, _DamageAttack))
"""Attacks that choose by what is reported, not by the objective's value."""
ATTENTION = ("gat", "gatv2", "gt", "pyg")
"""Models whose weights read nothing but the two ends of an edge; GCN's also read degrees."""
MODELS = (*ATTENTION, "gcn")
RECIPES = ("vanilla", "layer-norm", "adversarial", "faithful", *DEFENCES)
OBJECTIVES = ("prediction", "margin", "explanation", "preserving")
UNSEARCHED = (RandomInjection, RandomEdges, DICE)
START_FROM_NOISE = (PGDInjection, TDGIA, AdaptiveInjection)
"""Injections whose first candidate is what `RandomInjection` draws."""


class PygModel(nn.Module):
    """A user's own model: plain PyG layers, self-loops added by the layers, dropout while training."""

    def __init__(self, width: int, classes: int, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.first = GATConv(width, 4, heads=3, dropout=0.3)
        self.second = GATConv(12, classes, heads=1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.nn.functional.elu(self.first(self.norm(x), edge_index)), edge_index)


@cache
def tiny_graph() -> Graph:
    """30 nodes, 3 classes, 6 features; 8 training, 7 validation and 15 test nodes."""
    graph = small_data(seed=1, nodes=30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    masks = {
        name: torch.zeros(30, dtype=torch.bool).index_fill(0, order[a:b], True)
        for name, a, b in (("train_mask", 0, 8), ("val_mask", 8, 15), ("test_mask", 15, 30))
    }
    return graph.replace(**masks)


def untrained(model: str, norm: bool = False) -> nn.Module:
    """A small model with seeded weights."""
    graph = tiny_graph()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if model == "pyg":
            return PygModel(graph.num_features, graph.num_classes, norm)
        layer = {"norm": "layer"} if norm else {}
        if model == "gt":
            return GT.for_data(graph, hidden_channels=12, heads=(3, 1), encodings=4, **layer)
        if model == "gcn":
            return GCN.for_data(graph, hidden_channels=7, **layer)
        return {"gat": GAT, "gatv2": GATv2}[model].for_data(graph, hidden_channels=4, heads=3, **layer)


def defended(model: str, recipe: str) -> nn.Module:
    """A small model behind a defence; GCN stands in for a user's own model, and behind Soft-Median."""
    behind = untrained("gcn" if model == "pyg" or recipe == "soft-median" else model)
    own = {"gnnguard": {"threshold": 0.2}, "gnn-svd": {"rank": 5}, "pro-gnn": {"rank": 5}}.get(recipe, {})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        arguments = {k: v for k, v in behind.config.items() if k not in ("in_channels", "out_channels")}
        return DEFENCES[recipe].for_data(tiny_graph(), base=type(behind).__name__, **arguments, **own)


@cache
def trained(model: str, recipe: str) -> nn.Module:
    """A model after a few epochs of a recipe; shared by tests, so none may change it."""
    graph = tiny_graph()
    if recipe in ("vanilla", "layer-norm"):
        fresh = untrained(model, norm=recipe == "layer-norm")
        return train(fresh, graph, epochs=15, lr=0.05, progress=False)
    if recipe in DEFENCES:
        fresh = defended(model, recipe)
        terms = Regularised(prepared(fresh, graph))
        return train(fresh, graph, recipe=terms, epochs=15, lr=0.05, progress=False)
    vanilla = trained(model, "vanilla")
    if recipe == "faithful":
        mild = {"clip_share": 0.005, "shrink": 0.2}
        return make_faithful(vanilla, graph, nodes=3, edges=4, epochs=2, progress=False, **mild)
    against = AdversarialRecipe(prepared(vanilla, graph), HardenSettings(nodes=3, edges=4, attack_weight=0.5))
    return train(vanilla, graph, recipe=against, epochs=2, progress=False)


def attack(kind: type[Attack], objective: Any = "prediction", **changes: Any) -> Attack:
    """An attack with its tiny budget."""
    fields = {**BUDGETS[kind].to_dict(), **changes}
    return kind(Budget(**fields), objective, k=K)


@contextmanager
def quiet() -> Iterator[None]:
    """Tiny attacks may fail; here that is no news."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)
        yield


def first(count: int, rows: Sequence[Any]) -> list[Any]:
    """Cases of a test of which only the first `count` run by default; the others are slow."""
    others = [row if isinstance(row, tuple) else (row,) for row in rows[count:]]
    return [*rows[:count], *(pytest.param(*row, marks=pytest.mark.slow) for row in others)]


def rotated(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The product of some options; first the rows in which every value of the first stands once."""
    some = [tuple(values[i % len(values)] for values in options) for i in range(len(options[0]))]
    return [*some, *(row for row in itertools.product(*options) if row not in some)]


def pairwise(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations in which every two values of different options meet (greedy)."""
    places = list(itertools.combinations(range(len(options)), 2))
    pairs = {row: {(a, b, row[a], row[b]) for a, b in places} for row in itertools.product(*options)}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
