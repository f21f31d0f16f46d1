"""The attention adversary: inside its ball, above its random start, below the certificates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fgai
from fgai.attacks import attack_attention
from fgai.attacks.balls import _norms
from fgai.attention import record
from fgai.errors import AttentionError, InputError
from support import task_cases as cases
from support.attention_cases import assert_unchanged, snapshot

RADIUS = 0.07


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def rerun(model: torch.nn.Module, delta: Tensor | None = None, layer: int = -1) -> np.ndarray:
    """The logits of a PyG model, by its own forward pass, with a layer's attention moved by delta."""
    graph = cases.data("node")
    assert graph.features is not None
    deltas: list[Tensor | None] = [None, None]
    deltas[layer] = delta
    with torch.no_grad(), record(model.eval(), perturb=deltas):
        return np.asarray(model(graph.features.to_dense(), graph.edge_index).double())


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
@pytest.mark.parametrize("model", ["gat", "gatv2", "gt"])
def test_no_certificate_is_broken(model: str, norm: str) -> None:
    graph, attacked = cases.data("node"), cases.trained("node", model=model)
    found = attack_attention(attacked, graph, radius=RADIUS, norm=norm, steps=8)
    certified = fgai.certify_attention(attacked, graph, radius=RADIUS, norm=norm)
    assert [shift.name for shift in found] == [layer.name for layer in certified.layers]
    checked = 0
    for shift, layer in zip(found, certified.layers, strict=True):
        prediction = layer.prediction
        for change, bound in (
            (shift.logits, prediction.alpha2_logits),
            (shift.probabilities, prediction.alpha2_probabilities),
        ):
            if bound is not None:
                checked += 1
                assert bool((change <= bound + 1e-5).all())
        assert bool((_norms(shift.delta.values, shift.delta.rowptr, norm) <= RADIUS * (1 + 1e-5)).all())
        assert float(shift.probabilities.max()) <= 1
    assert checked


def test_the_exact_worst_case_is_nearly_reached() -> None:
    graph, model = cases.data("node"), cases.trained("node")
    exact = fgai.certify_attention(model, graph, radius=RADIUS).layer().prediction
    assert exact.logits_status == "exact" and exact.alpha2_logits is not None
    found = attack_attention(model, graph, radius=RADIUS, divergence="logits", steps=40)[-1]
    assert float(found.logits.mean()) >= 0.9 * float(exact.alpha2_logits.mean())


@pytest.mark.parametrize("divergence", ["logits", "probabilities"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_shift_is_what_the_model_does_at_delta(layer: int, divergence: str) -> None:
    graph, model = cases.data("node"), cases.untrained("node", "mine")
    found = attack_attention(model, graph, radius=RADIUS, divergence=divergence, steps=6)[layer]
    before, after = rerun(model), rerun(model, found.delta.values, layer)
    if divergence == "probabilities":
        before, after = softmax(before), softmax(after)
    there = np.abs(before - after).sum(1) / 2
    reported = np.asarray(getattr(found, divergence))
    assert there.mean() > 0
    assert (there <= reported + 1e-6).all()
    start = attack_attention(model, graph, radius=RADIUS, divergence=divergence, steps=0)[layer]
    assert there.mean() > float(getattr(start, divergence).mean())


@pytest.mark.parametrize("task", ["link", "graph"])
def test_links_and_graphs_have_a_row_each(task: str) -> None:
    graph, model = cases.data(task), cases.untrained(task)
    found = attack_attention(model, graph, radius=RADIUS, steps=2)[-1]
    rows = graph.links.pairs.shape[1] if graph.links is not None else int(graph.batch.max()) + 1
    assert found.logits.shape == found.probabilities.shape == (rows,)
    assert float(found.logits.max()) > 0


def test_seed_radius_and_the_model_itself() -> None:
    graph, model = cases.data("node"), cases.untrained("node").train()
    before = snapshot(model)
    deltas = [
        attack_attention(model, graph, radius=RADIUS, steps=2, seed=s)[0].delta.values for s in (1, 1, 2)
    ]
    assert torch.equal(deltas[0], deltas[1]) and not torch.equal(deltas[0], deltas[2])
    assert_unchanged(before, model)
    for shift in attack_attention(model, graph, radius=0.0, steps=2):
        assert not shift.logits.any() and not shift.delta.values.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"radius": -0.1}, "`radius` must be at least 0"),
        ({"steps": -1}, "`steps` must be at least 0"),
        ({"norm": "l0"}, "`norm` must be one of"),
        ({"divergence": "kl"}, "`divergence` must be one of"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        attack_attention(cases.untrained("node"), cases.data("node"), **changes)


def test_a_model_without_attention_is_refused() -> None:
    class Flat(torch.nn.Linear):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x)

    graph = cases.data("node")
    with pytest.raises(AttentionError):
        attack_attention(Flat(graph.num_features, 3), graph)
