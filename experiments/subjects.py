"""Models to draw: a vanilla and a faithful one, trained or from the cache, and the attacks on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from experiments.build import name_of
from experiments.cells import Cell
from experiments.threats import grid_threat
from experiments.trained import model_path, trained
from fgai import Graph, load_dataset
from fgai.attacks import EnsembleInjection, make_attack
from fgai.attention import observe, prepared
from fgai.explanations import NodeView
from fgai.reports.figures import Case, before_after

K = 5
DEGREES = (K + 1, 15)
"""Neighbours of a node worth drawing: more than k, and few enough to see each."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where models come from."""

    model: str = "GAT"  # class name
    dataset: str = "planted"  # name for `fgai.load_dataset`
    seed: int = 0  # of split, weights, training and attack
    root: Path | None = None  # folder of the datasets
    cache: Path | None = None  # folder of trained models; None trains anew
    device: str = "cpu"  # where to train
    epochs: int | None = None  # instead of the presets'
    threat: str = "standard"  # what attacks the models

    def graph(self) -> Graph:
        """The data, with the split of the seed."""
        return load_dataset(self.dataset, root=self.root, seed=self.seed).to(self.device)

    def trained(self, method: str, graph: Graph, vanilla: nn.Module | None = None) -> nn.Module:
        """Return a trained model, from the cache when it is there."""
        changes = {} if self.epochs is None else {"epochs": self.epochs}
        cell = Cell(model=self.model, dataset=self.dataset, method=method, seed=self.seed, settings=changes)
        path = model_path(self.cache, cell, parent_settings=changes)
        return trained(cell, graph, vanilla, self.device, path)[0]

    def pair(self, graph: Graph) -> dict[str, nn.Module]:
        """Return the vanilla and the faithful model by the names of their rows."""
        vanilla = self.trained("vanilla", graph)
        return {self.model: vanilla, name_of("fgai"): self.trained("fgai", graph, vanilla)}


def attacked(models: dict[str, nn.Module], graph: Graph, seed: int, threat: str = "standard") -> list[Case]:
    """Return each model, the first of them vanilla, with an attack on it.

    Endpoints are those of the seed for all: where a search chose them for each, no picture would show both.
    """
    attack = make_attack(grid_threat(threat))
    if isinstance(attack, EnsembleInjection):
        attack = EnsembleInjection(attack.budget, "prediction", rules=("random",))
    parent = next(iter(models.values()))
    return [
        Case(name, model, attack.run(model, graph, seed=seed, vanilla=None if model is parent else parent))
        for name, model in models.items()
    ]


def scores(case: Case, graph: Graph) -> str:
    """Share of the test nodes that a model classifies right, before and after its attack, in words."""
    assert graph.y is not None and graph.test_mask is not None
    nodes = graph.test_mask.nonzero().flatten()
    shares = []
    for one in (graph, case.attack.graph):
        classes = observe(case.model, prepared(case.model, one)).logits.argmax(1)
        shares.append(float((classes[nodes] == graph.y[nodes]).double().mean()))
    return f"{case.name} {shares[0]:.0%} → {shares[1]:.0%}"


def telling_node(cases: list[Case], graph: Graph) -> int:
    """Return the node to draw: the attacked one of whose top 5 the first model loses most.

    Among equals, one whose prediction flips, then the one of whose top 5 the last model keeps most, then the
    lowest number. Only nodes with 6 to 15 neighbours and an injected one; the best connected node where there
    is none such.
    """
    views = [before_after(case, graph) for case in cases]
    degree = graph.adjacency.degree
    ends = cases[0].attack.change.endpoints
    near: list[int] = [] if ends is None else sorted(set(ends.flatten().tolist()))
    near = [node for node in near if DEGREES[0] <= int(degree[node]) <= DEGREES[1]]
    if not near:
        return int(degree.argmax())

    def score(node: int) -> tuple[int, bool, int, int]:
        pairs = [(clean.node(node), hit.node(node)) for clean, hit in views]
        flips = pairs[0][0].predicted != pairs[0][1].predicted
        return -kept(*pairs[0]), flips, kept(*pairs[-1]), -node

    return max(near, key=score)


def kept(before: NodeView, after: NodeView) -> int:
    """How many of the top-k neighbours are in both views."""
    return len(set(before.neighbours[:K]) & set(after.neighbours[:K]))
