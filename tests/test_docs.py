"""The documentation: its Python runs, its links lead somewhere, and its site builds without a warning."""

from __future__ import annotations

import ast
import base64
import io
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import wraps
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from matplotlib.figure import Figure

import fgai
from fgai.attacks import THREATS, EnsembleInjection
from fgai.datasets import link_split, planted, random_split
from fgai.errors import FgaiWarning
from fgai.graph import Graph
from fgai.metrics import spec
from fgai.models import MODELS
from fgai.tasks import TASKS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "console", ""}
SHORT = {
    "train": {"epochs": 3, "progress": False},
    "make_faithful": {"epochs": 2, "progress": False},
    "harden": {"epochs": 2, "progress": False},
    "evaluate": {"curves": False, "nulls": False},
    "compare": {"curves": False, "nulls": False, "explanation_attack": False},
}


def blocks(page: Path) -> list[str]:
    """The Python of a page, in order."""
    return [code for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind == "python"]


WITH_PYTHON = [page for page in PAGES if blocks(page)]


def shortened(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The same call, with options that make it quick."""

    @wraps(function)
    def quick(*args: Any, **given: Any) -> Any:
        return function(*args, **{**given, **options})

    return quick


def small(name: str = "planted", *, task: str | None = None, seed: int = 0) -> Graph:
    """What `load_dataset` gives to a page: the built-in graph, made small."""
    assert name == "planted", "a page must not need files"
    graph = planted(num_nodes=120)
    split = random_split(graph, seed)
    graph = graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)
    return graph if task is None else link_split(graph, seed)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """What the pages speak of without making it: a graph, a model and the faithful one made from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)
        data = small()
        model = fgai.train("GAT", data, **SHORT["train"])
        faithful = fgai.make_faithful(model, data, **SHORT["make_faithful"])
    return {"fgai": fgai, "data": data, "model": model, "faithful": faithful}


def shorten_threats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fgai.attacks.ensemble.GENERATIONS", 1)
    for name, threat in list(THREATS.items()):
        ensemble = issubclass(threat.attack, EnsembleInjection)  # 0 steps are those of its members
        steps = 2 if ensemble else min(threat.budget.steps, 2)
        budget = replace(threat.budget, steps=steps, restarts=1)
        monkeypatch.setitem(THREATS, name, replace(threat, budget=budget))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Trainings and evaluations that take a moment; whatever a page registers is forgotten."""
    monkeypatch.chdir(tmp_path)
    for name, options in SHORT.items():
        monkeypatch.setattr(fgai, name, shortened(getattr(fgai, name), options))
    method = fgai.training.train_method
    options = {"settings": {"epochs": 3}, "progress": False}
    monkeypatch.setattr(fgai.training, "train_method", shortened(method, options))
    hetero = shortened(fgai.hetero.make_hetero_faithful, SHORT["make_faithful"])
    monkeypatch.setattr(fgai.hetero, "make_hetero_faithful", hetero)
    alone = shortened(fgai.training.accuracy_without_edges, SHORT["train"])
    monkeypatch.setattr(fgai.training, "accuracy_without_edges", alone)
    monkeypatch.setattr(fgai, "load_dataset", small)
    shorten_threats(monkeypatch)
    registries: list[dict[str, Any]] = [THREATS, MODELS, TASKS, spec._registry]
    before = [dict(registry) for registry in registries]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)  # models this raw are rightly doubted
        yield
    for registry, held in zip(registries, before, strict=True):
        registry.clear()
        registry.update(held)


class TestPython:
    @pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
    @pytest.mark.usefixtures("quick")
    def test_every_block_runs(self, page: Path, trained: dict[str, Any]) -> None:
        """In order, each page on names of its own; what `trained` holds is there from the start."""
        torch.manual_seed(0)
        names = dict(trained)
        for code in blocks(page):
            exec(compile(code, page.name, "exec"), names)

    def test_all_python_is_in_such_blocks(self) -> None:
        """No other language, and no indented block that would not be run."""
        python = re.compile(r"^ {4}(?:import |from \w+ import |(?:\w+ = )?fgai\.\w+\()", re.MULTILINE)
        for page in [ROOT / "README.md", *PAGES]:
            text = page.read_text(encoding="utf-8")
            assert {kind for kind, _ in FENCE.findall(text)} <= LANGUAGES, page.name
            assert not python.search(FENCE.sub("", text)), page.name

    def test_readers_find_some_on_every_guide(self) -> None:
        guides = {"five-minutes", "own-model", "faithful", "read-a-certificate", "attack", "defend", "extend"}
        assert guides <= {page.stem for page in WITH_PYTHON}


def headings(page: Path) -> set[str]:
    """The names under which the headings of a Markdown file can be linked to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_in_the_repository_name_files_and_headings() -> None:
    """Of what is read without the site as well; the pages of the site are checked as they are built."""
    sources = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
    ]
    for page in [*sources, *PAGES]:
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            address, _, name = link.partition("#")
            if address.startswith("http"):
                continue
            target = page.parent / address if address else page
            assert target.exists(), f"{page.name}: {link}"
            assert not name or name in headings(target), f"{page.name}: {link}"


