"""Every metric against an independent implementation; declared ranges, invariances, nulls and edge cases."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import fgai.metrics as fm
from fgai import evaluation
from fgai.errors import InputError
from support.csr_rows import attention, pointer, split

DEGREES = [7, 0, 2, 9, 1, 6, 4]


def logits(nodes: int, classes: int, seed: int) -> Tensor:
    return 2 * torch.randn(nodes, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_truth(size: int, seed: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.4


def shuffled(rowptr: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A relabelling of nodes with edges shuffled within rows: edge permutation, new pointers, node order."""
    rng = np.random.default_rng(seed)
    starts = rowptr.tolist()
    order = rng.permutation(len(rowptr) - 1)
    pieces = [rng.permutation(np.arange(starts[i], starts[i + 1])) for i in order]
    edges = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    return edges, pointer([len(p) for p in pieces]), torch.from_numpy(order)


# Prediction ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 5)), min_size=1, max_size=40))
def test_f1_and_accuracy_equal_sklearn(pairs: list[tuple[int, int]]) -> None:
    guess, truth = (torch.tensor(x) for x in zip(*pairs, strict=True))
    known = truth >= 0
    if not known.any():
        assert math.isnan(fm.accuracy(guess, truth))
        assert math.isnan(fm.macro_f1(guess, truth))
        return
    y, z = truth[known].numpy(), guess[known].numpy()
    assert fm.accuracy(guess, truth) == pytest.approx(sk.accuracy_score(y, z))
    for score, average in ((fm.f1, "micro"), (fm.macro_f1, "macro")):
        assert score(guess, truth) == pytest.approx(sk.f1_score(y, z, average=average, zero_division=0))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 5)), min_size=1, max_size=40))
def test_recall_and_balanced_accuracy_equal_sklearn(pairs: list[tuple[int, int]]) -> None:
    guess, truth = (torch.tensor(x) for x in zip(*pairs, strict=True))
    logits = torch.nn.functional.one_hot(guess, 6).float()
    known = truth >= 0
    found = fm.recall(logits, truth)
    assert found.shape == (6,)
    if not known.any():
        assert math.isnan(fm.balanced_accuracy(guess, truth)) and bool(found.isnan().all())
        return
    y, z = truth[known].numpy(), guess[known].numpy()
    expected = sk.recall_score(y, z, labels=range(6), average=None, zero_division=np.nan)
    assert found.tolist() == pytest.approx(expected.tolist(), nan_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and do not occur
        assert fm.balanced_accuracy(guess, truth) == pytest.approx(sk.balanced_accuracy_score(y, z))
    weights = fm.error_weights("balanced_accuracy", truth[known])
    assert weights is not None and fm.error_weights("f1", truth[known]) is None
    wrong = guess[known] != truth[known]
    assert float(weights[wrong].sum()) == pytest.approx(1 - fm.balanced_accuracy(guess, truth), abs=1e-6)
    assert fm.chance_score("balanced_accuracy", truth) == pytest.approx(1 / len(set(y.tolist())))


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=40))
def test_auc_and_average_precision_equal_sklearn(pairs: list[tuple[int, bool]]) -> None:
    score, truth = torch.tensor([p[0] / 3 for p in pairs]), torch.tensor([p[1] for p in pairs])
    if truth.any() and not truth.all():
        assert fm.roc_auc(score, truth) == pytest.approx(sk.roc_auc_score(truth, score), abs=1e-12)
    else:
        assert math.isnan(fm.roc_auc(score, truth))
    if truth.any():
        assert fm.average_precision(score, truth) == pytest.approx(sk.average_precision_score(truth, score))
    else:
        assert math.isnan(fm.average_precision(score, truth))


def test_scaled_logits_leave_f1_and_the_relative_change() -> None:
    y, z = logits(30, 4, 0), logits(30, 4, 1)
    target = torch.arange(30) % 4
    assert fm.f1(0.01 * y, target) == fm.f1(y, target)
    assert fm.g_tvd_rel(0.01 * y, 0.01 * z) == pytest.approx(fm.g_tvd_rel(y, z))
    assert fm.g_tvd(0.01 * y, 0.01 * z) == pytest.approx(0.01 * fm.g_tvd(y, z))
    assert fm.g_tvd_prob(0.01 * y, 0.01 * z) < fm.g_tvd_prob(y, z)


# Stability -------------------------------------------------------------------------------------------


