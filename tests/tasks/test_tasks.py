"""Links and small graphs: splits, views, read-outs, scores and budgets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch_geometric.data import Batch, Data

from fgai.attacks import Budget, check_budget, draw_endpoints, make_attack
from fgai.attention import call_model, evaluating, prepared
from fgai.datasets import fold_split, link_split, planted
from fgai.errors import BudgetError, InputError
from fgai.graph import Graph, GraphChange
from fgai.graph.fields import Links
from fgai.metrics import task_scores
from fgai.models import GAT
from fgai.sparse import edge_keys
from fgai.tasks import TASKS, link_logits, negative_pairs, task_of
from fgai.tasks.batch import _take_graphs
from fgai.training import FaithfulSettings, labelled_rows
from fgai.training.faithful import FaithfulRecipe
from support import task_cases as cases
from support.graph_cases import small_data


def undirected(graph: Graph) -> set[tuple[int, int]]:
    return {(a, b) for a, b in graph.edge_index.t().tolist() if a < b}


def pairs_of(links: Links, part: str, label: int) -> set[tuple[int, int]]:
    rows = links.rows(part)
    rows = rows[links.y[rows] == label]
    return {(min(a, b), max(a, b)) for a, b in links.pairs[:, rows].t().tolist()}


class TestLinkSplit:
    @given(seed=st.integers(0, 50))
    def test_parts_are_disjoint_and_cover_every_link(self, seed: int) -> None:
        graph = small_data(seed=4, nodes=37)
        split = link_split(graph, seed, train=0.6, val=0.15)
        links = split.links
        assert links is not None
        parts = [pairs_of(links, part, 1) for part in ("train", "val", "test")]
        assert set.union(*parts) == undirected(graph)
        assert sum(map(len, parts)) == len(undirected(graph))
        others = pairs_of(links, "val", 0) | pairs_of(links, "test", 0)
        assert not others & undirected(graph)
        assert [len(pairs_of(links, part, 0)) for part in ("train", "val", "test")] == [
            0,
            len(parts[1]),
            len(parts[2]),
        ]
        assert undirected(split) == parts[0] | parts[1]
        assert undirected(task_of(split).view(split, "fit")) == parts[0]
        assert task_of(split).view(split, "test") is split

    def test_seed_decides_everything_and_shares_are_those_of_the_protocol(self) -> None:
        graph = planted()
        one, again, other = link_split(graph, 1), link_split(graph, 1), link_split(graph, 2)
        assert one.links is not None and again.links is not None and other.links is not None
        assert torch.equal(one.links.pairs, again.links.pairs)
        assert not torch.equal(one.links.pairs, other.links.pairs)
        total = len(undirected(graph))
        shares = [len(pairs_of(one.links, part, 1)) / total for part in ("train", "val", "test")]
        assert shares == pytest.approx([0.85, 0.05, 0.10], abs=1e-3)
        assert one.y is None and one.train_mask is None and one.num_classes == 2

    def test_loops_are_no_links(self) -> None:
        graph = small_data(seed=4, nodes=37)
        split = link_split(graph.add_self_loops()[0], 3)
        assert split.links is not None
        assert split.has_loops and bool((split.links.pairs[0] != split.links.pairs[1]).all())

    def test_refuses_directed_and_tiny_graphs(self) -> None:
        one_way = Graph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
        with pytest.raises(InputError, match="without a reverse"):
            link_split(one_way)
        path = Graph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3, undirected=True)
        with pytest.raises(InputError, match="too few"):
            link_split(path)
        whole = Graph.from_edges(torch.combinations(torch.arange(5)).t(), 5, undirected=True)
        with pytest.raises(InputError, match="too few"):
            negative_pairs(whole, 2, torch.Generator())

    def test_views_are_taken_after_loops_too(self) -> None:
        graph = cases.data("link")
        task = task_of(graph)
        with_loops = graph.add_self_loops()[0]
        there = task.view(with_loops, "val")
        assert there.has_loops and undirected(there) == undirected(task.view(graph, "val"))
        assert task.view(there, "val") is there


class TestLinkTask:
    def test_every_epoch_draws_other_pairs_none_of_them_training_links(self) -> None:
        graph = task_of(cases.data("link")).view(cases.data("link"), "fit")
        drawn = []
        for seed in (0, 0, 1):
            epoch = TASKS["link"].epoch(graph, torch.Generator().manual_seed(seed))
            rows, labels = labelled_rows(epoch, "train_mask")
            assert epoch.links is not None
            assert int(labels.sum()) * 2 == labels.numel()
            pairs = epoch.links.pairs[:, rows[labels == 0]]
            assert not torch.isin(edge_keys(*pairs), graph.keys).any()
            assert pairs_of(epoch.links, "train", 1) == undirected(graph)
            assert len(pairs_of(epoch.links, "train", 0)) == int((labels == 0).sum())
            drawn.append(pairs)
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])

    def test_logits_have_the_binary_loss_of_the_score(self) -> None:
        draw = torch.Generator().manual_seed(0)
        embedding, pairs = torch.randn(9, 5, generator=draw), torch.randint(9, (2, 13), generator=draw)
        labels = torch.arange(13) % 2
        score = torch.stack([embedding[a] @ embedding[b] for a, b in pairs.t().tolist()])
        logits = link_logits(embedding, pairs)
        torch.testing.assert_close(logits[:, 1] - logits[:, 0], score)
        expected = binary_cross_entropy_with_logits(score, labels.float())
        torch.testing.assert_close(cross_entropy(logits, labels), expected)
        cosine = torch.nn.functional.cosine_similarity(embedding[pairs[0]], embedding[pairs[1]])
        found = link_logits(embedding, pairs, "cosine")
        torch.testing.assert_close(found[:, 1] - found[:, 0], 10 * cosine)

    def test_reach_is_one_of_both_ends(self) -> None:
        graph = cases.data("link")
        assert graph.links is not None
        nodes = torch.zeros(graph.num_nodes, dtype=torch.bool)
        nodes[[3, 8]] = True
        expected = [bool(nodes[a] or nodes[b]) for a, b in graph.links.pairs.t().tolist()]
        assert task_of(graph).rows_predicted_from(graph, nodes).tolist() == expected
        ends = {node for pair in graph.links.pairs[:, graph.links.rows("test")].t().tolist() for node in pair}
        assert task_of(graph).nodes(graph, "test").tolist() == sorted(ends)

    def test_bad_links_are_named(self) -> None:
        with pytest.raises(InputError, match="pairs"):
            Links(torch.zeros(3, 4), torch.zeros(4), torch.zeros(4))
        with pytest.raises(InputError, match="one entry per pair"):
            Links(torch.zeros(2, 4, dtype=torch.long), torch.zeros(3), torch.zeros(4))
        with pytest.raises(InputError, match="link_split"):
            TASKS["link"].count(cases.data("node"))


class TestGraphTask:
    @pytest.mark.parametrize("sparse", [False, True])
    def test_taken_graphs_are_those_of_the_batch(self, sparse: bool) -> None:
        whole = cases.batch_of_graphs(sparse=sparse)
        assert whole.batch is not None and whole.graph_y is not None and whole.features is not None
        rows = torch.tensor([2, 7, 19])
        part = _take_graphs(whole, rows)
        assert part.batch is not None and part.graph_y is not None and part.features is not None
        assert part.graph_y.tolist() == whole.graph_y[rows].tolist()
        assert part.features.is_sparse == sparse
        for new, old in enumerate(rows.tolist()):
            ours, theirs = ((g.batch == i).nonzero().flatten() for g, i in ((part, new), (whole, old)))
            torch.testing.assert_close(part.features.to_dense()[ours], whole.features.to_dense()[theirs])
            shift = int(theirs[0] - ours[0])
            mine = {(a + shift, b + shift) for a, b in part.edge_index.t().tolist() if a in ours}
            assert mine == {(a, b) for a, b in whole.edge_index.t().tolist() if a in theirs}

    def test_training_never_sees_a_test_graph(self) -> None:
        whole = cases.data("graph")
        task = task_of(whole)
        seen = {part: task.view(whole, part) for part in ("fit", "val", "test")}
        counts = {part: graph.num_graphs for part, graph in seen.items()}
        assert counts == {"fit": 24, "val": 6, "test": 6}
        assert seen["fit"].test_mask is not None and not bool(seen["fit"].test_mask.any())
        assert task.view(seen["test"], "test") is seen["test"]
        with pytest.raises(InputError, match="no graphs"):
            task.view(seen["test"], "val")

    @given(seed=st.integers(0, 30), folds=st.integers(3, 7))
    def test_folds_share_out_every_class(self, seed: int, folds: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        y = torch.randint(-1, 3, (41,), generator=draw)
        found = [fold_split(y, fold, folds=folds) for fold in range(folds)]
        tests = torch.stack([split.test for split in found])
        assert torch.equal(tests.sum(0), (y >= 0).long())
        for index, split in enumerate(found):
            assert torch.equal(split.val, found[(index + 1) % folds].test)
            assert torch.equal(split.train | split.val | split.test, y >= 0)
            assert not bool((split.train & (split.val | split.test)).any())
            for label in range(3):
                share = int((split.test & (y == label)).sum())
                assert abs(share - int((y == label).sum()) / folds) < 1
        assert not torch.equal(fold_split(y, 0, folds=folds).test, fold_split(y, folds, folds=folds).test)

    def test_a_batch_equals_pygs(self) -> None:
        draw = torch.Generator().manual_seed(0)
        graphs = [
            Data(
                x=torch.rand(size, 3, generator=draw),
                edge_index=torch.stack([torch.arange(size), (torch.arange(size) + 1) % size]),
                y=torch.tensor([size % 2]),
            )
            for size in (4, 2, 5)
        ]
        theirs = Batch.from_data_list(graphs)
        ours = Graph.from_data(theirs)
        assert ours.y is None and ours.features is not None and ours.num_graphs == 3
        assert torch.equal(ours.batch, theirs.batch) and torch.equal(ours.graph_y, theirs.y)
        torch.testing.assert_close(ours.features.to_dense(), theirs.x)
        assert set(map(tuple, ours.edge_index.t().tolist())) == set(
            map(tuple, theirs.edge_index.t().tolist())
        )

    def test_bad_folds_are_refused(self) -> None:
        with pytest.raises(InputError, match="at least 3"):
            fold_split(torch.arange(9) % 2, 0, folds=2)

    def test_a_head_classifies_pooled_states(self) -> None:
        graph = cases.data("graph")
        model = cases.untrained("graph", head="mlp").eval()
        seen = prepared(model, graph)
        states = torch.nn.functional.elu(model.embed(seen))  # type: ignore[operator]
        means = torch.stack([states[seen.batch == g].mean(0) for g in range(seen.num_graphs)])
        torch.testing.assert_close(model(seen), model.head(means))  # type: ignore[operator]
        with pytest.raises(InputError, match="needs `task="):
            GAT.for_data(cases.data("node"), head="mlp")

    def test_new_nodes_join_one_graph_each(self) -> None:
        graph = cases.data("graph")
        nodes = task_of(graph).nodes(graph, "test")
        ends = draw_endpoints(nodes, 2, 3, torch.Generator().manual_seed(0), graph.batch)
        assert graph.batch is not None
        groups = graph.batch[ends]
        assert ends.shape == (2 * 6, 3) and bool((groups == groups[:, :1]).all())
        assert sorted(groups[:, 0].tolist()) == sorted(task_of(graph).rows(graph, "test").tolist() * 2)
        attacked = graph.inject(ends)[0]
        assert attacked.batch is not None
        assert attacked.batch[graph.num_nodes :].tolist() == groups[:, 0].tolist()

    def test_budgets_are_granted_per_graph(self) -> None:
        graph = cases.data("graph")
        budget = Budget(nodes=1, edges=2, targets="test")
        first = [int((graph.batch == g).nonzero()[0]) for g in task_of(graph).rows(graph, "test")]
        fine = torch.tensor([[node, node + 1] for node in first])
        check_budget(GraphChange(endpoints=fine), budget, graph)
        with pytest.raises(BudgetError, match="different small graphs"):
            check_budget(GraphChange(endpoints=torch.tensor([first[:2]])), budget, graph)
        with pytest.raises(BudgetError, match="one small graph got 2"):
            check_budget(GraphChange(endpoints=fine[[0, 0]]), budget, graph)
        with pytest.raises(BudgetError, match="smallest attacked graph"):
            make_attack("standard").run(cases.trained("graph"), graph)
        with pytest.raises(BudgetError, match="one small graph got 3 new edges"):
            edges = torch.tensor([[first[0]] * 3, [first[0] + 1, first[0] + 2, first[0] + 3]])
            check_budget(GraphChange(edges=edges), Budget(edges=2), graph)


class TestScores:
    @given(seed=st.integers(0, 100))
    def test_equal_sklearn(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        logits, target = torch.from_numpy(draw.normal(size=(17, 2)).round(1)), draw.integers(0, 2, 17)
        target[:2] = (0, 1)
        labels, score = torch.from_numpy(target), (logits[:, 1] - logits[:, 0]).numpy()
        link = task_scores("link", logits, labels)
        assert link["roc_auc"] == pytest.approx(roc_auc_score(target, score))
        assert link["average_precision"] == pytest.approx(average_precision_score(target, score))
        graph = task_scores("graph", logits, labels)
        assert graph["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()))
        assert graph["roc_auc"] == pytest.approx(roc_auc_score(target, logits.softmax(1)[:, 1].numpy()))

    def test_more_than_two_classes_against_the_rest(self) -> None:
        draw = np.random.default_rng(0)
        logits, target = torch.from_numpy(draw.normal(size=(29, 3))), np.arange(29) % 3
        found = task_scores("graph", logits, torch.from_numpy(target))["roc_auc"]
        wanted = roc_auc_score(target, logits.softmax(1).numpy(), multi_class="ovr")
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("task", ["link", "graph"])
def test_a_users_model_is_called_for_the_task(task: str) -> None:
    graph, model = cases.data(task), cases.untrained(task, "mine").eval()
    assert graph.features is not None
    inputs = (graph.features.to_dense(), graph.edge_index)
    with torch.no_grad():
        found = call_model(model, graph)
        if task == "graph":
            torch.testing.assert_close(found, model(*inputs, graph.batch))
        else:
            assert graph.links is not None
            torch.testing.assert_close(found, link_logits(model(*inputs), graph.links.pairs))
    assert found.shape == (task_of(graph).count(graph), 2)


def test_score_of_faithful_training_counts_the_attacked_graphs_alone() -> None:
    vanilla, data = cases.untrained("graph"), cases.data("graph")
    graph = prepared(vanilla, task_of(data).view(data, "fit"))
    settings = FaithfulSettings(
        nodes=1, edges=2, closeness=0.0, similarity=0.0, prediction_stability=1.0, margin=0.0, sharpness=0.0
    )
    recipe = FaithfulRecipe(vanilla, graph, settings)
    recipe.start(vanilla, 3)
    rows = task_of(graph).rows(graph, "val")
    assert 1 < rows.numel() < graph.num_graphs == task_of(graph).rows(graph, "fit").numel()
    assert recipe.reach.predictions == 1.0
    assert recipe.validation.reach.predictions == pytest.approx(rows.numel() / graph.num_graphs)
    score = recipe.score(vanilla)
    attacked, _ = graph.inject(recipe.validation.endpoints, recipe.validation.adversary.features.detach())
    with evaluating(vanilla), torch.no_grad():
        before, after = (call_model(vanilla, where).log_softmax(1) for where in (graph, attacked))
    moved = (before.exp() * (before - after)).sum(1)
    others = torch.ones(graph.num_graphs, dtype=torch.bool)
    others[rows] = False
    assert float(moved[others].max()) < 1e-6 < float(moved[rows].min())
    assert score == pytest.approx(-float(moved[rows].mean()), rel=1e-4)


def test_score_of_faithful_training_on_nodes_and_links_is_measured_as_its_terms() -> None:
    for task in ("node", "link"):
        vanilla, data = cases.untrained(task), cases.data(task)
        graph = prepared(vanilla, task_of(data).view(data, "fit"))
        recipe = FaithfulRecipe(vanilla, graph, FaithfulSettings(nodes=2, edges=3))
        recipe.start(vanilla, 3)
        assert recipe.validation.reach == recipe.reach
