"""Neighbours that are drawn: they are there, in the right distribution, and the same whoever draws them."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency, chisquare
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large import NeighbourSampler
from fgai.large.sampling_kernels import FEW
from support.graph_cases import build, edge_sets, listed, small_data
from support.store_cases import slow

RARE = 1e-3
"""A fixed seed whose draws are less likely than this would be bad luck."""


def star(leaves: int) -> Graph:
    """Every other node points at node 0."""
    edges = torch.stack([torch.arange(1, leaves + 1), torch.zeros(leaves, dtype=torch.long)])
    return Graph.from_edges(edges, leaves + 1)


def drawn(sampler: NeighbourSampler, seeds: list[int], epochs: int) -> list[SamplerOutput]:
    """One sample per epoch."""
    found = []
    for epoch in range(epochs):
        sampler.epoch = epoch
        found.append(sampler.sample(torch.tensor(seeds)))
    return found


class TestEdges:
    @given(edge_sets(), st.data())
    def test_are_all_there(self, case: tuple[int, list[tuple[int, int]]], data: st.DataObject) -> None:
        nodes, edges = case
        graph = build(nodes, edges)
        fan_out = data.draw(st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3))
        replace, disjoint = data.draw(st.booleans()), data.draw(st.booleans())
        seeds = data.draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=4))
        sample = NeighbourSampler(graph, fan_out, replace=replace, disjoint=disjoint).sample(
            torch.tensor(seeds)
        )
        whole = listed(graph)
        ends = zip(sample.node[sample.row].tolist(), sample.node[sample.col].tolist(), strict=True)
        assert [whole[edge] for edge in sample.edge.tolist()] == list(ends)
        assert sample.node[: len(seeds)].tolist() == seeds
        assert sum(sample.num_sampled_nodes) == len(sample.node)
        assert sum(sample.num_sampled_edges) == len(sample.edge) == len(sample.row) == len(sample.col)
        if sample.batch is not None:
            assert torch.equal(sample.batch[sample.row], sample.batch[sample.col])
        degree, first = graph.adjacency.degree[sample.node], 0
        for hop, count in enumerate(fan_out):
            last = first + sample.num_sampled_nodes[hop]
            got = torch.bincount(sample.col, minlength=len(degree))[first:last]
            wanted = degree[first:last]
            if count > 0:
                wanted = (wanted > 0) * count if replace else wanted.clamp(max=count)
            assert torch.equal(got, wanted)
            first = last

    @pytest.mark.parametrize("disjoint", [False, True])
    def test_lead_to_nodes_that_ascend_in_each_hop(self, disjoint: bool) -> None:
        graph, seeds = small_data(nodes=60), torch.tensor([41, 7, 41, 20])
        sample = NeighbourSampler(graph, [4, 3, -1], disjoint=disjoint).sample(seeds)
        trees = torch.zeros_like(sample.node) if sample.batch is None else sample.batch
        hops = torch.split((trees << 32) | sample.node, sample.num_sampled_nodes)
        assert len(hops[1]) > 1 and len(hops[2]) > 1
        for hop in hops[1:]:
            assert (hop.diff() > 0).all()

    def test_come_once_without_replacement(self) -> None:
        for count in (5, FEW + 7):
            for sample in drawn(NeighbourSampler(star(90), [count]), [0], 20):
                assert len(set(sample.edge.tolist())) == count

    def test_all_of_them_are_the_neighbourhood(self) -> None:
        graph = small_data(nodes=60)
        for hops in (1, 2, 3):
            sample = NeighbourSampler(graph, [-1] * hops).sample(torch.tensor([4, 17]))
            nodes, _, _, mask = k_hop_subgraph([4, 17], hops, graph.edge_index, num_nodes=60)
            assert sorted(sample.node.tolist()) == nodes.tolist()
            inner, *_ = k_hop_subgraph([4, 17], hops - 1, graph.edge_index, num_nodes=60)
            inside = mask & torch.isin(graph.edge_index[1], inner)
            assert sorted(sample.edge.tolist()) == inside.nonzero().flatten().tolist()


class TestDistribution:
    def test_every_set_is_as_likely(self) -> None:
        samples = drawn(NeighbourSampler(star(6), [3]), [0], 4000)
        seen = Counter(tuple(sorted(sample.edge.tolist())) for sample in samples)
        counts = [seen[subset] for subset in combinations(range(6), 3)]
        assert sum(counts) == 4000 and chisquare(counts).pvalue > RARE

    def test_every_sequence_is_as_likely_with_replacement(self) -> None:
        samples = drawn(NeighbourSampler(star(4), [2], replace=True), [0], 4000)
        seen = Counter(tuple(sample.edge.tolist()) for sample in samples)
        counts = [seen[one, two] for one in range(4) for two in range(4)]
        assert sum(counts) == 4000 and chisquare(counts).pvalue > RARE

    def test_every_edge_is_as_likely_among_many(self) -> None:
        degree, count, times = 80, FEW + 2, 2000
        samples = drawn(NeighbourSampler(star(degree), [count]), [0], times)
        seen = np.bincount(np.concatenate([sample.edge.numpy() for sample in samples]), minlength=degree)
        share = count / degree
        # Counts of one draw add up to `count`: they vary by share · (1 − share) · degree / (degree − 1).
        spread = times * share * (1 - share) * degree / (degree - 1)
        assert chi2.sf(((seen - times * share) ** 2).sum() / spread, degree - 1) > RARE

    @pytest.mark.parametrize("replace", [False, True])
    def test_two_hops_are_those_of_a_slow_sampler(self, replace: bool) -> None:
        edges = [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (2, 1), (0, 2), (5, 2), (1, 3), (4, 3)]
        graph = build(6, edges)
        ours = Counter(
            tuple(sorted(sample.edge.tolist()))
            for sample in drawn(NeighbourSampler(graph, [2, 1], replace=replace), [0], 3000)
        )
        random = np.random.default_rng(5)
        theirs = Counter(slow_sample(graph, 0, (2, 1), replace, random) for _ in range(3000))
        outcomes = [o for o in {*ours, *theirs} if ours[o] + theirs[o] >= 20]
        table = [[seen[outcome] for outcome in outcomes] for seen in (ours, theirs)]
        assert len(outcomes) > 5 and chi2_contingency(table).pvalue > RARE


def slow_sample(
    graph: Graph, seed: int, fan_out: tuple[int, ...], replace: bool, random: np.random.Generator
) -> tuple[int, ...]:
    """Positions of the edges drawn around one node, by Python and numpy's own draws."""
    source, destination = graph.edge_index.tolist()
    known, frontier, found = [seed], [seed], []
    for count in fan_out:
        fresh: list[int] = []
        for node in frontier:
            there = [edge for edge, end in enumerate(destination) if end == node]
            size = (count if replace else min(count, len(there))) if there else 0
            for edge in random.choice(there, size, replace=replace).tolist() if size else []:
                found.append(edge)
                if source[edge] not in known:
                    known.append(source[edge])
                    fresh.append(source[edge])
        frontier = fresh
    return tuple(sorted(found))


