"""The page tells of certificates against injection what the certificates say."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import fgai
from fgai.certificates import certify_injection
from fgai.certificates.integrity import INVARIANT
from fgai.graph import Graph
from fgai.reports.build import Report
from fgai.reports.results import _injections_at, certify_injections, injection_summary
from support.report_cases import cards_of

K = 3


@cache
def planted() -> Graph:
    return fgai.load_dataset("planted")


@cache
def models() -> dict[str, nn.Module]:
    vanilla = fgai.train("GAT", planted(), epochs=10, progress=False)
    return {"GAT": vanilla, "limited": fgai.limit(vanilla, planted(), 0.2, shrink=0.9)}


def test_every_number_is_a_certificate_s() -> None:
    found, scored = certify_injections(models(), planted(), K), planted().test_mask
    assert [one.where for one in found["GAT"]] == ["direct"]  # without limits no class is known
    assert [one.where for one in found["limited"]] == ["direct", "any"]
    for one in found["limited"]:
        same = certify_injection(models()["limited"], planted(), neighbours=1, where=one.where, k=K)
        assert torch.equal(one.certified, same.certified)
    shares = injection_summary(found["limited"], scored)
    assert [one["share"] for one in shares] == [one.share(scored) for one in found["limited"]]
    assert shares[0]["share"] >= shares[1]["share"]
    assert shares[0]["share"] > 0
    nodes = [5, 0, 17]
    told = _injections_at(found["limited"], nodes)
    assert told[0]["class"] == found["limited"][0].certified[nodes].int().tolist()
    assert told[0]["layers"][0] == {"status": "invariant", "reason": INVARIANT, "certified": [1, 1, 1]}
    assert _injections_at(found["GAT"], nodes)[0]["class"] is None


def test_the_card_shows_both_threats_and_says_nothing_of_unknown_ones() -> None:
    found, scored = certify_injections(models(), planted(), K), planted().test_mask
    records = [{"name": name, "metrics": {}} for name in found]
    report = Report(
        title="t",
        reference="GAT",
        records=records,
        injections={name: injection_summary(one, scored) for name, one in found.items()},
    )
    page = cards_of(report)
    assert "Classes no injected node can change" in page
    shares = [f"{100 * one.share(scored):.1f}" for one in found["limited"]]
    assert all(share in page for share in shares)
    assert "Classes no injected node can change" not in cards_of(
        Report(title="t", reference="GAT", records=records)
    )
