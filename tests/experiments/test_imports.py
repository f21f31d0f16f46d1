"""The experiments use what everybody may use: names that a package of fgai lists as public."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import experiments
import fgai

FOLDER = Path(experiments.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
PACKAGES = {path.name for path in Path(fgai.__file__).parent.iterdir() if (path / "__init__.py").exists()}


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything a file imports from fgai; no name where it is a module itself."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "fgai")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{file}: relative import"
            if node.module.split(".")[0] == "fgai":
                yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_public_names_only(file: Path) -> None:
    for module, name in imported(file):
        parts = module.split(".")
        public = getattr(importlib.import_module(module), "__all__", None)
        assert public is not None, f"{file.name} imports {module}, a private module"
        if name and not (module == "fgai" and name in PACKAGES):
            assert name in public, f"{file.name} takes {name} from {module}, which does not offer it"
        assert not any(part.startswith("_") for part in (*parts, name))


def test_something_is_imported() -> None:
    assert sum(len(list(imported(file))) for file in FILES) > 50


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_no_private_attribute_of_the_package(file: Path) -> None:
    """`fgai.evaluation.run.describe` would be the same by another way."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fgai":
            assert node.attr in fgai.__all__ or node.attr in ("__file__", *PACKAGES), (
                f"{file}: fgai.{node.attr}"
            )