def equal(one: SamplerOutput, two: SamplerOutput) -> bool:
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("node", "row", "col", "edge"))


class TestDraws:
    def test_depend_on_seed_epoch_and_batch(self) -> None:
        graph, seeds = small_data(nodes=60), torch.arange(8)
        sampler = NeighbourSampler(graph, [2, 2], seed=3)
        first = sampler.sample(seeds)
        assert equal(first, NeighbourSampler(graph, [2, 2], seed=3).sample(seeds))
        assert not equal(first, NeighbourSampler(graph, [2, 2], seed=4).sample(seeds))
        sampler.epoch = 1
        assert not equal(first, sampler.sample(seeds))
        sampler.epoch = 0
        other = sampler.sample(torch.arange(9))
        assert equal(first, sampler.sample(seeds)) and other.edge[:2].tolist() != []

    def test_of_a_tree_depend_on_its_seed_alone(self) -> None:
        sampler = NeighbourSampler(small_data(nodes=60), [2, 2], disjoint=True)
        alone, together = sampler.sample(torch.tensor([9])), sampler.sample(torch.tensor([3, 9, 5]))
        assert together.batch is not None
        mine = together.batch[together.col] == 1
        assert together.edge[mine].tolist() == alone.edge.tolist()

    def test_neighbouring_seeds_draw_differently(self) -> None:
        graph = star(40)
        first = [tuple(NeighbourSampler(graph, [3], seed=s).sample(torch.tensor([0])).edge.tolist())
                 for s in range(40)]  # fmt: skip
        assert len(set(first)) > 35

    def test_survive_pickling(self) -> None:
        sampler = NeighbourSampler(small_data(nodes=60), [2, 2], seed=3)
        sampler.epoch = 5
        again = pickle.loads(pickle.dumps(sampler))
        assert equal(sampler.sample(torch.arange(5)), again.sample(torch.arange(5)))


def shuffled(graph: Graph, seed: int = 0) -> Data:
    """PyG data whose edges come in another order than the graph's."""
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(seed))
    data = graph.to_data()
    data.edge_index = data.edge_index[:, order]
    data.edge_attr = torch.arange(graph.num_edges).float()
    return data


