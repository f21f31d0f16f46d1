"""Records and tables: what is written can be read, and prints everywhere."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fgai
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import Comparison, EvaluationRecord, compare
from fgai.records import Column, Table, pack_array, unpack_array
from support import attack_cases as cases
from support.evaluate_cases import THREAT, whole_record


@pytest.fixture
def whole() -> EvaluationRecord:
    return whole_record()


def test_a_record_survives_the_file(whole: EvaluationRecord, tmp_path: Path) -> None:
    path = whole.save(tmp_path / "deep" / "record.json")
    again = EvaluationRecord.load(path)
    assert again == whole
    assert again.to_json() == whole.to_json()
    values = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert values["schema"] == 1 and values["kind"] == "evaluation"
    assert values["data"]["fingerprint"] == fgai.datasets.fingerprint(cases.tiny_graph())
    assert values["version"]["fgai"] == fgai.__version__
    assert [path.name for path in path.parent.iterdir()] == ["record.json"]


def test_records_of_a_newer_schema_are_refused(whole: EvaluationRecord, tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({**whole.to_dict(), "schema": 2, "future": True}))
    with pytest.raises(CheckpointError, match=r"newer\.json.*newer fgai.*update"):
        EvaluationRecord.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "damaged"),
        ('{"kind": "evaluation", "schema": 1, "na', "damaged"),
        ("[1, 2]", "expected a record"),
        ('{"kind": "certificate", "schema": 1}', "kind 'evaluation'"),
        ('{"kind": "evaluation", "schema": "1"}', "schema version is damaged"),
        ('{"kind": "evaluation", "schema": 1, "name": "x"}', "incomplete"),
    ],
)
def test_foreign_and_broken_records_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=message):
        EvaluationRecord.load(path)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no record at"):
        EvaluationRecord.load(tmp_path / "nothing.json")


def test_the_documented_metric_is_there(whole: EvaluationRecord) -> None:
    (path,) = re.findall(r"e\.g\. `([\w.]+)`", EvaluationRecord.value.__doc__ or "")
    assert isinstance(whole.value(path), float)


def test_values_are_found_by_name(whole: EvaluationRecord) -> None:
    assert whole.value("overlap.prediction.layers.1") == whole.metrics["overlap"]["prediction"]["layers"][1]
    assert whole.get("no.such") is None
    with pytest.raises(InputError, match="no 'nothing' among prediction, explanation, chance"):
        whole.value("overlap.nothing")
    unlabelled = replace(whole, metrics={"f1": {}})
    with pytest.raises(InputError, match=r"no metric 'f1\.clean': 'f1' was not measured"):
        unlabelled.value("f1.clean")
    with pytest.raises(InputError, match=r"'f1\.clean' is a single value"):
        whole.value("f1.clean.all")
    with pytest.raises(InputError, match=r"'overlap\.prediction\.layers' is a list of 2"):
        whole.value("overlap.prediction.layers.2")
    with pytest.raises(InputError, match="per-node 'nothing'"):
        whole.node_values("nothing")


@given(st.integers(0, 3), st.integers(1, 4), st.sampled_from(["<f4", "<i2", "?", ">i4"]))
def test_arrays_survive_packing(rows: int, columns: int, kind: str) -> None:
    array = np.arange(rows * columns).reshape(rows, columns).astype(kind)
    again = unpack_array(json.loads(json.dumps(pack_array(array))))
    assert again.shape == array.shape
    np.testing.assert_array_equal(again, array)


# Comparison and tables.


@pytest.fixture(scope="module")
def side_by_side() -> Comparison:
    models = {"GAT": cases.trained("gat", "vanilla"), "FGAI, 50 %": cases.trained("gat", "faithful")}
    with cases.quiet():
        return compare(models, cases.tiny_graph(), THREAT, k=2)


def test_comparisons_survive_the_file(side_by_side: Comparison, tmp_path: Path) -> None:
    again = Comparison.load(side_by_side.save(tmp_path / "comparison.json"))
    assert again == side_by_side
    assert [record.name for record in again] == ["GAT", "FGAI, 50 %"]
    with pytest.raises(InputError, match="no row 'x'"):
        again["x"]


def test_comparisons_print_everywhere(side_by_side: Comparison) -> None:
    for width in (60, 250):
        console = Console(record=True, width=width, file=io.StringIO())
        side_by_side.show(console, every=True)
        text = console.export_text()
        assert "GAT" in text and "uniform" in text and "random" in text and "seconds" in text
        assert "…" not in text
    markdown = side_by_side.to_markdown()
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert any(line.startswith("| uniform (null) |") for line in rows)
    assert any(line.startswith("| chance |") for line in rows)
    assert re.search(r"\| FGAI, 50 % \|.*\(\d+\.\d×\)", markdown)
    latex = side_by_side.to_latex()
    assert r"FGAI, 50 \%" in latex and latex.count(r"\toprule") == 3
    table = list(csv.reader(io.StringIO(side_by_side.to_csv())))
    assert table[0] == ["model", "metric", "value"]
    entries = {(row[0], row[1]): row[2] for row in table[1:]}
    expected = side_by_side["FGAI, 50 %"].value("g_jsd.last")
    assert float(entries["FGAI, 50 %", "g_jsd.last"]) == expected


def test_records_print_everywhere(whole: EvaluationRecord) -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    whole.show(console, every=True)
    assert "overlap_touched.explanation" in console.export_text()
    assert "| f1.clean |" in whole.to_markdown()
    assert r"f1.clean" in whole.to_latex()
    assert "f1.clean," in whole.to_csv()


def test_tables_escape_what_each_format_minds() -> None:
    table = Table(
        "[b]t[/b]", (Column("a_b"), Column("x", ".1f", "lower")), [["p|q & 5%", 0.25], ["[red]", None]]
    )
    assert "| p\\|q & 5% | 0.2 |" in table.to_markdown()
    assert r"a\_b & x $\downarrow$ \\" in table.to_latex() and r"p|q \& 5\% & 0.2" in table.to_latex()
    assert table.to_csv().splitlines() == ["a_b,x", "p|q & 5%,0.25", "[red],"]
    console = Console(record=True, width=80, file=io.StringIO())
    table.show(console)
    text = console.export_text()
    assert "[b]t[/b]" in text and "[red]" in text
    turned = table.transposed()
    assert turned.texts() == [["x ↓", "0.2", "–"]]
