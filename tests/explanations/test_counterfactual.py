"""Counterfactuals: the class really changes, and what is called smallest is, against brute force."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import call_model, prepared
from fgai.certificates import certify_injection
from fgai.errors import InputError
from fgai.explanations import counterfactual, explain
from fgai.explanations.counterfactual import injected_neighbours, removed_neighbours
from fgai.graph import ChangeRecord, Graph
from fgai.models import AttentionModel
from fgai.training import train, untrained_model
from support.graph_cases import small_data

GRAPH = small_data()


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    return train(untrained_model("GAT", GRAPH, hidden_channels=2, heads=3), GRAPH, epochs=30, progress=False)


def class_of(model: nn.Module, graph: Graph, node: int) -> int:
    with torch.no_grad():
        return int(call_model(model.eval(), prepared(model, graph))[node].argmax())


def test_a_lost_tie_changes_the_class() -> None:
    """Without its neighbour a node of zeros has equal logits, and class 0."""
    features = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    data = Graph.from_edges(torch.tensor([[0, 1], [1, 0]]), 2, features)
    own = fgai.GAT(2, 2, hidden_channels=2, heads=1, num_layers=1).eval()
    with torch.no_grad():
        own.convs[0].value.weight.copy_(torch.eye(2))
    assert class_of(own, data, 0) == 1
    found = removed_neighbours(own, data, 0)
    assert found.size == found.lower_bound == 1 and found.predicted == 0 and not found.exhausted


def neighbours_of(node: int) -> list[int]:
    source, destination = GRAPH.edge_index
    return [n for n in source[destination == node].tolist() if n != node]


def least_removal(model: nn.Module, node: int, most: int = 3) -> int | None:
    """By brute force, on new graphs; None if more than `most` neighbours have to go."""
    top, neighbours = class_of(model, GRAPH, node), neighbours_of(node)
    for size in range(1, most + 1):
        for chosen in combinations(neighbours, size):
            edges = [[node, other] for other in chosen]
            record = ChangeRecord.of(model, GRAPH, node, removed_edges=edges)
            if class_of(model, record.apply(model, GRAPH), node) != top:
                return size
    return None


class TestRemoved:
    @pytest.mark.parametrize("most", [200, 0])
    def test_against_brute_force(
        self, model: AttentionModel, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`most` 0 leaves all but single neighbours to the greedy search."""
        monkeypatch.setattr(counterfactual, "EXHAUSTIVE", most)
        sizes = []
        for node in (n for n in range(0, 39, 3) if 0 < len(neighbours_of(n)) <= 6):
            found, least = removed_neighbours(model, GRAPH, node), least_removal(model, node)
            if found.size is None:
                assert least is None
                assert not most or found.exhausted is (found.lower_bound is None)
                continue
            sizes.append(found.size)
            assert found.change is not None and len(found.change.removed_edges) == found.size
            assert found.lower_bound is not None and found.lower_bound <= found.size
            assert least is None or found.lower_bound <= least <= found.size
            if found.size == found.lower_bound and found.size <= 3:
                assert least == found.size
            assert not most or found.size == found.lower_bound
            after = class_of(model, found.change.apply(model, GRAPH), node)
            assert after == found.predicted != class_of(model, GRAPH, node)
        assert len(sizes) >= 3

    def test_an_isolated_node(self, model: AttentionModel) -> None:
        found = removed_neighbours(model, GRAPH, 39)
        assert found.exhausted and found.change is None and found.size is None
        record = explain(model, GRAPH, 39, threat=None, certificate=False, counterfactual=True)
        notes = " ".join(record.tables()[0].notes)
        assert "whichever of its neighbours are removed, the class stays" in notes