def test_commands_of_reproduce_name_what_there_is() -> None:
    from experiments import grid_names, only, read_grid
    from experiments.figures import FIGURES
    from experiments.tables import TABLES

    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert len(re.findall(r"[^\s|]+", text)) <= 700
    known = {"run": set(grid_names()), "table": set(TABLES), "figure": set(FIGURES)}
    found = re.findall(r"fgai bench (run|table|figure) ([\w-]+)([^`\n]*)", text)
    assert len(found) > 15
    for verb, name, options in found:
        assert name in known[verb], f"{verb} {name}"
        if verb == "run":
            assert only(read_grid(name), re.findall(r"--only (\S+)", options)), name


def test_lists_and_tables_begin_after_a_blank_line() -> None:
    """The site would show them as running text."""
    begins = re.compile(r"^(?![-|<>\s]|\d+\. ).+\n(?:- |\d+\. |\|)", re.MULTILINE)
    for page in PAGES:
        found = begins.search(FENCE.sub("", page.read_text(encoding="utf-8")))
        assert not found, f"{page.name}: {found[0] if found else ''}"


class Links(HTMLParser):
    """Links, names and outside files of one page; apart, the links of its text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.text: set[str] = set()
        self.names: set[str] = set()
        self.loaded: set[str] = set()
        self._in_text = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self._in_text |= tag == "article"
        self.names.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
            if self._in_text:
                self.text.add(found["href"])
        if tag in ("script", "img", "iframe") and "src" in found:
            self.loaded.add(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "preconnect", "preload", "icon"):
            self.loaded.add(found["href"])

    def handle_endtag(self, tag: str) -> None:
        self._in_text &= tag != "article"


JOURNEYS = {
    "with a model of one's own": ("own-model.html", "faithful.html", "read-a-certificate.html"),
    "with the paper": ("reproduce.html", "method.html", "results.html"),
    "as an auditor": ("attack.html", "read-a-certificate.html", "threat-model.html"),
}


def run_here(source: Path, folder: Path) -> Any:
    """Run a notebook in this process, which needs no kernel, and return it with its outputs."""
    import jupytext

    notebook, names = jupytext.read(source), {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tree, value = ast.parse(re.sub("^%.*$", "", cell.source, flags=re.MULTILINE)), None
        last = tree.body[-1] if tree.body else None
        with redirect_stdout(io.StringIO()) as printed:
            if isinstance(last, ast.Expr):
                exec(compile(ast.Module(tree.body[:-1], []), source.name, "exec"), names)
                value = eval(compile(ast.Expression(last.value), source.name, "eval"), names)
            else:
                exec(compile(tree, source.name, "exec"), names)
        stream = SimpleNamespace(output_type="stream", name="stdout", text=printed.getvalue())
        cell.outputs = [stream, *([] if value is None else [shown(value)])]
    return notebook


def shown(value: Any) -> Any:
    """The output of a cell that ends in a value."""
    if isinstance(value, Figure):
        value.savefig(picture := io.BytesIO(), format="png", dpi=40)
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
    elif type(value).__name__ == "WhatIfWidget":
        data = {"application/vnd.jupyter.widget-view+json": {}}
    elif hasattr(value, "_repr_html_"):
        data = {"text/html": value._repr_html_()}
    else:
        data = {"text/plain": repr(value)}
    return SimpleNamespace(output_type="execute_result", data=data)


NOTEBOOKS = ("quick-tour", "audit-your-gat", "what-if")


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run_in_a_kernel(name: str, tmp_path: Path) -> None:
    from tools.notebooks import write_page

    write_page(DOCS / "notebooks" / f"{name}.py", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "FGAI: class" in text if name == "what-if" else text.count('class="fgai-table"') >= 3


@pytest.fixture(scope="module")
def short_notebooks() -> Iterator[None]:
    """Notebooks run in this process, with short trainings and attacks."""
    from tools import notebooks

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)
        patched.setattr(notebooks, "run", run_here)
        for name in ("train", "make_faithful"):
            patched.setattr(fgai, name, shortened(getattr(fgai, name), SHORT[name]))
        shorten_threats(patched)
        yield


@pytest.fixture(scope="module")
def site(short_notebooks: None) -> Path:
    """The site as `make docs` builds it, but with short notebooks; a warning fails."""
    pytest.importorskip("zensical")
    from tools import site as tool

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)
        tool.stage()
    assert tool.build() == 0
    return tool.SITE


@pytest.mark.many
@pytest.mark.usefixtures("short_notebooks")
@pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")  # models this raw are rightly doubted
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_become_pages(name: str, tmp_path: Path) -> None:
    from tools.notebooks import write_page

    write_page(DOCS / "notebooks" / f"{name}.py", tmp_path / f"{name}.md")
    text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    if name == "what-if":
        assert "FGAI: class" in text and "Widget" not in text
        return
    assert text.count('class="fgai-table"') >= 3 and 'class="dataframe"' in text
    assert bool(list(tmp_path.glob("*.png"))) == (name == "quick-tour")


def test_every_public_package_has_a_page_in_the_reference(tmp_path: Path) -> None:
    from tools.site import packages, write_reference

    write_reference(tmp_path / "api")
    index = (tmp_path / "api" / "index.md").read_text(encoding="utf-8")
    assert len(list((tmp_path / "api").glob("*.md"))) == len(packages()) + 1
    assert all(f"`{name}`" in index for name in packages())


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path.resolve(): Links(path) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow  # builds the whole site
class TestSite:
    def test_every_link_leads_somewhere(self, pages: dict[Path, Links]) -> None:
        assert len(pages) > 60
        for page, found in pages.items():
            for link in found.links | found.loaded:
                address, _, name = link.partition("#")
                if address.startswith(("http:", "https:", "mailto:")):
                    continue
                target = (page.parent / unquote(address)).resolve() if address else page
                assert target.exists(), f"{page.name}: {link}"
                if name and target in pages and name != "__codelineno":
                    assert unquote(name) in pages[target].names, f"{page.name}: {link}"

    def test_nothing_is_fetched(self, site: Path, pages: dict[Path, Links]) -> None:
        for page, found in pages.items():
            outside = [address for address in found.loaded if address.startswith(("http", "//"))]
            assert not outside, f"{page.name}: {outside}"
        for sheet in site.rglob("*.css"):
            assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name

    @pytest.mark.parametrize("journey", JOURNEYS)
    def test_goals_are_near_the_front_page(self, site: Path, pages: dict[Path, Links], journey: str) -> None:
        """Under five clicks by links of the text alone, each from the one before."""
        clicks, here = 0, (site / "index.html").resolve()
        for goal in JOURNEYS[journey]:
            there = (site / goal).resolve()
            clicks += distance(here, there, pages)
            here = there
        assert clicks < 5

    def test_every_page_is_in_the_menu(self, site: Path, pages: dict[Path, Links]) -> None:
        menu = {
            (site / unquote(link.partition("#")[0])).resolve()
            for link in pages[(site / "index.html").resolve()].links
        }
        decisions = (site / "decisions").resolve()
        assert {page for page in pages if page.parent != decisions} <= menu

    def test_every_public_package_has_its_reference(self, pages: dict[Path, Links]) -> None:
        from tools.site import packages

        named = {name for page, found in pages.items() if page.parent.name == "api" for name in found.names}
        assert {f"fgai.{name}" for name in fgai.__all__ if not name.startswith("_")} <= named
        assert {"fgai.metrics.overlap", "fgai.attacks.Budget", "fgai.training.train_method"} <= named
        assert len([page for page in pages if page.parent.name == "api"]) == len(packages()) + 1

    def test_notebooks_show_what_they_printed(self, site: Path) -> None:
        for name in ("quick-tour", "audit-your-gat"):
            page = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
            assert page.count('class="fgai-table"') >= 3 and 'class="dataframe"' in page
        assert list((site / "notebooks").glob("quick-tour-*.png"))


def distance(start: Path, goal: Path, pages: dict[Path, Links]) -> int:
    """Clicks between two pages."""
    seen, waiting = {start: 0}, deque([start])
    while waiting:
        page = waiting.popleft()
        if page == goal:
            return seen[page]
        for link in pages[page].text:
            target = (page.parent / unquote(link.partition("#")[0])).resolve()
            if target in pages and target not in seen:
                seen[target] = seen[page] + 1
                waiting.append(target)
    pytest.fail(f"{goal.name} cannot be reached from {start.name}")
