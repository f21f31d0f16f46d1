"""Stored graphs are written beside their place and moved there when they are whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from fgai.errors import CheckpointError, DataError, FgaiError, FgaiWarning, InputError, warn
from fgai.files import check, parse_json, regular, write_atomic
from fgai.graph import Graph
from fgai.graph.fields import VALUES
from fgai.graph.fingerprint import Numbers, Piece, content_fingerprint, feature_pieces
from fgai.graph.on_disk import MANIFEST, is_store
from fgai.large.arrays import Array, _describe, _write_array
from fgai.large.stored import DTYPES, EDGE_ARRAYS, NODE_ARRAYS, SPARSE, VERSION, StoredGraph, encode
from fgai.sparse import Features, SparseRows
from fgai.typed import typed

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

RECORD = "work.json"
_RECORD_VERSION = 1
SAMPLES, SAMPLE = 64, 1 << 16  # parts of a large file that are hashed, and the bytes of each

Job = dict[str, Any]  # what decides the result of a job, as JSON holds it: its sources and its options


class _Record(TypedDict):
    format: Literal["fgai work"]  # says what kind of file this is
    version: int  # of the format
    job: Job  # what is being made
    stages: dict[str, Any]  # the finished ones, in order, and what each found
    files: dict[str, int]  # sizes of the files that the next stage needs


class _Work:
    """A folder that is filled stage by stage; `work.json` records finished stages, to resume the same job."""

    def __init__(self, place: Path, job: Job | None) -> None:
        self.folder, self._path, self._job = place / "files", place / RECORD, job
        found = None if job is None else _read(self._path)
        self.stages: dict[str, Any] = {}
        if found is not None:
            sizes, complete = found["files"].items(), False
            with suppress(OSError):
                complete = all((self.folder / name).stat().st_size == size for name, size in sizes)
            if found["job"] == job and complete:
                self.stages = found["stages"]
                self._clear(found["files"])
                return
            what = "its sources or options" if found["job"] != job else "its files"
            warn(FgaiWarning(f"{what} have changed since this conversion was stopped; it begins anew"))
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def once(self, stage: str, run: Callable[[], Any], drops: str | None = None) -> Any:
        """Run a stage unless it is finished, and return what it found."""
        if stage in self.stages:
            return self.stages[stage]
        found = run()
        self.stages = {**self.stages, stage: found}
        files = {file.name: file.stat().st_size for file in self.folder.iterdir() if file.suffix != drops}
        if self._job is not None:
            heading = {"format": "fgai work", "version": _RECORD_VERSION, "job": self._job}
            record = {**heading, "stages": self.stages, "files": files}
            write_atomic(self._path, json.dumps(record, indent=1))
        self._clear(files)
        return found

    def _clear(self, files: Iterable[str]) -> None:
        for file in self.folder.iterdir():
            if file.name not in files:
                file.unlink()


def _read(path: Path) -> _Record | None:
    """The record at `path`; None where there is none that can be read."""
    try:
        found: _Record = parse_json(regular(path).read_bytes())
        check(found, _Record, RECORD)
    except (CheckpointError, ValueError, OSError):
        return None
    return found if found["version"] == _RECORD_VERSION else None


@contextmanager
def _claimed(place: Path, wanted: Path) -> Iterator[None]:
    """Lock a folder, made if missing, for this process; does nothing where there are no locks."""
    place.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    while (handle := _claim(place, wanted)) is None:  # whoever held it has removed it meanwhile
        place.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        os.close(handle)


def _claim(place: Path, wanted: Path) -> int | None:
    """Open and lock a folder; None if it is gone by then."""
    try:
        handle = os.open(place, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise FgaiError(f"another process is writing {wanted}; wait for it, or stop it") from error
    except OSError:  # there are no locks here
        return handle
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), place.stat()):
            return handle
    os.close(handle)
    return None


def _source_of(path: Path) -> Job:
    """Path, size, time and a hash of a file: of all of it up to 4 MiB, else of 4 MiB spread over it."""
    found, digest = regular(path).stat(), hashlib.sha256()
    parts = min(SAMPLES, -(-found.st_size // SAMPLE))
    last = max(0, found.st_size - SAMPLE)
    with path.open("rb") as file:
        for number in range(parts):
            file.seek(last * number // max(1, parts - 1))
            digest.update(file.read(SAMPLE))
    place = os.path.realpath(path)
    return {"path": place, "size": found.st_size, "time": found.st_mtime_ns, "hash": digest.hexdigest()}


BLOCK = 1 << 20  # edges that are read or written together
NUMBERS = 1 << 22  # features that are read or written together
_PARTIAL, _OLD = ".partial", "old"


@contextmanager
def _building(
    path: Path, overwrite: bool = False, *, job: Job | None = None, resume: bool = True
) -> Iterator[_Work]:
    """Give work in a hidden folder beside `path`, whose files take that place if the block ends well.

    If it fails they are removed; after a kill or Ctrl-C finished stages wait for a run of the same job.
    """
    hidden = path.parent / f".{path.name}{_PARTIAL}"
    try:
        _check_free(path, overwrite)
        with _claimed(hidden, path):
            if (hidden / _OLD).exists() and not path.exists():  # killed while it replaced a stored graph
                (hidden / _OLD).rename(path)
            shutil.rmtree(hidden / _OLD, ignore_errors=True)
            _check_free(path, overwrite)
            with _removed_unless_stopped(hidden):
                if not resume:
                    (hidden / RECORD).unlink(missing_ok=True)
                work = _Work(hidden, job)
                yield work
                _take_place(work.folder, path, hidden / _OLD)
    except (OSError, ValueError) as error:
        if isinstance(error, FgaiError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise FgaiError(f"cannot write {path}: {reason}; nothing was left there") from error


def _check_free(path: Path, overwrite: bool) -> None:
    if (path.exists() or path.is_symlink()) and not (overwrite and is_store(path)):
        raise DataError(f"there is something at {path} already; remove it or choose another place")


@contextmanager
def _removed_unless_stopped(folder: Path) -> Iterator[None]:
    """Remove a folder after the block, unless Ctrl-C ended it and there is a record of what is finished."""
    keep = False
    try:
        yield
    except KeyboardInterrupt:
        keep = (folder / RECORD).exists()
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, path: Path, old: Path) -> None:
    """Move a folder to its place; what was there goes last, and only once it is moved away."""
    if not path.exists():
        folder.rename(path)
        return
    path.rename(old)
    try:
        folder.rename(path)
    except OSError:
        old.rename(path)
        raise


def _complete(folder: Path, name: str, num_features: int, sources: str = "") -> StoredGraph:
    """Write the manifest of the arrays in a folder, fingerprint included."""
    arrays = _describe(folder)
    manifest = {
        "format": "fgai graph",
        "version": VERSION,
        "name": name,
        "num_nodes": arrays["rowptr"]["shape"][0] - 1,
        "num_edges": arrays["source"]["shape"][0],
        "num_features": num_features,
        "fingerprint": "",
        "sources": sources,
        "arrays": arrays,
    }
    write_atomic(folder / MANIFEST, encode(manifest))
    manifest["fingerprint"] = _stored_fingerprint(StoredGraph(folder))
    write_atomic(folder / MANIFEST, encode(manifest))
    return StoredGraph(folder)


def _stored_fingerprint(stored: StoredGraph) -> str:
    pieces = [Piece("", "<i8", _keys(stored))]
    if stored.has_features:
        pieces += feature_pieces(lambda: _feature_blocks(stored))
    for name in VALUES:
        values = stored.array(name)
        pieces += [] if values is None else [Piece(f"\n{name} {list(values.shape)}", "<f8", _blocks(values))]
    y = stored.array("y")
    pieces += [] if y is None else [Piece("\ny", "<i8", _blocks(y))]
    return content_fingerprint(stored.num_nodes, stored.num_features, pieces)


def _keys(stored: StoredGraph) -> Iterator[Numbers]:
    """`destination · 2³² + source` of every edge, in order."""
    rowptr, source = stored.rows()
    for first in range(0, stored.num_edges, BLOCK):
        place = np.arange(first, min(first + BLOCK, stored.num_edges))
        destination = np.searchsorted(rowptr, place, "right") - 1
        yield (destination << 32) | source[place[0] : place[-1] + 1]


def _feature_blocks(
    stored: StoredGraph, share: Callable[[list[int]], list[int]] = list
) -> Iterator[tuple[int, Features]]:
    """The features in blocks of rows, each with the number of its first row."""
    step = max(1, NUMBERS // max(1, stored.num_features))
    for first in share(list(range(0, stored.num_nodes, step))):
        features = stored.features(slice(first, first + step))
        assert features is not None
        yield first, features


def _blocks(array: Array) -> Iterator[Array]:
    for first in range(0, len(array), BLOCK):
        yield array[first : first + BLOCK]


@typed
def write_store(graph: Graph, path: Path | str) -> StoredGraph:
    """Write a graph to a folder of arrays, from where it can be read block by block.

    Features and edge values become float32. The folder is moved to its place when it is whole.

    Args:
        graph: of nodes, on any device.
        path: the new folder.

    Raises:
        DataError: there is something at `path` already.
        InputError: a batch of small graphs, or links to predict; those fit into memory.
        FgaiError: the folder cannot be written.
    """
    place = Path(path)
    with _building(place) as work:
        _fill(work.folder, graph.to("cpu"))
    return StoredGraph(place)


def _fill(folder: Path, graph: Graph) -> None:
    """Write a graph on the CPU into a folder that is being built."""
    if graph.batch is not None or graph.links is not None or graph.entry_values is not None:
        raise InputError(
            f"{graph.name!r} holds small graphs, links or `entry_values`, which are not stored; store"
            " the whole graph"
        )
    fields = {name: getattr(graph, name) for name in (*NODE_ARRAYS, *EDGE_ARRAYS)}
    fields |= {"rowptr": graph.adjacency.rowptr, "source": graph.adjacency.source}
    _save_arrays(folder, {name: value.numpy() for name, value in fields.items() if value is not None})
    _save_features(folder, graph.features)
    _complete(folder, graph.name, graph.num_features)


def _save_arrays(folder: Path, arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        _write_array(folder / f"{name}.npy", _blocks(array), DTYPES[name], array.shape[1:])


def _save_features(folder: Path, features: Features | None) -> None:
    if features is None:
        return
    if isinstance(features.base, SparseRows) and features.appended is None and features.delta is None:
        base = features.base
        parts: Iterable[Array] = (part.detach().numpy() for part in (base.indptr, base.indices, base.values))
        _save_arrays(folder, dict(zip(SPARSE, parts, strict=True)))
    else:
        _save_arrays(folder, {"x": features.to_dense().detach().numpy()})
