"""Every bar, on both sides of its limit, from synthetic records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments import Store, bars, read_grid
from experiments.results import Results
from support import bench_cases as cases
from support.bench_cases import photo_results


def judged(results: Results, name: str) -> bars.Bar:
    found = [bar for bar in bars.judge(results, results) if bar.name == name]
    return next(bar for bar in found if (bar.model, bar.dataset) == ("GAT", "amazon-photo"))


class TestBars:
    def test_counts(self, whole: Store) -> None:
        found = bars.check(whole)
        assert len(found) == 3 * 4 * 28 - 4 + 2 + 3 * 4 * 5
        missed = {(bar.dataset, bar.name) for bar in found if bar.met is False}
        # the synthetic .92 is below what the paper reports on Physics, and above it elsewhere
        assert missed == {
            *(("coauthor-physics", f"{word} F1 vs paper") for word in ("clean", "`ensemble`")),
            ("coauthor-physics", "certified classes, t = 1"),
        }
        assert all(bar.met is not None for bar in found), "the grids hold every pair a bar asks for"
        assert "387 met, 7 missed, 0 no number, of 394." in bars.table(found).to_markdown()
        assert len(bars.table(found, every=False).rows) == 7
        assert "3/4 (missed: coauthor-physics)" in bars.summary(found).to_markdown()

    @pytest.mark.parametrize(
        ("name", "path", "good", "bad", "more"),
        [
            ("clean F1", "f1.clean", 0.9150001, 0.9149, {}),
            ("clean F1 vs paper", "f1.clean", 0.8665, 0.866, {}),
            ("`ensemble` F1", "f1.attacked", 0.9000001, 0.899, {}),
            ("`ensemble` F1 vs paper", "f1.attacked", 0.8637, 0.863, {}),
            ("`ensemble-strong` F1", "f1.attacked", 0.8200001, 0.819, {"threat": "ensemble-strong"}),
            (
                "`ensemble-strong` F1, random endpoints",
                "f1.attacked_random",
                0.8600001,
                0.859,
                {"threat": "ensemble-strong"},
            ),
            ("`ensemble-strong` F1 vs LN and AT", "f1.attacked", 0.7, 0.68, {"threat": "ensemble-strong"}),
            (
                "`ensemble-strong` F1 vs AT + limits",
                "f1.attacked",
                0.8500001,
                0.849,
                {"threat": "ensemble-strong"},
            ),
            ("`values` F1", "f1.attacked", 0.8800001, 0.879, {"threat": "values"}),
            ("worst seed", "f1.attacked", 0.896, 0.88, {"seeds": 1}),
            ("g-TVD rel", "g_tvd.rel", 0.0113, 0.0115, {}),
            ("g-TVD prob", "g_tvd.probs", 0.0113, 0.0115, {}),
            ("g-JSD last", "g_jsd.last", 0.000113, 0.000115, {}),
            ("g-JSD all", "g_jsd.all", 0.00113, 0.00115, {}),
            ("similarity", "similarity.overlap.all", 0.85, 0.849, {}),
            ("similarity, sharpest layer", "similarity.overlap.sharpest", 0.9, 0.899, {}),
            ("top 5 lost, `cover`", "lost.explanation.cover", 0.1159, 0.1161, {}),
            ("top 5 lost at the first layer", "overlap_touched.explanation.layers.0", 1.0, 0.9999, {}),
            ("sharpness", "sharpness.clean.all", 0.1801, 0.1799, {}),
            ("sharpness, sharpest layer", "sharpness.clean.sharpest", 0.1801, 0.1799, {}),
            ("F-gap attacked, graph", "f_slope.graph.attacked.gap", 0.9001, 0.89, {"threat": "standard"}),
            ("F-gap attacked, node", "f_slope.node.attacked.gap", 0.9001, 0.89, {"threat": "standard"}),
            ("f− attacked, graph", "f_slope.graph.attacked.minus", 0.0, 0.001, {"threat": "standard"}),
            ("f− attacked, node", "f_slope.node.attacked.minus", 0.0, 0.001, {"threat": "standard"}),
            ("F-gap above null rows", "f_slope.node.attacked.gap", 0.101, 0.099, {"threat": "standard"}),
            ("seconds per epoch", "training.epoch_seconds", 0.0064, 0.0065, {}),
            ("peak memory", "training.peak_memory", 319_000_000, 321_000_000, {}),
        ],
    )
    def test_each_bar(self, name: str, path: str, good: float, bad: float, more: dict[str, Any]) -> None:
        assert judged(photo_results(path, good, **more), name).met is True
        found = judged(photo_results(path, bad, **more), name)
        assert found.met is False and found.seeds == 5 and found.found != "–"

    def test_without_records_nothing_is_said(self, tmp_path: Path) -> None:
        found = bars.check(Store(tmp_path))
        assert {bar.met for bar in found} == {None} and {bar.seeds for bar in found} == {0}
        assert f"0 met, 0 missed, {len(found)} no number" in bars.table(found).to_markdown()
        photo = ("GAT", "amazon-photo")
        few = [c for c in read_grid("node") if c.seed < 3 and (c.model, c.dataset) == photo]
        store = cases.fill(Store(tmp_path / "few"), few)
        assert judged(Results.node(store), "clean F1").seeds == 3
        assert "fewer than 5 seeds" in bars.table(bars.check(store)).to_markdown()
