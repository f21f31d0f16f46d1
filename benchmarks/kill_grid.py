"""Kill a running grid at random moments, go on, and compare with a run nobody disturbed.

A grid of small cells on the built-in graph runs in a process of its own, which is killed (SIGKILL) after a
random time, again and again. After every kill: each record there is whole, and none that was there is gone or
changed. In the end: every cell has one record, and records and tables equal those of the undisturbed run.

    python benchmarks/kill_grid.py --kills 50
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common  # noqa: F401  (finds the experiments)
import numba
import torch

from experiments import Cell, Store, read_grid, read_record, run_grid
from experiments.tables import render

GRID = """
[[cells]]
label = "small"
method = ["vanilla", "ln"]
model = ["GAT", "GATv2"]
seed = [{seeds}]
settings = {{ epochs = 3 }}
threats = []

[[cells]]
label = "small"
method = "at"
settings = {{ epochs = 3 }}
threats = []

[[cells]]
settings = {{ epochs = 4 }}
threats = ["standard"]

[[cells]]
kind = "search"
settings = [{{ epochs = 2 }}, {{ epochs = 3 }}]
"""
CHANGES = ("seconds", "epoch_seconds", "peak_memory", "base_memory", "about", "trace")


def worker(cells: list[Cell], results: Path, cache: Path) -> None:
    torch.set_num_threads(1)  # the built-in graph is small: threads would only wait for each other
    numba.set_num_threads(1)
    run_grid(cells, Store(results), cache=cache)


def start(grid: Path, results: Path, cache: Path) -> Any:
    # Forked: everything is imported already, so kills fall into the work and not into the start-up.
    arguments = (read_grid(grid), results, cache)
    process = mp.get_context("fork").Process(target=worker, args=arguments, daemon=True)
    process.start()
    return process


def digests(results: Path) -> dict[str, str]:
    """The records there are, each read (which raises if it is not whole), by what is in their files."""
    found = {}
    for path in sorted(results.rglob("*.json")):
        read_record(path)
        found[str(path.relative_to(results))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def lasting(value: Any) -> Any:
    """A record without what differs from run to run: times, memory, machine."""
    if isinstance(value, dict):
        return {name: lasting(part) for name, part in value.items() if name not in CHANGES}
    return [lasting(part) for part in value] if isinstance(value, list) else value


def check(cells: list[Cell], disturbed: Path, quiet: Path) -> list[str]:
    """What is wrong in the end; nothing, if all is well."""
    wrong = []
    wanted = {str(cell.path) for cell in cells}
    for folder in (disturbed, quiet):
        found = set(digests(folder))
        wrong += [f"{folder}: {len(wanted - found)} cells lost"] if wanted - found else []
        wrong += [f"{folder}: {len(found - wanted)} records too many"] if found - wanted else []
    if wrong:
        return wrong
    for path in sorted(wanted):
        ours, theirs = read_record(disturbed / path), read_record(quiet / path)
        if ours["status"] != "done" or lasting(ours) != lasting(theirs):
            wrong.append(f"{path} differs from the undisturbed run ({ours.get('error', ours['status'])})")
    for name in ("f1", "stability", "similarity", "search"):
        if render(name, Store(disturbed)) != render(name, Store(quiet)):
            wrong.append(f"table {name} differs")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=20, help="size of the grid: more cells for more kills")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # takes the grid's process along
    folder = Path(args.keep or tempfile.mkdtemp(prefix="fgai-kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    grid = folder / "grid.toml"
    grid.write_text(GRID.format(seeds=", ".join(map(str, range(args.seeds)))))
    cells = read_grid(grid)

    began = time.monotonic()
    calm = start(grid, folder / "quiet", folder / "quiet-cache")
    while calm.is_alive() and not list((folder / "quiet").rglob("*.json")):
        time.sleep(0.01)
    ready = time.monotonic() - began  # until the first record
    calm.join()
    whole = time.monotonic() - began
    print(f"{len(cells)} cells, undisturbed in {whole:.1f} s")

    moments, kills, early, pace = random.Random(args.seed), 0, 0, 1.0
    known: dict[str, str] = {}
    results, cache = folder / "disturbed", folder / "cache"
    while kills < args.kills:
        # So long that, on average, the grid is as far as the kills are; longer on a busy machine.
        cell, left = (whole - ready) / len(cells), (len(cells) - len(known)) / (args.kills - kills + 1)
        process = start(grid, results, cache)
        process.join(moments.uniform(0.0, 2.0 * pace * (ready + cell * left)))
        if process.exitcode is not None:
            early += 1
            shutil.rmtree(results)  # it finished first: again from the start
            known = {}
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        now = digests(results)
        if lost := [path for path, digest in known.items() if now.get(path) != digest]:
            print(f"kill {kills}: {len(lost)} records lost or changed: {sorted(lost)[0]}")
            return 1
        pace = max(1.0, pace * (1.15 if len(now) == len(known) else 0.7))
        known = now
        print(f"kill {kills}: {len(now)} of {len(cells)} records, all whole", flush=True)
    last = start(grid, results, cache)
    last.join()
    half = len([path for path in results.rglob(".*") if path.is_file()])
    wrong = check(cells, results, folder / "quiet")
    print(f"{kills} kills, {early} runs that finished first, {half} half-written files left aside")
    print("\n".join(wrong) or "no record lost, duplicated or corrupt; same records, same tables")
    if args.keep is None:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
