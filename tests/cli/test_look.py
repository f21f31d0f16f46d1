"""What commands look like: progress on narrow terminals, one line in a log, whole tables, honest help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fgai as root
from fgai.cli import app
from fgai.reports import figures
from fgai.training import train_method
from support.cli_cases import answer, commands, here, processes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("look")
    answer("train", "--epochs", 3, "-o", "gat.safetensors", cwd=folder)
    return folder


def on_a_terminal(*words: object, cwd: Path, columns: int = 60) -> str:
    """What a command writes to a terminal of that width, without control characters."""
    done = processes().on_a_terminal(*words, cwd=cwd, COLUMNS=str(columns))
    assert done.code == 0, done
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.err)


SLOW = pytest.mark.slow
SHOWN = r"\S.*[━╸╺].* +\d+/\d+ +(\d\d:\d\d|--:--|-:--:--)"


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (("compare", "A=gat.safetensors", "--no-nulls"), ["prediction attack", "removing edges"]),
        pytest.param(
            ("faithful", "gat.safetensors", "--epochs", 30, "-o", "f.safetensors"), ["fgai"], marks=SLOW
        ),
        pytest.param(("attack", "gat.safetensors", "--threat", "strong"), ["prediction attack"], marks=SLOW),
        pytest.param(
            ("explain", "gat.safetensors", "--node", 24, "-t", "strong"), ["prediction attack"], marks=SLOW
        ),
    ],
    ids=lambda value: str(value[0]),
)
def test_progress_with_time_left_at_60_columns(
    trained: Path, words: tuple[Any, ...], stages: list[str]
) -> None:
    lines = re.split(r"[\r\n]+", on_a_terminal(*words, cwd=trained))
    bars = [line.rstrip() for line in lines if re.search(SHOWN, line)]
    assert bars and max(map(len, bars)) <= 60
    for stage in stages:
        assert any(stage in line for line in bars), (stage, bars[:3])


def test_two_lines_in_a_log(trained: Path) -> None:
    done = here("compare", "A=gat.safetensors", "--no-curves", "--no-nulls", "-t", "random", cwd=trained)
    remarks = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    begins, estimate = remarks
    assert done.exit_code == 0 and begins.startswith("comparing A on") and estimate.startswith("this takes")
    assert "\x1b" not in done.stderr and "\r" not in done.stderr


@pytest.mark.parametrize("columns", [50, pytest.param(60, marks=SLOW)])
def test_tables_are_whole_on_narrow_terminals(
    trained: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = ("compare", "vanilla=gat.safetensors", "again=gat.safetensors", "--no-curves", "-t", "random")
    text = here(*words, cwd=trained).stdout
    assert max(map(len, text.splitlines())) <= columns
    assert {"vanilla", "again", "attack", "chance", "sharpness"} <= set(re.findall(r"\w+", text))
    shown = here("explain", "gat.safetensors", "--node", 24, "-t", "random", cwd=trained).stdout
    assert max(map(len, shown.splitlines())) <= columns and "attention" in shown
    assert "…" not in shown


@pytest.mark.many
@pytest.mark.parametrize("name", commands())
def test_help_shows_flags_as_flags(name: str) -> None:
    text = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "100"}).output
    assert "--json" in text or name == "bench", name
    assert "<bool>" not in text and "BOOLEAN" not in text


@pytest.mark.parametrize(("threat", "drawn"), [("random", "node_before_after"), ("none", "node_attention")])
def test_explain_draws_the_attack_it_reports(
    trained: Path, monkeypatch: pytest.MonkeyPatch, threat: str, drawn: str
) -> None:
    made: list[tuple[str, tuple[Any, ...]]] = []

    def kept(name: str) -> Any:
        draw = getattr(figures, name)

        def drawing(*given: Any, **options: Any) -> Any:
            made.append((name, given))
            return draw(*given, **options)

        return drawing

    for name in ("node_before_after", "node_attention"):
        monkeypatch.setattr(figures, name, kept(name))
    words = ("explain", "gat.safetensors", "--node", 24, "--threat", threat, "-o", f"{threat}.png")
    done = here(*words, cwd=trained)
    assert done.exit_code == 0, done.stderr
    ((name, given),) = made
    assert name == drawn and ("under the random attack" in done.stdout) == (threat != "none")
    if threat != "none":
        case = given[0][0]
        seen = root.explain(case.model, given[1], 24, attack=case.attack, threat=threat, certificate=False)
        assert seen.attacked is not None and 0 < seen.attacked["chance"] < 1
        assert f"{len(seen.attacked['kept'])} of the top 5 stay (by chance" in done.stdout.replace("\n", " ")


def test_python_and_the_demo_have_one_set_of_defaults() -> None:
    data = root.load_dataset("planted")
    ours = root.train("GAT", data, epochs=2, progress=False)
    theirs = train_method("vanilla", "GAT", data, seed=0, progress=False, settings={"epochs": 2})
    faithful = [
        root.make_faithful(ours, data, epochs=1, progress=False),
        train_method("fgai", "GAT", data, seed=0, vanilla=theirs, progress=False, settings={"epochs": 1}),
    ]
    for one, two in ((ours, theirs), faithful):
        for name, value in one.state_dict().items():
            assert torch.equal(value, two.state_dict()[name]), name
