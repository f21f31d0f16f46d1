"""Every public function and class, called as nobody planned: no crash, no hang, no foreign exception."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import fgai
from support import fuzz
from support.graph_cases import small_data

FEW, MANY, PIECES = 2, 20_000, 20
"""Calls of each function; in all where there is time, and in how many pieces."""
LIMITS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls may write files."""
    monkeypatch.chdir(tmp_path)


def check(call: tuple[fuzz.Door, dict[str, Any]]) -> None:
    door, arguments = call
    found = fuzz.foreign(door, arguments)
    shown = ", ".join(f"{name}={value!r:.120}" for name, value in arguments.items())
    assert found is None, f"{door.home}.{door.name}({shown}) {found}"


def make_calls(count: int, number: int, among: tuple[fuzz.Door, ...] | None = None) -> int:
    """Draw calls from a seed and make them; how many it were."""
    made = 0

    @seed(number)
    @settings(max_examples=count, phases=[Phase.generate], **LIMITS)
    @given(fuzz.calls(among))
    def calls(call: tuple[fuzz.Door, dict[str, Any]]) -> None:
        nonlocal made
        made += 1
        check(call)

    calls()
    return made


def test_every_function_is_called() -> None:
    made = [make_calls(FEW, number, (door,)) for number, door in enumerate(fuzz.doors())]
    assert min(made) >= 1 and sum(made) > 500


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(PIECES))
def test_twenty_thousand_calls(piece: int) -> None:
    assert make_calls(MANY // PIECES, piece) == MANY // PIECES


FOUND: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (fgai.attention.duplicate, {"model": ()}),
    (fgai.figures.certified_curves, {"records": "node"}),
    (fgai.limit, {"model": torch.ones(3), "data": small_data()}),
    (fgai.metrics.chance_score, {"name": "f1", "target": torch.tensor([0.5, 1.0])}),
    (fgai.metrics.chance_score, {"name": "f1", "target": torch.tensor([0, 2 * 10**15])}),
    (fgai.report, {"models": {}, "data": small_data(), "on_step": torch.ones(2)}),
    (fgai.report, {"models": {}, "data": small_data(), "node": torch.ones(2)}),
    (fgai.attacks.Budget, {"box": torch.ones(2, 3)}),
    (fgai.attacks.EnsembleInjection, {"budget": fgai.attacks.Budget(), "members": [None]}),
    (fgai.metrics.random_ranking, {"num_edges": 10**12, "seed": 1}),
    (fgai.figures.ExplainerDot, {"name": "a", "kept": torch.ones(2, 3), "again": None, "chance": 0.5}),
    (fgai.tasks.check_logits, {"logits": "l1", "graph": small_data()}),
]


@pytest.mark.parametrize(("call", "arguments"), FOUND)
def test_what_it_has_found_stays_mended(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    check((fuzz.Door(call.__module__, call.__name__, call), arguments))


class TestTheFuzzer:
    """It would find nothing if its calls were all refused at the door."""

    def test_knows_every_public_function(self) -> None:
        known = {door.name for door in fuzz.doors()} | fuzz.LEFT_OUT
        public = [name for name in fgai.__all__ if inspect.isfunction(getattr(fgai, name))]
        assert set(public) <= known and len(known) > 250

    @pytest.mark.parametrize("name", ["evaluate", "explain", "train", "make_faithful", "certify", "limit"])
    def test_gets_to_the_bottom(self, name: str) -> None:
        pools = fuzz.pools.__wrapped__()
        fitting = {"model": pools["model"][0], "data": pools["graph"][0], "node": 3, "radius": 0.1}
        fitting["threat"] = pools["threat"][0] if name != "certify" else None
        known = inspect.signature(getattr(fgai, name)).parameters
        wanted = {key: value for key, value in fitting.items() if key in known}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(fgai, name)(**wanted, **fuzz.SHORT.get(name, {}))

    def test_notices(self) -> None:
        def foreign() -> None:
            raise KeyError("a")

        def slow() -> None:
            while True:
                pass

        assert "KeyError" in str(fuzz.foreign(fuzz.Door("", "", foreign), {}))
        assert "hangs" in str(fuzz.foreign(fuzz.Door("", "", slow), {}, seconds=0.2))
