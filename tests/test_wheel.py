"""The package as it is shipped: built, installed in a fresh environment, and used from there.

The environment sees torch and the rest through a path file, so nothing is downloaded. Run by `make
wheel-check`; kernels are not compiled, which would take a minute for every installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fgai

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `fgai` script of an environment that holds the wheel alone, and sees its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    (wheel,) = built.glob("*.whl")
    python = folder / "bin" / "python"
    pip: list[Any] = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    outside = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(outside) + "\n")
    return folder / "bin" / "fgai"


class Shell:
    """Runs the installed script in a folder of its own."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.script, self.folder = script, folder

    def run(self, *words: str, code: int = 0) -> str:
        drop = ("PYTHONPATH", "FGAI_DATA")
        env = {k: v for k, v in os.environ.items() if k not in drop} | {"NUMBA_DISABLE_JIT": "1"}
        done = subprocess.run(
            [self.script, *words], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def answer(self, *words: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(*words, "--json", "--quiet", code=code))
        return found


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"fgai", f"fgai-{fgai.__version__}.dist-info"}
    there = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "fgai").rglob("*.*")}
    wanted = {name for name in there if "__pycache__" not in name}
    assert wanted <= set(names)


def test_the_source_distribution_can_build_and_test_itself(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2] for name in found.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"} <= names
    assert {"src/fgai/__init__.py", "tests/test_wheel.py", "experiments/__init__.py"} <= names


def test_it_works_from_there(installed: Path, tmp_path: Path) -> None:
    shell = Shell(installed, tmp_path)
    assert shell.run("--version") == f"fgai {fgai.__version__}\n"
    doctor = shell.answer("doctor")
    assert doctor["good"] and doctor["packages"]["fgai"] == fgai.__version__
    shell.run("train", "--epochs", "2", "-o", "gat.safetensors")
    fast = ("--threat", "random", "--no-curves", "--no-nulls")
    shell.run("evaluate", "gat.safetensors", *fast, "-o", "evaluation.json")
    shell.run("report", "evaluation.json", "-o", "report.html")
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    shell.run("card", "evaluation.json", "-o", "cards/gat.json")
    assert shell.answer("check", "cards/gat.json", "--min", "f1=0")["passed"] is True
    shell.run("check", "cards/gat.json", "--min", "f1=2", code=1)
    shell.run("check", "cards/gat.json", "--min", "beauty=0", code=2)
    shell.run("cards", "cards", "--output", "page.html")
    assert "<table" in (tmp_path / "page.html").read_text(encoding="utf-8")
