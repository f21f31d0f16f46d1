"""The kernels against the plain reference, and the reference against loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fgai import ops
from fgai.errors import InputError
from fgai.ops import cpu, reference
from fgai.ops.cpu.parallel import BLOCK_WORK, blocks
from fgai.ops.reference import ADDITIVE, DOT, DYNAMIC, Score
from fgai.sparse import Adjacency
from support.ops_cases import (
    FUSED,
    INPUTS,
    SLOPE,
    TOLERANCE,
    adjacencies,
    assert_same,
    call,
    inputs,
    results_and_gradients,
    skewed,
)

SIZES = [(1, 1), (1, 13), (2, 5), (3, 8), (8, 8), (16, 3), (5, 24), (1, 256)]
DTYPES = [torch.float32, torch.float64]
CASES = [
    pytest.param(
        *size, dtype, marks=[pytest.mark.slow] * (dtype == torch.float32 and size not in SIZES[1::3])
    )
    for size in SIZES
    for dtype in DTYPES
]


def compare(
    name: str, adjacency: Adjacency, heads: int, channels: int, dtype: torch.dtype, p: float = 0.0
) -> None:
    made = inputs(name, adjacency, heads, channels, dtype)
    ours = results_and_gradients(lambda given: call(cpu, name, given, adjacency, p), made)
    theirs = results_and_gradients(lambda given: call(reference, name, given, adjacency, p), made)
    assert_same(ours, theirs, TOLERANCE[dtype])


@pytest.mark.many
@pytest.mark.parametrize(("heads", "channels", "dtype"), CASES)
@pytest.mark.parametrize("name", INPUTS)
def test_kernels_equal_the_reference_on_a_skewed_graph(
    name: str, heads: int, channels: int, dtype: torch.dtype
) -> None:
    compare(name, skewed(), heads, channels, dtype)


@given(
    adjacencies(),
    st.sampled_from(sorted(INPUTS)),
    st.integers(1, 9),
    st.integers(1, 11),
    st.sampled_from(DTYPES),
)
def test_kernels_equal_the_reference_on_any_graph(
    adjacency: Adjacency, name: str, heads: int, channels: int, dtype: torch.dtype
) -> None:
    compare(name, adjacency, heads, channels, dtype)


@pytest.mark.parametrize("name", INPUTS)
def test_gradients_pass_gradcheck(name: str) -> None:
    index = torch.tensor([[0, 1, 1, 3, 2, 0, 3], [1, 1, 1, 1, 0, 2, 2]])
    adjacency = Adjacency.build(index, 5)[0]
    made = inputs(name, adjacency, 3, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *given: call(cpu, name, given, adjacency), made, atol=1e-6)


class TestReference:
    """The plain operations against loops over nodes and edges."""

    def test_attention_of_every_node_by_hand(self) -> None:
        adjacency, heads = skewed(hub_degree=17), 3
        scores = inputs("edge_softmax", adjacency, heads, 1, torch.float64)[0].detach()
        out = reference.edge_softmax(scores, adjacency)
        for node in range(adjacency.num_nodes):
            for head in range(heads):
                row = [e for e in range(adjacency.num_edges) if int(adjacency.destination[e]) == node]
                total = sum(math.exp(float(scores[e, head])) for e in row)
                for e in row:
                    assert float(out[e, head]) == pytest.approx(math.exp(float(scores[e, head])) / total)

    def test_scores_and_aggregation_by_hand(self) -> None:
        adjacency, heads, channels = skewed(hub_degree=5), 2, 3
        given_ = inputs("attend_dynamic", adjacency, heads, channels, torch.float64)
        left, right, weight, values = (t.detach() for t in given_)
        additive = reference.score(Score(ADDITIVE, right[..., 0], left[..., 0], None, SLOPE), adjacency)
        dynamic = reference.score(Score(DYNAMIC, right, left, weight, SLOPE), adjacency)
        dots = reference.score(Score(DOT, left, right, None, SLOPE), adjacency)
        summed = reference.aggregate(dynamic, values, adjacency)
        expected = torch.zeros_like(summed)
        for e, (j, i) in enumerate(
            zip(adjacency.source.tolist(), adjacency.destination.tolist(), strict=True)
        ):
            for h in range(heads):
                z = left[j, h] + right[i, h]
                z = torch.where(z > 0, z, SLOPE * z)
                assert float(additive[e, h]) == pytest.approx(float(z[0]))
                assert float(dynamic[e, h]) == pytest.approx(float((weight[h] * z).sum()))
                assert float(dots[e, h]) == pytest.approx(
                    float(left[i, h] @ right[j, h]) / math.sqrt(channels)
                )
                expected[i, h] += dynamic[e, h] * values[j, h]
        torch.testing.assert_close(summed, expected)


class TestNumbers:
    """Extreme, missing and repeated numbers."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_attention_sums_to_one_at_extreme_scores(self, dtype: torch.dtype) -> None:
        adjacency = skewed()
        scores = torch.linspace(-1e4, 1e4, adjacency.num_edges * 8, dtype=dtype).view(-1, 8).requires_grad_()
        attention = cpu.edge_softmax(scores, adjacency)
        assert torch.isfinite(attention).all() and (attention >= 0).all()
        total = reference._segment_sum(attention, adjacency.destination, adjacency.num_nodes)
        torch.testing.assert_close(total, (adjacency.degree > 0)[:, None].expand_as(total).to(dtype))
        (gradient,) = torch.autograd.grad((attention**2).sum(), scores)
        assert torch.isfinite(gradient).all()

    @pytest.mark.parametrize("name", FUSED)
    def test_fused_attention_is_finite_at_extreme_scores(self, name: str) -> None:
        adjacency = skewed()
        made = [1e3 * t.detach() for t in inputs(name, adjacency, 8, 8, torch.float32)]
        out, attention, *gradients = results_and_gradients(
            lambda given: call(cpu, name, given, adjacency), [t.requires_grad_() for t in made]
        )
        assert all(torch.isfinite(t).all() for t in (out, attention, *gradients))

    @pytest.mark.parametrize("heads", [1, 3, 8])
    def test_nan_spreads_over_its_own_row_and_head_only(self, heads: int) -> None:
        adjacency = skewed(hub_degree=40)
        (scores,) = inputs("edge_softmax", adjacency, heads, 1, torch.float32)
        bad = int(adjacency.rowptr[2]) + 3
        scores = scores.detach()
        scores[bad, 0] = math.nan
        found = torch.isnan(cpu.edge_softmax(scores, adjacency))
        assert torch.equal(found, torch.isnan(reference.edge_softmax(scores, adjacency)))
        assert int(found.sum()) == int(adjacency.degree[2])

    def test_infinitely_bad_edges_get_nothing(self) -> None:
        adjacency = skewed(hub_degree=40)
        (scores,) = inputs("edge_softmax", adjacency, 8, 1, torch.float64)
        scores = scores.detach()
        scores[::2] = -math.inf
        alone = torch.isnan(reference.edge_softmax(scores, adjacency))
        found = cpu.edge_softmax(scores, adjacency)
        assert torch.equal(torch.isnan(found), alone)
        assert (found[::2][~alone[::2]] == 0).all()


