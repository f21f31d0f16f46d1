"""Definition 1 in every evaluation: the shares are those of the certificates, and unknown is never 0."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fgai
from fgai.certificates import ALL_FOUR, PROPERTIES
from fgai.errors import ReliabilityWarning
from fgai.evaluation import EvaluationRecord, definition_shares, evaluate, faithful_share
from fgai.evaluation.definition import ALPHA, BETA, RADII
from support import attack_cases as cases
from support.evaluate_cases import THREAT, record_of, whole_record

SHARES = (*PROPERTIES, ALL_FOUR)


def certified(model: Any, radius: float, **options: Any) -> fgai.certificates.CertificateRecord:
    sizes = {"k1": cases.K, "k2": cases.K}
    with cases.quiet():
        return fgai.certify_attention(model, cases.tiny_graph(), radius=radius, **sizes, **options)


@pytest.mark.many
@pytest.mark.parametrize("model", ["gat", "gt", "pyg"])
@pytest.mark.parametrize("radius", RADII)
def test_shares_are_those_of_certify_attention(model: str, radius: str) -> None:
    vanilla, network = cases.trained(model, "vanilla"), cases.trained(model, "at")
    record = record_of(network, vanilla=vanilla)
    wanted = certified(network, RADII[radius], vanilla=vanilla)
    found = record.value(f"definition.{radius}")
    assert list(found) == ["counted", *SHARES]
    count = len(wanted.layers)
    assert found["counted"] == [int(wanted.counted(index).sum()) for index in range(count)]
    for name in SHARES:
        shares = [wanted.shares(index)[name] for index in range(count)]
        assert found[name]["layers"] == shares
        assert found[name]["last"] == shares[-1] and set(found[name]) == {"layers", "last", "all", "sharpest"}
    if model == "gat":
        assert None not in [wanted.shares(index)[ALL_FOUR] for index in range(count)]
        last = certified(network, RADII[radius], vanilla=vanilla)
        assert faithful_share(last) == record.value(f"definition.{radius}.all_four.last")
    else:
        assert found["stable_prediction"]["layers"][0] is None and found[ALL_FOUR]["layers"][0] is None
    assert (wanted.alpha, wanted.beta) == (ALPHA, BETA)


def test_without_vanilla_half_of_it_is_none_and_not_zero() -> None:
    model = cases.trained("gat", "vanilla")
    record = record_of(model)
    for radius, name in ((r, n) for r in RADII for n in ("same_explanation", "same_prediction", ALL_FOUR)):
        values = record.value(f"definition.{radius}.{name}")
        assert values == {"layers": [None, None], "last": None, "all": None, "sharpest": None}
    wanted = certified(model, 0.01)
    for name in ("stable_explanation", "stable_prediction"):
        shares = [wanted.shares(index)[name] for index in range(2)]
        assert record.value(f"definition.r01.{name}.layers") == shares and None not in shares
    assert math.isnan(faithful_share(wanted))
    assert EvaluationRecord.from_dict(record.to_dict()).metrics == record.metrics


def test_a_model_beside_itself_has_the_same_explanation_and_prediction() -> None:
    model = cases.trained("gat", "vanilla")
    found = record_of(model, vanilla=model).value("definition.r01")
    assert found["same_explanation"]["layers"] == found["same_prediction"]["layers"] == [1.0, 1.0]
    direct = definition_shares(model, cases.tiny_graph(), model, cases.K)
    assert direct["r01"][ALL_FOUR] == found[ALL_FOUR]["layers"]


class Random(cases.PygModel):
    """Gives other outputs each time it runs."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index) + 0.1 * torch.rand(x.shape[0], 1)


def test_a_model_that_cannot_be_certified_is_evaluated_with_a_warning() -> None:
    model = Random(6, 3).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = evaluate(model, cases.tiny_graph(), THREAT, k=cases.K, curves=False, nulls=False)
    said = [str(w.message) for w in caught if isinstance(w.message, ReliabilityWarning)]
    assert any("Definition 1 cannot be measured" in text and "in two runs" in text for text in said)
    assert "definition" not in record.metrics and record.value("f1.clean") >= 0
    assert "certificate-unknown" in {entry["code"] for entry in record.warnings}


def test_tables_say_the_shares_in_words() -> None:
    record = whole_record()
    last = {name: record.value(f"definition.r01.{name}.last") for name in SHARES}
    words = ", ".join(f"{name.replace('_', ' ')} {100 * share:.1f}\u00a0%" for name, share in last.items())
    counted = record.value("definition.r01.counted")[-1]
    note = f"Definition 1 at the output layer, radius 0.01, of {counted} nodes: {words}."
    assert note in record.to_markdown()
    assert "all four" in record.to_markdown()
