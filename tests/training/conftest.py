"""Trainings of these tests score an epoch by a shorter attack."""

from __future__ import annotations

import pytest

from fgai.training import faithful, hardening


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (faithful, hardening):
        monkeypatch.setattr(module, "SCORE_STEPS", 2)
