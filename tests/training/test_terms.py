"""The four losses against slow references, and the traps of the paper's attention space."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from experiments.terms import prediction_distance
from fgai.errors import DivergenceError, InputError
from fgai.metrics import sharpness
from fgai.ops import aggregate, edge_softmax
from fgai.sparse import Adjacency
from fgai.topk import swap_margin, topk_l1
from fgai.training import StepContext, make_faithful, term
from fgai.training.settings import FaithfulSettings
from fgai.training.terms import (
    BUILT_IN,
    _sharpness_loss,
    _uncertified_share,
    contrast,
    layer_sharpness,
    spread,
    sum_scalars,
    weighted_terms,
)
from support.training_cases import GRAPH, fresh


def small(
    seed: int, nodes: int = 7, edges: int = 23, classes: int = 3
) -> tuple[Adjacency, torch.Tensor, torch.Tensor]:
    """A random graph with attention [E] and values [N, C], in float64."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.unique(torch.randint(nodes, (2, edges), generator=generator), dim=1)
    adjacency, _ = Adjacency.build(index, nodes)
    scores = torch.randn(adjacency.num_edges, 1, generator=generator, dtype=torch.float64)
    values = torch.randn(nodes, classes, generator=generator, dtype=torch.float64)
    return adjacency, edge_softmax(scores, adjacency)[:, 0], values


def test_prediction_distance_equals_loops() -> None:
    generator = torch.Generator().manual_seed(1)
    y, z = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    plain = np.mean(
        [
            0.5 * sum(abs(a - b) for a, b in zip(r, s, strict=True))
            for r, s in zip(y.tolist(), z.tolist(), strict=True)
        ]
    )
    assert float(prediction_distance(y, z, "logits")) == pytest.approx(plain, rel=1e-12)
    assert float(prediction_distance(y, z, "relative", 4.0)) == pytest.approx(plain / 4, rel=1e-12)
    p, q = torch.softmax(y, 1).numpy(), torch.softmax(z, 1).numpy()
    expected = 0.5 * np.abs(p - q).sum(1).mean()
    assert float(prediction_distance(y, z, "probabilities")) == pytest.approx(expected, rel=1e-12)
    expected = (p * np.log(p / q)).sum(1).mean()
    assert float(prediction_distance(y, z, "kl")) == pytest.approx(expected, rel=1e-12)
    assert float(prediction_distance(y, z, "log", 4.0)) == pytest.approx(
        torch.log1p((y - z).abs().sum(1) / 8).mean().item(), rel=1e-12
    )
    with pytest.raises(InputError, match="divergence"):
        prediction_distance(y, z, "logit")


def test_contrast_equals_a_loop() -> None:
    adjacency, w, _ = small(3)
    apart = 0.0
    for a, b in zip(adjacency.rowptr[:-1].tolist(), adjacency.rowptr[1:].tolist(), strict=True):
        apart += sum(abs(v - 1 / (b - a)) for v in w[a:b].tolist()) / 2
    assert contrast(w, adjacency.rowptr) == pytest.approx(apart / adjacency.num_nodes, rel=1e-10)


def test_spread_makes_distances_scale_free() -> None:
    generator = torch.Generator().manual_seed(2)
    y, z = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    one = prediction_distance(y, z, "relative", spread(y))
    small_one = prediction_distance(0.01 * y, 0.01 * z, "relative", spread(0.01 * y))
    assert float(one) == pytest.approx(float(small_one), rel=1e-10)


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_margin_equals_a_loop(seed: int, k: int) -> None:
    adjacency, w, _ = small(seed)
    radius, expected, count = 0.2, 0.0, 0
    for i in range(adjacency.num_nodes):
        row = sorted(w[adjacency.rowptr[i] : adjacency.rowptr[i + 1]].tolist(), reverse=True)
        cost = 0.0
        for m in range(1, min(k, len(row) - k) + 1):
            cost += row[k - m] - row[k + m - 1]
            expected += max(0.0, radius - cost / m) / radius
            count += 1
    got = float(swap_margin(w, adjacency.rowptr, k, radius))
    assert got == pytest.approx(expected / max(1, count), abs=1e-12)


