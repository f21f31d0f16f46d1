"""`fgai report` through real subprocesses: from models, from records, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fgai import datasets
from fgai.cli import app
from fgai.cli.files import _write_model
from fgai.records import read_json
from fgai.reports import Report
from fgai.training import make_faithful, train, untrained_model
from support.cli_cases import answer, fgai, refused
from support.report_cases import certificates, comparison, whole_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of the built-in graph, and records of a tiny one."""
    place = tmp_path_factory.mktemp("report")
    graph = datasets.load_dataset("planted", seed=0)
    model = train(untrained_model("GAT", graph, hidden_channels=2, heads=2), graph, epochs=2, progress=False)
    faithful = make_faithful(model, graph, epochs=1, nodes=2, edges=3, progress=False)
    about: dict[str, Any] = {"dataset": "planted", "split_seed": 0, "seed": 0, "settings": {"epochs": 2}}
    _write_model(model, place / "gat.safetensors", graph, {**about, "method": "vanilla"})
    _write_model(
        faithful, place / "faithful.safetensors", graph, {**about, "method": "fgai", "settings": {"nodes": 2}}
    )
    comparison().save(place / "both.json")
    certificates()["GAT"].save(place / "certificate-gat.json")
    whole_report().save(place / "whole.json")
    (place / "classes.txt").write_text("a\nb\nc\nd\n<e>\n")
    return place


class TestReport:
    def test_from_models(self, folder: Path) -> None:
        words = ("report", "GAT=gat.safetensors", "FGAI=faithful.safetensors", "-t", "random", "--node", 24)
        words += ("--counterfactual",)
        found = answer(*words, "--class-names", "classes.txt", "-o", "page", cwd=folder)
        assert found["output"] == "page.html" and found["models"] == ["GAT", "FGAI"]
        assert found["missing"] == [] and found["nodes"] == 2000 and found["bytes"] < 10_000_000
        made = Report.load(folder / found["document"])
        assert made.subgraph is not None and made.subgraph["centre"] == 24
        assert made.explorer is not None and made.explorer["classes"][4] == "<e>"
        for shown in made.explorer["models"]:
            without, injected = shown["changes"]
            assert without.startswith("without ") and "new neighbour" in injected
        assert made.reproduce == [
            "fgai train --data planted --model GAT --method vanilla --seed 0 --epochs 2"
            " --output gat.safetensors",
            "fgai faithful gat.safetensors --seed 0 --set nodes=2 --output faithful.safetensors",
            "fgai report GAT=gat.safetensors FGAI=faithful.safetensors --threat random --k 5 --seed 0"
            " --counterfactual",
        ]

    def test_missing_extras_are_told_before_anything_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "plotly", None)
        monkeypatch.setitem(sys.modules, "plotly.offline", None)
        told = refused("report", "A=none.safetensors", "B=neither.safetensors", cwd=tmp_path)
        assert "pip install 'fgai[report]'" in told

    def test_from_records(self, folder: Path) -> None:
        done = fgai("report", "both.json", "certificate-gat.json", cwd=folder)
        assert done.code == 0, done.err
        assert "written to report.html" in done.out and "not shown: Loss curves" in done.out
        assert set(Report.load(folder / "report.json").certificates) == {"GAT"}

    def test_the_document_given_is_not_overwritten(self, folder: Path) -> None:
        values = read_json(folder / "whole.json")
        (folder / "newer.json").write_text(json.dumps({**values, "schema": 4, "more": 1}))
        before = (folder / "newer.json").read_bytes()
        found = answer("report", "newer.json", "-o", "newer.html", cwd=folder)
        assert (folder / "newer.json").read_bytes() == before and found["document"] == "newer.json"
        assert "schema 4" in found["missing"][0] and "schema 4" in (folder / "newer.html").read_text()

    def test_help_has_an_example(self, folder: Path) -> None:
        done = fgai("report", "--help", cwd=folder)
        assert done.code == 0 and "fgai report GAT=gat" in done.out and "--json" in done.out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("missing.safetensors",), "no checkpoint"),
            (("both.json", "gat.safetensors"), "models or records, not both"),
            (("certificate-gat.json",), "no evaluation in these files"),
            (("both.json", "--class-names", "classes.txt"), "names of nodes and classes need models"),
            (("both.json", "--counterfactual"), "needs models"),
            (("both.json", "a=both.json", "a=whole.json"), "two files are called"),
            (("gat.safetensors", "--node", "2000"), "its nodes are 0 to 1999"),
            (("gat.safetensors", "--node-names", "nowhere.txt"), "nowhere.txt must be a readable text file"),
            (("gat.safetensors", "--threat", "weird"), "--threat"),
        ],
    )
    def test_refusals(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
    ) -> None:
        monkeypatch.chdir(folder)
        found = CliRunner().invoke(app, ["report", *words, "--force"])
        assert found.exit_code == 2 and said in " ".join(found.stderr.split())

    def test_refusals_of_the_real_command(self, folder: Path) -> None:
        assert "there is no record at missing.json" in refused(
            "report", "missing.json", "--force", cwd=folder
        )
        assert "cannot write" in refused("report", "both.json", "-o", "both.json/page.html", cwd=folder)
        assert "Missing argument" in refused("report", cwd=folder)

    def test_damaged_record_as_json(self, folder: Path) -> None:
        (folder / "broken.json").write_text("{")
        done = fgai("report", "broken.json", "--force", "--json", cwd=folder)
        assert done.code == 2 and json.loads(done.out)["error"]["type"] == "CheckpointError"
