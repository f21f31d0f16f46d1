"""`fgai bench` finds the experiments of a checkout, and says so where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import grid_names
from experiments.figures import FIGURES
from experiments.tables import TABLES
from fgai.cli import app, bench

ROOT = Path(bench.__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "names"),
    [("run", grid_names()), ("status", grid_names()), ("table", list(TABLES)), ("figure", list(FIGURES))],
)
def test_help_names_all_there_is(words: str, names: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", words, "--help"], terminal_width=200)
    said = done.stdout.replace(",", " ").replace(".", " ").split()
    assert done.exit_code == 0 and len(names) > 5
    assert [name for name in names if name not in said] == []


def test_found_around_the_package_and_around_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench._load() is not None
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "fgai" / "cli" / "bench.py"))
    assert bench._load() is None
    monkeypatch.chdir(ROOT / "docs")
    assert bench._load() is not None


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package alone, as a wheel holds it."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "fgai", folder / "fgai", ignore=ignored)
    return folder


def bench_in(folder: Path, installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fgai", "bench", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    done = bench_in(tmp_path, installed, "run", "node", "--jobs", "2")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: `fgai bench` needs a checkout of fgai: run it inside one, where experiments/ is\n"
    )


def test_inside_one_whatever_else_is_called_experiments(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "lib" / "experiments").mkdir(parents=True)
    (tmp_path / "lib" / "experiments" / "__init__.py").write_text("raise ImportError('not this one')\n")
    shutil.copytree(installed / "fgai", tmp_path / "lib" / "fgai")
    done = bench_in(ROOT / "docs", tmp_path / "lib", "status", "nodes")
    assert done.returncode == 2 and "there is no grid 'nodes'" in done.stderr