class TestInjected:
    def test_the_class_changes_and_files_replay_it(self, model: AttentionModel, tmp_path: Path) -> None:
        record = explain(model, GRAPH, 4, threat=None, certificate=False, counterfactual=True)
        assert record.counterfactual is not None
        for kind in ("removed", "injected"):
            entry = record.counterfactual[kind]
            change = ChangeRecord.from_dict(entry["change"])
            again = ChangeRecord.load(change.save(tmp_path / f"{kind}.json"))
            changed = again.apply(model, GRAPH)
            assert class_of(model, changed, 4) == entry["predicted"] != record.predicted
            assert entry["size"] == len(again.removed_edges) + len(again.injected) == len(entry["items"])
            assert changed.num_nodes - GRAPH.num_nodes == len(again.injected)
        assert type(record).from_dict(record.to_dict()) == record
        notes = " ".join(record.tables()[0].notes)
        assert "of its neighbours: class" in notes and "new neighbour: class" in notes

    def test_the_bound_is_that_of_the_certificate(self, model: AttentionModel) -> None:
        limited = fgai.limit(model, GRAPH, clip_share=0.2, shrink=0.6)
        one, two = (certify_injection(limited, GRAPH, neighbours=t, where="direct").certified for t in (1, 2))
        bounds = set()
        for node in [*(one & two).nonzero().flatten().tolist()[:1], *(~one).nonzero().flatten().tolist()[:1]]:
            found = injected_neighbours(limited, GRAPH, node)
            assert found is not None and found.lower_bound is not None
            assert found.size is None or found.lower_bound <= found.size
            assert (found.lower_bound > 1) is bool(one[node]) or found.size == 1
            bounds.add(found.lower_bound)
        assert {1} < bounds

    def test_an_attack_finds_what_copies_do_not(
        self, model: AttentionModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(counterfactual, "_search", lambda *args, **options: (None, 0))
        found = injected_neighbours(model, GRAPH, 4)
        assert found is not None and found.change is not None and found.size == len(found.change.injected)
        assert all("features" in new for new in found.change.injected)
        changed = found.change.apply(model, GRAPH)
        assert class_of(model, changed, 4) == found.predicted != class_of(model, GRAPH, 4)

    def test_models_of_pyg(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(3)
                self.first, self.second = GATConv(6, 4, heads=3, concat=False), GATConv(4, 3)

            def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
                return self.second(self.first(x, edge_index).relu(), edge_index)

        net = train(Net(), GRAPH, epochs=20, progress=False)
        for search in (removed_neighbours, injected_neighbours):
            found = search(net, GRAPH, 4)
            assert found is not None
            if found.change is not None:
                assert class_of(net, found.change.apply(net, GRAPH), 4) == found.predicted
        assert not net.training or class_of(net, GRAPH, 4) >= 0

    def test_links_are_refused(self) -> None:
        data = fgai.load_dataset("planted", task="link")
        with pytest.raises(InputError, match="`counterfactual`"):
            explain(fgai.GAT.for_data(data), data, 4, threat=None, certificate=False, counterfactual=True)


@given(
    weights=st.lists(st.floats(-1, 2), min_size=1, max_size=6),
    margin=st.floats(0.1, 5),
    pairs=st.booleans(),
    repeats=st.booleans(),
    exhaustive=st.sampled_from([0, 7, 200]),
)
def test_the_search(weights: list[float], margin: float, pairs: bool, repeats: bool, exhaustive: int) -> None:
    """Of leads that items add up to, or that the first two only change together."""

    def lead(chosen: tuple[int, ...]) -> float:
        gained = sum(weights[i] for i in chosen)
        return margin - gained - (2.0 if pairs and {0, 1} <= {*chosen} else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counterfactual, "EXHAUSTIVE", exhaustive)
        patch.setattr(counterfactual, "MOST_ITEMS", 5)
        found, tried = counterfactual._choose_few(len(weights), lead, repeats=repeats)
    among = combinations_with_replacement if repeats else combinations
    sizes = range(1, 6)
    least = next((s for s in sizes if any(lead(c) < 0 for c in among(range(len(weights)), s))), None)
    if found is None:
        assert least is None or least > tried
        return
    assert lead(found) < 0 and list(found) == sorted(found) and (repeats or len({*found}) == len(found))
    assert least is not None and tried + 1 <= least <= len(found)
    assert all(lead(found[:i] + found[i + 1 :]) >= 0 for i in range(len(found)))
    if exhaustive == 200 and not repeats:
        assert len(found) == least
