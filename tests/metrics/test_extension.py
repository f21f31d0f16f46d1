"""A metric declared outside the package: evaluate, tables, report and command line show it unasked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fgai
from fgai.cli import app
from fgai.errors import InputError
from fgai.metrics import METRICS, Views, metric, metric_at, quantity, shown_numbers, spec
from fgai.reports import make_report, render
from support import attack_cases as cases
from support import evaluate_cases


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, spec.MetricSpec]]:
    """What is declared in a test is forgotten after it."""
    before = dict(spec._registry)
    yield spec._registry
    spec._registry.clear()
    spec._registry.update(before)


@pytest.fixture
def declared(registry: dict[str, spec.MetricSpec]) -> None:
    @metric(
        direction="lower", low=0, high=1, form=".4f",
        measure=lambda views: flips(views.logits["clean"][views.rows], views.logits["attacked"][views.rows]),
    )  # fmt: skip
    def flips(before: Tensor, after: Tensor) -> float:
        """Share of the scored nodes whose class changed."""
        return float((before.argmax(1) != after.argmax(1)).double().mean())

    def of_views(views: Views) -> dict[str, float]:
        return {name: strongest(attention.last.values) for name, attention in views.attention.items()}

    @metric(
        direction="higher", low=0, high=1, title="strongest edge", paths=("peak.edge",),
        section="explanation", measure=of_views,
    )  # fmt: skip
    def strongest(values: Tensor) -> float:
        """The largest attention of the output layer."""
        return float(values.max())


@pytest.mark.usefixtures("declared")
class TestDeclaredOutside:
    def test_evaluate_measures_it(self) -> None:
        record = evaluate_cases.record_of()
        view = record.value("peak.edge")
        assert set(view) == {"clean", "attacked", "attacked_explanation"}
        assert 0 < view["clean"] <= 1
        assert 0 <= record.value("flips") <= 1
        assert type(record).from_dict(record.to_dict()) == record

    def test_tables_and_the_report_show_it(self) -> None:
        models = {name: cases.trained(name, "vanilla") for name in ("gat", "gatv2")}
        options = {"k": cases.K, "curves": False, "nulls": True}
        with cases.quiet():
            compared = fgai.compare(models, cases.tiny_graph(), evaluate_cases.THREAT, **options)
        prediction, *_, explanation = compared.tables()
        assert "flips ↓" in [column.heading for column in prediction.columns]
        headings = [column.heading for column in explanation.columns]
        assert headings[-3:] == [f"strongest edge {view} ↑" for view in _VIEWS]
        value = compared["gatv2"].value("peak.edge.attacked")
        assert explanation.texts()[1][-2] == f"{value:.3f}"
        text = f"{compared['gat'].value('flips'):.4f}"
        assert text in prediction.to_markdown()
        assert "peak.edge.clean" in [row[0] for row in compared["gat"].tables()[0].rows]
        page = render(make_report(compared))
        assert "Share of the scored nodes whose class changed." in page
        assert "strongest edge attacked" in page and "The largest attention of the output layer." in page

    def test_the_command_line_shows_it(self, tmp_path: Path) -> None:
        runner = CliRunner()
        model = tmp_path / "gat.safetensors"
        for words in (
            ["train", "--epochs", "1", "-o", str(model), "-q"],
            ["evaluate", str(model), "-t", "random", "--no-curves", "--no-nulls", "-q", "--json"],
        ):
            done = runner.invoke(app, words)
            assert done.exit_code == 0, done.output
        values = json.loads(done.stdout)
        assert values["metrics"]["flips"] >= 0 and set(values["metrics"]["peak"]["edge"]) == set(_VIEWS)
        words = ["evaluate", str(model), "-t", "random", "--no-curves", "--no-nulls", "-q", "--all"]
        shown = runner.invoke(app, words, env={"COLUMNS": "200"})
        assert "peak.edge.attacked" in shown.stdout and "strongest edge clean" in shown.stdout


_VIEWS = ("clean", "attacked", "attacked_explanation")


class TestDeclaration:
    def test_without_one_nothing_is_added(self) -> None:
        record = evaluate_cases.record_of()
        shown = [entry.path for entry in shown_numbers([record.metrics])]
        assert len(shown) == len(set(shown)) and all(metric_at(path) for path in shown)
        assert "flips" not in record.metrics and "peak" not in record.metrics

    def test_every_number_of_a_record_is_declared_once(self) -> None:
        record = evaluate_cases.whole_record()
        lines = record.to_csv().splitlines()[1:]
        paths = {line.partition(",")[0] for line in lines if not line.startswith("null.")}
        assert len(paths) > 100
        for path in paths:
            found = [
                one.name
                for one in METRICS.values()
                if any(spec._rest(p, path) is not None for p in one.paths)
            ]
            assert len(found) == 1, (path, found)

    def test_headings(self) -> None:
        assert quantity("g_jsd.last").title == "g-JSD last"
        assert quantity("overlap_touched.prediction.all").title == "touched"
        assert quantity("f1.clean", "clean").title == "clean"
        assert quantity("g_tvd.logits", form=".2e").form == ".2e"
        assert [quantity(p).better for p in ("f1.clean", "g_tvd.rel", "touched.all")] == [
            "higher",
            "lower",
            "",
        ]
        with pytest.raises(InputError, match=r"no metric is declared at 'f2\.clean'"):
            quantity("f2.clean")

    @pytest.mark.usefixtures("registry")
    @pytest.mark.parametrize("place", ["f1.flips", "touched", "null.flips", "overlap", "overlap.*"])
    def test_places_of_others_are_refused(self, place: str) -> None:
        def flips(before: Tensor) -> float:
            return 0.0

        with pytest.raises(InputError, match="records"):
            metric(direction="lower", low=0, high=1, paths=(place,), measure=lambda views: 0.0)(flips)
        assert "flips" not in METRICS

    @pytest.mark.usefixtures("registry")
    def test_names_of_others_are_refused(self) -> None:
        def f1(before: Tensor) -> float:
            return 0.0

        with pytest.raises(InputError, match="there is a metric 'f1'"):
            metric(direction="lower", low=0, high=1)(f1)

    @pytest.mark.usefixtures("registry")
    def test_what_records_cannot_hold_is_refused(self) -> None:
        @metric(direction="lower", low=0, high=1, measure=lambda views: torch.ones(2))
        def odd() -> float:
            return 0.0

        with pytest.raises(InputError, match="plain values"):
            evaluate_cases.record_of()

    @pytest.mark.usefixtures("registry")
    def test_a_metric_without_one_place_returns_mappings(self) -> None:
        @metric(direction="lower", paths=("odd.*",), measure=lambda views: 0.5)
        def odd() -> float:
            return 0.0

        with pytest.raises(InputError, match=r"the metric 'odd' .* must return mappings, got 0\.5"):
            evaluate_cases.record_of()
