"""`fgai data` lists datasets and converts graphs to folders; `fgai doctor` checks the installation."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numba
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from fgai import datasets
from fgai.attacks import Budget, PGDInjection
from fgai.certificates import certify_attention
from fgai.cli import options
from fgai.cli.app import App
from fgai.cli.output import FAILURE, Output, command
from fgai.compiled import REBUILT
from fgai.datasets.loader import find, search_path, user_cache
from fgai.errors import EXTRAS, collect_warnings
from fgai.evaluation import compare
from fgai.graph import Graph
from fgai.large import convert as convert_graph
from fgai.ops import use_backend
from fgai.training import make_faithful, train, untrained_model

data = App(no_args_is_help=True)


@data.callback()
def _data() -> None:
    """List and describe datasets, and convert graphs that are larger than memory."""


def _location_of(name: str, root: Path | None) -> str:
    """Return where a dataset's files are: `built in`, a folder, or `to download`."""
    about = datasets.info(name)
    if not about.files:
        return "built in"
    files = find(about, root)
    return "to download" if files is None else str(files[0].parent)


@data.command("list", epilog="Example: fgai data list --json")
@command
def _list(*, root: options.Root = None, out: Output) -> None:
    """List the datasets, their sizes, and whether their files are on this machine."""
    sizes, rows = ("nodes", "edges", "features", "classes"), []
    table = RichTable(box=None, padding=(0, 1))
    for column in ("name", "task", *sizes, "where"):
        table.add_column(column, justify="right" if column in sizes else "left", no_wrap=True)
    for name in datasets.names():
        about, where = datasets.info(name), _location_of(name, root)
        counts = {size: getattr(about, f"num_{size}") for size in (*sizes, "graphs")}
        rows.append({"name": name, **counts, "task": about.task, "where": where})
        place = where if where in ("built in", "to download") else "here"
        table.add_row(name, about.task, *(f"{counts[size]:,}" for size in sizes), place)
    out.result({"command": "data list", "datasets": rows}, lambda console: console.print(table))


@data.command("info", epilog="Example: fgai data info amazon-photo")
@command
def _info(name: Annotated[str, "Name of a dataset."], *, root: options.Root = None, out: Output) -> None:
    """Describe a dataset: its sizes, source, licence and files."""
    about = datasets.info(name)
    values = {**dataclasses.asdict(about), "where": _location_of(name, root)}
    sizes = ("num_nodes", "num_edges", "num_features", "num_classes", "num_graphs")
    lines = {label.removeprefix("num_"): f"{values[label]:,}" for label in sizes}
    lines |= {label: str(values[label]) for label in ("task", "source", "citation", "licence")}
    lines |= {"splits": ", ".join(about.splits), "files": "; ".join(map(" ".join, about.files))}
    heading = f"{about.name} ({values['where']}): {about.description}"
    out.result({"command": "data info", **values}, partial(_show_lines, {"": heading, **lines}))


def _show_lines(lines: Mapping[str, str], console: Console) -> None:
    table = RichTable(show_header=False, box=None)
    for label, text in lines.items():
        table.add_row(label, escape(text))
    console.print(table)


@data.command("convert", epilog="Example: fgai data convert edges.csv.gz graph --features x.npy --undirected")
@command
def _convert(
    source: Annotated[str, "Edge list, PyG file, folder of tables, or name of a dataset."],
    target: Annotated[Path, "The new folder."],
    *,
    node_table: Annotated[Path | None, "CSV with features, labels and split of the nodes."] = None,
    features: Annotated[Path | None, ".npy with the features [N, F]."] = None,
    labels: Annotated[Path | None, ".npy with the classes [N]."] = None,
    undirected: Annotated[bool, "Also store every edge's reverse."] = False,
    force: Annotated[bool, "Replace an older stored graph."] = False,
    resume: Annotated[bool, "Continue a stopped run, or discard its files."] = True,
    root: options.Root = None,
    out: Output,
) -> None:
    """Convert a graph to a folder of memory-mapped arrays for `--data`.

    Edge lists (.csv, .txt, .tsv, .edges, also .gz; .parquet, .npy) are streamed and may be larger than
    memory. The folder appears when it is complete; a stopped run continues from its last finished stage.
    """
    files: dict[str, Any] = {"node_table": node_table, "features": features, "labels": labels, "root": root}
    stored = convert_graph(source, target, undirected=undirected, overwrite=force, resume=resume, **files)
    sizes = {"nodes": stored.num_nodes, "edges": stored.num_edges, "features": stored.num_features}
    values = {"path": str(stored.path), "name": stored.name, **sizes, "fingerprint": stored.fingerprint}
    counts = ", ".join(f"{count:,} {what}" for what, count in sizes.items())
    out.result({"command": "data convert", **values}, f"{target}: {counts} ({stored.fingerprint})")


