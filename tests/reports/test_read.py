"""Reports from files: records and certificates of this fgai, of a newer one, and with parts missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fgai.errors import CheckpointError, InputError
from fgai.records import read_json
from fgai.reports import Report, read_report, render
from support.report_cases import certificates, comparison, whole_report

LIBRARY = "/* plotly */"


def written(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    comparison().save(folder / "both.json")
    comparison()["GAT"].save(folder / "gat.json")
    for name, record in certificates().items():
        record.save(folder / f"certificate-{name.lower()}.json")
    whole_report().save(folder / "report.json")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Files of every kind, for one test to change."""
    return Path(shutil.copytree(saved, tmp_path, dirs_exist_ok=True))


class TestKinds:
    def test_report_document(self, folder: Path) -> None:
        assert read_report(folder / "report.json") == whole_report()

    def test_comparison_with_certificates(self, folder: Path) -> None:
        files = [folder / "both.json", *sorted(folder.glob("certificate-*.json"))]
        found = read_report(files)
        assert found.names == ["GAT", "FGAI"] and set(found.certificates) == {"GAT", "FGAI"}
        assert found.notes == [] and found.distribution == whole_report().distribution
        assert found.certificates == whole_report().certificates
        assert found.explorer is not None and found.explorer["models"][0]["radii"]

    def test_evaluation_named_by_the_caller(self, folder: Path) -> None:
        found = read_report({"mine": folder / "gat.json"})
        assert found.names == ["mine"] and "mine" in render(found, LIBRARY)

    def test_certificates_of_unknown_owners_are_named(self, folder: Path) -> None:
        (folder / "certificate-gat.json").rename(folder / "proof.json")
        found = read_report([folder / "both.json", folder / "proof.json"])
        assert found.certificates == {} and "NAME=FILE" in found.notes[0]
        given = read_report({"": folder / "both.json", "gat": folder / "proof.json"})
        assert set(given.certificates) == {"GAT"}
        alone = read_report([folder / "gat.json", folder / "proof.json"])
        assert set(alone.certificates) == {"GAT"}

    def test_a_certificate_of_other_weights_is_left_out(self, folder: Path) -> None:
        found = read_report({"GAT": folder / "gat.json", "gat": folder / "certificate-fgai.json"})
        assert found.certificates == {}
        assert found.notes == ["The certificate given for GAT is of other weights or data: it is left out."]


class TestNewerAndBroken:
    @pytest.mark.parametrize("name", ["report", "both", "gat"])
    def test_newer_schema_is_shown_as_far_as_it_goes(self, folder: Path, name: str) -> None:
        values = read_json(folder / f"{name}.json")
        values |= {"schema": 7, "surprise": {"a": 1}}
        made = render(read_report(written(folder / "new.json", values)), LIBRARY)
        assert "written by a newer fgai (schema 7; this one knows 1)" in made
        assert '<details class="notice" id="missing" open>' in made and "Predictions that survive" in made

    def test_any_part_of_a_record_may_be_missing(self, folder: Path) -> None:
        whole = read_json(folder / "gat.json")
        for part in whole.keys() - {"kind"}:
            values = {name: value for name, value in whole.items() if name != part}
            found = read_report(written(folder / "less.json", values))
            made = render(found, LIBRARY)
            if part not in ("warnings", "per_node"):
                assert part in " ".join(found.notes) and part in made, part

    @pytest.mark.many
    @pytest.mark.parametrize("part", list(Report().to_dict()))
    def test_any_part_of_a_document_may_be_missing_or_odd(self, folder: Path, part: str) -> None:
        if part in ("kind", "records"):
            return
        values = read_json(folder / "report.json")
        del values[part]
        assert part in render(read_report(written(folder / "less.json", values)), LIBRARY)
        if part != "schema":
            odd = read_report(written(folder / "odd.json", {**values, part: 3.5}))
            assert any(note.startswith(f"Left out: {part} of") for note in odd.notes)
            render(odd, LIBRARY)

    @pytest.mark.many
    @pytest.mark.parametrize(
        "value", [None, {"layers": [1]}, *(pytest.param(odd, marks=pytest.mark.slow) for odd in ("x", [1]))]
    )
    @pytest.mark.parametrize("name", ["gat", "certificate-gat"])
    def test_any_part_of_a_record_may_be_odd(self, folder: Path, name: str, value: Any) -> None:
        whole = read_json(folder / f"{name}.json")
        for part in whole.keys() - {"kind"}:
            written(folder / f"{name}.json", {**whole, part: value})
            found = read_report([folder / "gat.json", folder / "certificate-gat.json"])
            render(found, LIBRARY)
            if part == "version":
                assert any("version of" in note for note in found.notes if note.startswith("Left out: "))

    @pytest.mark.parametrize("budget", ["x", 3, [1], {"nodes": "x", "edges": [], "radius": {}, "rows": "x"}])
    def test_budgets_may_be_odd(self, folder: Path, budget: Any) -> None:
        values = read_json(folder / "both.json")
        for record in values["records"]:
            record["threat"]["budget"] = budget
        render(read_report(written(folder / "odd.json", values)), LIBRARY)

    @pytest.mark.many
    @pytest.mark.parametrize(
        "odd",
        [("x", {"layers": []}), pytest.param((None, [1]), marks=pytest.mark.slow)],
        ids=["one", "other"],
    )
    @pytest.mark.parametrize("metric", list(comparison()["GAT"].metrics))
    def test_any_metric_may_be_missing_or_odd(self, folder: Path, metric: str, odd: tuple[Any, Any]) -> None:
        for value in odd:
            values = read_json(folder / "both.json")
            for record in values["records"]:
                record["metrics"][metric] = value
            render(read_report(written(folder / "odd.json", values)), LIBRARY)

    def test_damaged_arrays_are_told(self, folder: Path) -> None:
        values = read_json(folder / "gat.json")
        values["per_node"]["degree"] = {"dtype": "<i4", "shape": [3], "data": "?"}
        found = read_report(written(folder / "odd.json", values))
        assert any("'degree'" in note for note in found.notes) and found.explorer is None

    def test_refusals(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="there is no record"):
            read_report(tmp_path / "missing.json")
        (tmp_path / "text.json").write_text("{")
        with pytest.raises(CheckpointError, match="damaged"):
            read_report(tmp_path / "text.json")
        for values in ([1, 2], {"kind": "recipe"}):
            (tmp_path / "other.json").write_text(json.dumps(values))
            with pytest.raises(CheckpointError, match="must hold a report, comparison, evaluation or"):
                read_report(tmp_path / "other.json")
        with pytest.raises(InputError, match="no evaluation in these files"):
            read_report(folder / "certificate-gat.json")
        with pytest.raises(InputError, match="give it alone"):
            read_report([folder / "report.json", folder / "gat.json"])
        with pytest.raises(InputError, match="at least one record"):
            read_report([])
