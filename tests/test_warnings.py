"""Warnings point at the line that called fgai, through decorators, helpers and torch."""

from __future__ import annotations

import inspect
import linecache
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

import fgai
from fgai.attacks import Attack, Budget, EnsembleInjection, PGDInjection, Threat
from fgai.errors import FgaiWarning
from fgai.training import stability
from support import attack_cases
from support.graph_cases import small_data

BUDGET = Budget(nodes=2, edges=2, steps=2, step_size=0.1)
SMALL = Threat("small", PGDInjection, BUDGET, "for tests")
TWICE = torch.tensor([[0, 0, 1], [1, 1, 2]])
SHORT = {"epochs": 60, "nodes": 2, "edges": 2, "progress": False}


class Blind(attack_cases.PygModel):
    """Gives its input no gradient."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x.detach() + 0 * x, edge_index)


class Careless(nn.Module):
    """Calls fgai from within torch's call."""

    def forward(self, edges: Tensor) -> fgai.Graph:
        return fgai.Graph.from_edges(edges, 3)


@cache
def model() -> fgai.GAT:
    return fgai.train(fgai.GAT.for_data(small_data()), small_data(), epochs=2, progress=False)


@cache
def hooked() -> fgai.GAT:
    """Its last layer is followed by what no certificate knows."""
    made = fgai.GAT.for_data(small_data())
    made.convs[-1].register_forward_hook(lambda _, __, out: torch.tanh(out))
    return made.eval()


def attacked(attack: Attack) -> Any:
    return attack.run(Blind(6, 3).eval(), attack_cases.tiny_graph())


def ensemble() -> Attack:
    return EnsembleInjection(BUDGET, members=attack_cases.SHORT_MEMBERS, rules=("random",), baselines=())


open_ = small_data().replace(test_mask=None)
DOORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "evaluate": ("[no-split]", lambda: fgai.evaluate(model(), open_, SMALL, curves=False)),
    "compare": ("[no-split]", lambda: fgai.compare({"GAT": model()}, open_, SMALL, curves=False)),
    "make_faithful": ("[not-close]", lambda: fgai.make_faithful(model(), small_data(), **SHORT)),
    "certify": ("[certificate-unknown]", lambda: fgai.certify_attention(hooked(), small_data(), radius=0.1)),
    "from_edges": ("1 duplicate edge", lambda: fgai.Graph.from_edges(TWICE, 3)),
    "from_data": ("1 duplicate edge", lambda: fgai.Graph.from_data(Data(edge_index=TWICE, num_nodes=3))),
    "attack": ("[zero-gradient]", lambda: attacked(PGDInjection(BUDGET))),
    "ensemble": ("[zero-gradient]", lambda: attacked(ensemble())),
    "inside torch": ("1 duplicate edge", lambda: Careless()(TWICE)),
}
CALLS = {
    "attack": "return attack.run(",
    "ensemble": "return attack.run(",
    "inside torch": "return fgai.Graph.from_edges(",
}
"""The line a door's warning points at, where that is not the door's own."""


@pytest.mark.many
@pytest.mark.parametrize("name", DOORS)
def test_warnings_point_at_the_caller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "MIN_AGREEMENT", 1.1)  # no model agrees so much
    message, call = DOORS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FgaiWarning)
        call()
    told = [entry for entry in caught if issubclass(entry.category, FgaiWarning)]
    assert any(message in str(entry.message) for entry in told), [str(entry.message) for entry in told]
    for entry in told:
        assert entry.filename == __file__
        line = linecache.getline(entry.filename, entry.lineno)
        assert CALLS.get(name, inspect.getsource(call).strip()) in line


def test_each_line_is_told_once_and_a_filter_by_module_works() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            fgai.Graph.from_edges(TWICE, 3)
        warnings.filterwarnings("ignore", module=__name__.replace(".", r"\."))
        fgai.Graph.from_edges(TWICE, 3)
    assert len(caught) == 1
