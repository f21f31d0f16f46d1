"""What the page claims: only what exceeds the noise over nodes, with what chance would get beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fgai.evaluation.summary import BETTER, SAME, WORSE
from fgai.records import pack_array
from fgai.reports.build import Report, _assemble
from fgai.reports.page import _best_records, _best_value, _numbers_of
from fgai.reports.results import _results_of
from fgai.reports.words import _kinds_of, changes_in, headline, meaning
from support.report_cases import cards_of, whole_report

NODES = 140


def right(count: int) -> np.ndarray:
    return np.arange(NODES) < count


def document(counts: dict[str, tuple[int, int]], kept: dict[str, float] | None = None) -> Report:
    """Models with so many of 140 nodes right, before and after; `kept` of the top 5 stay at every node."""
    records = []
    for name, (clean, attacked) in counts.items():
        share = (kept or {}).get(name, 0.8)
        overlap = np.full((1, NODES), share, np.float32)
        arrays = {
            "scored": right(NODES), "correct_clean": right(clean), "correct_attacked": right(attacked),
            "touched": np.ones((1, NODES), bool),
            "overlap_prediction": overlap, "overlap_explanation": overlap,
        }  # fmt: skip
        overlaps = {key: {"all": share} for key in ("prediction", "explanation")}
        metrics: dict[str, Any] = {
            "f1": {"clean": clean / NODES, "attacked": attacked / NODES, "chance": 0.3},
            "overlap_touched": {**overlaps, "chance": {"all": 0.66}},
            "sharpness": {"clean": {"all": 0.015}},
            "top_share": {"clean": {"all": 0.33}, "uniform": {"all": 0.28}},
        }
        packed = {key: pack_array(value) for key, value in arrays.items()}
        records.append({"name": name, "config": {"k": 5}, "metrics": metrics, "per_node": packed})
    parts = _results_of(records, {}, [])
    return _assemble(parts, reference=next(iter(counts)), histories={})


def said(report: Report) -> str:
    return " ".join(meaning(report)).replace("\u00a0", " ")


def test_a_few_nodes_are_no_better() -> None:
    report = document({"GAT": (109, 108), "FGAI": (111, 111)})
    assert headline(report) == "FGAI made no clear difference here"
    assert _kinds_of(changes_in(report))["attacked"] == SAME


@pytest.mark.parametrize(("attacked", "kind"), [(111, BETTER), (81, WORSE), (98, SAME)])
def test_intervals_decide(attacked: int, kind: str) -> None:
    found = changes_in(document({"GAT": (109, 96), "FGAI": (109, attacked)}))
    assert _kinds_of(found)["attacked"] == kind and _kinds_of(found)["clean"] == SAME


def test_small_differences_that_all_nodes_share_count() -> None:
    found = changes_in(document({"GAT": (109, 60), "FGAI": (109, 60)}, {"GAT": 0.6, "FGAI": 0.8}))
    assert _kinds_of(found)["kept"] == _kinds_of(found)["aimed"] == BETTER


def test_rises_and_falls_are_real_ones() -> None:
    assert "GAT stays at 79 % and FGAI goes from 79 % to 78 %, which may be noise," in said(
        document({"GAT": (110, 111), "FGAI": (110, 109)})
    )
    assert "GAT falls from 79 % to 36 % and FGAI rises from 36 % to 79 %" in said(
        document({"GAT": (111, 50), "FGAI": (50, 111)})
    )


def test_chance_and_sharpness_are_said() -> None:
    report = document({"GAT": (109, 60), "FGAI": (109, 100)})
    words = said(report)
    assert "classified right (chance: 30 %)" in words and "(chance: 66 %)." in words
    assert "strongest neighbour gets 33 % of its attention in GAT (sharpness 0.015)" in words
    assert words.endswith("; 28 % if all got the same.")
    made = cards_of(report).replace("\u00a0", " ")
    assert "chance: 30 %" in made and "chance: 3.3 of 5" in made


def test_intervals_are_part_of_the_document() -> None:
    report = whole_report()
    assert set(report.intervals) == {"GAT", "FGAI"} and set(report.intervals["GAT"]) == {"fall"}
    assert {"fall", "attacked", "clean", "kept", "aimed", "proved"} == set(report.intervals["FGAI"])
    assert Report.from_dict(report.to_dict()).intervals == report.intervals


def test_sharper_under_attack_is_not_better() -> None:
    row = next(row for row in _numbers_of([])["Explanations"] if row.path == "sharpness.attacked.all")
    sharp = [
        {"metrics": {"sharpness": {"clean": {"all": 0.06}, "attacked": {"all": v}}}} for v in (0.407, 0.057)
    ]
    assert _best_records(row, sharp) == [False, True] and "clean" in _best_value(row)


def test_what_prints_alike_is_not_the_best() -> None:
    row = next(row for row in _numbers_of([])["Predictions"] if row.path == "f1.clean")
    values = [{"metrics": {"f1": {"clean": value}}} for value in (0.79312, 0.79321, 0.79298)]
    assert _best_records(row, values[:2]) == [False, False]
    assert _best_records(row, [*values, {"metrics": {"f1": {"clean": 0.9}}}]) == [False, False, False, True]


def test_bars_are_as_long_as_their_numbers() -> None:
    report = document({"GAT": (109, 60), "FGAI": (109, 100)})
    for record, gap, moved in zip(report.records, (0.03, 0.07), (0.2, 0.4), strict=True):
        record["metrics"]["f_slope"] = {"node": {"clean": {"gap": gap}, "attacked": {"gap": gap}}}
        record["metrics"]["g_tvd"] = {"rel": moved}
    made = cards_of(report)
    assert "width:7.0%" in made and "width:3.0%" in made and "width:40.0%" in made
