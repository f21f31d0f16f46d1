"""Indices that point nowhere: refused in words at every door to a kernel, and looked at only once."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from fgai import divergence, metrics, ops, topk
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT
from fgai.sparse import Adjacency, Features, SparseRows, valid
from support.ops_cases import INPUTS

W = torch.tensor([0.5, 0.2, 0.3])
MASK = torch.tensor([True, False, True])
FAR = 10**9
POINTERS = {
    "far": torch.tensor([0, FAR, 3]),
    "back": torch.tensor([0, 3, 1, 3]),
    "below": torch.tensor([-2, 1, 3]),
    "late": torch.tensor([1, 2, 3]),
    "short": torch.tensor([0, 1, 2]),
    "long": torch.tensor([0, 2, FAR]),
}
ROWS: dict[str, Callable[[torch.Tensor], object]] = {
    "overlap": lambda ptr: metrics.overlap(W, W, ptr, 1),
    "overlap_graph": lambda ptr: metrics.overlap_graph(W, W, ptr, 1),
    "rank_correlation": lambda ptr: metrics.rank_correlation(W, W, ptr),
    "truth_auc": lambda ptr: metrics.truth_auc(W, MASK, ptr),
    "truth_precision": lambda ptr: metrics.truth_precision(W, MASK, ptr),
    "truth_chance": lambda ptr: metrics.truth_chance(MASK, ptr),
    "uniform_attention": lambda ptr: metrics.uniform_attention(ptr, 3),
    "sharpness": lambda ptr: metrics.sharpness(W, ptr),
    "intruder_places": lambda ptr: metrics.intruder_places(W, MASK, ptr),
    "edges_to_remove": lambda ptr: metrics.removal._edges_to_remove(W, ptr, 0.5, largest=True),
    "topk_mask": lambda ptr: topk.topk_mask(W, ptr, 1),
    "topk_mask, many": lambda ptr: topk.topk_mask(W, ptr, 2),
    "leaders": lambda ptr: topk.leaders(W, ptr, 2),
    "ranks_in_rows": lambda ptr: topk.ranks_in_rows(W, ptr),
    "overlap of sets": lambda ptr: topk.overlap(MASK, MASK, ptr),
    "topk_l1": lambda ptr: topk.topk_l1(W, W, ptr, 1),
    "swap_costs": lambda ptr: topk.swap_costs(W, ptr, 1),
    "swap_margin": lambda ptr: topk.swap_margin(W, ptr, 1, 0.1),
    "row_tvd": lambda ptr: divergence.row_tvd(W, W, ptr),
}
EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
GOOD = {
    "num_nodes": 3,
    "source": torch.tensor([2, 0, 1]),
    "destination": torch.tensor([0, 1, 2]),
    "rowptr": torch.tensor([0, 1, 2, 3]),
    "colptr": torch.tensor([0, 1, 2, 3]),
    "csc": torch.tensor([1, 2, 0]),
}
WRONG = {
    "source far": {"source": torch.tensor([2, FAR, 1])},
    "source below": {"source": torch.tensor([2, -1, 1])},
    "source just outside": {"source": torch.tensor([2, 3, 1])},
    "destination elsewhere": {"destination": torch.tensor([0, 1, 1])},
    "rowptr far": {"rowptr": torch.tensor([0, FAR, 2, 3])},
    "rowptr short": {"rowptr": torch.tensor([0, 1, 3])},
    "fewer sources": {"source": torch.tensor([2, 0])},
    "floating": {"source": torch.tensor([2.0, 0.0, 1.0])},
    "too many nodes": {"num_nodes": 2**31},
}
WRONG_BACK = {
    "csc far": {"csc": torch.tensor([1, FAR, 0])},
    "csc twice": {"csc": torch.tensor([1, 1, 0])},
    "colptr far": {"colptr": torch.tensor([0, FAR, 2, 3])},
    "other order": {"csc": torch.tensor([2, 1, 0])},
}


def aggregate(adjacency: Adjacency, **options: object) -> torch.Tensor:
    return ops.aggregate(torch.ones(3, 2), torch.ones(3, 2, 4, **options), adjacency)  # type: ignore[call-overload]


class TestPointers:
    @pytest.mark.parametrize("kind", POINTERS)
    @pytest.mark.parametrize("call", ROWS)
    def test_are_checked_at_every_door(self, call: str, kind: str) -> None:
        with pytest.raises(InputError, match="rowptr"):
            ROWS[call](POINTERS[kind])

    def test_are_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[torch.Tensor] = []
        steps = valid._first_last_rising
        monkeypatch.setattr(valid, "_first_last_rising", lambda ptr: looks.append(ptr) or steps(ptr))
        rowptr = torch.tensor([0, 2, 3])
        for call in ROWS.values():
            call(rowptr)
        assert sum(seen is rowptr for seen in looks) == 1

    def test_are_read_again_after_a_change(self) -> None:
        rowptr = torch.tensor([0, 2, 3])
        topk.topk_mask(W, rowptr, 1)
        rowptr[1] = FAR
        with pytest.raises(InputError, match="rowptr"):
            topk.topk_mask(W, rowptr, 1)

    def test_of_inference_mode_are_read(self) -> None:
        with torch.inference_mode():
            rowptr = torch.tensor([0, FAR, 3])
            with pytest.raises(InputError, match="rowptr"):
                topk.topk_mask(W, rowptr, 1)

    def test_stay_as_they_were(self) -> None:
        rowptr = torch.tensor([0, 2, 3])
        metrics.overlap(W, W, rowptr, 1)
        stored = io.BytesIO()
        torch.save(rowptr, stored)
        stored.seek(0)
        assert torch.equal(torch.load(stored), rowptr) and not rowptr.__dict__

    def test_a_known_set_covers_the_edges(self) -> None:
        with pytest.raises(InputError, match="known"):
            topk.topk_l1(W, W, torch.tensor([0, 2, 3]), 1, known=MASK[:1])


class TestAdjacency:
    @pytest.mark.parametrize("backend", ["auto", "reference"])
    @pytest.mark.parametrize("wrong", WRONG)
    def test_by_hand_is_checked(self, wrong: str, backend: str) -> None:
        with pytest.raises(InputError), ops.use_backend(backend):
            aggregate(Adjacency(**{**GOOD, **WRONG[wrong]}))

    @pytest.mark.parametrize("wrong", WRONG_BACK)
    def test_is_checked_before_the_way_back(self, wrong: str) -> None:
        adjacency = Adjacency(**{**GOOD, **WRONG_BACK[wrong]})
        out = aggregate(adjacency, requires_grad=True)
        with pytest.raises(InputError, match=r"csc|colptr"):
            out.sum().backward()

    def test_that_fits_is_taken(self) -> None:
        assert torch.equal(aggregate(Adjacency(**GOOD)), torch.ones(3, 2, 4))

    def test_of_edges_that_name_no_node(self) -> None:
        with pytest.raises(InputError, match="source"):
            aggregate(Adjacency.build(torch.tensor([[0, 1, 7], [1, 2, 0]]), 3)[0])

    def test_is_looked_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []
        look = Adjacency._parts

        def count(adjacency: Adjacency, *names: str) -> tuple[torch.Tensor, ...]:
            looks.extend([1] * ("rowptr" in names))
            return look(adjacency, *names)

        monkeypatch.setattr(Adjacency, "_parts", count)
        graph = Graph.from_edges(EDGES, 3, torch.ones(3, 5))
        for _ in range(3):
            aggregate(graph.adjacency)
            grown, _ = graph.inject(torch.tensor([[0, 2]]))
            more, _ = graph.inject_edges(torch.tensor([[0], [2]]))
            ops.edge_softmax(torch.ones(grown.num_edges, 1), grown.adjacency)
            ops.edge_softmax(torch.ones(more.num_edges, 1), more.adjacency)
        assert len(looks) == 1  # what is made of something checked is not read again

    @pytest.mark.parametrize("targets", [[[3]], [[-1]], [[FAR]], [[1, 1]], [0, 1], [[0.5]]])
    def test_new_nodes_are_joined_to_old_ones(self, targets: list[object]) -> None:
        with pytest.raises(InputError, match="targets"):
            Graph.from_edges(EDGES, 3).inject(torch.tensor(targets))

    def test_nobody_can_ask_not_to_be_checked(self) -> None:
        with pytest.raises(TypeError, match="trusted"):
            Graph.from_edges(EDGES, 3).inject(torch.tensor([[0]]), trusted=True)  # type: ignore[call-arg]


@pytest.mark.many
@pytest.mark.parametrize("name", [name for name in INPUTS if name != "node_scores"])
def test_every_operation_refuses_what_is_too_short(name: str) -> None:
    adjacency, letters = Adjacency.build(EDGES, 3)[0], INPUTS[name]
    sizes = {"N": 3, "E": 3, "H": 2, "C": 4}
    good = [torch.ones([sizes[letter] for letter in given]) for given in letters]
    getattr(ops, name)(*good, adjacency)
    for place, given in enumerate(letters):
        others = "NE" + "".join(letters[:place] + letters[place + 1 :])
        for axis, letter in enumerate(given):
            if letter in others:
                short = good[place].narrow(axis, 0, sizes[letter] - 1)
                with pytest.raises(InputError, match="must"):
                    getattr(ops, name)(*good[:place], short, *good[place + 1 :], adjacency)
        if len(letters) > 1:
            with pytest.raises(InputError, match=r"must be torch\.float"):
                getattr(ops, name)(*good[:place], good[place].double(), *good[place + 1 :], adjacency)


def matrix(kind: str = "csr") -> sp.spmatrix:
    dense = np.array([[0, 1, 0, 2, 0], [3, 0, 0, 0, 4], [0, 0, 5, 0, 0]], np.float32)
    return getattr(sp, f"{kind}_matrix")(dense)


class TestFeatures:
    @pytest.mark.parametrize("kind", ["csr", "csc", "bsr"])
    @pytest.mark.parametrize("place", ["indices", "indptr"])
    @pytest.mark.parametrize("value", [FAR, -1, 5])
    def test_of_scipy_are_checked(self, kind: str, place: str, value: int) -> None:
        given = matrix(kind)
        getattr(given, place)[1] = value
        with pytest.raises(InputError, match=r"indptr|indices"):
            Graph.from_edges(EDGES, 3, given)

    @pytest.mark.parametrize("place", ["row", "col"])
    def test_of_scipy_by_coordinates(self, place: str) -> None:
        given = matrix("coo")
        getattr(given, place)[1] = FAR
        with pytest.raises(InputError, match=place):
            Graph.from_edges(EDGES, 3, given)

    def test_leave_the_callers_matrix_alone(self) -> None:
        indices, data = np.array([3, 1, 1, 4, 0, 2]), np.arange(6, dtype=np.float32)
        given = sp.csr_matrix((data, indices, np.array([0, 3, 5, 6])), (3, 5))
        before = [part.copy() for part in (given.data, given.indices, given.indptr)]
        graph = Graph.from_edges(EDGES, 3, given)
        for mine, theirs in zip(before, (given.data, given.indices, given.indptr), strict=True):
            assert np.array_equal(mine, theirs)
        given.indices[:] = FAR
        assert graph.features is not None and graph.features.to_dense()[0].tolist() == [0, 3, 0, 0, 0]

    @pytest.mark.parametrize("indptr", [[0, FAR, 3, 3], [0, 2, 1, 3], [0, 1, 2]])
    def test_by_hand_are_checked(self, indptr: list[int]) -> None:
        features = Features.sparse(torch.tensor(indptr), torch.tensor([0, 1, 2]), torch.ones(3), 5)
        with pytest.raises(InputError):
            GAT(5, 2)(Graph.from_edges(EDGES, 3, features))
        with pytest.raises(InputError):
            ops.project(features, torch.ones(5, 2))

    def test_are_looked_at_once_for_a_pattern(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []
        look = SparseRows._check
        monkeypatch.setattr(SparseRows, "_check", lambda self: looks.append(1) or look(self))
        graph = Graph.from_edges(EDGES, 3, matrix())
        model = GAT(5, 2).train()
        for _ in range(3):
            model(graph).sum().backward()
        assert len(looks) == 1
