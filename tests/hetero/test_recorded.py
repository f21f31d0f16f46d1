"""Attention by layer and type: that of PyG's own layers, on the edges as given, normalised as they do it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import leaky_relu
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv, to_hetero
from torch_geometric.utils import softmax

import fgai
from fgai.errors import AttentionError, InputError
from fgai.hetero import HeteroView, attend
from support.attention_cases import assert_unchanged, snapshot
from support.hetero_cases import (
    CITES,
    DRAFTS,
    KINDS,
    LAYERS,
    SHOWS,
    WRITES,
    WRITTEN,
    hetero_data,
    hetero_model,
)

DATA = hetero_data()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def summed(entry, nodes):
    zeros = entry.values.new_zeros(nodes, entry.values.shape[1])
    return zeros.index_add(0, entry.edge_index[1], entry.values)


class TestToHetero:
    @pytest.mark.parametrize("kind", LAYERS)
    def test_it_is_what_the_layers_return(self, kind):
        """The first layer of every type, called by itself with `return_attention_weights`."""
        model = hetero_model(kind, DATA)
        before = snapshot(model)
        found = attend(model, DATA)
        assert_unchanged(before, model)
        assert [w.layer.split(".")[0] for w in found.entries] == ["conv1"] * 6 + ["conv2"] * 6
        for edge_type in KINDS:
            layer = model.conv1["__".join(edge_type)]
            x = DATA[edge_type[0]].x, DATA[edge_type[2]].x
            edges = DATA[edge_type].edge_index
            with torch.no_grad():
                _, (same, weights) = layer(x, edges, return_attention_weights=True)
            first, second = found[edge_type]
            assert torch.equal(first.edge_index, edges) and torch.equal(same, edges)
            assert_close(first.values, weights)
            assert first.values.shape == (edges.shape[1], 2) and second.values.shape == (edges.shape[1], 1)

    @pytest.mark.parametrize("kind", LAYERS)
    def test_it_sums_to_one_within_a_type(self, kind):
        for entry in attend(hetero_model(kind, DATA), DATA).entries:
            assert_close(entry.sums(), torch.ones_like(entry.sums()))
            assert entry.sums().shape[0] == entry.edge_index[1].unique().numel()

    def test_later_layers_read_the_hidden_states(self):
        model, edges = hetero_model("gat", DATA), DATA[WRITES].edge_index
        held = {}
        layer = model.conv2["__".join(WRITES)]
        handle = layer.register_forward_pre_hook(lambda _, args: held.update(x=args[0]))
        model(DATA.x_dict, DATA.edge_index_dict)
        handle.remove()
        with torch.no_grad():
            _, (_, weights) = layer(held["x"], edges, return_attention_weights=True)
        assert_close(attend(model, DATA)[WRITES][1].values, weights)

    def test_a_type_without_edges_and_a_node_without_neighbours(self):
        found = attend(hetero_model("gat", DATA), DATA)
        assert all(entry.values.shape[0] == 0 for entry in found[DRAFTS])
        assert 0 not in found[WRITES][0].edge_index[1]

    def test_dropout_and_training_mode_do_not_matter(self):
        torch.manual_seed(0)
        convs = {one: GATConv((-1, -1), 3, dropout=0.5, add_self_loops=False) for one in KINDS}
        model = _Only(HeteroConv(convs))
        model(DATA.x_dict, DATA.edge_index_dict)
        model.train()
        one, two = (attend(model, DATA)[CITES][0].values for _ in range(2))
        assert torch.equal(one, two) and model.training


class _Only(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edges):
        return self.conv(x, edges)


class TestHeteroConv:
    def test_types_are_told_and_self_loops_come_last(self):
        torch.manual_seed(0)
        convs = {
            CITES: GATConv((-1, -1), 4, heads=3),
            WRITES: GATConv((-1, -1), 4, heads=3, add_self_loops=False),
        }
        model = _Only(HeteroConv(convs))
        model(DATA.x_dict, DATA.edge_index_dict)
        found = attend(model.eval(), DATA)
        (cites,), given = found[CITES], DATA[CITES].edge_index
        loops = torch.arange(DATA["paper"].num_nodes).expand(2, -1)
        assert torch.equal(cites.edge_index, torch.cat([given, loops], dim=1))
        with torch.no_grad():
            x = DATA["paper"].x
            _, (same, weights) = convs[CITES]((x, x), given, return_attention_weights=True)
        assert torch.equal(same, cites.edge_index)
        assert_close(cites.values, weights)
        assert found[SHOWS] == [] and found.edge_masks()[SHOWS].count_nonzero() == 0


class TestHANConv:
    def test_it_is_the_formula_within_each_type(self):
        model = hetero_model("han", DATA)
        found, conv = attend(model, DATA), model.conv1
        for edge_type in KINDS:
            source, destination = DATA[edge_type].edge_index
            name = "__".join(edge_type)
            far, near = (
                conv.proj[kind](DATA[kind].x).view(-1, 2, 4) for kind in (edge_type[0], edge_type[2])
            )
            score = (far * conv.lin_src[name]).sum(-1)[source] + (near * conv.lin_dst[name]).sum(-1)[
                destination
            ]
            expected = softmax(leaky_relu(score, 0.2), destination, num_nodes=near.shape[0])
            assert_close(found[edge_type][0].values, expected.detach())
            assert_close(found[edge_type][0].sums(), torch.ones_like(found[edge_type][0].sums()))


class TestHGTConv:
    def test_it_is_the_formula_over_all_types(self):
        model = hetero_model("hgt", DATA)
        found, conv = attend(model, DATA), model.conv1
        parts = {kind: h.tensor_split(3, dim=1) for kind, h in conv.kqv_lin(DATA.x_dict).items()}
        scores, ends = [], []
        for number, edge_type in enumerate(KINDS):
            source, destination = DATA[edge_type].edge_index
            key = parts[edge_type[0]][0].view(-1, 2, 4)
            relation = conv.k_rel.weight.view(2, len(KINDS), 4, 4)[:, number]
            key = torch.einsum("nhd,hde->nhe", key, relation)
            query = parts[edge_type[2]][1].view(-1, 2, 4)
            score = (query[destination] * key[source]).sum(-1) * conv.p_rel["__".join(edge_type)]
            scores.append(score / math.sqrt(4))
            offset = {"paper": 0, "author": 1000, "venue": 2000}[edge_type[2]]
            ends.append(destination + offset)
        sizes = [len(one) for one in scores]
        expected = softmax(torch.cat(scores), torch.cat(ends)).detach().split(sizes)
        for edge_type, one in zip(KINDS, expected, strict=True):
            assert_close(found[edge_type][0].values, one)

    def test_it_sums_to_one_over_all_types_and_to_less_in_each(self):
        found = attend(hetero_model("hgt", DATA), DATA)
        papers = DATA["paper"].num_nodes
        inward = [edge_type for edge_type in KINDS if edge_type[2] == "paper"]
        total = sum(summed(found[edge_type][0], papers) for edge_type in inward)
        assert_close(total, torch.ones_like(total))
        assert float(found[WRITES][0].sums().max()) < 1


@pytest.mark.parametrize("kind", ["gat", "han", "hgt", "heteroconv"])
def test_recording_changes_nothing(kind):
    """Bit by bit."""
    model = hetero_model(kind, DATA)
    view = HeteroView(DATA)
    wrapped, papers = view.wrap(model), slice(view.number("paper", 0), view.number("paper", 59) + 1)
    alone = wrapped(view.graph)
    with fgai.record(wrapped) as tape:
        recorded = wrapped(view.graph)
    assert torch.equal(alone, recorded) and len(tape.attention) == 12
    given = model(DATA.x_dict, DATA.edge_index_dict)
    assert_close(recorded[papers], given["paper"] if isinstance(given, dict) else given)


@pytest.mark.parametrize("kind", ["gat", "han", "hgt"])
def test_perturbed_attention_is_what_the_model_goes_on_with(kind):
    view = HeteroView(DATA)
    wrapped = view.wrap(hetero_model(kind, DATA))
    clean = wrapped(view.graph)
    with fgai.record(wrapped, perturb=lambda number, attention, source, destination: 0 * attention):
        silenced = wrapped(view.graph)
    assert not torch.equal(clean, silenced)
    assert torch.equal(clean, wrapped(view.graph))


def test_masks_stand_on_the_edges_as_given():
    found = attend(hetero_model("gat", DATA), DATA)
    masks = found.edge_masks()
    assert list(masks) == DATA.edge_types
    expected = (found[WRITES][0].values.mean(1) + found[WRITES][1].values.mean(1)) / 2
    assert_close(masks[WRITES], expected)
    assert "author writes paper" in found.to_markdown()


def test_shuffled_edges_keep_their_attention():
    model = hetero_model("gatv2", DATA)
    other, order = (
        DATA.clone(),
        torch.randperm(DATA[WRITES].num_edges, generator=torch.Generator().manual_seed(1)),
    )
    other[WRITES].edge_index = DATA[WRITES].edge_index[:, order]
    assert_close(attend(model, other)[WRITES][1].values, attend(model, DATA)[WRITES][1].values[order])


class TestRefusals:
    def test_models_without_attention(self):
        class Sage(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = SAGEConv((-1, -1), 3)

            def forward(self, x, edge_index):
                return self.conv(x, edge_index)

        model = to_hetero(Sage(), DATA.metadata())
        with pytest.raises(AttentionError, match="no attention layer"):
            attend(model, DATA)

    def test_layers_that_do_not_say_their_type(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = GATConv(6, 3)

            def forward(self, x, edges):
                return {"paper": self.conv(x["paper"], edges[CITES])}

        with pytest.raises(AttentionError, match="'conv' does not say which type of edges"):
            attend(Own(), DATA)

    def test_unknown_types_and_wrong_models(self):
        found = attend(hetero_model("gat", DATA), DATA)
        with pytest.raises(InputError, match=r"`edge_type` must be one of .*'writes'.*got \('a', 'b', 'c'\)"):
            found["a", "b", "c"]
        with pytest.raises(InputError, match="heterogeneous model of PyG's layers, got GAT"):
            attend(fgai.GAT(3, 2), DATA)
        with pytest.raises(InputError, match="`call` must be a function"):
            attend(hetero_model("gat", DATA), DATA, call=3)

    def test_typed_models_outside_a_view(self):
        model = hetero_model("gat", DATA)
        with pytest.raises(AttentionError, match=r"fgai\.hetero"), fgai.record(model):
            model(DATA.x_dict, DATA.edge_index_dict)
        with pytest.raises(AttentionError, match=r"HGTConv: heterogeneous.*fgai\.hetero"):
            fgai.attention.find_layers(hetero_model("hgt", DATA))
        with pytest.raises(InputError, match=r"got HeteroData; see `fgai\.hetero\.HeteroView`"):
            fgai.evaluate(model, DATA)

    def test_an_error_leaves_the_model_as_it_was(self):
        for kind in ("gat", "han", "hgt"):
            model = hetero_model(kind, DATA)
            before = snapshot(model)
            wrapped = HeteroView(DATA).wrap(model)
            with pytest.raises(ZeroDivisionError), fgai.record(wrapped):
                wrapped(HeteroView(DATA).graph)
                raise ZeroDivisionError
            assert_unchanged(before, model)


def test_reverse_edges_are_edges_like_others():
    """Both directions of a relation are types of their own."""
    found = attend(hetero_model("hgt", DATA), DATA)
    assert torch.equal(found[WRITTEN][0].edge_index, DATA[WRITTEN].edge_index)
