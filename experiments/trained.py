"""Models of cells: trained, or from a cache whose names hold everything that makes a model what it is."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import io
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

try:
    import fcntl
except ImportError:  # not on this system; then several processes may train one parent each
    fcntl = None  # type: ignore[assignment]

import fgai
from experiments import methods
from experiments.cells import Cell, current_names
from experiments.defences import DEFENCES
from experiments.methods import FROM_SCRATCH, preset, setting_names, settings_for, train_method
from experiments.threats import BOX
from fgai import Graph
from fgai.records import plain
from fgai.training import load_model, save_model

ABOVE = ("certificates", "cli", "evaluation", "explanations", "figures", "reports")
"""The packages that no training imports; all others make a model what it is."""


SIZES = ("batch_size", "fan_out")
"""Settings of a cell that make its training one in mini-batches; its vanilla parent's is not."""


def settings_of(cell: Cell) -> dict[str, Any]:
    """Everything a training depends on beside the code: own settings, the parent's, and the defaults."""
    chosen = _chosen(cell)
    rest = {name: value for name, value in _defaults(cell.method).items() if name not in chosen}
    parent = {} if cell.method in FROM_SCRATCH else preset("vanilla", cell.model, cell.dataset, cell.predicts)
    values = {"settings": chosen, "parent": parent, "defaults": rest}
    return {name: plain(part) for name, part in values.items()}


def _chosen(cell: Cell) -> dict[str, Any]:
    """The settings of a training: the cell's over its preset, a trial's over the general one.

    What an earlier search chose for the method on this graph has no say in the next: where a trial leaves it
    open, the general preset or the default is taken.
    """
    where = (cell.method, cell.model, cell.dataset, cell.predicts)
    found = settings_for(*where)
    if cell.kind == "search":
        before = {**_defaults(cell.method), **settings_for(*where, tuned=False)}
        found = {name: before.get(name, value) for name, value in found.items()}
    return {**found, **current_names(cell.settings)}


@functools.cache
def _defaults(method: str) -> dict[str, Any]:
    """A method's settings where nobody gives any."""
    found = methods.defaults(method)
    return {**found, "box": BOX} if "box" in found else found


OWN = ("algorithm1.py", "defences.py", "methods.py", "terms.py")
"""The files of the experiments that train, too."""


def training_sources(root: Path) -> list[Path]:
    """Every file of the package that can change a trained model, in a fixed order."""
    return sorted(path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in ABOVE)


@functools.cache
def training_code(root: Path | None = None) -> str:
    """A short hash of the code that trains: a model of other code is not taken for this one's.

    Docstrings, lines of comments and empty lines do not count.
    """
    root, digest = Path(fgai.__file__).parent if root is None else root, hashlib.sha256()
    for file in training_sources(root):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(_told(file.read_text(encoding="utf-8")).encode())
    for file in (Path(__file__).with_name(name) for name in OWN):
        digest.update(_told(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:12]


@functools.cache
def _told(source: str) -> str:
    """What a source tells the interpreter, line by line: all but docstrings, comments and empty lines."""
    silent: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL) and not token.line[: token.start[1]].strip():
            silent.add(token.start[0])
    return "\n".join(line for n, line in enumerate(source.split("\n"), 1) if n not in silent)


def model_path(cache: Path | None, cell: Cell, **more: Any) -> Path | None:
    """Where the model of a cell is kept: named by its settings and by the code; None without a cache."""
    if cache is None:
        return None
    settings = {**settings_of(cell), **more, "code": training_code()}
    tag = dataclasses.replace(cell, kind="evaluate", threats=(), label="", settings=settings).key
    return Path(cache) / f"{cell.dataset}-{cell.model}-{cell.method}-s{cell.seed}-{tag}.safetensors"


def trained(
    cell: Cell, graph: Graph, vanilla: nn.Module | None, device: str, path: Path | None, *, anew: bool = False
) -> tuple[nn.Module, bool]:
    """Return the model of a cell, and whether it was trained now."""
    if path is not None and path.exists() and not anew:
        return load_model(path, factory=DEFENCES.get(cell.method)).to(device), False
    settings = _chosen(cell)
    if "box" in setting_names(cell.method, cell.model):
        settings = {"box": BOX, **settings}
    options = {name: settings.pop(name) for name in SIZES if name in settings}
    if cell.kind == "search":  # a trial is what its settings say, and nothing else
        options["check"] = False
    model = train_method(
        cell.method,
        cell.model,
        graph,
        seed=cell.seed,
        vanilla=vanilla,
        device=device,
        progress=False,
        settings=settings,
        **options,
    )
    if path is not None:
        factory = DEFENCES.get(cell.method)
        save_model(model, path, factory=factory, arguments=getattr(model, "config", None))
    return model, True


def training_graph(graph: Graph) -> Graph:
    """Return a graph without its test nodes and their edges: everything an inductive training may know."""
    assert graph.features is not None and graph.y is not None and graph.test_mask is not None
    there = ~graph.test_mask
    nodes, (source, destination) = there.nonzero().flatten(), graph.edge_index
    edges = (there.cumsum(0) - 1)[graph.edge_index[:, there[source] & there[destination]]]
    kept = {name: getattr(graph, name)[nodes] for name in ("y", "train_mask", "val_mask")}
    return Graph.from_edges(edges, len(nodes), graph.features.select(nodes), name=graph.name, **kept)


def vanilla_of(cell: Cell, graph: Graph, device: str, cache: Path | None) -> tuple[nn.Module, bool]:
    """Return the vanilla parent that cells of one model, dataset and seed share, and whether it is new."""
    parent = dataclasses.replace(cell, kind="evaluate", method="vanilla", settings={}, label="")
    path = model_path(cache, parent)
    with _one_at_a_time(path):
        return trained(parent, graph, None, device, path)


@contextmanager
def _one_at_a_time(path: Path | None) -> Iterator[None]:
    """Let one process of this machine in at a time: the first trains a model, the others find it."""
    if path is None or fcntl is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def model_of(
    cell: Cell, graph: Graph, vanilla: nn.Module | None, device: str, cache: Path | None
) -> tuple[nn.Module, bool]:
    """Return the model a cell measures, and whether it was trained now.

    Evaluations train, because their records hold the training's cost, and leave the model in the cache;
    certificates and explainers take it from there. Searches and costs train, and keep nothing.
    """
    kinds = ("evaluate", "attack", "certify", "inject", "collective", "vote", "explainers", "again")
    keeps = cell.kind in kinds
    if cell.method == "vanilla" and keeps and not cell.settings:
        return vanilla_of(cell, graph, device, cache)
    path = model_path(cache, cell) if keeps else None
    return trained(cell, graph, vanilla, device, path, anew=cell.kind == "evaluate")