class TestInPyG:
    def test_edges_keep_their_place_in_the_data(self) -> None:
        data = shuffled(small_data(nodes=60))
        loader = NodeLoader(data, NeighbourSampler(data, [3, 2]), torch.arange(60), batch_size=16)
        batches = list(loader)
        assert [batch.batch_size for batch in batches] == [16, 16, 16, 12]
        for batch in batches:
            assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
            assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
            assert torch.equal(batch.x, data.x[batch.n_id])

    @pytest.mark.parametrize("disjoint", [False, *slow((True,))])
    def test_workers_change_nothing(self, disjoint: bool) -> None:
        data = shuffled(small_data(nodes=60))
        sampler = NeighbourSampler(data, [3, 2], disjoint=disjoint)

        def batches(workers: int, persistent: bool = False) -> list[list[Data]]:
            loader = NodeLoader(
                data, sampler, torch.arange(60), batch_size=16, num_workers=workers,
                persistent_workers=persistent,
            )  # fmt: skip
            found = []
            for sampler.epoch in (0, 1):
                found.append(list(loader))
            return found

        here = batches(0)
        for there in (batches(2), batches(2, persistent=True)):
            for one, two in zip(here, there, strict=True):
                assert all(torch.equal(a.n_id, b.n_id) for a, b in zip(one, two, strict=True))
                assert all(torch.equal(a.e_id, b.e_id) for a, b in zip(one, two, strict=True))
        assert any(not torch.equal(a.e_id, b.e_id) for a, b in zip(*here, strict=True))

    def test_links_with_pairs_beside_them(self) -> None:
        data = shuffled(small_data(nodes=60))
        sampler = NeighbourSampler(data, [3, 2])
        found = [
            list(LinkLoader(data, sampler, data.edge_index[:, :20], neg_sampling="binary", batch_size=8,
                            num_workers=workers))
            for workers in (0, 2)
        ]  # fmt: skip
        for one, two in zip(*found, strict=True):
            assert torch.equal(one.n_id, two.n_id) and torch.equal(one.edge_label_index, two.edge_label_index)
            positive = one.edge_label > 0
            ends = one.n_id[one.edge_label_index[:, positive]]
            known = {tuple(pair) for pair in data.edge_index.t().tolist()}
            assert {tuple(pair) for pair in ends.t().tolist()} <= known

    def test_global_draws_are_left_alone(self) -> None:
        data = shuffled(small_data(nodes=60))
        torch.manual_seed(1)
        wanted = torch.rand(3)
        torch.manual_seed(1)
        index = EdgeSamplerInput(None, *data.edge_index[:, :20])
        NeighbourSampler(data, [3]).sample_from_edges(index, NegativeSampling("binary"))
        assert torch.equal(torch.rand(3), wanted)


class TestBadInput:
    @pytest.mark.parametrize("fan_out", [[0], [3, 0], [], [-2], [1.5], [2**70]])
    def test_fan_out(self, fan_out: list[int]) -> None:
        with pytest.raises(InputError, match="`fan_out` must hold"):
            NeighbourSampler(small_data(), fan_out)

    def test_a_matrix_is_no_fan_out(self) -> None:
        with pytest.raises(TypeError, match="`fan_out`"):
            NeighbourSampler(small_data(), torch.ones(2, 2))

    def test_seeds(self) -> None:
        sampler = NeighbourSampler(small_data(nodes=40), [2])
        for seeds in (torch.tensor([40]), torch.tensor([-1]), torch.tensor([0.5]), torch.tensor([[1]])):
            with pytest.raises(InputError, match="`seeds` must"):
                sampler.sample(seeds)

    def test_isolated_seeds_come_alone(self) -> None:
        graph = small_data(nodes=40)  # the last node is isolated
        sample = NeighbourSampler(graph, [2, -1], replace=True).sample(torch.tensor([39, 39]))
        assert sample.node.tolist() == [39, 39] and sample.edge.numel() == 0
        assert sample.num_sampled_nodes == [2, 0, 0] and sample.num_sampled_edges == [0, 0]

    def test_no_seeds(self) -> None:
        assert NeighbourSampler(small_data(), [2]).sample(torch.zeros(0, dtype=torch.long)).node.numel() == 0

    def test_times_and_types(self) -> None:
        sampler = NeighbourSampler(small_data(), [2])
        with pytest.raises(InputError, match="does not support `time`"):
            sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([0]), torch.tensor([3])))

    def test_what_is_no_graph(self) -> None:
        with pytest.raises(InputError, match="expected a homogeneous"):
            NeighbourSampler(3, [2])
        with pytest.raises(TypeError, match="`fan_out`"):
            NeighbourSampler(small_data(), "3")
