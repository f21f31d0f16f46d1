"""Every example in a docstring, of the package and the experiments: found by itself, run, and counted."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r"^\s*>>> ", re.MULTILINE)


def modules() -> dict[str, int]:
    """Every module whose text has an example, and how many it has."""
    found = {}
    for base in (ROOT / "src", ROOT):
        package = base / ("fgai" if base.name == "src" else "experiments")
        for path in sorted(package.rglob("*.py")):
            count = len(EXAMPLE.findall(path.read_text(encoding="utf-8")))
            if count:
                parts = path.relative_to(base).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = count
    return found


class Finder(doctest.DocTestFinder):
    """Also finds the examples of functions that check the types of their arguments first."""

    def _from_module(self, module: types.ModuleType, object: object) -> bool:
        return bool(super()._from_module(module, inspect.unwrap(object)))  # type: ignore[misc]


EXAMPLES = modules()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 55


@pytest.mark.filterwarnings("ignore::fgai.errors.ReliabilityWarning")  # of models that trained for a moment
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module, runner = importlib.import_module(name), doctest.DocTestRunner()
    for test in Finder().find(module, name):
        runner.run(test)
    ran = runner.summarize()
    assert ran.failed == 0
    assert ran.attempted == EXAMPLES[name], "an example was not found by doctest, or is skipped"
