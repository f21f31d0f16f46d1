"""Run a grid: skip what is done, share the rest among processes and machines."""

from __future__ import annotations

import multiprocessing as mp
import queue
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from experiments.cells import Cell
from experiments.explained import check_ready
from experiments.methods import FROM_SCRATCH
from experiments.run import is_done, run_cell
from experiments.store import Store
from fgai.errors import FgaiError, InputError


@dataclass(frozen=True)
class Status:
    """How far a grid has come."""

    done: int
    failed: int
    open: int


def status(cells: list[Cell], store: Store) -> Status:
    """Count the cells by state."""
    counts: Counter[str] = Counter()
    for cell in cells:
        record = store.read(cell)
        counts["open" if record is None else record["status"]] += 1
    return Status(counts["done"], counts["failed"], counts["open"])


def shard(cells: list[Cell], text: str) -> list[Cell]:
    """Return the part `i/n` of the cells, i from 1; the parts are disjoint and cover all."""
    try:
        part, of = map(int, text.split("/"))
    except ValueError:
        raise InputError(f"`shard` must look like 2/5, got {text!r}") from None
    if not 1 <= part <= of:
        raise InputError(f"`shard` must be i/n with 1 ≤ i ≤ n, got {text!r}")
    return [cell for index, cell in enumerate(cells) if index % of == part - 1]


CHOSEN_BY = ("kind", "model", "dataset", "method", "row", "seed", "task")
"""What cells may be chosen by, see `only`."""


def only(cells: list[Cell], wanted: Sequence[str]) -> list[Cell]:
    """Return the cells that meet every condition.

    Example:
        >>> cells = [Cell(method=method, seed=seed) for method in ("vanilla", "fgai") for seed in (0, 1)]
        >>> [cell.seed for cell in only(cells, ["method=fgai", "seed=0,1"])]
        [0, 1]
    """
    for text in wanted:
        field, equals, values = text.partition("=")
        if not equals or field not in CHOSEN_BY:
            raise InputError(f"`only` must look like method=fgai,at, by {', '.join(CHOSEN_BY)}, got {text!r}")
        known = dict.fromkeys(str(getattr(cell, field)) for cell in cells)
        asked = values.split(",")
        for value in asked:
            if value not in known:
                raise InputError(f"no cell left has {field} {value!r}; there are {', '.join(known)}")
        cells = [cell for cell in cells if str(getattr(cell, field)) in asked]
    return cells


def run_grid(
    cells: list[Cell],
    store: Store,
    *,
    device: str = "cpu",
    root: Path | str | None = None,
    cache: Path | None = None,
    jobs: int = 1,
    limit: float | None = None,
    redo: bool = False,
    on_cell: Callable[[Cell, str, float], None] | None = None,
) -> Status:
    """Run every cell that has no good record.

    Cells with the same vanilla parent stay together, so that a parent is trained once; with a cache, where
    they wait for it, only as far as every process has work. A killed run loses at most the cells in flight.
    After `limit` seconds running cells are ended; none is begun that would not end by then, see `Pace`.

    Raises:
        CheckpointError: before any work, if a record is damaged, foreign or was made with other settings.
        MissingExtraError: before any work, if a cell needs a package that is not installed.
        FgaiError: if a record cannot be written.
    """
    todo = []
    for cell in cells:
        record = store.read(cell)
        if record is None or not is_done(record, cell, store, redo):
            todo.append(cell)
    check_ready(todo)
    store.sweep()
    groups = _by_parent(todo)
    deadline = None if limit is None else monotonic() + limit
    if jobs <= 1 and limit is None:
        for cell in (cell for group in groups for cell in group):
            record = run_cell(cell, store, device=device, root=root, cache=cache, redo=redo)
            if on_cell is not None:
                on_cell(cell, record["status"], record["seconds"])
    else:
        options = {"device": device, "root": root, "cache": cache, "redo": redo}
        groups = groups if cache is None else _spread(groups, jobs)
        _parallel(groups, store, options, max(1, min(jobs, len(groups))), deadline, on_cell)
    return status(cells, store)


class Pace:
    """How long cells take, known to all processes of a run, and until when there is time.

    A cell is taken to last as long as the longest of its kind and method so far; `deadline` is on the
    monotonic clock.
    """

    def __init__(self, cells: Iterable[Cell], deadline: float | None, context: Any) -> None:
        sorts = dict.fromkeys((cell.kind, cell.method) for cell in cells)
        self.places = {sort: place for place, sort in enumerate(sorts)}
        self.longest = context.Array("d", len(sorts))
        self.deadline = deadline

    def allows(self, cell: Cell) -> bool:
        """Whether a cell that begins now would end in time; yes where none of its sort has ended yet."""
        seconds: float = self.longest[self.places[cell.kind, cell.method]]
        return self.deadline is None or monotonic() + seconds <= self.deadline

    def note(self, cell: Cell, seconds: float) -> None:
        """Tell all processes how long a cell took."""
        place = self.places[cell.kind, cell.method]
        with self.longest.get_lock():
            self.longest[place] = max(self.longest[place], seconds)


def _by_parent(cells: list[Cell]) -> list[list[Cell]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        own = cell.key if cell.settings and cell.method in FROM_SCRATCH else ""  # no parent, and nobody's
        groups.setdefault((cell.model, cell.dataset, cell.seed, cell.kind, own), []).append(cell)
    for group in groups.values():
        group.sort(key=lambda cell: cell.method != "vanilla")
    return list(groups.values())


def _spread(groups: list[list[Cell]], jobs: int) -> list[list[Cell]]:
    """Halve the largest groups until there is one for every process."""
    groups = list(groups)
    while groups and len(groups) < jobs:
        largest = max(range(len(groups)), key=lambda place: len(groups[place]))
        group = groups[largest]
        if len(group) < 2:
            break
        half = (len(group) + 1) // 2
        groups[largest : largest + 1] = [group[:half], group[half:]]
    return groups


def _parallel(
    groups: list[list[Cell]],
    store: Store,
    options: dict[str, Any],
    jobs: int,
    deadline: float | None,
    on_cell: Callable[[Cell, str, float], None] | None,
) -> None:
    context = mp.get_context("spawn")
    work: Any = context.Queue()
    news: Any = context.Queue()
    for group in groups:
        work.put([cell.to_dict() for cell in group])
    for _ in range(jobs):
        work.put(None)
    pace = Pace((cell for group in groups for cell in group), deadline, context)
    arguments = (work, news, str(store.root), options, pace)
    workers = [context.Process(target=_worker, args=arguments, daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers) or not news.empty():
            if deadline is not None and monotonic() > deadline:
                break
            try:
                values, state, seconds = news.get(timeout=0.5)
            except queue.Empty:
                continue
            if values is None:
                raise FgaiError(state)
            if on_cell is not None:
                on_cell(Cell.from_dict(values), state, seconds)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _worker(work: Any, news: Any, folder: str, options: dict[str, Any], pace: Pace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = Store(folder)
    while (group := work.get()) is not None:
        for values in group:
            parent = mp.parent_process()
            if parent is not None and not parent.is_alive():  # killed: nobody waits for more
                return
            cell = Cell.from_dict(values)
            if not pace.allows(cell):
                continue
            try:
                record = run_cell(cell, store, **options)
            except FgaiError as error:  # the record itself: damaged, or the disk is full
                news.put((None, str(error), 0.0))
                return
            pace.note(cell, record["seconds"])
            news.put((values, record["status"], record["seconds"]))
