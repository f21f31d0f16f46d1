"""`HeteroView`: one graph of all nodes, and back again; what cannot be read is refused in words."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import HeteroData

import fgai
from fgai.attention import AttentionMap, LayerAttention, observe, touched_rows
from fgai.attention.reach import _reach_and_moved
from fgai.errors import AttentionError, InputError
from fgai.hetero import HeteroView
from fgai.metrics.removal import _edge_ranking, _predict_without
from support.attention_cases import assert_sums
from support.hetero_cases import AUTHORS, CITES, KINDS, PAPERS, WIDTHS, WRITES, hetero_data, hetero_model

DATA = hetero_data()
ALSO = ("author", "edits", "paper")


def changed(**stores):
    """The data with a field of some types replaced; None leaves it out."""
    data = DATA.clone()
    for field, (kind, value) in stores.items():
        if value is None:
            del data[kind][field]
        else:
            data[kind][field] = value
    return data


class TestOneGraph:
    def test_round_trip(self):
        view = HeteroView(DATA)
        split = view.layout.split(view.graph.to_data())
        assert split.edge_types == DATA.edge_types
        for kind in KINDS:
            ours, theirs = (set(map(tuple, one[kind].edge_index.T.tolist())) for one in (split, DATA))
            assert ours == theirs
        for name, width in WIDTHS.items():
            assert torch.equal(split[name].x, DATA[name].x) and split[name].x.shape[1] == width

    def test_labels_and_masks_are_the_targets(self):
        view = HeteroView(DATA)
        graph, first = view.graph, view.number("paper", 0)
        assert graph.num_nodes == PAPERS + AUTHORS + 7 and graph.num_features == max(WIDTHS.values())
        assert torch.equal(graph.y[first : first + PAPERS], DATA["paper"].y)
        assert int((graph.y >= 0).sum()) == PAPERS
        assert torch.equal(graph.test_mask[first : first + PAPERS], DATA["paper"].test_mask)
        assert int(graph.test_mask.sum()) == int(DATA["paper"].test_mask.sum())

    def test_a_missing_mask_holds_the_target_alone(self):
        view = HeteroView(changed(test_mask=("paper", None)))
        assert view.graph.test_mask.nonzero().flatten().tolist() == [
            view.number("paper", number) for number in range(PAPERS)
        ]

    def test_one_pair_may_be_of_several_types(self):
        data = DATA.clone()
        data[ALSO].edge_index = data[WRITES].edge_index[:, :9].flip(1)
        view = HeteroView(data)
        assert view.graph.num_edges == HeteroView(DATA).graph.num_edges
        split = view.layout.split(view.graph.to_data())
        assert split[ALSO].num_edges == 9 and split[WRITES].num_edges == DATA[WRITES].num_edges

    def test_logits_are_the_models_own(self):
        model = hetero_model("gat", DATA)
        logits = HeteroView(DATA).wrap(model)(HeteroView(DATA).graph)
        first = HeteroView(DATA).number("paper", 0)
        torch.testing.assert_close(
            logits[first : first + PAPERS], model(DATA.x_dict, DATA.edge_index_dict)["paper"]
        )
        assert logits.abs().sum(1).count_nonzero() == PAPERS

    def test_a_call_of_ones_own(self):
        view, model = HeteroView(DATA), hetero_model("gat", DATA)
        mine = view.wrap(model, lambda m, d: 2 * m(d.x_dict, d.edge_index_dict)["paper"])
        torch.testing.assert_close(mine(view.graph), 2 * view.wrap(model)(view.graph))

    def test_training_evaluation_and_explanations_take_it(self):
        view = HeteroView(DATA, edge_type=WRITES)
        with pytest.warns(fgai.FgaiWarning):
            made = fgai.train(view.wrap(hetero_model("gat", DATA)), view.graph, epochs=8, progress=False)
            sizes = {"nodes": 2, "edges": 3, "k": 2, "curves": False, "nulls": False}
            record = fgai.evaluate(made, view.graph, "random", **sizes)
            node = view.number("paper", 4)
            found = fgai.explain(made, view.graph, node, nodes=2, edges=3, k=2)
        alone = made.model(DATA.x_dict, DATA.edge_index_dict)["paper"].argmax(1) == DATA["paper"].y
        assert record.value("f1.clean") == pytest.approx(float(alone[DATA["paper"].test_mask].float().mean()))
        assert sum(one["attention"] for one in found.neighbours) == pytest.approx(1.0, abs=1e-5)
        assert {layer["class_status"] for layer in found.certified["layers"]} == {"unknown"}


class TestNewNodes:
    def attacked(self, edge_type, target=("paper", 1)):
        view = HeteroView(DATA, edge_type=edge_type)
        width = view.graph.num_features
        features = torch.arange(2.0 * width).view(2, width)
        ends = torch.tensor([[view.number(*target)], [view.number("paper", 5)]])
        return view, view.graph.inject(ends, features)[0], features

    def test_they_are_of_the_type_and_nothing_else_changes(self):
        view, graph, features = self.attacked(WRITES)
        split = view.layout.split(graph.to_data())
        assert split["author"].x.shape[0] == AUTHORS + 2
        assert torch.equal(split["author"].x[AUTHORS:], features[:, : WIDTHS["author"]])
        assert {(AUTHORS, 1), (AUTHORS + 1, 5)} <= set(map(tuple, split[WRITES].edge_index.T.tolist()))
        for kind in KINDS:
            assert split[kind].num_edges == DATA[kind].num_edges + 2 * (kind == WRITES)

    def test_within_one_type_of_nodes_they_hear_too(self):
        view, graph, _ = self.attacked(CITES)
        edges = set(map(tuple, view.layout.split(graph.to_data())[CITES].edge_index.T.tolist()))
        assert {(PAPERS, 1), (1, PAPERS), (PAPERS + 1, 5), (5, PAPERS + 1)} <= edges
        logits = view.wrap(hetero_model("gat", DATA))(graph)
        assert logits.shape[0] == graph.num_nodes and bool(logits[-2:].any())

    def test_edges_of_no_type_are_refused(self):
        view = HeteroView(DATA)
        with pytest.raises(InputError, match="new edges must have a type"):
            view.layout.split(view.graph.inject(torch.tensor([[view.number("paper", 1)]]))[0].to_data())
        view, graph, _ = self.attacked(WRITES, ("venue", 1))
        with pytest.raises(InputError, match="go from 'author' to 'paper' nodes, and some join others"):
            view.layout.split(graph.to_data())


class TestMaps:
    def test_entries_of_one_layer_run_side_by_side(self):
        view = HeteroView(DATA)
        found = observe(view.wrap(hetero_model("gat", DATA)), view.graph).attention
        assert found.depths == [0] * 6 + [1] * 6
        assert [w.edge_type for w in found.of_type(WRITES)] == [WRITES] * 2
        with pytest.raises(AttentionError, match="no edges of type"):
            found.of_type(("a", "b", "c"))
        plain = LayerAttention.from_edges(torch.ones(2, 1), [0, 1], [1, 2], num_nodes=3)
        assert AttentionMap((plain, plain)).depths == [0, 1]

    @pytest.mark.parametrize("scope", ["node", "graph"])
    def test_edges_of_every_type_are_removed(self, scope):
        view = HeteroView(DATA)
        wrapped = view.wrap(hetero_model("gat", DATA))
        before = observe(wrapped, view.graph)
        ranking = _edge_ranking(before.attention, scope)
        assert torch.equal(ranking.keys, view.graph.keys)
        logits = _predict_without(wrapped, before, ranking.keys)
        papers = logits[view.number("paper", 0) :][:PAPERS]
        assert torch.allclose(papers, papers[:1].expand_as(papers))

    @pytest.mark.parametrize("kind", ["gat", "hgt"])
    def test_no_row_out_of_reach_moves(self, kind):
        view = HeteroView(DATA, edge_type=WRITES)
        wrapped = view.wrap(hetero_model(kind, DATA))
        ends = torch.tensor([[view.number("paper", 3)]])
        attacked, _ = view.graph.inject(ends, torch.full((1, view.graph.num_features), 3.0))
        before, after = (observe(wrapped, graph).attention for graph in (view.graph, attacked))
        touched = _reach_and_moved(before, after, None)[0]
        assert all(torch.equal(*pair) for pair in zip(touched, touched_rows(before, after), strict=True))
        assert touched[0].nonzero().flatten().tolist() == ends.flatten().tolist()
        ours, theirs = before.align(after)
        for one, two, rows in zip(ours, theirs, touched, strict=True):
            still = ~rows[one.destination]
            torch.testing.assert_close(one.values[still], two.values[still])
        assert int(touched[-1].sum()) > 1

    @pytest.mark.parametrize("kind", ["gat", "han", "hgt"])
    def test_joined_types_sum_to_one(self, kind):
        data = DATA.clone()
        data[ALSO].edge_index = data[WRITES].edge_index[:, :9]
        view = HeteroView(data)
        attention = observe(view.wrap(hetero_model(kind, data)), view.graph).attention
        joined = attention.joined()
        assert_sums(joined)
        assert [w.name for w in joined] == ["conv1", "conv2"] and joined.depths == [0, 1]
        assert torch.equal(joined.last.keys, view.graph.keys)
        reduced = attention.over_layers("mean")
        assert torch.allclose(reduced.sums()[reduced.degree > 0], torch.ones(1))


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (HeteroData(), "it is empty"),
            (changed(x=("venue", None)), r"`data\['venue'\].x` must be a dense tensor.*got nothing"),
            (changed(x=("venue", torch.ones(7))), r"data\['venue'\].x"),
            (changed(x=("venue", torch.ones(0, 5))), "leave out types without nodes"),
            (changed(x=("venue", torch.full((7, 5), torch.nan))), "venue"),
            (changed(x=("venue", torch.ones(7, 5).double())), "of one dtype"),
            (changed(edge_index=(WRITES, None)), r"edge_index` must be a tensor \[2, edges\]"),
            (changed(edge_index=(WRITES, torch.tensor([[AUTHORS], [0]]))), r"sources of .* 0..23"),
            (changed(edge_index=(WRITES, torch.tensor([[0], [-1]]))), r"destinations of .* 0..59"),
            (
                changed(edge_index=(WRITES, torch.zeros(2, 3, dtype=torch.long))),
                "2 duplicate edges.*coalesce",
            ),
            (changed(edge_attr=(CITES, torch.ones(3, 1))), "edge_attr` would be ignored"),
            (changed(y=("paper", torch.ones(PAPERS))), r"`data\['paper'\].y` must be torch.int64"),
            (changed(val_mask=("paper", torch.ones(3).bool())), "val_mask` must be torch.bool"),
        ],
    )
    def test_data(self, data, match):
        with pytest.raises(InputError, match=match):
            HeteroView(data)

    def test_types(self):
        with pytest.raises(InputError, match="`target` must be one of paper, author, venue, got 'reader'"):
            HeteroView(DATA, "reader")
        with pytest.raises(InputError, match=r"`data\['author'\].y` is missing"):
            HeteroView(DATA, "author")
        with pytest.raises(InputError, match=r"`data\['paper'\].y` is missing"):
            HeteroView(changed(y=("paper", None)), edge_type=WRITES)
        with pytest.raises(InputError, match="ends at 'paper'"):
            other = DATA.clone()
            other["author"].y = torch.arange(AUTHORS) % 2
            HeteroView(other, "author", WRITES)
        with pytest.raises(InputError, match=r"got 'writes'"):
            HeteroView(DATA, edge_type="writes")
        with pytest.raises(TypeError, match="`data` of `HeteroView` must be HeteroData, got Data"):
            HeteroView(HeteroView(DATA).graph.to_data())

    def test_nodes(self):
        view = HeteroView(DATA)
        with pytest.raises(InputError, match="no type of nodes 'reader'; there are paper, author, venue"):
            view.number("reader", 0)
        with pytest.raises(InputError, match="`node` must be at least 0, at most 6"):
            view.number("venue", 7)

    def test_outputs(self):
        view, model = HeteroView(DATA), hetero_model("gat", DATA)
        for call, match in (
            (lambda m, d: {"author": d["author"].x}, "returns no logits of 'paper' nodes, but of 'author'"),
            (lambda m, d: d["author"].x, r"logits \[60, classes\] of the 'paper' nodes, got \(24, 8\)"),
            (lambda m, d: [1], "must return logits, or those by type of nodes, got list"),
        ):
            with pytest.raises(InputError, match=match):
                view.wrap(model, call)(view.graph)
