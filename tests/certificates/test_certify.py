"""The mathematics of the certificates: exhaustive on small neighbourhoods, in all three norms."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fgai.certificates.kernels import _channel_norms, _class_norms, _margin_gains, _value_range
from fgai.certificates.linear import (
    _crossing_radius,
    _LinearReadOut,
    _node_prediction,
    _probability_change,
    _trivial_change,
)
from fgai.certificates.record import LayerCertificate, Prediction
from fgai.errors import InputError
from fgai.topk import overlap, swap_costs, topk_mask
from support.certify_cases import NORMS, cheapest_swap, least_norm, swap
from support.csr_rows import attention, pointer

ORDER = {"l1": 1, "l2": 2, "linf": math.inf}
DUAL = {"l1": math.inf, "l2": 2, "linf": 1}


def layer_of(values: Tensor, rowptr: Tensor, k: int | None, norm: str) -> LayerCertificate:
    costs = swap_costs(values, rowptr, k, norm)
    return LayerCertificate("conv", 1, k, 0.5, rowptr.diff(), costs, None, Prediction())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("degree", [2, 3, 4, 5, 6])
def test_certified_overlap_equals_the_best_of_all_swaps(degree: int, norm: str) -> None:
    # Every set of k neighbours that could become the top-k is tried: the certificate is exact, not a bound.
    values, rowptr = attention([degree], seed=degree, sharp=1.0)
    for k in range(1, degree):
        layer = layer_of(values, rowptr, k, norm)
        swaps = range(1, min(k, degree - k) + 1)
        costs = [cheapest_swap(values.numpy(), k, m, norm) for m in swaps]
        assert layer.topk_radius.item() == pytest.approx(costs[0], abs=1e-9)
        for m, cost in zip(swaps, costs, strict=True):
            assert layer.beta2(cost * (1 + 1e-6) + 1e-9).item() <= 1 - m / k + 1e-12
            assert layer.beta2(max(0.0, cost * (1 - 1e-6) - 1e-9)).item() >= 1 - (m - 1) / k - 1e-12


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from(NORMS),
    st.floats(1e-3, 1.5),
)
def test_certified_overlap_is_met_by_a_constructed_perturbation(
    seed: int, degrees: list[int], k: int, norm: str, radius: float
) -> None:
    values, rowptr = attention(degrees, seed)
    layer = layer_of(values, rowptr, k, norm)
    if bool(((layer.costs - radius).abs() < 1e-4).any()):
        radius *= 1.01  # the constructed level is found on a grid
    delta = swap(values, rowptr, k, radius, norm)
    rows = [delta[a:b] for a, b in itertools.pairwise(rowptr.tolist())]
    assert all(float(torch.linalg.vector_norm(row, ORDER[norm])) <= radius * (1 + 1e-9) for row in rows)
    kept = overlap(topk_mask(values, rowptr, k), topk_mask(values + delta, rowptr, k), rowptr)
    clear = ((layer.costs - radius).abs() >= 1e-4).all(1)
    torch.testing.assert_close(kept[clear], layer.beta2(radius)[clear])


@pytest.mark.parametrize(("norm", "heads"), [("l1", 1), ("l1", 2), ("l2", 1), ("linf", 1), ("linf", 2)])
@pytest.mark.parametrize("degree", [1, 2, 4, 6])
def test_class_radius_equals_a_program_and_is_attained(degree: int, norm: str, heads: int) -> None:
    generator = torch.Generator().manual_seed(10 * degree + heads)
    classes, rowptr = 3, pointer([degree])
    z = torch.randn(degree, heads, classes, generator=generator, dtype=torch.float64)
    y = torch.randn(1, classes, generator=generator, dtype=torch.float64)
    found = _node_prediction(_LinearReadOut(z, torch.arange(degree)), rowptr, y, 0.1, norm)
    assert found.class_radius is not None and found.class_status == "exact"
    top = int(y.argmax())
    others = [c for c in range(classes) if c != top]
    gains = {c: (z[:, :, c] - z[:, :, top]).T.flatten().numpy() for c in others}  # heads one after another
    needed = {c: float(y[0, top] - y[0, c]) for c in others}
    slow = min(least_norm(gains[c][None], np.array([needed[c]]), norm, heads) for c in others)
    assert found.class_radius.item() == pytest.approx(slow, rel=1e-9)
    # The worst perturbation of every head, a hair inside and a hair outside.
    rival = min(others, key=lambda c: needed[c] / sum(_dual(gains[c].reshape(heads, degree), norm)))
    worst = _steepest(gains[rival].reshape(heads, degree), norm)
    for factor, changes in ((0.999, False), (1.001, True)):
        delta = torch.from_numpy(worst.T) * found.class_radius.item() * factor
        moved = y + torch.einsum("eh,ehc->c", delta, z)
        assert (int(moved.argmax()) != top) is changes


def _dual(rows: np.ndarray, norm: str) -> list[float]:
    return [float(np.linalg.norm(row, DUAL[norm])) for row in rows]


def _steepest(rows: np.ndarray, norm: str) -> np.ndarray:
    if norm == "linf":
        return np.sign(rows)
    if norm == "l2":
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)
    out = np.zeros_like(rows)
    for head, row in zip(out, rows, strict=True):
        head[np.abs(row).argmax()] = np.sign(row[np.abs(row).argmax()])
    return out


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 6])
def test_change_of_logits_is_exact_in_l1_and_never_too_small(degree: int) -> None:
    generator = torch.Generator().manual_seed(degree)
    classes, radius, rowptr = 4, 0.3, pointer([degree])
    z = torch.randn(degree, 1, classes, generator=generator, dtype=torch.float64)
    y = torch.randn(1, classes, generator=generator, dtype=torch.float64)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=classes)), dtype=torch.float64)
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=degree)), dtype=torch.float64)
    # max ½‖Zᵀδ‖₁: on a vertex in l1 and linf; in l2 it is R/2 · max over signs s of ‖Z s‖₂.
    truth = {
        "l1": radius / 2 * float(z.abs().sum(2).max()),
        "l2": radius / 2 * float(torch.linalg.vector_norm(signs @ z[:, 0].T, dim=1).max()),
        "linf": radius / 2 * float((corners @ z[:, 0]).abs().sum(1).max()),
    }
    for norm, largest in truth.items():
        found = _node_prediction(_LinearReadOut(z, torch.arange(degree)), rowptr, y, radius, norm)
        assert found.alpha2_logits is not None
        if norm == "l1":
            assert found.logits_status == "exact"
            assert found.alpha2_logits.item() == pytest.approx(largest, rel=1e-12)
        else:
            assert found.logits_status == "bound"
            assert largest <= found.alpha2_logits.item() * (1 + 1e-12)


@given(st.integers(0, 10_000), st.integers(2, 5), st.floats(0, 20), st.floats(0.1, 8))
def test_probability_bound_covers_every_set_of_classes(
    seed: int, classes: int, spread: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = scale * torch.randn(1, classes, generator=generator, dtype=torch.float64)
    bound = _probability_change(y, torch.tensor([spread], dtype=torch.float64)).item()
    assert 0 <= bound <= math.tanh(spread / 4) + 1e-12
    assert bound <= _trivial_change(y).item() + 1e-12
    # Raising one set of classes by the whole spread is the worst there is.
    worst = 0.0
    for members in itertools.product([0.0, spread], repeat=classes):
        moved = y + torch.tensor([members], dtype=torch.float64)
        worst = max(worst, float((moved.softmax(1) - y.softmax(1)).abs().sum() / 2))
    assert worst <= bound + 1e-12
    if classes == 2:
        assert bound == pytest.approx(worst, abs=1e-9)


def test_probability_bound_at_its_limits() -> None:
    y = torch.tensor([[0.0, 0.0], [800.0, -800.0]], dtype=torch.float64)
    assert _probability_change(y, torch.tensor([0.0, 0.0])).tolist() == [0.0, 0.0]
    endless = _probability_change(y, torch.tensor([torch.inf, torch.inf]))
    assert endless.tolist() == pytest.approx([0.5, 1.0])


@given(st.integers(0, 10_000), st.sampled_from(NORMS))
def test_kernels_equal_dense_loops(seed: int, norm: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    rowptr, nodes, heads, classes = pointer([3, 0, 1, 5]), 7, 2, 3
    index = torch.randint(0, nodes, (9,), generator=generator)
    z = torch.randn(nodes, heads, classes, generator=generator, dtype=torch.float64)
    top = torch.randint(0, classes, (4,), generator=generator)
    rates = _class_norms(rowptr, index, z, top, norm)
    margin, spread, total = rates[:, :-2], rates[:, -2], rates[:, -1]
    channels = _channel_norms(rowptr, index, z, norm)
    apart, between = _value_range(rowptr, index, z), _value_range(rowptr, index, z, top)
    w, r = torch.rand(9, heads, generator=generator), torch.rand(z.shape, generator=generator)
    growth, change = 1 + torch.rand(4, heads, generator=generator), torch.rand(4, heads, generator=generator)
    mixed = _margin_gains(rowptr, index, w, r, growth, change, torch.where(torch.arange(4) == 2, -1, top))
    assert float(mixed[2].abs().max()) == 0
    for i, (start, stop) in enumerate(itertools.pairwise(rowptr.tolist())):
        rows, t = z[index[start:stop]], int(top[i])
        if start == stop:
            flat = [
                margin[i].sum(),
                spread[i],
                total[i],
                channels[i].sum(),
                apart[i].sum(),
                between[i].sum(),
            ]
            assert [float(x) for x in flat] == [0.0] * 6
            continue

        def dual(x: Tensor) -> Tensor:
            return torch.linalg.vector_norm(x, DUAL[norm], dim=0)

        torch.testing.assert_close(margin[i], dual(rows - rows[:, :, [t]]).sum(0))
        torch.testing.assert_close(channels[i], dual(rows))
        pairs = [dual(rows[:, :, c] - rows[:, :, d]).sum() for c in range(classes) for d in range(classes)]
        assert float(spread[i]) >= float(max(pairs)) - 1e-12
        middle = (rows.amax(2, keepdim=True) + rows.amin(2, keepdim=True)) / 2
        torch.testing.assert_close(spread[i], 2 * dual(rows - middle).sum(0).max())
        sizes = rows.abs().sum(2).amax(0).sum() if norm == "l1" else dual(rows).sum()
        torch.testing.assert_close(total[i], sizes)
        torch.testing.assert_close(apart[i], rows.amax(0) - rows.amin(0))
        gap = rows[:, :, [t]] - rows
        torch.testing.assert_close(between[i], gap.amax(0) - gap.amin(0))
        moved, share = r[index[start:stop]].double(), w[start:stop].double()
        total_moved = (share[:, :, None] * moved).sum(0)
        either = (
            growth[i, :, None] * total_moved,
            total_moved + change[i, :, None] * (moved.amax(0) - moved.amin(0)),
        )
        least = torch.minimum(*either)
        if i != 2:
            torch.testing.assert_close(mixed[i], least + least[:, [t]])


def test_few_neighbours_are_trivial_and_not_counted() -> None:
    values, rowptr = attention([0, 1, 3, 7], seed=1)
    layer = layer_of(values, rowptr, 3, "l1")
    assert layer.counted.tolist() == [False, False, False, True]
    assert layer.topk_radius[:3].tolist() == [math.inf] * 3
    assert layer.beta2(100.0)[:3].tolist() == [1.0] * 3
    everything = layer_of(values, rowptr, None, "l1")
    assert not bool(everything.counted.any()) and everything.beta2(5.0).tolist() == [1.0] * 4
    assert everything.share("topk", 0.1) is None


@pytest.mark.parametrize("norm", NORMS)
def test_ties_count_as_lost_even_at_radius_zero(norm: str) -> None:
    values, rowptr = torch.tensor([0.4, 0.2, 0.2, 0.2, 0.6, 0.3, 0.1], dtype=torch.float64), pointer([4, 3])
    layer = layer_of(values, rowptr, 2, norm)
    assert layer.topk_radius[0] == 0.0 and layer.topk_radius[1] > 0
    assert layer.beta2(0.0).tolist() == [0.5, 1.0]
    assert layer.share("topk", 0.0) == 0.5


@pytest.mark.parametrize(("norm", "whole"), [("l1", 2.0), ("l2", math.sqrt(2)), ("linf", 1.0)])
def test_overlap_has_a_floor_whatever_the_radius(norm: str, whole: float) -> None:
    values, rowptr = attention([4, 5, 9], seed=3, sharp=4.0)
    layer = layer_of(values, rowptr, 3, norm)
    floor = torch.tensor([1 - 1 / 3, 1 - 2 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(layer.beta2(whole), floor)
    torch.testing.assert_close(layer.beta2(1e6), floor)


def test_the_top_k_changes_at_its_radius() -> None:
    values, rowptr = attention([12, 8, 11], seed=5)
    layer = layer_of(values, rowptr, 5, "l1")
    for radius in (1e-3, 0.03, 0.3, 3.0):
        assert (layer.beta2(radius) == 1.0).tolist() == (layer.topk_radius > radius).tolist()
    assert layer.curve("topk", (1e-6, 2.0)) == [1.0, 0.0]
    assert layer.share("class", 0.1) is None


def test_class_radius_of_ties_and_of_classes_without_influence() -> None:
    lead = torch.tensor([[math.inf, 0.0], [math.inf, 2.0], [math.inf, 0.0], [math.inf, 1.0]])
    rate = torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
    assert _crossing_radius(lead, rate).tolist() == [0.0, math.inf, 0.0, 0.25]


@pytest.mark.parametrize(
    ("kind", "radius", "word"),
    [
        ("topk", -0.1, "radius"),
        ("topk", math.nan, "radius"),
        ("class", math.inf, "radius"),
        ("top", 0.1, "kind"),
    ],
)
def test_bad_questions_are_named(kind: str, radius: float, word: str) -> None:
    values, rowptr = attention([4, 5], seed=3)
    with pytest.raises(InputError, match=f"`{word}`"):
        layer_of(values, rowptr, 3, "l1").share(kind, radius)


def test_a_size_of_the_explanation_is_a_whole_number() -> None:
    layer = layer_of(*attention([4, 5], seed=3), 2, "l1")
    for k in (0, -1, 2.5, True):
        with pytest.raises(InputError, match="`k`"):
            dataclasses.replace(layer, k=k)  # type: ignore[arg-type]