def test_stability_equals_loops() -> None:
    y, z = logits(11, 3, 2).numpy(), logits(11, 3, 3).numpy()
    assert fm.g_tvd(torch.tensor(y), torch.tensor(z)) == pytest.approx(np.abs(y - z).sum() / 22)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (y, z))
    assert fm.g_tvd_prob(torch.tensor(y), torch.tensor(z)) == pytest.approx(np.abs(p - q).sum() / 22)
    spread = np.abs(y - y.mean(1, keepdims=True)).sum()
    assert fm.g_tvd_rel(torch.tensor(y), torch.tensor(z)) == pytest.approx(np.abs(y - z).sum() / spread)
    w, _ = attention(DEGREES, 0)
    v, _ = attention(DEGREES, 1)
    m = (w + v) / 2
    divergence = stats.entropy(w / w.sum(), m / m.sum()) + stats.entropy(v / v.sum(), m / m.sum())
    assert fm.g_jsd(w, v) == pytest.approx(float(w.sum()) * divergence / (2 * len(w)))


def test_unchanged_attention_is_perfectly_stable() -> None:
    w, rowptr = attention(DEGREES, 4)
    w = w.float()
    edges, moved, _ = shuffled(rowptr, 0)
    for a, ptr in ((w, rowptr), (w[edges], moved)):
        assert fm.g_jsd(a, a.clone()) == 0.0
        assert fm.overlap(a, a.clone(), ptr) == 1.0
        assert fm.overlap_graph(a, a.clone(), ptr, k=6) == 1.0
        assert fm.rank_correlation(a, a.clone(), ptr) == pytest.approx(1.0)
    y = logits(5, 3, 0)
    assert fm.g_tvd(y, y) == fm.g_tvd_prob(y, y) == fm.g_tvd_rel(y, y) == 0.0


# Ground truth ----------------------------------------------------------------------------------------


def test_truth_auc_equals_sklearn() -> None:
    w, rowptr = attention(DEGREES, 9)
    w = (w * 20).round() / 20  # ties
    truth = some_truth(len(w), 0)
    assert fm.truth_auc(w, truth, rowptr) == pytest.approx(sk.roc_auc_score(truth, w))
    per_node = {
        i: sk.roc_auc_score(t, r)
        for i, (r, t) in enumerate(zip(split(w, rowptr), split(truth, rowptr), strict=True))
        if t.any() and not t.all()
    }
    assert fm.truth_auc(w, truth, rowptr, "node") == pytest.approx(np.mean(list(per_node.values())))
    first = next(iter(per_node))
    nodes = torch.tensor([first])
    assert fm.truth_auc(w, truth, rowptr, "node", nodes=nodes) == pytest.approx(per_node[first])
    assert fm.truth_auc(w, truth, rowptr, "graph", nodes=nodes) == pytest.approx(per_node[first])
    flat = fm.uniform_attention(rowptr, len(w))
    assert fm.truth_auc(flat, truth, rowptr, "node") == pytest.approx(0.5)


@pytest.mark.parametrize("k", [1, 2, 5, None])
def test_truth_precision_equals_a_loop(k: int | None) -> None:
    w, rowptr = attention(DEGREES, 10)
    truth = some_truth(len(w), 1)
    expected, chance = [], []
    for r, t in zip(split(w, rowptr), split(truth, rowptr), strict=True):
        if t.any() and not t.all():
            size = min(k or len(t), int(t.sum()))
            expected.append(float(t[r.argsort(descending=True)[:size]].double().mean()))
            chance.append(float(t.double().mean()))
    assert fm.truth_precision(w, truth, rowptr, k) == pytest.approx(np.mean(expected))
    assert fm.truth_chance(truth, rowptr) == pytest.approx(np.mean(chance))
    assert fm.truth_precision(truth.double(), truth, rowptr, k) == 1.0


# All of them -----------------------------------------------------------------------------------------


def sample(seed: int) -> dict[str, Any]:
    """Arguments by the names that metrics have for them."""
    w, rowptr = attention(DEGREES, seed)
    shares = torch.rand(6, generator=torch.Generator().manual_seed(seed)).tolist()
    y, z = logits(7, 3, seed), logits(7, 3, seed + 1)
    return {
        **dict.fromkeys(("w", "score"), w),
        "w_other": attention(DEGREES, seed + 1)[0],
        "rowptr": rowptr,
        **{name: some_truth(len(w), 2) for name in ("truth", "injected")},
        **dict.fromkeys(("y", "prediction", "before"), y),
        **dict.fromkeys(("y_other", "without", "only", "after"), z),
        "target": torch.tensor([0, 1, 2, 0, 1, -1, 2]),
        "touched": torch.arange(7) % 2 == 0,
        "stayed": torch.arange(7) % 3 == 0,
        "shares": shares,
        "plus": shares[2],
        "minus": shares[3],
        "sharpness": shares,
    }