class TestRuns:
    """The same numbers run to run, whatever the threads."""

    @pytest.fixture
    def threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    @pytest.mark.usefixtures("threads")
    @pytest.mark.parametrize("name", INPUTS)
    def test_identical_on_one_thread_and_on_several(self, name: str) -> None:
        generator = torch.Generator().manual_seed(3)
        source = (torch.rand(9000, generator=generator) ** 3 * 700).long()
        adjacency = Adjacency.build(
            torch.stack([source, source[torch.randperm(9000, generator=generator)]]), 701
        )[0]
        made = inputs(name, adjacency, 4, 9, torch.float32)
        runs = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            runs.append(results_and_gradients(lambda given: call(cpu, name, given, adjacency), made))
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))

    @given(st.lists(st.integers(0, 3000), min_size=1, max_size=60))
    def test_blocks_cover_every_row_once_with_about_equal_work(self, degrees: list[int]) -> None:
        pointers = torch.tensor([0, *degrees]).cumsum(0).to(torch.int32).numpy()
        edges = blocks(pointers)
        assert edges[0] == 0 and edges[-1] == len(degrees) and (edges[1:] >= edges[:-1]).all()
        work = pointers[edges[1:]] - pointers[edges[:-1]] + edges[1:] - edges[:-1]
        assert work.max() <= 2 * BLOCK_WORK + max(degrees) + 2


