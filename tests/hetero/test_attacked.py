"""Attacks within a type: the budget holds, other types keep their edges, and what is told is what happens."""

from __future__ import annotations

import warnings

import pytest
import torch

import fgai
from fgai.attacks import Budget, PGDInjection, Threat
from fgai.errors import BudgetError, InputError
from fgai.hetero import attack, attend, explain_node
from support.attention_cases import assert_unchanged, snapshot
from support.hetero_cases import (
    AUTHORS,
    CITES,
    DRAFTS,
    HOSTS,
    KINDS,
    PAPERS,
    SHOWS,
    WIDTHS,
    WRITES,
    WRITTEN,
    hetero_data,
    hetero_model,
)

DATA = hetero_data()
SHORT = Threat("short", PGDInjection, Budget(nodes=3, edges=4, box=(-2.0, 1.5), steps=3, step_size=0.5), "-")
DEFAULT = Threat("default", PGDInjection, Budget(nodes=3, edges=4, steps=3, step_size=0.5), "-")
QUIET = pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")
MODELS = ["gat", "transformer", "han", "hgt"]
OTHERS = ["gatv2", "heteroconv"]


def logits_of(model, data):
    found = model(data.x_dict, data.edge_index_dict)
    return (found["paper"] if isinstance(found, dict) else found).detach()


@pytest.mark.many
@QUIET
@pytest.mark.parametrize(
    ("kind", "edge_type"),
    [
        *((kind, WRITES) for kind in MODELS),
        ("gat", CITES),
        ("hgt", DRAFTS),
        *(pytest.param(kind, WRITES, marks=pytest.mark.slow) for kind in OTHERS),
    ],
)
def test_the_budget_holds_and_other_types_keep_their_edges(kind, edge_type):
    model = hetero_model(kind, DATA)
    before = snapshot(model)
    found = attack(model, DATA, edge_type, threat=SHORT, k=2)
    assert_unchanged(before, model)
    after, source = found.data, edge_type[0]
    count = DATA[source].num_nodes
    assert after[source].num_nodes == count + 3
    new = after[source].x[count:]
    assert new.shape == (3, WIDTHS[source]) and float(new.min()) >= -2 and float(new.max()) <= 1.5
    assert torch.equal(after[source].x[:count], DATA[source].x)
    for other in KINDS:
        old = DATA[other].num_edges
        assert torch.equal(after[other].edge_index[:, :old], DATA[other].edge_index)
        both = 2 if source == "paper" else 1
        assert after[other].num_edges == old + (12 * both if other == edge_type else 0)
    joined = after[edge_type].edge_index[:, DATA[edge_type].num_edges :]
    inward = joined[:, joined[0] >= count]
    assert torch.equal(torch.bincount(inward[0])[count:], torch.full((3,), 4))
    assert bool(DATA["paper"].test_mask[inward[1]].all())


@QUIET
@pytest.mark.parametrize("edge_type", [WRITES, CITES])
def test_new_nodes_have_features_like_those_of_their_type(edge_type):
    data = hetero_data()
    for place, kind in enumerate(data.node_types):  # every type in a unit of its own
        data[kind].x = 10.0**place * (data[kind].x + 7)
    found = attack(hetero_model("gat", data), data, edge_type, threat=DEFAULT, k=2)
    x, new = data[edge_type[0]].x, found.data[edge_type[0]].x[data[edge_type[0]].num_nodes :]
    low, high = x.amin(0), x.amax(0)
    more = 0.1001 * (high - low)
    assert bool(((new >= low - more) & (new <= high + more)).all())
    assert not found.result.change.features[:, x.shape[1] :].any()


@QUIET
@pytest.mark.parametrize("kind", ["gat", "han", "hgt"])
def test_what_is_told_is_what_the_model_says_of_the_attacked_data(kind):
    model = hetero_model(kind, DATA)
    found = attack(model, DATA, WRITES, threat=SHORT, k=2)
    test = DATA["paper"].test_mask
    one, two = logits_of(model, DATA)[test], logits_of(model, found.data)[test]
    assert found.prediction["changed"] == pytest.approx(
        float((one.argmax(1) != two.argmax(1)).float().mean())
    )
    shift = (one.softmax(1) - two.softmax(1)).abs().sum(1).mean() / 2
    assert found.prediction["g_tvd"] == pytest.approx(float(shift), rel=1e-3)
    right = (two.argmax(1) == DATA["paper"].y[test]).float().mean()
    assert found.prediction["attacked"] == pytest.approx(float(right))


