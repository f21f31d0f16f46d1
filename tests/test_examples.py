"""The examples run, on the built-in graph."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_users_own_model_becomes_more_stable() -> None:
    names = runpy.run_path(str(EXAMPLES / "pyg_model.py"))
    comparison = names["main"]("planted", epochs=40)
    mine, faithful = comparison["mine"], comparison["faithful"]
    assert faithful.model["class"] == mine.model["class"] == "Net"
    for metric in ("g_tvd.rel", "g_jsd.last"):
        assert faithful.value(metric) < mine.value(metric)
    assert faithful.value("f1.attacked") > mine.value("f1.attacked")
