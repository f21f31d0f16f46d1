"""Build the documentation site: python -m tools.site (or `make docs`).

The pages of docs/ are copied to build/pages, others are written beside them (one per public package of fgai,
from its docstrings; one per notebook, with what it printed; the list of decisions), and Zensical makes
build/site of it all. A warning is an error. Nothing is fetched, neither to build the site nor to read it.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fgai
from tools.notebooks import write_page

ROOT = Path(__file__).parent.parent
DOCS, PAGES, SITE = ROOT / "docs", ROOT / "build" / "pages", ROOT / "build" / "site"
COPIED = ("*.md", "*.png", "*.css")
NOTEBOOK = re.compile(r"(\]\((?:\.\./)*notebooks/[\w-]+)\.py(?=\))")
"""A link to a notebook: in the repository it leads to the source, on the site to the page."""
LONG = "<!-- site table: "
"""Begins a table that only the site shows, made of the records when it is built."""
API = """# `{name}`

::: {name}
"""
DECISIONS = """# Decisions

What somebody may want to undo, and why it is as it is. Half a page each. Numbers in them were measured when
the decision was made, and are not kept up; today's are among the [results](../results.md).

{entries}
"""
API_INDEX = """# Reference

Every public name with its arguments, from the docstrings. Verbs are functions of `fgai` itself; nouns are
packages.

{entries}
"""


def stage(pages: Path = PAGES) -> None:
    """Put all pages into one folder: those of docs/, the reference and the notebooks."""
    shutil.rmtree(pages, ignore_errors=True)
    for pattern in COPIED:
        for source in DOCS.rglob(pattern):
            target = pages / source.relative_to(DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    long = []
    for page in pages.rglob("*.md"):
        text = NOTEBOOK.sub(r"\1.md", page.read_text(encoding="utf-8"))
        if LONG in text:
            long.append(page)
        page.write_text(text.replace(LONG, "<!-- table: "), encoding="utf-8")
    command = [sys.executable, "-m", "fgai", "bench", "fill", *map(str, long), "--quiet"]
    subprocess.run([*command, "--results", str(ROOT / "results")], cwd=ROOT, check=True)
    write_reference(pages / "api")
    write_decisions(pages / "decisions")
    for source in sorted((DOCS / "notebooks").glob("*.py")):
        write_page(source, pages / "notebooks" / f"{source.stem}.md")


def write_decisions(folder: Path) -> None:
    """Write the page that lists the decisions by their titles."""
    pages = sorted(folder.glob("[0-9]*.md"))
    titles = [page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in pages]
    entries = [f"- [{title}]({page.name})" for title, page in zip(titles, pages, strict=True)]
    (folder / "index.md").write_text(DECISIONS.format(entries="\n".join(entries)), encoding="utf-8")


def write_reference(folder: Path) -> None:
    """Write a page for `fgai` and for each of its public packages, and one that lists them."""
    folder.mkdir(parents=True)
    entries = []
    for name in packages():
        page = f"{name.removeprefix('fgai.')}.md"
        text = API.format(name=name) + (verbs_first() if name == "fgai" else "")
        (folder / page).write_text(text, encoding="utf-8")
        entries.append(f"- [`{name}`]({page}): {first_sentence(name)}")
    (folder / "index.md").write_text(API_INDEX.format(entries="\n".join(entries)), encoding="utf-8")


def verbs_first() -> str:
    """Return the option that puts functions before classes, and errors last."""
    public = [name for name in fgai.__all__ if not name.startswith("_")]
    order = sorted(public, key=lambda name: (name[0].isupper(), name.endswith(("Error", "Warning"))))
    return f"    options:\n      group_by_category: false\n      members: [{', '.join(order)}]\n"


def packages() -> list[str]:
    """Return `fgai` and its public packages and modules, by name."""
    names = {*dir(fgai), "reports.cards", "reports.figures"} - set(fgai.__all__)
    return ["fgai", *sorted(f"fgai.{name}" for name in names)]


def first_sentence(name: str) -> str:
    """Return the first line of a module's docstring."""
    path = ROOT / "src" / Path(*name.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").splitlines()[0]


def build() -> int:
    """Make the site of the staged pages, strictly, and return the exit status."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    stage()
    sys.exit(build())