class TestUse:
    """Layouts, partial gradients, backends."""

    @pytest.mark.parametrize("name", INPUTS)
    def test_layout_in_memory_does_not_matter(self, name: str) -> None:
        adjacency = skewed(hub_degree=11)
        made = inputs(name, adjacency, 3, 5, torch.float64)
        strided = [torch.stack([t.detach(), t.detach() + 1], dim=-1)[..., 0].requires_grad_() for t in made]
        assert not strided[0].is_contiguous()
        ours = results_and_gradients(lambda given: call(cpu, name, given, adjacency), strided)
        assert_same(ours, results_and_gradients(lambda given: call(cpu, name, given, adjacency), made), 1e-14)

    @pytest.mark.parametrize("name", INPUTS)
    def test_gradients_only_where_asked(self, name: str) -> None:
        adjacency = skewed(hub_degree=11)
        made = inputs(name, adjacency, 3, 5, torch.float64)
        every = results_and_gradients(lambda given: call(cpu, name, given, adjacency), made)[-len(made) :]
        for chosen in range(len(made)):
            alone = [t.detach().requires_grad_(k == chosen) for k, t in enumerate(made)]

            def run(asked: list[Tensor], alone: list[Tensor] = alone) -> tuple[Tensor, ...]:
                return call(cpu, name, alone, adjacency)

            found = results_and_gradients(run, [alone[chosen]])[-1]
            assert_same([found], [every[chosen]], 1e-12)

    def test_second_derivatives_are_refused(self) -> None:
        adjacency = skewed(hub_degree=3)
        (scores,) = inputs("edge_softmax", adjacency, 2, 1, torch.float64)
        (gradient,) = torch.autograd.grad(
            (cpu.edge_softmax(scores, adjacency) ** 2).sum(), scores, create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    def test_relabelling_nodes_commutes(self) -> None:
        adjacency = skewed(hub_degree=60)
        left, right, values = inputs("attend_additive", adjacency, 4, 6, torch.float64)
        out, _ = ops.attend_additive(left, right, values, adjacency)
        order = torch.randperm(adjacency.num_nodes, generator=torch.Generator().manual_seed(2))
        place = torch.argsort(order)
        index = torch.stack([place[adjacency.source], place[adjacency.destination]])
        moved, _ = ops.attend_additive(
            left[order], right[order], values[order], Adjacency.build(index, adjacency.num_nodes)[0]
        )
        torch.testing.assert_close(moved, out[order])

    @pytest.mark.parametrize(("name", "kernels"), [("reference", reference), ("numba", cpu), ("auto", cpu)])
    def test_backends_agree(self, name: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        adjacency = skewed(hub_degree=20)
        attention, values = inputs("aggregate", adjacency, 2, 3, torch.float64)
        expected = reference.aggregate(attention, values, adjacency)
        ran: list[ModuleType] = []
        for home in (reference, cpu):
            monkeypatch.setattr(home, "aggregate", _noting(home.aggregate, home, ran))
        with ops.use_backend(name):
            found = ops.aggregate(attention, values, adjacency)
        assert ran == [kernels]
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(("name", "device"), [("triton", "cpu"), ("triton", "meta"), ("numba", "meta")])
    def test_a_backend_refuses_tensors_of_another_device(self, name: str, device: str) -> None:
        adjacency = skewed(hub_degree=5)
        scores = torch.zeros(adjacency.num_edges, 2, device=device)
        with ops.use_backend(name), pytest.raises(InputError, match=f"{name!r} runs on .* one on {device}"):
            ops.edge_softmax(scores, adjacency)

    def test_half_precision_uses_the_reference(self) -> None:
        adjacency = skewed(hub_degree=5)
        scores = torch.zeros(adjacency.num_edges, 2, dtype=torch.bfloat16)
        assert ops.edge_softmax(scores, adjacency).dtype == torch.bfloat16

    def test_an_unknown_backend_is_refused(self) -> None:
        with pytest.raises(ValueError, match="numba"), ops.use_backend("fast"):
            pass


def _noting(
    function: Callable[..., Tensor], home: ModuleType, ran: list[ModuleType]
) -> Callable[..., Tensor]:
    """The same function, which also notes whose it is."""

    def noting(*args: object) -> Tensor:
        ran.append(home)
        return function(*args)

    return noting
