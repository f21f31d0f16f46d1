"""The work of processes in `tests/large/test_processes.py`, and their launcher.

Called with the folder of a stored graph, a folder for results, and a list of jobs as JSON. Processes are
forked from here, where everything is imported already; agent, rendezvous and restarts are torchrun's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from typer.testing import CliRunner

import fgai
from fgai.cli import app
from fgai.errors import FgaiError
from fgai.large import StoredGraph, evaluate_store, observe_store, process_group
from fgai.processes import ProcessGroup, current
from fgai.trackers import Tracker
from fgai.training import load_model, untrained_model
from fgai.training.capture import _backward
from fgai.training.loop import fit

MODEL: dict[str, Any] = {"hidden_channels": 3, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
TRAIN: dict[str, Any] = {"progress": False, "lr": 0.02, **MODEL}
SHORT: dict[str, Any] = {**TRAIN, "epochs": 4}
LONG: dict[str, Any] = {**TRAIN, "epochs": 8, "batch_size": 2, "fan_out": 3, "dropout": 0.4}
"""Saved once, after 5 epochs, where ranks are killed."""
MODELS: dict[str, dict[str, Any]] = {
    "GAT": {"hidden_channels": 3, "heads": 2},
    "GATv2": {"hidden_channels": 3, "heads": 2},
    "GT": {"hidden_channels": 8, "heads": (4, 1), "encodings": 0, "norm": "layer"},
}
STEADY: dict[str, Any] = {
    "epochs": 3, "progress": False, "nodes": 3, "edges": 2, "steps": 3, "batch_size": 7,
    "fan_out": 4,
}  # fmt: skip


def sockets() -> set[str]:
    """Those this process holds; of a forked one at first its parent's."""
    found = {str(place.readlink()) for place in Path("/proc/self/fd").iterdir() if place.is_symlink()}
    return {name for name in found if name.startswith("socket:")}