def literal_explanation_stability(rho: Tensor, w: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """`L(w, w + rho)` with `rho` given, as the paper writes it: it depends on `w` through index sets only."""
    return topk_l1(w, w + rho, rowptr, k)


def test_literal_terms_give_the_attention_no_gradient_and_the_margin_does() -> None:
    adjacency, w, values = small(3)
    rho = 0.01 * torch.randn(w.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    moving = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        literal_explanation_stability(rho, moving, adjacency.rowptr, 2), moving, allow_unused=True
    )
    assert gradient is None or float(gradient.abs().max()) < 1e-12

    def logits(attention: torch.Tensor) -> torch.Tensor:
        return aggregate(attention[:, None], values[:, None, :], adjacency).squeeze(1)

    moving = w.clone().requires_grad_()
    literal = prediction_distance(logits(moving), logits(moving + rho), "logits")
    (gradient,) = torch.autograd.grad(literal, moving)
    assert float(gradient.abs().max()) < 1e-12
    moving = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(swap_margin(moving, adjacency.rowptr, 2, 0.5), moving)
    assert float(gradient.abs().max()) > 1e-3


def test_literal_explanation_maximum_is_the_same_for_every_attention() -> None:
    """Over the l1 ball the worst L is R/2 whatever w is: all of it on one top-k edge of both."""
    radius = 1e-4
    for seed in (5, 6):
        adjacency, w, _ = small(seed)
        rows = [i for i in range(adjacency.num_nodes) if adjacency.rowptr[i + 1] - adjacency.rowptr[i] > 2]
        for i in rows:
            row = w[adjacency.rowptr[i] : adjacency.rowptr[i + 1]]
            ptr = torch.tensor([0, row.numel()])
            worst = max(
                float(
                    literal_explanation_stability(
                        sign * radius * torch.eye(row.numel(), dtype=torch.float64)[j], row, ptr, 2
                    )
                )
                for j, sign in itertools.product(range(row.numel()), (1, -1))
            )
            assert worst == pytest.approx(radius / 2, rel=1e-6)


def test_losses_pass_gradcheck() -> None:
    adjacency, w, values = small(10)
    other = small(11)[1][: w.numel()]
    other = torch.cat([other, w[other.numel() :]]).clone()
    moving = w.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: swap_margin(a, adjacency.rowptr, 2, 0.37), (moving,))
    assert torch.autograd.gradcheck(lambda a: topk_l1(other, a, adjacency.rowptr, None), (moving,))
    logits = values.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda y: prediction_distance(y, values.flip(0), "probabilities"), (logits,)
    )


def test_weights_refuse_nothing_to_train() -> None:
    zero = dict.fromkeys(("closeness", "similarity", "prediction_stability", "margin", "sharpness"), 0.0)
    with pytest.raises(InputError, match="all weights are zero"):
        weighted_terms(FaithfulSettings(**zero))
    with pytest.raises(InputError, match="similarity"):
        FaithfulSettings(similarity=-1.0)


@term(on="clean", weight=0.5)
def small_logits(context: StepContext) -> Tensor:
    """Mean square of the logits."""
    return context.logits.square().mean()


@term(on="attacked", weight=2.0, needs_attention=True)
def explanation_stability(context: StepContext) -> Tensor:
    """Total variation of the attention on old edges."""
    assert context.attacked_attention is not None
    pairs = zip(context.attention, context.attacked_attention, strict=True)
    return sum_scalars([(before - after).abs().sum() / 2 for before, after in pairs])


