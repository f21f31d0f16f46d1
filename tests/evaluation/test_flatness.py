"""Attention that says little is told, in words a reader understands; chance stands beside every share."""

from __future__ import annotations

import warnings
from functools import cache
from itertools import pairwise

import pytest
import torch

from fgai import metrics
from fgai.attention import AttentionMap, observe, prepared
from fgai.errors import ReliabilityWarning
from fgai.evaluation import EvaluationRecord, evaluate
from fgai.evaluation.record import _explanation_table, _notes_of, _prediction_table
from fgai.evaluation.reliability import FLAT, WEAK, check_attention
from fgai.metrics.sharpness import sharpness_by_layer
from support import attack_cases as cases
from support.evaluate_cases import tiny_threat

K = 2


def bent(bend: float, *, ties: bool = False) -> AttentionMap:
    """Attention that prefers some neighbours, the more the larger `bend`; with `ties` in two levels only."""
    model = cases.trained("gat", "vanilla")
    layer = observe(model, prepared(model, cases.tiny_graph())).averaged().attention.layers[0]
    draw = torch.rand(layer.num_edges, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = (bend * (draw.round() if ties else draw)).exp()
    total = torch.zeros(layer.num_nodes, dtype=torch.float64).index_add_(0, layer.destination, weights)
    return AttentionMap((layer.with_values((weights / total[layer.destination])[:, None]),))


def codes(attention: AttentionMap) -> dict[str, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_attention(sharpness_by_layer(attention), attention, K)
    return {e.message.code: str(e.message) for e in caught if isinstance(e.message, ReliabilityWarning)}


@pytest.mark.parametrize(
    ("bend", "code"), [(0.0, "flat-attention"), (0.3, "flat-attention"), (0.9, "weak-attention"), (3.0, "")]
)
def test_sharpness_is_judged_and_said_in_words(bend: float, code: str) -> None:
    attention = bent(bend)
    (sharp,) = sharpness_by_layer(attention)
    assert (sharp < FLAT) == (code == "flat-attention") and (sharp < WEAK) == bool(code)
    found = codes(attention)
    assert set(found) - {"tied-ranking"} == {code} - {""}
    if code:
        layer = attention.layers[0]
        top, uniform = (
            metrics.top_share(layer.values[:, 0], layer.rowptr),
            metrics.uniform_share(layer.rowptr),
        )
        assert (
            f"the strongest neighbour gets {top:.1%} of a node's attention, {uniform:.1%} if all"
            in found[code]
        )


def test_rankings_within_rounding_are_told() -> None:
    assert "tied-ranking" in codes(bent(3.0, ties=True)) and "tied-ranking" in codes(bent(0.0))
    assert "tied-ranking" not in codes(bent(3.0))


def test_shares_of_the_strongest_neighbour() -> None:
    w, rowptr = torch.tensor([0.1, 0.6, 0.3, 1.0, 0.0, 0.0]), torch.tensor([0, 3, 4, 4, 6])
    shares = [metrics.top_share(w, rowptr, nodes=torch.tensor([node])) for node in range(4)]
    assert shares == pytest.approx([0.6, float("nan"), float("nan"), 0.5], nan_ok=True)
    assert metrics.top_share(w, rowptr) == pytest.approx(0.55)
    assert metrics.uniform_share(rowptr) == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_ties_are_found_by_a_slow_loop() -> None:
    draw = torch.Generator().manual_seed(3)
    w = torch.randint(0, 4, (40,), generator=draw).double()
    rowptr = torch.tensor([0, 7, 7, 9, 12, 25, 40])
    cut = [sorted(w[a:b].tolist(), reverse=True) for a, b in pairwise(rowptr.tolist())]
    expected = [float(row[K - 1] == row[K]) for row in cut if len(row) > K]
    assert metrics.tied_share(w, rowptr, K) == pytest.approx(sum(expected) / len(expected))
    assert metrics.tied_share(w, rowptr, 20) != metrics.tied_share(w, rowptr, 20)


@cache
def record() -> EvaluationRecord:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate(
            cases.trained("gat", "vanilla"), cases.tiny_graph(), tiny_threat("random"), k=K, curves=False
        )


def test_tables_show_chance_beside_every_share() -> None:
    found, graph = record(), cases.tiny_graph()
    assert graph.y is not None and graph.test_mask is not None
    common = torch.bincount(graph.y[graph.test_mask]).max() / graph.test_mask.sum()
    rows = {row[0]: row for row in _prediction_table([found], found).rows}
    columns = [column.title for column in _prediction_table([found], found).columns]
    assert rows["chance"][columns.index("F1 clean")] == pytest.approx(float(common))
    table = _explanation_table([found], found)
    chance = dict(zip([c.title for c in table.columns], table.rows[-1], strict=True))
    assert chance["overlap"] == found.value("overlap.chance.all")
    assert chance["touched"] == found.value("overlap_touched.chance.all")
    assert {chance[c.title] for c in table.columns if "AUC" in c.title} <= {None}


def test_tables_say_what_a_sharpness_means() -> None:
    words = " ".join(_notes_of([record()]))
    top = 100 * record().value("top_share.clean.all")
    assert "sharpness" in words and f"{top:.0f}" in words and "if all got the same" in words
