"""What the library promises to the outside: public names, executed examples, and a clean tree."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import types
import warnings
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import pytest

import fgai
from fgai.errors import FgaiWarning

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(
    f"fgai.{path.parent.name}"
    for path in (ROOT / "src" / "fgai").glob("*/__init__.py")
    if path.stat().st_size
)


def public_names(module: types.ModuleType) -> set[str]:
    """Names without a leading underscore that are neither submodules nor imported from outside fgai."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("fgai")
        for alias in node.names
    }
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in foreign
    }


class TestNames:
    def test_root(self) -> None:
        assert fgai.__all__ == sorted(fgai.__all__, key=_isort)
        for name in fgai.__all__:
            assert getattr(fgai, name) is not None
        modules = {name for name in dir(fgai) if isinstance(getattr(fgai, name), types.ModuleType)}
        assert set(dir(fgai)) - modules == set(fgai.__all__)
        assert {f"fgai.{name}" for name in modules} >= set(PACKAGES) - {"fgai.cli"}
        with pytest.raises(AttributeError, match="'fgai' has no attribute 'load'"):
            fgai.load  # noqa: B018

    def test_root_says_the_same_to_type_checkers(self) -> None:
        tree = ast.parse(Path(str(fgai.__file__)).read_text(encoding="utf-8"))
        typed = {
            alias.name: str(node.module).split(".")[1]
            for block in tree.body
            if isinstance(block, ast.If)
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert typed == {name: home.split(".")[0] for name, home in fgai._HOMES.items()}
        assert {*typed, "__version__"} == set(fgai.__all__)

    def test_root_loads_nothing_until_asked(self) -> None:
        code = """
import json, sys, fgai
before = sorted(name for name in sys.modules if name.startswith(("fgai.", "torch", "numpy")))
here = dir(fgai)
print(json.dumps([before, sorted(fgai.__all__) == sorted(set(here) - set(fgai._PACKAGES))]))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        before, complete = json.loads(done.stdout)
        assert before == ["fgai.version"] and complete
        loaded = {name: fgai.__getattr__(name).__name__ for name in ("metrics", "attacks", "records")}
        assert loaded == {name: f"fgai.{name}" for name in ("metrics", "attacks", "records")}

    @pytest.mark.parametrize("name", PACKAGES)
    def test_packages(self, name: str) -> None:
        module = importlib.import_module(name)
        promised = getattr(module, "__all__", None)
        if promised is None:
            assert public_names(module) == set()
            return
        assert len(promised) == len(set(promised))
        for entry in promised:
            assert getattr(module, entry) is not None
        assert public_names(module) <= set(promised)

    def test_verbs_are_functions_and_nouns_are_packages(self) -> None:
        verbs = {"train", "make_faithful", "evaluate", "compare", "explain", "report", "record"}
        verbs |= {"certify_attention", "certify_injection", "load_dataset", "load_model", "save_model"}
        for name in PACKAGES:
            importlib.import_module(name)
        for name in verbs:
            assert isinstance(getattr(fgai, name), types.FunctionType) and f"fgai.{name}" not in PACKAGES
            assert getattr(fgai, name).__name__ == name
        for name in set(PACKAGES) - {"fgai.cli"}:
            assert isinstance(getattr(fgai, name.removeprefix("fgai.")), types.ModuleType)

    def test_version(self) -> None:
        assert fgai.__version__ == installed("fgai")
        assert f"version: {fgai.__version__}" in (ROOT / "CITATION.cff").read_text()
        assert f"## {fgai.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def _isort(name: str) -> tuple[int, str]:
    """Constants first, then classes, then the rest: the order ruff keeps `__all__` in."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, name


class TestReadme:
    def test_examples_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every Python block of the README, in order; only the trainings are cut short."""
        monkeypatch.chdir(tmp_path)
        short = partial(fgai.compare, curves=False, nulls=False, explanation_attack=False)
        monkeypatch.setattr(fgai, "train", partial(fgai.train, epochs=3, progress=False))
        monkeypatch.setattr(fgai, "make_faithful", partial(fgai.make_faithful, epochs=2, progress=False))
        monkeypatch.setattr(fgai, "compare", short)
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
        assert len(blocks) >= 2
        names: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FgaiWarning)  # models this raw are rightly doubted
            for block in blocks:
                exec(compile(block, "README.md", "exec"), names)
        assert (tmp_path / "faithful.safetensors").exists()
        assert names["explanation"].edge_mask.shape == (names["data"].num_edges,)

    def test_it_is_short_and_its_links_lead_somewhere(self) -> None:
        for page in [
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            ROOT / "CHANGELOG.md",
            *ROOT.glob("docs/**/*.md"),
        ]:
            text = page.read_text(encoding="utf-8")
            for link in re.findall(r"\]\(([^)#\s]+)", text):
                assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
        assert len((ROOT / "README.md").read_text().splitlines()) <= 150


class TestTree:
    def tracked(self) -> list[Path]:
        try:
            listed = subprocess.run(
                ["git", "ls-files", "*.py", "*.md", "*.toml", "Makefile"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("not a git checkout")
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]

    def test_nothing_is_left_over(self) -> None:
        """No notes to self, no debugger, no paths of somebody's machine."""
        left = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|\bpdb\.|/(home|root|Users)/\w|/wo" r"rk/")
        for path in self.tracked():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert not left.search(line), f"{path.name}:{number}: {line}"

    def test_the_library_prints_nothing_by_itself(self) -> None:
        for path in (ROOT / "src").rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path.name
