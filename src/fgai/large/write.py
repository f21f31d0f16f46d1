"""Write stored graphs: in a hidden folder beside the target, which is moved there when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from torch import Tensor

from fgai.errors import CheckpointError, DataError, FgaiError, FgaiWarning, InputError, warn
from fgai.files import check, digest_of, parse_json, regular, write_atomic
from fgai.graph import Graph
from fgai.graph.fields import VALUES
from fgai.graph.fingerprint import Numbers, Piece, content_fingerprint, feature_pieces
from fgai.graph.on_disk import MANIFEST, is_store
from fgai.large.arrays import _blocks, _describe, _write_array
from fgai.large.stored import DTYPES, EDGE_ARRAYS, NAMES, NODE_ARRAYS, SPARSE, VERSION, StoredGraph, encode
from fgai.sparse import Features, SparseRows
from fgai.typed import typed

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

RECORD = "work.json"
_RECORD_VERSION = 2
SAMPLES, SAMPLE = 64, 1 << 16  # samples of a large file that are hashed, and the bytes of each
BLOCK = 1 << 20  # edges that are read or written together
NUMBERS = 1 << 22  # features that are read or written together


class _Record(TypedDict):
    format: Literal["fgai work"]
    version: int  # of the format
    job: dict[str, Any]  # sources and options, which decide the result
    stages: dict[str, Any]  # results of the finished stages, in order
    files: dict[str, int]  # sizes of the files that the next stage needs


class _Work:
    """A folder that is filled stage by stage; `work.json` records finished stages, to resume the same job."""

    def __init__(self, folder: Path, job: dict[str, Any] | None) -> None:
        self.folder, self._path, self._job = folder / "files", folder / RECORD, job
        record = None if job is None else _read_record(self._path)
        self.stages: dict[str, Any] = {}
        if record is not None:
            sizes = _file_sizes(self.folder)
            if record["job"] == job and record["files"].items() <= sizes.items():
                self.stages = record["stages"]
                self._remove_but(record["files"])
                return
            changed = "its sources or options" if record["job"] != job else "its files"
            warn(FgaiWarning(f"{changed} have changed since this conversion was stopped; it starts again"))
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def run_stage(self, stage: str, run: Callable[[], Any], remove: str | tuple[()] = ()) -> Any:
        """Return the result of a stage, run unless it is finished; then remove files of an ending."""
        if stage in self.stages:
            return self.stages[stage]
        result = run()
        self.stages = {**self.stages, stage: result}
        files = {n: size for n, size in _file_sizes(self.folder).items() if not n.endswith(remove)}
        if self._job is not None:
            heading = {"format": "fgai work", "version": _RECORD_VERSION, "job": self._job}
            write_atomic(self._path, json.dumps({**heading, "stages": self.stages, "files": files}, indent=1))
        self._remove_but(files)
        return result

    def _remove_but(self, files: Iterable[str]) -> None:
        for file in self.folder.iterdir():
            if file.name not in files:
                file.unlink()


def _file_sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.glob("*")}


def _read_record(path: Path) -> _Record | None:
    """Return the record at `path`; None if there is none that can be read."""
    try:
        record: _Record = parse_json(regular(path).read_bytes())
        check(record, _Record, RECORD)
    except (CheckpointError, ValueError, OSError):
        return None
    return record if record["version"] == _RECORD_VERSION else None


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Lock a folder, created if missing, for this process; does nothing on systems without locks."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FgaiError(f"another process is writing {target}; wait for it, or stop it") from error
        if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
            raise FgaiError(f"another process has just written {target}; run this again")
        yield
    finally:
        os.close(handle)


def _file_identity(path: Path) -> dict[str, Any]:
    """Return path, size, time and a hash of a file; beyond 4 MiB the hash is of 4 MiB spread over it."""
    status, digest = regular(path).stat(), hashlib.sha256()
    samples = min(SAMPLES, -(-status.st_size // SAMPLE))
    last = max(0, status.st_size - SAMPLE)
    with path.open("rb") as file:
        for number in range(samples):
            file.seek(last * number // max(1, samples - 1))
            digest.update(file.read(SAMPLE))
    size, time = status.st_size, status.st_mtime_ns
    return {"path": os.path.realpath(path), "size": size, "time": time, "hash": digest.hexdigest()}


@contextmanager
def _new_folder(
    path: Path, overwrite: bool = False, *, job: dict[str, Any] | None = None, resume: bool = True
) -> Iterator[_Work]:
    """Yield work in a hidden folder beside `path`, whose files are moved to `path` if the block succeeds.

    If it fails they are removed; after a kill or Ctrl-C a run of the same job resumes after the last stage.
    """
    hidden = path.parent / f".{path.name}.partial"
    old = hidden / "old"  # the folder that is replaced
    try:
        _check_free(path, overwrite)
        with _locked(hidden, path):
            if old.exists() and not path.exists():  # killed while it replaced a stored graph
                old.rename(path)
            shutil.rmtree(old, ignore_errors=True)
            _check_free(path, overwrite)
            keep = False
            try:
                if not resume:
                    (hidden / RECORD).unlink(missing_ok=True)
                work = _Work(hidden, job)
                yield work
                _move(work.folder, path, old)
            except KeyboardInterrupt:
                keep = (hidden / RECORD).exists()
                raise
            finally:
                if not keep:
                    shutil.rmtree(hidden, ignore_errors=True)
    except (OSError, ValueError) as error:
        if isinstance(error, FgaiError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise FgaiError(f"cannot write {path}: {reason}; nothing was left there") from error


def _check_free(path: Path, overwrite: bool) -> None:
    if (path.exists() or path.is_symlink()) and not (overwrite and is_store(path)):
        raise DataError(f"{path} exists already; remove it or choose another path")


def _move(folder: Path, path: Path, old: Path) -> None:
    """Move a folder to `path`; an older one is moved to `old` first, and back if that fails."""
    if not path.exists():
        folder.rename(path)
        return
    path.rename(old)
    try:
        folder.rename(path)
    except OSError:
        old.rename(path)
        raise


def _write_manifest(folder: Path, name: str, num_features: int, sources: str = "") -> str:
    """Write the manifest of a graph with the arrays in a folder; return its fingerprint."""
    arrays = _describe(folder)
    manifest: dict[str, Any] = {
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
    if (folder / NAMES).exists():
        manifest["names"] = digest_of(folder / NAMES)
    write_atomic(folder / MANIFEST, encode(manifest))
    manifest["fingerprint"] = fingerprint = _stored_fingerprint(StoredGraph(folder))
    write_atomic(folder / MANIFEST, encode(manifest))
    return fingerprint


def _stored_fingerprint(stored: StoredGraph) -> str:
    pieces = [Piece("", "<i8", _keys(stored))]
    if stored.has_features:
        pieces += feature_pieces(lambda: _feature_blocks(stored))
    for name in VALUES:
        values = stored.array(name)
        if values is not None:
            pieces.append(Piece(f"\n{name} {list(values.shape)}", "<f8", _blocks(values, BLOCK)))
    if (y := stored.array("y")) is not None:
        pieces.append(Piece("\ny", "<i8", _blocks(y, BLOCK)))
    return content_fingerprint(stored.num_nodes, stored.num_features, pieces)


def _keys(stored: StoredGraph) -> Iterator[Numbers]:
    """`destination · 2³² + source` of every edge, in order."""
    rowptr, source = stored.rows()
    for first in range(0, stored.num_edges, BLOCK):
        edges = np.arange(first, min(first + BLOCK, stored.num_edges))
        destination = np.searchsorted(rowptr, edges, "right") - 1
        yield (destination << 32) | source[first : first + BLOCK]


def _feature_blocks(
    stored: StoredGraph, share: Callable[[list[int]], list[int]] = list
) -> Iterator[tuple[int, Features]]:
    """Yield the features in blocks of rows, or a `share` of them, with the number of the first row."""
    step = max(1, NUMBERS // max(1, stored.num_features))
    for first in share(list(range(0, stored.num_nodes, step))):
        features = stored.features(slice(first, first + step))
        assert features is not None
        yield first, features


@typed
def write_store(graph: Graph, path: Path | str) -> StoredGraph:
    """Write a graph of nodes to a new folder of arrays, from where it can be read block by block.

    Features and edge values become float32. The folder appears when it is complete. `DataError` if `path`
    exists already, `InputError` for small graphs or links to predict, `FgaiError` if it cannot be written.
    """
    with _new_folder(Path(path)) as work:
        _save_graph(work.folder, graph.to("cpu"))
    return StoredGraph(path)


def _save_graph(folder: Path, graph: Graph) -> None:
    """Write a graph on the CPU into a new folder."""
    if graph.batch is not None or graph.links is not None or graph.entry_values is not None:
        other = "small graphs, links or `entry_values`"
        raise InputError(f"{graph.name!r} holds {other}, which are not stored; store the whole graph")
    _save_arrays(folder, {name: getattr(graph, name) for name in (*NODE_ARRAYS, *EDGE_ARRAYS)})
    _save_arrays(folder, {"rowptr": graph.adjacency.rowptr, "source": graph.adjacency.source})
    _save_features(folder, graph.features)
    _save_names(folder, {"node_names": graph.node_names, "class_names": graph.class_names})
    _write_manifest(folder, graph.name, graph.num_features)


def _save_arrays(folder: Path, arrays: Mapping[str, Tensor | None]) -> None:
    for name, tensor in arrays.items():
        if tensor is not None:
            array = tensor.detach().numpy()
            _write_array(folder / f"{name}.npy", _blocks(array, BLOCK), DTYPES[name], array.shape[1:])


def _save_features(folder: Path, features: Features | None) -> None:
    if features is None:
        return
    if isinstance(features.base, SparseRows) and features.appended is None and features.delta is None:
        base = features.base
        _save_arrays(folder, dict(zip(SPARSE, (base.indptr, base.indices, base.values), strict=True)))
    else:
        _save_arrays(folder, {"x": features.to_dense()})


def _save_names(folder: Path, names: dict[str, tuple[str, ...] | None]) -> None:
    present = {kind: list(values) for kind, values in names.items() if values is not None}
    if present:
        write_atomic(folder / NAMES, json.dumps(present, ensure_ascii=False))