@command
def doctor(
    *,
    compile_: Annotated[bool, "Compile the CPU kernels of every model now, for later runs."] = False,
    root: options.Root = None,
    out: Output,
) -> None:
    """Check versions, device, kernels and data, and run a tiny training, attack and certificate.

    Examples:
    - `fgai doctor --compile`
    - `fgai doctor --json`
    """
    out.say("checking; the first run compiles the kernels")
    packages = {name: _version(name) for name in (*PACKAGES, *EXTRAS)}
    places = {name: _location_of(name, root) for name in datasets.names()}
    chosen = {**CHECKS, "compiled": _compile} if compile_ else CHECKS
    checks = {name: _attempt(check) for name, check in chosen.items()}
    advice = []
    if packages["plotly"] is None:
        advice.append("reports need plotly: pip install 'fgai[report]'")
    if all(where == "to download" for name, where in places.items() if name != "planted"):
        advice.append("no datasets found; they are downloaded when needed, or set FGAI_DATA to their folder")
    values: dict[str, Any] = {
        "command": "doctor",
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "data": places,
        "folders": [str(folder) for folder in search_path(root)],
        "cache": str(user_cache()),
        "checks": checks,
        "advice": advice,
        "good": all(check["good"] for check in checks.values()),
    }
    lines = {
        "python": f"{values['python']} on {values['system']}",
        "packages": ", ".join(f"{name} {number or 'not installed'}" for name, number in packages.items()),
        "device": f"{values['device']}, {values['threads']} threads",
        "data found": ", ".join(name for name, where in places.items() if where != "to download"),
        "data folders": ", ".join(values["folders"]) or "none",
        "cache": values["cache"],
    }
    for name, check in checks.items():
        mark = "good" if check["good"] else "BAD"
        lines[name] = f"{mark}  {check['said']} ({check['seconds']:.1f} s)"
    if advice:
        lines["advice"] = "\n".join(advice)
    out.result(values, partial(_show_lines, lines))
    if not values["good"]:
        raise typer.Exit(FAILURE)


PACKAGES = (
    *("fgai", "torch", "torch_geometric", "numpy", "scipy", "numba", "safetensors", "rich", "typer"),
    *("matplotlib", "triton"),
)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels() -> str:
    """The compiled CPU kernels agree with plain PyTorch on a small forward pass."""
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT=1: no kernels, the slower reference runs in their place"
    graph = _small_graph()
    model = untrained_model("GAT", graph).eval()
    with torch.no_grad():
        fast = model(graph)
        with use_backend("reference"):
            slow = model(graph)
    gap = float((fast - slow).abs().max())
    if not gap < 1e-4:
        raise ValueError(f"kernels and reference differ by {gap:.2g}")
    return f"kernels and reference agree to {gap:.0e}"


def _stored() -> str:
    """The machine code that numba keeps on disk can be read, or has been compiled again."""
    if not REBUILT:
        return "the stored code of the kernels can be read"
    return f"the stored code of {len(REBUILT)} kernels was damaged and is rebuilt: {', '.join(REBUILT)}"


def _small_graph() -> Graph:
    graph = datasets.planted(seed=1, num_nodes=60, num_classes=3)
    assert graph.y is not None
    split = datasets.random_split(graph.y, train=0.4, val=0.2)
    return graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)


def _compile() -> str:
    """Train, attack and certify every model once, which compiles what a first run would wait for."""
    graph = _small_graph()
    for name in ("GAT", "GATv2", "GT"):
        model = train(name, graph, epochs=2, progress=False)
        faithful = make_faithful(model, graph, epochs=2, progress=False)
        compare({name: model, "FGAI": faithful}, graph, nodes=2, edges=3)
        certify_attention(faithful, graph, vanilla=model)
    return "the kernels of GAT, GATv2 and GT are compiled and stored"


def _end_to_end() -> str:
    graph = _small_graph()
    model = train(untrained_model("GAT", graph), graph, epochs=3, progress=False)
    PGDInjection(Budget(nodes=2, edges=3, steps=2, step_size=0.2)).run(model, graph)
    certify_attention(model, graph, radius=0.01)
    return "trained, attacked and certified a small model"


def _figures() -> str:
    import_module("fgai.reports.figures")
    return "matplotlib can be imported"


CHECKS = {"kernels": _kernels, "end to end": _end_to_end, "stored code": _stored, "figures": _figures}


def _attempt(check: Callable[[], str]) -> dict[str, Any]:
    began, good = perf_counter(), True
    try:
        with collect_warnings():
            message = check()
    except Exception as error:
        message, good = f"{type(error).__name__}: {error}", False
    return {"good": good, "said": message, "seconds": perf_counter() - began}
