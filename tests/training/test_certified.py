"""Training towards certificates against injection: it comes nearer, and keeps what it must."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fgai
from fgai.attention import observe, prepared
from fgai.bounds.scores import worst_margins
from fgai.datasets import planted, random_split
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.metrics import sharpness
from fgai.models import GT
from fgai.training import Term, certified, history_of, train_method
from fgai.training.terms import _uncertified_share, spread

TIGHT = {"clip_share": 0.05, "shrink": 0.4}
TOWARDS = certified._replace(weight=2.0)
PLAIN: dict[str, Any] = {
    "epochs": 40, "prediction_stability": 0.0, "margin": 0.0, "similarity": 1.0, "closeness": 1.0,
    "clip_share": 0.05, "shrink": 0.4, "progress": False,
}  # fmt: skip


@cache
def graph() -> Graph:
    made = planted(num_nodes=300, num_classes=3)
    split = random_split(made, seed=0)
    return made.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)


@cache
def vanilla(kind: str) -> nn.Module:
    return fgai.train(kind, graph(), epochs=40, progress=False)


def falls_short(model: nn.Module, kind: str) -> float:
    """By what classes of the vanilla model fall short of a certificate."""
    seen = prepared(model, graph())
    with torch.no_grad():
        logits = observe(vanilla(kind), seen).logits
        margins = worst_margins(model, seen, logits.argmax(1), neighbours=1, **TIGHT)
        return float(_uncertified_share(margins, float(spread(logits))))


@cache
def trained(kind: str, *terms: Term, sharpness: float = 0.0) -> nn.Module:
    return fgai.make_faithful(vanilla(kind), graph(), terms=terms, sharpness=sharpness, **PLAIN)


@pytest.mark.parametrize("kind", ["GAT", pytest.param("GATv2", marks=pytest.mark.slow)])
def test_it_comes_nearer_to_a_certificate(kind: str) -> None:
    assert falls_short(trained(kind, TOWARDS), kind) < 0.9 * falls_short(trained(kind), kind)


def test_sharpness_is_held() -> None:
    shares = [
        min(
            sharpness(now.heads(), now.rowptr) / sharpness(old.heads(), old.rowptr)
            for now, old in zip(
                observe(model, prepared(model, graph())).attention,
                observe(vanilla("GAT"), prepared(model, graph())).attention,
                strict=True,
            )
        )
        for model in (trained("GAT", TOWARDS), trained("GAT", TOWARDS, sharpness=5.0))
    ]
    assert shares[0] < shares[1]
    assert shares[1] > 0.85


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(InputError, match="`certified` needs limits"):
        fgai.make_faithful(vanilla("GAT"), graph(), terms=[certified], limits=False)
    with pytest.raises(InputError, match="GAT or GATv2"):
        fgai.make_faithful(GT.for_data(graph()), graph(), terms=[certified])
    with pytest.raises(InputError, match="`settings` must be one of"):
        fgai.make_faithful(vanilla("GAT"), graph(), certified=4.0)


def test_the_method_by_name() -> None:
    made = train_method("fgai-certified", "GAT", graph(), vanilla=vanilla("GAT"), settings={"epochs": 2})
    assert set(history_of(made).terms[-1]) == {"closeness", "similarity", "sharpness", "certified", "total"}