@QUIET
@pytest.mark.parametrize("kind", ["gat", "han", "hgt"])
def test_stability_is_measured_type_by_type(kind):
    """Against a slow loop over layers and nodes in reach: one hop at the first layer, two at the second.

    HAN weighs types of edges by means over all nodes, so that nodes further away move, too.
    """
    model = hetero_model(kind, DATA)
    found = attack(model, DATA, WRITES, threat=SHORT, k=2)
    before, after = attend(model, DATA), attend(model, found.data)
    count = DATA[WRITES].num_edges
    joined = set(found.data[WRITES].edge_index[1, count:].tolist())
    reach = [{"paper": joined, "author": set(), "venue": set()}]
    reach.append({name: set(nodes) for name, nodes in reach[0].items()})
    for edge_type in KINDS:
        source, destination = DATA[edge_type].edge_index.tolist()
        for start, end in zip(source, destination, strict=True):
            if start in reach[0][edge_type[0]]:
                reach[1][edge_type[2]].add(end)
        if kind == "han":
            one, two = before[edge_type][1], after[edge_type][1]
            shift = (one.values - two.values[: len(one.values)]).abs().mean(1)
            reach[1][edge_type[2]] |= set(one.edge_index[1][shift > 1e-5].tolist())
    for edge_type in (WRITES, WRITTEN, CITES, SHOWS):
        overlaps, shifts = [], []
        for depth in range(2):
            one, two = before[edge_type][depth], after[edge_type][depth]
            old = one.values.shape[0]
            rows = sorted(reach[depth][edge_type[2]] & set(one.edge_index[1].tolist()))
            a, b = one.values.double().mean(1), two.values.double().mean(1)[:old]
            moved = [float((a - b).abs()[one.edge_index[1] == row].sum()) / 2 for row in rows]
            shifts += [sum(moved) / len(moved)] if moved else []
            at = [_overlap(one.values, two.values[:old], one.edge_index[1] == row) for row in rows]
            at = [value for value in at if value is not None]
            overlaps += [sum(at) / len(at)] if at else []
        told = found.stability[edge_type]
        assert told["tvd"] == pytest.approx(sum(shifts) / len(shifts), rel=1e-3, abs=1e-6)
        assert told["overlap"] == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-6)
    new = after[WRITES][0]
    fresh = new.edge_index[0] >= AUTHORS
    taken = new.values.mean(1)[fresh].sum() / len(joined)
    later = after[WRITES][1].values.mean(1)[fresh].sum() / len(joined)
    assert found.stability[WRITES]["new"] == pytest.approx(float(taken + later) / 2, rel=1e-3)


def _overlap(one, two, row):
    """Top-2 by the mean logarithm over heads; None where there are no more than two."""
    if int(row.sum()) <= 2:
        return None
    tops = [set(values[row].log().mean(1).topk(2).indices.tolist()) for values in (one, two)]
    return len(tops[0] & tops[1]) / 2


@QUIET
def test_the_first_layer_of_other_types_does_not_move():
    """Where layers normalise within a type; HGTConv takes the attention of new nodes from all types."""
    for kind in ("gat", "han"):
        model = hetero_model(kind, DATA)
        found = attack(model, DATA, WRITES, threat=SHORT)
        before, after = attend(model, DATA), attend(model, found.data)
        for other in (CITES, HOSTS, WRITTEN):
            assert torch.equal(before[other][0].values, after[other][0].values)
        assert not torch.equal(before[WRITES][0].values, after[WRITES][0].values[: DATA[WRITES].num_edges])
    model = hetero_model("hgt", DATA)
    found = attack(model, DATA, WRITES, threat=SHORT)
    before, after = attend(model, DATA), attend(model, found.data)
    assert float((before[CITES][0].values - after[CITES][0].values).min()) >= -1e-6
    assert not torch.equal(before[CITES][0].values, after[CITES][0].values)


@QUIET
def test_objectives_seeds_and_sizes():
    model = hetero_model("gat", DATA)
    one = attack(model, DATA, WRITES, threat=SHORT, objective="explanation", k=2, seed=4)
    two = attack(model, DATA, list(WRITES), threat=SHORT, objective="explanation", k=2, seed=4)
    assert one.stability[WRITES] == two.stability[WRITES] and one.result.value >= one.result.noise
    small = attack(model, DATA, WRITES, nodes=1, edges=2)
    assert small.data["author"].num_nodes == AUTHORS + 1 and small.threat == "standard"
    assert "TVD" in small.to_markdown()


