"""What every rank does under torchrun in `tests/training/test_ranks.py`: scenes one after the other.

Called with the folder of a stored graph and a folder for what was found, a file for each rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import fgai
from fgai.errors import FgaiError
from fgai.ranks import current, joined
from fgai.store import open_store
from fgai.trackers import Tracker
from fgai.training.capture import run_parts

RANK = int(os.environ.get("RANK", "0"))
MODEL: dict[str, Any] = {"hidden_channels": 3, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
TRAIN: dict[str, Any] = {"preset": None, "progress": False, "lr": 0.02, **MODEL}
SHORT: dict[str, Any] = {**TRAIN, "epochs": 4}
LONG: dict[str, Any] = {**TRAIN, "epochs": 30, "batch_size": 2, "fan_out": 3, "dropout": 0.4}
"""Saved once, after 25 epochs."""
STEADY: dict[str, Any] = {
    "epochs": 3, "preset": None, "progress": False, "nodes": 3, "edges": 2, "steps": 3, "batch_size": 7,
    "fan_out": 4,
}  # fmt: skip


def listening() -> list[str]:
    """Addresses, in hexadecimal, at which this process listens."""
    own = {str(place.readlink()) for place in Path("/proc/self/fd").iterdir() if place.is_symlink()}
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


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


def scenes(graph: Path, folder: Path) -> dict[str, Any]:
    """All that does not end a process, with what it came to."""
    found: dict[str, Any] = {}
    stored = open_store(graph)

    def keep(name: str, model: nn.Module) -> None:
        fgai.save_model(model, folder / f"{name}-{RANK}.safetensors")

    with joined(timeout=60) as ranks:
        found["size"], found["listening"] = ranks.size, listening()
        model = fgai.train("GAT", stored, batch_size=4, fan_out=-1, **SHORT)
        keep("vanilla", model)
        keep("uneven", fgai.train("GAT", stored, batch_size=7, fan_out=-1, **SHORT))
        keep("faithful", fgai.make_faithful(model, stored, **STEADY))
        keep("long", fgai.train("GAT", stored, **LONG))
        found["seed"] = refused(lambda: fgai.train("GAT", stored, batch_size=4, seed=RANK, **SHORT))
        found["whole"] = refused(lambda: fgai.train("GAT", stored.load(), **SHORT))
        norm = {**SHORT, "hidden_channels": 8, "heads": (4, 1), "encodings": 0}
        del norm["attention_dropout"]
        found["norm"] = refused(lambda: fgai.train("GT", stored, batch_size=4, **norm))
    found["after"] = current().size

    def missing() -> None:
        with joined(timeout=60):
            fgai.train("GAT", graph if RANK == 0 else graph / "nowhere", batch_size=4, **SHORT)

    def halted() -> None:
        with joined(timeout=60):
            place = folder / "halted" if RANK == 0 else None
            settings = {**SHORT, "batch_size": 4, "fan_out": -1, "checkpoint": place}
            fgai.train("GAT", stored, tracker=Stop(), **settings)

    found["missing"] = refused(missing)
    try:
        found["halted"] = refused(halted)
    except OSError as error:
        found["halted"] = str(error)
    return found


def killed(graph: Path, folder: Path, moments: list[list[int]]) -> None:
    """Train; in the n-th life the process of a rank kills itself before its step of a number."""
    life, steps = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0
    fatal = moments[life] if life < len(moments) else [-1, -1]

    def mortal(parts: Any) -> Any:
        nonlocal steps
        steps += 1
        if [RANK, steps] == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_parts(parts)

    with patch("fgai.training.loop.run_parts", mortal), joined(timeout=60) as ranks:
        model = fgai.train("GAT", graph, checkpoint=folder / "state", **LONG)
        if ranks.leads:
            fgai.save_model(model, folder / "killed.safetensors")
            (folder / "lives.json").write_text(json.dumps([life, steps]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, place, *rest = sys.argv[1:]
    if rest:
        killed(Path(where), Path(place), json.loads(rest[0]))
    else:
        (Path(place) / f"{RANK}.json").write_text(json.dumps(scenes(Path(where), Path(place))))
