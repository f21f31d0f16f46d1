"""Which nodes an attack touches where they meet outside the recorded attention, too."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import AGNNConv, GATConv, GeneralConv

import fgai
from fgai import Graph, ReliabilityWarning
from fgai.attacks import Budget, EnsembleInjection, Threat
from fgai.attention import Observation, observe, prepared, touched_rows, warn_coupled
from fgai.attention.reach import _reach_and_moved
from fgai.evaluation import breaking_point
from fgai.recompute import Recompute
from support import attack_cases as cases
from support.coupled_cases import Coupled, coupled_model, ring_data


class Short(EnsembleInjection):
    def __init__(self, budget: Budget, objective: Any = "prediction", *, k: int = 5) -> None:
        super().__init__(budget, objective, k=k, members=cases.SHORT_MEMBERS, rules=("random",), baselines=())


SHORT = Threat("short", Short, Budget(nodes=2, edges=2, steps=2), "for tests")
SIZE: dict[str, Any] = {"nodes": 2, "edges": 2, "k": 2}
CODES = {"global-coupling", "unread-attention"}
EXPECTED = {
    "plain": set(),
    "gps": CODES,
    "norm": {"global-coupling"},
    "virtual": {"global-coupling"},
    "gcn": {"global-coupling"},
    "head": {"global-coupling"},
}


def views(kind: str) -> tuple[Coupled, Observation, Observation]:
    model = coupled_model(kind)
    graph = prepared(model, Graph.from_data(ring_data()))
    attacked, _ = graph.inject(torch.tensor([[3, 40], [41, 90]]), torch.full((2, graph.num_features), 2.0))
    return model, observe(model, graph).averaged(), observe(model, attacked).averaged()


def codes(run: Any) -> tuple[Any, dict[str, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = run()
    shown = [entry.message for entry in caught if isinstance(entry.message, ReliabilityWarning)]
    return out, {warning.code: str(warning) for warning in shown if warning.code in CODES}


@pytest.mark.parametrize("kind", EXPECTED)
def test_touched_rows_hold_every_row_that_moved(kind: str) -> None:
    _, before, after = views(kind)
    near = _reach_and_moved(before.attention, after.attention, None)[0]
    touched = touched_rows(before.attention, after.attention)
    ours, theirs = before.attention.align(after.attention)
    for one, two, hops, rows in zip(ours, theirs, near, touched, strict=True):
        moved = torch.zeros_like(rows)
        moved[one.destination[((one.values - two.values).abs() > 1e-3)[:, 0]]] = True
        assert not bool((moved & ~rows).any()) and not bool((hops & ~rows).any())
    assert torch.equal(touched[0], near[0])
    counts = int(near[1].sum()), int(touched[1].sum())
    assert counts[0] < 40
    if kind in ("plain", "head"):
        assert torch.equal(touched[1], near[1])
    elif kind == "gcn":
        assert counts[0] < counts[1] < 60
    else:
        assert counts[1] == 150


@pytest.mark.many
@pytest.mark.parametrize("kind", EXPECTED)
def test_evaluate_and_explain_say_so(kind: str) -> None:
    model, data = coupled_model(kind), ring_data()
    fast: dict[str, Any] = {"curves": False, "nulls": False}
    record, said = codes(lambda: fgai.evaluate(model, data, "random", **fast, **SIZE))
    assert set(said) == EXPECTED[kind]
    assert {entry["code"] for entry in record.warnings} & CODES == EXPECTED[kind]
    share = record.value("touched.all")
    assert share < 0.3 if kind in ("plain", "gcn", "head") else share > 0.5
    if kind == "gps":
        assert "first.attn (MultiheadAttention)" in said["unread-attention"]
    if kind in ("gps", "norm", "virtual", "head"):
        near, others = map(
            int, re.findall(r"(\d+) of 150 outputs .* (\d+) others", said["global-coupling"])[0]
        )
        assert near + others == 150
    _, said = codes(lambda: fgai.explain(model, data, 3, threat="random", certificate=False, **SIZE))
    assert set(said) == EXPECTED[kind]
    _, said = codes(lambda: fgai.explain(model, data, 3, threat=None, certificate=False, k=2))
    assert set(said) == EXPECTED[kind] - {"global-coupling"}


def test_explanation_damage_counts_what_moved() -> None:
    model, data = coupled_model("norm"), ring_data()
    with cases.quiet():
        record = fgai.evaluate(model, data, SHORT, curves=False, nulls=False, **SIZE)
        _, said = codes(lambda: breaking_point(model, data, "random", limit=2, k=2))
    worst = record.ledgers["explanation"]
    kept = record.metrics["overlap_touched"]["explanation"]["all"]
    assert worst["damages"][worst["won"]] == pytest.approx(1 - kept, abs=1e-6)
    assert set(said) == {"global-coupling"}


@pytest.mark.parametrize("kind", EXPECTED)
def test_none_of_them_is_computed_in_part(kind: str) -> None:
    model = coupled_model(kind)
    assert not Recompute.fits(model, prepared(model, Graph.from_data(ring_data())))


def test_a_subclass_with_a_norm_over_nodes_is_not_computed_in_part() -> None:
    class Normed(fgai.GAT):
        def embed(self, graph: Graph) -> Tensor:
            out = super().embed(graph)
            return out - out.mean(0, keepdim=True)

    data = Graph.from_data(ring_data())
    model = Normed.for_data(data).eval()
    assert not Recompute.fits(model, model.prepare(data))
    assert Recompute.fits(fgai.GAT.for_data(data).eval(), model.prepare(data))


def test_a_model_that_is_random_is_not_called_coupled() -> None:
    class Noisy(Coupled):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = super().forward(x, edge_index)
            return out + torch.randn_like(out)

    _, before, after = views("plain")
    noisy = Noisy("plain").eval()
    before, after = (observe(noisy, seen.graph).averaged() for seen in (before, after))
    assert not codes(lambda: warn_coupled(noisy, before, after))[1]


def test_names_of_unread_modules() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.agnn = GATConv(8, 3), AGNNConv()
            self.with_attention = GeneralConv(3, 3, attention=True)
            self.without = GeneralConv(3, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.without(self.agnn(self.conv(x, edge_index), edge_index), edge_index)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    mixed = fgai.wrap(Mixed().eval(), lambda m, g: m(g.x, g.edge_index))
    _, said = codes(lambda: fgai.explain(mixed, ring_data(), 3, threat=None, certificate=False, k=2))
    text = said["unread-attention"]
    assert "agnn (AGNNConv), with_attention (GeneralConv)" in text and "without" not in text
