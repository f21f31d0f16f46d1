"""`.npy` files that are written block by block and read through a memory map."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ZEROS = 1 << 24
"""Bytes that are written together where room is taken by writing."""


class Place(NamedTuple):
    """Where in a file that several processes write one of them begins.

    Attributes:
        first: row.
        rows: of the whole file.
    """

    first: int
    rows: int


class ArrayFile:
    """An `.npy` file that grows by rows; its heading is completed when it is closed.

    Args:
        path: a new file, or one that others write, too.
        dtype: of its numbers.
        tail: shape of one row.
        place: where rows go in a file that several processes write; None writes all of it.
    """

    def __init__(
        self, path: Path, dtype: Any, tail: tuple[int, ...] = (), place: Place | None = None
    ) -> None:
        self.dtype, self.tail, self.rows = np.dtype(dtype), tail, 0 if place is None else place.rows
        self._shared = place is not None
        self._file: BinaryIO = path.open("xb") if place is None else os.fdopen(_opened(path), "r+b")
        self._heading = self._write_heading()
        if place is not None:
            width = self.dtype.itemsize * int(np.prod(tail, dtype=np.int64))
            self._file.seek(self._heading + place.first * width)

    def append(self, block: Array) -> None:
        """Write more rows, converted to the file's type."""
        assert block.shape[1:] == self.tail
        self._file.write(np.ascontiguousarray(block, self.dtype).data)
        self.rows += 0 if self._shared else len(block)

    def close(self) -> None:
        """Complete the heading and put everything on disk."""
        self._file.seek(0)
        assert self._write_heading() == self._heading  # numpy leaves room for more digits
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_heading(self) -> int:
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.tail)}
        np.lib.format.write_array_header_1_0(self._file, described)
        return self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def _opened(path: Path) -> int:
    """Open a file for writing that may be there already, and keep what it holds."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def write_array(path: Path, blocks: Iterable[Array], dtype: Any, tail: tuple[int, ...] = ()) -> int:
    """Write an `.npy` file from blocks of rows; return the number of rows."""
    with ArrayFile(path, dtype, tail) as file:
        for block in blocks:
            file.append(block)
    return file.rows


def scratch(path: Path, shape: tuple[int, ...], dtype: Any) -> Array:
    """A memory-mapped array for intermediate results, whose room on the disk is there from the start.

    Without that a full disk would end the process at the first page that has no place.

    Raises:
        OSError: there is not enough room.
    """
    size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
    with path.open("xb") as file:
        _take_room(file, size)
    return open_scratch(path, shape, dtype)


def _take_room(file: BinaryIO, size: int) -> None:
    """Give an empty file so many bytes on the disk; where the system cannot (macOS), zeros are written."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = memoryview(bytes(min(size, ZEROS)))
    for first in range(0, size, ZEROS):
        file.write(zeros[: size - first])


def open_scratch(path: Path, shape: tuple[int, ...], dtype: Any) -> Array:
    """Map what `scratch` has made once more."""
    return np.memmap(path, dtype, "r+", shape=shape) if np.prod(shape) else np.zeros(shape, dtype)


def write_scratch(path: Path, array: Array) -> None:
    """Write an array as `scratch` would have it, and put it on disk."""
    found = scratch(path, array.shape, array.dtype)
    found[:] = array
    put_on_disk(found)


def put_on_disk(array: Array) -> None:
    """Wait until what was written to a mapped array is in its file."""
    if isinstance(array, np.memmap):
        array.flush()


def map_array(path: Path) -> Array:
    """Map an `.npy` file, read-only.

    Raises:
        ValueError: it is cut off, pickled, or no array.
        OSError: it cannot be read.
    """
    found: Array = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
    return found


def open_array(path: Path, shape: tuple[int, ...], dtype: str) -> Array:
    """Map an `.npy` file that must be of this shape and type; read-only.

    Raises:
        ValueError: it is another one, cut off, or no array.
        OSError: it cannot be read.
    """
    found = map_array(path)
    if found.shape != shape or found.dtype.str != dtype or not found.flags.c_contiguous:
        raise ValueError(f"it holds {found.dtype.str} {list(found.shape)}, not {dtype} {list(shape)}")
    return found
