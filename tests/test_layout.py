"""The shape of the repository: no circles between modules, tests that mirror the source, files that fit."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fgai", "experiments")
CODE = ("benchmarks", "examples", "experiments", "src", "tests", "tools")
MOST_LINES = 600


def imports_of(*packages: str) -> dict[str, set[str]]:
    """Every module and what it imports: at the top, in functions and under TYPE_CHECKING."""
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_circle_of_imports() -> None:
    imports = imports_of(*PACKAGES)
    assert len(imports) > 200
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' → '.join(reversed(error.args[1]))}")


def test_circles_inside_functions_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ring"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "one.py").write_text("def late():\n    from ring.two import x\n    return x\n")
    (folder / "two.py").write_text(
        "from typing import TYPE_CHECKING\nx = 1\nif TYPE_CHECKING:\n    from ring.one import late\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CycleError):
        TopologicalSorter(imports_of("ring")).prepare()


def python_files(folder: Path) -> list[Path]:
    """The Python files below a folder."""
    return sorted(folder.rglob("*.py"))


def test_every_folder_of_tests_has_its_source() -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "fgai").glob("*/__init__.py")}
    parts = [path.relative_to(ROOT / "tests").parts for path in python_files(ROOT / "tests")]
    folders = {part[0] for part in parts if len(part) > 1}
    assert folders - {"experiments", "support"} <= packages
    assert {"support", "experiments", "attacks", "training"} <= folders


def test_no_module_hides_behind_a_package_of_its_name() -> None:
    files = [path for name in ("src", "experiments") for path in python_files(ROOT / name)]
    assert not [path for path in files if path.with_suffix("").is_dir()]


def test_files_fit() -> None:
    files = [path for folder in CODE for path in python_files(ROOT / folder)]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lengths) > 300
    long = {str(path.relative_to(ROOT)): count for path, count in lengths.items() if count > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines, split them: {long}"