OF_EDGES = ("w", "w_other", "truth", "injected", "score")
OF_NODES = ("y", "y_other", "prediction", "without", "only", "before", "after", "target", "touched", "stayed")
SMALL = {"k": 3}


def call(name: str, case: dict[str, Any]) -> float:
    """A metric of a sample; small options, so that not every neighbourhood is shown whole."""
    given = dict(case)
    names = inspect.signature(fm.METRICS[name].function).parameters
    if "score" in names:
        given["target"] = case["truth"]
    if name == "lost":
        given["kept"] = case["plus"]
    if "stayed" in names:
        given["kept"] = torch.where(case["stayed"], 0.5, 1.0).double()
    needed = [n for n, p in names.items() if p.default is p.empty]
    if not set(needed) <= set(given):
        pytest.skip(f"{name} has arguments of its own, and tests")
    options = {n: SMALL[n] for n in fm.METRICS[name].defaults if n in SMALL}
    value = fm.METRICS[name].function(**{n: given[n] for n in needed}, **options)
    return float(value.max()) if isinstance(value, Tensor) else float(value)


def test_every_metric_is_declared() -> None:
    for name, spec in fm.METRICS.items():
        assert spec.name == name
        assert spec.low < spec.high
        assert spec.description
        home = evaluation if name == "faithful_share" else fm  # it reads certificates, which read metrics
        assert spec.function is getattr(home, name)
    assert fm.METRICS["overlap"].defaults == {"k": 5}


@pytest.mark.parametrize("name", fm.METRICS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**16))
def test_every_metric_stays_in_its_range_and_ignores_labels(name: str, seed: int) -> None:
    case = sample(seed)
    value = call(name, case)
    spec = fm.METRICS[name]
    assert spec.low - 1e-12 <= value <= spec.high + 1e-12
    edges, rowptr, order = shuffled(case["rowptr"], seed)
    moved = {key: case[key][edges] for key in OF_EDGES} | {key: case[key][order] for key in OF_NODES}
    assert call(name, {**case, **moved, "rowptr": rowptr}) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    "name", ["g_tvd_prob", "g_tvd_rel", "g_jsd", "overlap", "rank_correlation", "sharpness"]
)
def test_extreme_values_stay_finite(name: str) -> None:
    case = sample(3)
    case["y"], case["y_other"] = 1e300 * case["y"], -1e300 * case["y_other"]
    case["w"], case["w_other"] = (attention(DEGREES, seed, sharp=500.0)[0] for seed in (1, 2))
    assert (case["w"] == 0).any()
    assert math.isfinite(call(name, case))


def test_nulls_are_what_they_say() -> None:
    rowptr = pointer(DEGREES)
    flat = fm.uniform_attention(rowptr, 29)
    assert flat.tolist() == [1 / d for d in DEGREES for _ in range(d)]
    scores = fm.random_ranking(29, seed=5)
    assert torch.equal(scores, fm.random_ranking(29, seed=5))
    assert not torch.equal(scores, fm.random_ranking(29, seed=6))
    assert scores.dtype == torch.float64
    assert ((scores >= 0) & (scores < 1)).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w, p: fm.overlap(w, w[:-1], p), "match the edges"),
        (lambda w, p: fm.overlap(w, w, p, 0), "`k` must be at least 1"),
        (lambda w, p: fm.rank_correlation(w, w / 0, p), "`w_other` must be finite"),
        (lambda w, p: fm.f_slope_plus([0.0, 2.0], [1.0, 1.0]), "`fractions` must vary"),
        (lambda w, p: fm.f_slope_plus([1.0, 0.5]), "as long"),
        (lambda w, p: fm.f1(w, torch.ones(5).long()), "`prediction` must be logits"),
        (lambda w, p: fm.accuracy(torch.ones(3, 2), torch.ones(5).long()), "same nodes"),
        (lambda w, p: fm.roc_auc(w / 0, w > 1), "`score` must be finite"),
        (lambda w, p: fm.roc_auc(w, w[:-1] > 1), r"\[M\] alike"),
        (lambda w, p: fm.truth_auc(w, w, p), "`truth` must be a boolean mask"),
        (lambda w, p: fm.fidelity_plus(w.long(), w[:-1].long()), "same nodes"),
        (lambda w, p: fm.characterization(0.5, 1.5), "`minus` must be between 0 and 1"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(torch.arange(5.0), pointer([2, 3]))  # type: ignore[operator]
