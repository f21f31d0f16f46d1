"""The default dtype of torch changes nothing that is drawn or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fgai
from fgai.attacks import Attack, Budget, PGDInjection, ValueInjection
from fgai.graph.change import GraphChange
from support import attack_cases as cases


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DTYPES = (torch.float32, torch.float64)


KINDS = list(cases.BUDGETS)


@pytest.mark.many
@pytest.mark.parametrize(("kind", "model"), cases.first(len(KINDS), cases.rotated(KINDS, ("gat", "pyg"))))
def test_attacks_draw_the_same(kind: type[Attack], model: str) -> None:
    trained, graph = cases.trained(model, "vanilla"), cases.tiny_graph()
    changes = []
    for dtype in DTYPES:
        with default(dtype), cases.quiet():
            changes.append(cases.attack(kind).run(trained, graph, seed=3).change)
    for field in dataclasses.fields(GraphChange):
        first, second = (getattr(change, field.name) for change in changes)
        assert (first is None) == (second is None)
        assert first is None or (first.dtype == second.dtype and torch.equal(first, second))


def test_values_draw_the_same() -> None:
    graph = cases.tiny_graph()
    model = fgai.limit(cases.trained("gat", "vanilla"), graph, 0.0, shrink=0.0)
    budget = Budget(nodes=3, edges=4, steps=3)
    attack = ValueInjection(budget, k=cases.K, feature_attack=cases.attack(PGDInjection))
    changes = []
    for dtype in DTYPES:
        with default(dtype), cases.quiet():
            changes.append(attack.run(model, graph, seed=3).change)
    assert changes[0].entry_values is not None and torch.equal(
        changes[0].entry_values, changes[1].entry_values
    )


def test_records_are_the_same() -> None:
    graph, model = cases.tiny_graph(), cases.trained("pyg", "vanilla")
    options: dict[str, Any] = {"k": cases.K, "nodes": 3, "edges": 4, "explanation_attack": False}
    records = []
    for dtype in DTYPES:
        with default(dtype), cases.quiet():
            records.append(fgai.evaluate(model, graph, "standard", **options).to_dict())
    assert _without_times(records[0]) == _without_times(records[1])


def _without_times(part: object) -> object:
    if isinstance(part, dict):
        return {
            key: _without_times(value)
            for key, value in part.items()
            if not any(word in str(key) for word in ("second", "time", "memory", "provenance", "cost"))
        }
    return [_without_times(one) for one in part] if isinstance(part, list | tuple) else part
