"""`.npy` files that are written block by block and read through a memory map."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fgai.files import digest_of, regular

Array = NDArray[Any]
T = TypeVar("T", NDArray[Any], Tensor)
ZEROS = 1 << 24  # zero bytes per write where a file's disk space cannot be reserved
CHECKED = 1 << 22  # entries that are checked per block


class _ArrayInfo(TypedDict):
    shape: list[int]
    dtype: str
    sha256: str


class _ArrayFile:
    """An `.npy` file that grows by rows; a `share` is this process's first row and the number of all rows."""

    def __init__(
        self, path: Path, dtype: Any, tail: tuple[int, ...] = (), share: tuple[int, int] | None = None
    ) -> None:
        self.dtype, self.tail, self._shared = np.dtype(dtype), tail, share is not None
        first, self.rows = share or (0, 0)
        if share is None:
            self._file: BinaryIO = path.open("xb")
        else:  # keep the rows of other processes
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        self._header_size = self._write_header()
        width = self.dtype.itemsize * int(np.prod(tail, dtype=np.int64))
        self._file.seek(self._header_size + first * width)

    def append(self, block: Array) -> None:
        assert block.shape[1:] == self.tail
        self._file.write(np.ascontiguousarray(block, self.dtype).data)
        self.rows += 0 if self._shared else len(block)

    def _write_header(self) -> int:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.tail)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                assert self._write_header() == self._header_size  # numpy leaves room for more digits
                self._file.flush()
                os.fsync(self._file.fileno())


class _ArrayFiles(ExitStack):
    """The `.npy` files of a folder by name, each created by its first block of rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._files = folder, dict[str, _ArrayFile]()

    def append(self, name: str, block: Array, share: tuple[int, int] | None = None) -> None:
        if name not in self._files:
            file = _ArrayFile(self._folder / f"{name}.npy", block.dtype, block.shape[1:], share)
            self._files[name] = self.enter_context(file)
        self._files[name].append(block)


def _write_array(path: Path, blocks: Iterable[Array], dtype: Any, tail: tuple[int, ...] = ()) -> None:
    with _ArrayFile(path, dtype, tail) as file:
        for block in blocks:
            file.append(block)


def _blocks(rows: T, step: int) -> Iterator[T]:
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _scratch(path: Path, shape: tuple[int, ...], dtype: Any) -> np.memmap[Any, Any]:
    """Map a new `.npy` file of zeros; its space is reserved, as a full disk would kill the process later."""
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        else:  # macOS
            file.seek(-array.nbytes, os.SEEK_END)
            zeros = memoryview(bytes(min(array.nbytes, ZEROS)))
            for first in range(0, array.nbytes, ZEROS):
                file.write(zeros[: array.nbytes - first])
    return array


def map_array(path: Path) -> Array:
    """Map an `.npy` file, read-only; `ValueError` or `OSError` if it is damaged or cannot be read."""
    try:
        array: Array = np.lib.format.open_memmap(regular(path), mode="r").view(np.ndarray)
    except (OSError, ValueError):
        raise
    except Exception as error:  # numpy parses the header as Python, whose tokenizer has errors of its own
        raise ValueError(f"its header is damaged: {error}") from error
    return array


def _describe(folder: Path) -> dict[str, _ArrayInfo]:
    arrays = {file: map_array(file) for file in sorted(folder.glob("*.npy"))}
    return {
        file.stem: {"shape": list(array.shape), "dtype": array.dtype.str, "sha256": digest_of(file)}
        for file, array in arrays.items()
    }


def _are_rows(pointers: Array, index: Array, count: int) -> bool:
    """Whether pointers of at least one row ascend from 0 to `len(index)`, and all entries are valid."""
    if len(pointers) < 2 or pointers[0] != 0 or pointers[-1] != len(index):
        return False
    blocks = (pointers[first : first + CHECKED + 1] for first in range(0, len(pointers) - 1, CHECKED))
    return all((block[1:] >= block[:-1]).all() for block in blocks) and _are_below(index, count)


def _are_below(index: Array, count: int) -> bool:
    return all(block.min() >= 0 and block.max() < count for block in _blocks(index, CHECKED))