def listening(own: set[str]) -> list[str]:
    """Addresses, in hexadecimal, at which some sockets listen."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


@contextmanager
def small_blocks() -> Iterator[None]:
    """Cut even a small graph into blocks: of 50 edges, and of 13 rows of its seven features."""
    with (
        patch("fgai.large.observation.BLOCK", 50),
        patch("fgai.large.write.NUMBERS", 13 * 7),
    ):
        yield


def passes(stored: StoredGraph, folder: Path, ranks: ProcessGroup) -> None:
    """Exact passes of all kinds of models, each into a folder of its name."""
    graph = stored.load()
    for name, settings in MODELS.items():
        model = untrained_model(name, graph, seed=3, **settings).eval()
        observe_store(model, stored, folder / name, ranked=True, block_edges=40, group=ranks)


class Stop(Tracker):
    """Fails after an epoch."""

    def on_epoch(self, run: str, epoch: int, values: Any) -> None:
        if epoch == 1:
            raise OSError("no space left")


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except FgaiError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def scenes(graph: Path, folder: Path) -> None:
    """All that does not end a process, with what it came to, a file for each rank."""
    found: dict[str, Any] = {}
    stored, rank, before = StoredGraph(graph), int(os.environ["RANK"]), sockets()

    def keep(name: str, model: nn.Module) -> None:
        fgai.save_model(model, folder / f"{name}-{rank}.safetensors")

    with process_group(timeout=60) as ranks:
        found["size"], found["listening"] = ranks.size, listening(sockets() - before)
        model = fgai.train("GAT", stored, batch_size=4, fan_out=-1, **SHORT)
        keep("vanilla", model)
        keep("uneven", fgai.train("GAT", stored, batch_size=7, fan_out=-1, **SHORT))
        keep("faithful", fgai.make_faithful(model, stored, **STEADY))
        keep("long", fgai.train("GAT", stored, **LONG))
        with small_blocks():
            passes(stored, folder, ranks)
            one, two = (load_model(folder / f"{name}-{rank}.safetensors") for name in ("faithful", "vanilla"))
            found["evaluation"] = evaluate_store(one, stored, vanilla=two, group=ranks).to_dict()
        found["k"] = refused(lambda: evaluate_store(one, stored, k=2 + rank, group=ranks))
        found["seed"] = refused(lambda: fgai.train("GAT", stored, batch_size=4, seed=rank, **SHORT))
        found["whole"] = refused(lambda: fgai.train("GAT", stored.load(), **SHORT))
        norm = {**SHORT, "hidden_channels": 8, "heads": (4, 1), "encodings": 0}
        del norm["attention_dropout"]
        found["norm"] = refused(lambda: fgai.train("GT", stored, batch_size=4, **norm))
    found["after"] = current().size

    def missing() -> None:
        with process_group(timeout=60):
            fgai.train("GAT", graph if rank == 0 else graph / "nowhere", batch_size=4, **SHORT)

    def halted() -> None:
        with process_group(timeout=60):
            place = folder / "halted" if rank == 0 else None
            settings = {**SHORT, "batch_size": 4, "fan_out": -1, "checkpoint": place}
            fgai.train("GAT", stored, tracker=Stop(), **settings)

    found["missing"] = refused(missing)
    try:
        found["halted"] = refused(halted)
    except OSError as error:
        found["halted"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def killed(graph: Path, folder: Path, moments: list[list[float]]) -> None:
    """Train; in the n-th life a rank is killed so many seconds after it begins its step of a number.

    The other one then fails too, at once. The launcher names whoever it finds first, so that one lingers.
    """
    life, rank, steps = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), 0
    fatal, number, later = moments[life] if life < len(moments) else (-1, -1, 0)

    def mortal(parts: Any) -> Any:
        nonlocal steps
        steps += 1
        if (rank, steps) == (fatal, number):
            kill = Timer(later, os.kill, (os.getpid(), signal.SIGKILL))
            kill.start() if later else kill.function(*kill.args)
        return _backward(parts)

    with (
        patch("fgai.training.loop._backward", mortal),
        patch.object(sys.modules["fgai.training.methods"], "fit", partial(fit, checkpoint_every=5)),
        process_group(timeout=60) as ranks,
    ):
        try:
            model = fgai.train("GAT", graph, checkpoint=folder / "state", **LONG)
        except Exception:
            time.sleep(10)  # the launcher ends it long before
            raise
        if ranks.is_main:
            fgai.save_model(model, folder / "killed.safetensors")
            (folder / "lives.json").write_text(json.dumps([life, steps]))


def single(graph: Path, folder: Path) -> None:
    """Train on one rank, whose group of one makes the same exchanges as a larger one."""
    with process_group(timeout=60) as ranks:
        assert torch.distributed.is_initialized() and ranks.gather(3) == [3]
        model = fgai.train("GAT", graph, batch_size=7, fan_out=-1, **SHORT)
    fgai.save_model(model, folder / "model.safetensors")


def commands(graph: Path, folder: Path) -> None:
    """`fgai evaluate` and `fgai train` as every rank runs them; a file for each with what was printed."""
    path = folder / f"{os.environ['RANK']}.safetensors"
    fgai.save_model(untrained_model("GAT", StoredGraph(graph).load(), **MODELS["GAT"]), path)
    words = ["evaluate", str(path), "--data", str(graph), "--json"]
    stored, attack = (CliRunner().invoke(app, [*words, *more]) for more in (["--stored"], []))
    assert (stored.exit_code, attack.exit_code) == (0, 2), stored.output
    output, log = folder / "trained" / "model.safetensors", folder / "trained" / "log.csv"
    words = ["train", "--data", str(graph), "--output", str(output), "--log", str(log), "--json"]
    trained = CliRunner().invoke(app, [*words, "--epochs", "2", "--batch-size", "4"])
    assert trained.exit_code == 0, trained.output
    found = {"stored": stored.stdout, "attack": attack.output, "train": trained.stdout}
    path.with_suffix(".json").write_text(json.dumps(found | {"notes": trained.stderr}))


def launch(work: Callable[..., None], *args: object, ranks: int = 2, restarts: int = 0) -> str:
    """Run a function on some ranks; return what the launcher says if it does not end well."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.05, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, work)(*args)
    except ChildFailedError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, place = map(Path, sys.argv[1:3])
    for job in json.loads(sys.argv[3]):
        target = place / job["name"]
        target.mkdir()
        said = launch(globals()[job["work"]], where, target, *job.get("given", []), **job.get("how", {}))
        (target / "failed.txt").write_text(said)
