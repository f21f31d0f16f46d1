"""What a long job has finished, written down beside its files, so that a second run goes on from there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from fgai.errors import CheckpointError, FgaiError, FgaiWarning, warn
from fgai.files import check, parse_json, regular, write_atomic

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

RECORD = "work.json"
VERSION = 1
SAMPLES, SAMPLE = 64, 1 << 16
"""Parts of a large file that are hashed, and the bytes of each."""

Job = dict[str, Any]
"""What decides the result of a job, as JSON holds it: its sources and its options."""


class _Record(TypedDict):
    """What `work.json` holds.

    Attributes:
        format: says what kind of file this is.
        version: of the format.
        job: what is being made.
        stages: the finished ones, in order, and what each found.
        files: sizes of the files that the next stage needs.
    """

    format: Literal["fgai work"]
    version: int
    job: Job
    stages: dict[str, Any]
    files: dict[str, int]


class Work:
    """A folder that is being filled, stage by stage.

    After each stage, what it found and the sizes of all files are written to `work.json` in one step. Whoever
    opens the same place for the same job gets that back; what an unfinished stage left is removed.

    Args:
        place: holds the folder and the record.
        job: what is being made; None for work that is never taken up again.

    Attributes:
        folder: where the files go.
        stages: the finished ones and what each found.
    """

    def __init__(self, place: Path, job: Job | None) -> None:
        self.folder, self._path, self._job = place / "files", place / RECORD, job
        found = None if job is None else _read(self._path)
        self.stages: dict[str, Any] = {}
        if found is not None and found["job"] == job and _all_there(self.folder, found["files"]):
            self.stages = found["stages"]
            self._clear(found["files"])
            return
        if found is not None:
            what = "its sources or options" if found["job"] != job else "its files"
            warn(FgaiWarning(f"{what} have changed since this conversion was stopped; it begins anew"))
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def once(self, stage: str, run: Callable[[], Any], drops: str | None = None) -> Any:
        """Run a stage unless it is finished, and return what it found.

        Args:
            stage: its name.
            run: does the work, in `folder`, and returns what JSON can hold.
            drops: suffix of files that no later stage needs.
        """
        if stage in self.stages:
            return self.stages[stage]
        found = run()
        self.stages = {**self.stages, stage: found}
        files = {file.name: file.stat().st_size for file in self.folder.iterdir() if file.suffix != drops}
        if self._job is not None:
            record: _Record = {
                "format": "fgai work",
                "version": VERSION,
                "job": self._job,
                "stages": self.stages,
                "files": files,
            }
            write_atomic(self._path, json.dumps(record, indent=1))
        self._clear(files)
        return found

    def _clear(self, files: Iterable[str]) -> None:
        """Remove what is not among `files`."""
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
    return found if found["version"] == VERSION else None


def _all_there(folder: Path, files: dict[str, int]) -> bool:
    with suppress(OSError):
        return all((folder / name).stat().st_size == size for name, size in files.items())
    return False


@contextmanager
def claimed(place: Path, wanted: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is not there, for this process alone; killed ones hold nothing.

    On Windows, and on a file system without locks, nothing is held.

    Args:
        place: the folder.
        wanted: what is made there, for the message.

    Raises:
        FgaiError: another process holds it.
    """
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


def source_of(path: Path) -> Job:
    """What tells one version of a file from another: place, size, time, and a hash of parts of it.

    A file of up to 4 MiB is hashed as a whole; of a larger one as much, spread from its front to its end.
    """
    found, digest = regular(path).stat(), hashlib.sha256()
    parts = min(SAMPLES, -(-found.st_size // SAMPLE))
    last = max(0, found.st_size - SAMPLE)
    with path.open("rb") as file:
        for number in range(parts):
            file.seek(last * number // max(1, parts - 1))
            digest.update(file.read(SAMPLE))
    place = os.path.realpath(path)
    return {"path": place, "size": found.st_size, "time": found.st_mtime_ns, "hash": digest.hexdigest()}
