"""The examples run, on the built-in graph."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import pytest

import fgai

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_users_own_model_becomes_more_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    names = runpy.run_path(str(EXAMPLES / "pyg_model.py"))
    short = partial(fgai.compare, threat="standard", curves=False, nulls=False, explanation_attack=False)
    monkeypatch.setattr(fgai, "compare", short)
    comparison = names["main"]("planted", epochs=30)
    mine, faithful = comparison["mine"], comparison["faithful"]
    assert faithful.model["class"] == mine.model["class"] == "Net"
    for metric in ("g_tvd.rel", "g_jsd.last"):
        assert faithful.value(metric) < mine.value(metric)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.filterwarnings("ignore:.weak-attention", "ignore:.masked-gradients")
def test_a_users_own_model_keeps_its_predictions_on_cora(data_root: Path) -> None:
    names = runpy.run_path(str(EXAMPLES / "pyg_model.py"))
    comparison = names["main"]("cora", epochs=100)
    mine, faithful = comparison["mine"], comparison["faithful"]
    assert faithful.value("f1.clean") > mine.value("f1.clean") - 0.02
    assert faithful.value("f1.attacked") > mine.value("f1.attacked") + 0.1