class TestOwnTerms:
    QUICK: ClassVar[dict[str, Any]] = {"epochs": 3, "nodes": 3, "edges": 4, "progress": False}

    @pytest.mark.many
    @pytest.mark.parametrize("batches", [{}, {"batch_size": 20, "fan_out": 3}])
    def test_they_train(self, batches: dict[str, Any]) -> None:
        model = fresh().eval()
        plain = make_faithful(model, GRAPH, **self.QUICK, **batches)
        for own in (small_logits, explanation_stability):
            made = make_faithful(model, GRAPH, terms=[own], **self.QUICK, **batches)
            assert own.name in made.history.terms[-1] and own.name not in plain.history.terms[-1]
            pairs = zip(made.parameters(), plain.parameters(), strict=True)
            assert any(not torch.equal(one, two) for one, two in pairs)

    def test_one_of_a_built_in_name_replaces_it(self) -> None:
        @term(on="clean")
        def similarity(context: StepContext) -> Tensor:
            return context.attention[-1].sum() * 0 + 3.0

        made = make_faithful(fresh().eval(), GRAPH, terms=[similarity], **self.QUICK)
        assert made.history.terms[-1]["similarity"] == 3.0
        weights = weighted_terms(FaithfulSettings(similarity=7.0), [similarity]).weights
        assert weights[similarity] == 7.0 and len(weights) == len(BUILT_IN)

    def test_a_setting_that_is_no_weight_is_not_one(self) -> None:
        @term(on="clean", weight=0.25)
        def epochs(context: StepContext) -> Tensor:
            return context.logits.square().mean()

        assert weighted_terms(FaithfulSettings(), [epochs]).weights[epochs] == 0.25

    def test_attention_under_attack_is_recorded_only_if_needed(self) -> None:
        assert not weighted_terms(FaithfulSettings()).need_attention
        assert weighted_terms(FaithfulSettings(), [explanation_stability]).need_attention
        unused = explanation_stability._replace(weight=0.0)
        assert not weighted_terms(FaithfulSettings(), [unused]).need_attention

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (lambda context: context.logits, "`wrong` must return a scalar tensor, got a tensor of shape"),
            (lambda context: 3.0, "must return a scalar tensor, got 3.0"),
            (lambda context: context.logits.detach().mean(), "`wrong` must depend on the model's outputs"),
        ],
    )
    def test_a_wrong_one_is_refused(self, value: Any, message: str) -> None:
        @term(on="clean")
        def wrong(context: StepContext) -> Tensor:
            return value(context)  # type: ignore[no-any-return]

        with pytest.raises(InputError, match=message):
            make_faithful(fresh().eval(), GRAPH, terms=[wrong], **self.QUICK)

    def test_explanations_that_were_not_declared_are_refused(self) -> None:
        """They would be those of the mean over heads."""

        def first(context: StepContext) -> Tensor:
            return context.explanations[0].square().sum()

        alone = {"similarity": 0.0, "margin": 0.0, **self.QUICK}
        with pytest.raises(InputError, match="needs_explanation=True"):
            make_faithful(fresh().eval(), GRAPH, terms=[term(on="clean")(first)], **alone)
        declared = term(on="clean", needs_explanation=True)(first)
        other = make_faithful(fresh().eval(), GRAPH, terms=[declared], **{**self.QUICK, "margin": 0.0})
        made = make_faithful(fresh().eval(), GRAPH, terms=[declared], **alone)
        assert made.history.terms[0]["first"] == other.history.terms[0]["first"]

    def test_one_that_is_not_finite_is_named(self) -> None:
        @term(on="clean")
        def endless(context: StepContext) -> Tensor:
            return context.logits.sum() * float("inf")

        with pytest.raises(DivergenceError, match="endless"):
            make_faithful(fresh().eval(), GRAPH, terms=[endless], **self.QUICK)

    def test_bad_declarations(self) -> None:
        with pytest.raises(InputError, match="`on` must be one of clean, attacked"):
            term(on="dirty")
        with pytest.raises(InputError, match="`weight` must be at least 0"):
            term(on="clean", weight=-1.0)
        with pytest.raises(InputError, match="`own_pass` is for terms on the clean graph"):
            term(on="attacked", own_pass=True)
        with pytest.raises(InputError, match="`needs_attention` is for terms on the attacked graph"):
            term(on="clean", needs_attention=True)
        for name in ("total", "score"):
            with pytest.raises(InputError, match=f"cannot be named '{name}'"):
                weighted_terms(FaithfulSettings(), [small_logits._replace(name=name)])
        with pytest.raises(InputError, match="different names"):
            weighted_terms(FaithfulSettings(), [small_logits, small_logits])
        with pytest.raises(TypeError, match="`terms` of `make_faithful` must be a sequence of Term"):
            make_faithful(fresh(), GRAPH, terms=[lambda context: 0])  # type: ignore[list-item]


class TestSharpnessKept:
    def test_sharp_is_the_metric(self) -> None:
        rowptr = torch.tensor([0, 1, 4, 4, 9])
        w = torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        destination = torch.repeat_interleave(torch.arange(4), rowptr.diff())
        w = w / torch.zeros(4, dtype=torch.float64).index_add(0, destination, w)[destination]
        assert float(layer_sharpness(w, rowptr, destination)) == pytest.approx(
            sharpness(w, rowptr), abs=1e-12
        )

    def test_only_what_is_flatter_counts(self) -> None:
        now = [torch.tensor(0.4), torch.tensor(0.1)]
        assert float(_sharpness_loss(now, [0.3, 0.1])) == 0.0
        assert float(_sharpness_loss(now, [0.3, 0.2])) == pytest.approx(0.45)

    def test_a_layer_that_said_nothing_has_nothing_to_keep(self) -> None:
        now = [torch.tensor(1e-9, requires_grad=True), torch.tensor(0.1, requires_grad=True)]
        lost = _sharpness_loss(now, [1e-7, 0.2])
        lost.backward()
        assert float(lost) == pytest.approx(0.45)
        assert [float(value.grad) for value in now if value.grad is not None] == pytest.approx([0.0, -5.0])


class TestShortfall:
    def test_the_nearest_class_counts(self) -> None:
        leads = torch.tensor([[torch.inf, 2.0, 3.0], [1.0, torch.inf, -1.4]])
        expected = [1 / (1 + math.exp((lead / 2.0 - 0.1) / 0.3)) for lead in (2.0, -1.4)]
        assert float(_uncertified_share(leads, 2.0)) == pytest.approx(sum(expected) / 2)

    def test_what_is_near_pulls_more_than_what_is_lost_or_safe(self) -> None:
        leads = torch.tensor([[-1e4, torch.inf], [0.0, torch.inf], [1e4, torch.inf]], requires_grad=True)
        found = _uncertified_share(leads, 1.0)
        assert 1 / 3 < float(found.detach()) < 2 / 3  # a smooth count
        (slope,) = torch.autograd.grad(found, leads)
        assert slope[1, 0] < 0 and slope[0, 0] == slope[2, 0] == 0
