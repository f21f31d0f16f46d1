"""Threads get what one thread gets: numbers, certificates and warnings."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attacks import Budget, PGDInjection, Threat
from fgai.attention import evaluating, record
from fgai.attention.limits import counting
from fgai.certificates.traced import _ChainBuilder, _trace
from fgai.errors import ReliabilityWarning, collect_warnings, warn
from fgai.models import AttentionLayer
from support import attack_cases as cases

SMALL = Threat("small", PGDInjection, Budget(nodes=2, edges=2, steps=1, step_size=0.1), "for tests")
MODELS = ("gat", "limited", "gt", "pyg")
CALLS = ("evaluate", "explain", "certify", "injection")
THREADS = 4


@cache
def model_of(name: str) -> nn.Module:
    if name == "limited":
        return fgai.limit(cases.trained("gat", "vanilla"), cases.tiny_graph(), 0.05, shrink=0.0)
    return cases.trained(name, "vanilla")


def answer(call: str, name: str) -> Any:
    """What a call says, without how long it took."""
    model, graph = model_of(name), cases.tiny_graph()
    if call == "evaluate":
        record = fgai.evaluate(model, graph, SMALL, k=2, explanation_attack=False, curves=False, nulls=False)
        return _lasting(record.to_dict())
    if call == "explain":
        return _lasting(fgai.explain(model, graph, 3, k=2, threat=SMALL).to_dict())
    if call == "certify":
        return _lasting(fgai.certify_attention(model, graph, radius=0.01, k1=2, k2=2).to_dict())
    return _lasting(fgai.certify_injection(model, graph, neighbours=1, where="direct", k=2).to_dict())


def _lasting(part: Any) -> Any:
    if isinstance(part, dict):
        passing = ("second", "memory", "cost", "time", "provenance")
        return {k: _lasting(v) for k, v in part.items() if not any(word in str(k) for word in passing)}
    return [_lasting(one) for one in part] if isinstance(part, list | tuple) else part


@pytest.mark.parametrize("count", [48, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_threads_give_what_one_thread_gives(count: int) -> None:
    kinds = [(call, name) for name in MODELS for call in CALLS]
    alone = {kind: answer(*kind) for kind in kinds}
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    work = [kinds[place % len(kinds)] for place in order]
    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(lambda kind: answer(*kind), work))
    assert [kind for kind, one in zip(work, answers, strict=True) if one != alone[kind]] == []


@pytest.mark.filterwarnings("ignore")
def test_certificates_wait_for_the_hooks_of_another_thread() -> None:
    model, graph = model_of("limited"), cases.tiny_graph()
    installed, done = threading.Event(), threading.Event()

    def listen() -> None:
        with evaluating(model), record(model):
            installed.set()
            time.sleep(0.5)
        done.set()

    thread = threading.Thread(target=listen)
    thread.start()
    installed.wait()
    certificate = fgai.certify_injection(model, graph, neighbours=0, where="direct")
    assert certificate.known and done.is_set()
    thread.join()


class Meanwhile(nn.Module):
    """A GAT during whose forward pass another thread calls a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        graph = cases.tiny_graph()
        self.conv, self.answers = GATConv(graph.num_features, graph.num_classes), list[Any]()

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        def other() -> None:
            self.answers.append(nn.Sequential(nn.ELU(), nn.ELU())(torch.ones(2)).tolist())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        self.answers.append(None)
        return self.conv(x, edge_index)  # type: ignore[no-any-return]


def test_modules_of_other_threads_run_while_a_model_is_traced() -> None:
    graph, traced = cases.tiny_graph(), Meanwhile()
    assert not isinstance(_trace(traced, graph), str)
    answers = _ChainBuilder(
        traced
    ).root.model.answers  # of a copy; the passes of `_trace` had copies of their own
    assert answers == traced.answers == []
    reader = _ChainBuilder(traced)
    reader._traced()
    assert reader.root.model.answers == [[1.0, 1.0], None]


def test_settings_of_limits_wait_for_the_passes_of_another_thread() -> None:
    model, counted = model_of("limited"), threading.Event()

    def count() -> None:
        with counting(model):
            counted.set()

    with evaluating(model):
        thread = threading.Thread(target=count)
        thread.start()
        assert not counted.wait(0.3)
    thread.join()
    assert counted.is_set()


def test_parts_of_a_layer_wait_for_settings_of_another_thread() -> None:
    model, inside, read = model_of("limited"), threading.Event(), threading.Event()
    layer = next(part for part in model.modules() if isinstance(part, AttentionLayer))
    x = torch.zeros(3, layer.value.weight.shape[0])

    def read_sides() -> None:
        inside.wait(10)
        layer.sides(x)
        read.set()

    thread = threading.Thread(target=read_sides)
    thread.start()
    with counting(model) as counts:
        inside.set()
        assert not read.wait(0.3)
        assert counts == [0, 0]
    thread.join()
    assert read.is_set()


def test_warnings_stay_in_their_thread() -> None:
    inside, go_on = threading.Event(), threading.Event()
    kept: list[Warning] = []

    def collect() -> None:
        with collect_warnings() as notes:
            warn(ReliabilityWarning("one", "of this thread"))
            inside.set()
            go_on.wait(10)
        kept.extend(notes)

    before = list(warnings.filters)
    thread = threading.Thread(target=collect)
    thread.start()
    inside.wait(10)
    with pytest.warns(ReliabilityWarning, match="of the other"):
        warn(ReliabilityWarning("two", "of the other thread"))
    assert warnings.filters == before
    go_on.set()
    thread.join()
    assert [str(one) for one in kept] == ["[one] of this thread"]
