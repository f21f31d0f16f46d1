"""`fgai doctor`: is everything in place, and does a tiny run work from end to end?"""

from __future__ import annotations

import importlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import numba
import torch
import typer
from rich.console import Console
from rich.table import Table

from fgai import datasets
from fgai.attacks import Budget, PGDInjection
from fgai.certificates import certify
from fgai.cli import options
from fgai.cli.data import location_of
from fgai.cli.output import FAILURE, Output, command
from fgai.compiled import REBUILT
from fgai.datasets.download import search_path, user_cache
from fgai.errors import EXTRAS, collected
from fgai.ops import use_backend
from fgai.training import train, untrained

PACKAGES = (
    "torch",
    "torch_geometric",
    "numpy",
    "scipy",
    "numba",
    "safetensors",
    "rich",
    "typer",
    "matplotlib",
)
OPTIONAL = (*EXTRAS, "triton")


@command
def doctor(*, root: options.Root = None, json: options.Json = False, quiet: options.Quiet = False) -> None:
    """Check versions, device, kernels and data, and run a tiny training, attack and certificate.

    Examples:
    - `fgai doctor --json`
    """
    out = Output(json, quiet)
    out.say("checking; the first run compiles the kernels")
    values: dict[str, Any] = {
        "command": "doctor",
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("fgai", *PACKAGES, *OPTIONAL)},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "load": _load(),
        "data": {name: location_of(name, root) for name in datasets.names()},
        "folders": [str(folder) for folder in search_path(root)],
        "cache": str(user_cache()),
        "checks": {name: _attempt(check) for name, check in CHECKS.items()},
    }
    values["advice"] = _advice(values)
    values["good"] = all(check["good"] for check in values["checks"].values())
    out.result(values, lambda console: _show(console, values))
    if not values["good"]:
        raise typer.Exit(FAILURE)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _kernels() -> str:
    """The compiled CPU kernels agree with plain PyTorch on a small forward pass."""
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT=1: no kernels, the slower reference runs in their place"
    graph = datasets.planted(seed=1, num_nodes=60, num_classes=3)
    model = untrained("GAT", graph).eval()
    with torch.no_grad():
        fast = model(graph)
        with use_backend("reference"):
            slow = model(graph)
    gap = float((fast - slow).abs().max())
    if not gap < 1e-4:
        raise ValueError(f"kernels and reference differ by {gap:.2g}")
    return f"kernels and reference agree to {gap:.0e}"


def _stored() -> str:
    """The machine code that numba keeps on disk can be read; what cannot was compiled anew by now."""
    if not REBUILT:
        return "the stored code of the kernels can be read"
    return f"the stored code of {len(REBUILT)} kernels was damaged and is rebuilt: {', '.join(REBUILT)}"


def _end_to_end() -> str:
    """Train, attack and certify a small model."""
    graph = datasets.planted(seed=1, num_nodes=60, num_classes=3)
    assert graph.y is not None
    split = datasets.random_split(graph.y, train=0.4, val=0.2)
    graph = graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)
    model = train(untrained("GAT", graph), graph, epochs=3, progress=False)
    PGDInjection(Budget(nodes=2, edges=3, steps=2, step_size=0.2)).run(model, graph)
    certify(model, graph, radius=0.01)
    return "trained, attacked and certified a small model"


def _picture() -> str:
    importlib.import_module("fgai.reports.figures")
    return "matplotlib draws"


CHECKS = {"kernels": _kernels, "end to end": _end_to_end, "stored code": _stored, "figures": _picture}


def _attempt(check: Any) -> dict[str, Any]:
    began = perf_counter()
    try:
        with collected():
            said, good = check(), True
    except Exception as error:
        said, good = f"{type(error).__name__}: {error}", False
    return {"good": good, "said": said, "seconds": perf_counter() - began}


def _advice(values: dict[str, Any]) -> list[str]:
    advice = []
    cores = os.cpu_count() or 1
    if values["load"] is not None and values["load"] > cores and not os.environ.get("OMP_WAIT_POLICY"):
        advice.append(
            f"{values['load']:.1f} processes share {cores} cores: set OMP_WAIT_POLICY=passive, or threads"
            " that wait for each other will slow everything down many times"
        )
    if values["packages"]["plotly"] is None:
        advice.append("reports need plotly: pip install 'fgai[report]'")
    if all(where == "to download" for name, where in values["data"].items() if name != "planted"):
        advice.append("no datasets found; they are downloaded when needed, or set FGAI_DATA to their folder")
    return advice


def _show(console: Console, values: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    packages = [f"{name} {number or 'not installed'}" for name, number in values["packages"].items()]
    table.add_row("python", f"{values['python']} on {values['system']}")
    table.add_row("packages", ", ".join(packages))
    table.add_row("device", f"{values['device']}, {values['threads']} threads")
    here = [name for name, where in values["data"].items() if where != "to download"]
    table.add_row("data found", ", ".join(here))
    table.add_row("data folders", ", ".join(values["folders"]) or "none")
    table.add_row("cache", values["cache"])
    for name, check in values["checks"].items():
        mark = "[green]good[/]" if check["good"] else "[red]BAD[/]"
        table.add_row(name, f"{mark}  {check['said']} ({check['seconds']:.1f} s)")
    console.print(table)
    for line in values["advice"]:
        console.print(f"advice: {line}", markup=False)