@QUIET
def test_labels_and_masks_of_new_nodes_of_the_target():
    found = attack(hetero_model("gat", DATA), DATA, CITES, threat=SHORT).data["paper"]
    assert found.y[PAPERS:].tolist() == [-1] * 3 and not found.test_mask[PAPERS:].any()
    assert torch.equal(found.train_mask[:PAPERS], DATA["paper"].train_mask)


class TestRefusals:
    model = hetero_model("gat", DATA)

    def test_types(self):
        with pytest.raises(InputError, match="`edge_type` must be one of"):
            attack(self.model, DATA, ("a", "b", "c"))
        with pytest.raises(InputError, match=r"`data\['author'\].y` is missing"):
            attack(self.model, DATA, WRITTEN)

    def test_threats(self):
        with pytest.raises(BudgetError, match="lower `edges`"):
            attack(self.model, DATA, WRITES, nodes=1, edges=PAPERS)
        with pytest.raises(InputError, match="use a threat that injects nodes"):
            attack(self.model, DATA, WRITES, threat="edges", edges=3)
        with pytest.raises(InputError, match="limits"):
            attack(self.model, DATA, WRITES, threat="values", nodes=2, edges=2)


class TestExplain:
    @pytest.mark.parametrize("kind", ["gat", "han", "hgt", "heteroconv"])
    def test_neighbours_by_type(self, kind):
        model = hetero_model(kind, DATA)
        found, seen = explain_node(model, DATA, "paper", 7, k=2), attend(model, DATA)
        assert list(found.neighbours) == [WRITES, CITES, HOSTS, DRAFTS]
        for edge_type, near in found.neighbours.items():
            source, destination = DATA[edge_type].edge_index
            assert {one["node"] for one in near} == set(source[destination == 7].tolist())
            given = [one["attention"] for one in near]
            assert given == sorted(given, reverse=True)
            if near:
                total = sum(entry.values[destination == 7].sum(0).mean() for entry in seen[edge_type]) / 2
                assert sum(given) == pytest.approx(float(total), rel=1e-4)
        assert found.predicted == int(logits_of(model, DATA)[7].argmax())
        assert found.label == int(DATA["paper"].y[7]) and 0 < found.confidence <= 1
        assert found.top()[WRITES] == [one["node"] for one in found.neighbours[WRITES][:2]]
        assert found.neighbours[DRAFTS] == [] and "no edges of type author drafts paper" in found.to_html()

    def test_one_layer_with_one_head_is_as_recorded(self):
        model = hetero_model("gat", DATA)
        entry = attend(model, DATA)[WRITES][1]
        near = explain_node(model, DATA, "paper", 7, layer=1).neighbours[WRITES]
        for one in near:
            spot = (entry.edge_index == torch.tensor([[one["node"]], [7]])).all(0)
            assert one["attention"] == pytest.approx(float(entry.values[spot]), rel=1e-4)
        assert explain_node(model, DATA, "paper", 7, layer="last").neighbours[WRITES] == near

    def test_nodes_of_other_types_and_isolated_ones(self):
        model = hetero_model("gat", DATA)
        author = explain_node(model, DATA, "author", 2)
        assert author.predicted is None and list(author.neighbours) == [WRITTEN]
        assert explain_node(model, DATA, "paper", 0).neighbours[WRITES] == []

    def test_refusals(self):
        model = hetero_model("gat", DATA)
        for arguments, match in (
            (("reader", 0), "no type of nodes 'reader'"),
            (("venue", 7), "`node` must be"),
        ):
            with pytest.raises(InputError, match=match):
                explain_node(model, DATA, *arguments)
        with pytest.raises(InputError, match="`layer` must be one of mean, last, max"):
            explain_node(model, DATA, "paper", 1, layer="first")
        with pytest.raises(fgai.AttentionError, match="layer 5"):
            explain_node(model, DATA, "paper", 1, layer=5)


@pytest.mark.parametrize(("kind", "coupled"), [("gat", False), ("han", True)])
def test_layers_that_join_more_nodes_are_named(kind, coupled):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attack(hetero_model(kind, DATA), DATA, WRITES, threat=SHORT, k=2)
    assert any("[global-coupling]" in str(entry.message) for entry in caught) is coupled
