"""Edge lists of any length, read block by block: CSV, SNAP's text, both also as gzip, Parquet and `.npy`."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fgai.errors import DataError, extra
from fgai.files import most_bytes, regular
from fgai.large.arrays import Array, _blocks, map_array
from fgai.large.sort import _Edges

PART = 1 << 23  # bytes of text, or eight times the edges of arrays, that are read per block
MOST_LINE = 1 << 20  # bytes of the longest line
BEYOND = 1 << 40  # replaces larger node numbers, which are invalid anyway
ENDS = ("source", "destination")
COMMENTS = ("#", "%")  # first letters of comment lines in SNAP's text


def _edge_reader(path: Path) -> Callable[[], Iterator[_Edges]] | None:
    """Return the reader of an edge list; None if the file's name is not that of one."""
    name = path.name.removesuffix(".gz")
    readers = {".csv": _csv, **dict.fromkeys((".txt", ".tsv", ".edges", ".edgelist"), _snap)}
    if name == path.name:
        readers |= {".parquet": _parquet, ".npy": _array}
    reader = readers.get(Path(name).suffix)
    return None if reader is None else partial(reader, path)


class _Lines(NamedTuple):
    text: bytes
    line: int  # number of the first line, from 1
    byte: int  # offset of the first line in the unpacked file


def _lines(path: Path) -> Iterator[_Lines]:
    """Yield the lines of a text file, many at a time; bytes of a gzip file are counted unpacked."""
    line, byte, rest = 1, 0, b""
    is_gzip = path.suffix == ".gz"
    most = most_bytes(regular(path).stat().st_size) if is_gzip else None
    with gzip.open(path, "rb") if is_gzip else path.open("rb") as file:
        while True:
            try:
                block = file.read(PART)
            except (EOFError, OSError, zlib.error) as error:
                where = f"after byte {byte + len(rest)}, line {line} or later"
                raise DataError(f"{path} is damaged or truncated {where}: {error}; fetch it again") from error
            if not block:
                break
            end = block.rfind(b"\n") + 1
            lines, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
            if len(rest) > MOST_LINE:
                raise DataError(f"line {line + lines.count(10)} of {path} is longer than {MOST_LINE} bytes")
            if most is not None and byte + len(lines) > most:
                raise DataError(f"{path} unpacks to more than its own size explains; do not trust it")
            if lines:
                yield _Lines(lines, line, byte)
            line, byte = line + lines.count(b"\n"), byte + len(lines)
    if rest:
        yield _Lines(rest, line, byte)


def _snap(path: Path) -> Iterator[_Edges]:
    """Read two numbers a line, separated by spaces or tabs."""
    for lines in _lines(path):
        yield _by_columns(dict(zip(ENDS, _table(lines, 2, path, None).T, strict=True)))


def _csv(path: Path) -> Iterator[_Edges]:
    """Read columns `source` and `destination`, perhaps `weight`, and others as attributes."""
    heading: list[str] | None = None
    for block in _lines(path):
        lines = block
        if heading is None:
            first, _, rest = block.text.partition(b"\n")
            heading = [name.strip() for name in first.decode("utf-8", "replace").split(",")]
            _check_heading(heading, path)
            lines = _Lines(rest, 2, len(first) + 1)
        yield _by_columns(dict(zip(heading, _table(lines, len(heading), path, ",").T, strict=True)))
    if heading is None:
        raise DataError(f"{path} is empty; its first line must name `source` and `destination`")


def _check_heading(heading: list[str], path: Path) -> None:
    missing = [name for name in ENDS if name not in heading]
    if missing or len(set(heading)) != len(heading):
        required = f"a column `{missing[0]}`" if missing else "different columns"
        raise DataError(f"{path} must have {required}, named in its heading, got {', '.join(heading)[:200]}")


def _table(lines: _Lines, columns: int, path: Path, delimiter: str | None) -> Array:
    content = lines.text.decode("utf-8", "replace")
    if delimiter is None and any(letter in content for letter in COMMENTS):
        content = "\n".join(line for line in content.splitlines() if not line.lstrip().startswith(COMMENTS))
    if not content.strip():
        return np.empty((0, columns))
    with suppress(ValueError):
        table = np.loadtxt(io.StringIO(content), np.float64, delimiter=delimiter, comments=None, ndmin=2)
        if table.shape[1] == columns and (columns > 2 or table.min() >= 0):
            return table
    _refuse_line(lines, path, columns, delimiter)
    raise DataError(f"{path} has lines with another number of values than its heading")


def _refuse_line(lines: _Lines, path: Path, columns: int, delimiter: str | None) -> None:
    """Raise `DataError` for the first line that does not hold so many numbers, the ends at least 0."""
    start = lines.byte
    for number, raw in enumerate(lines.text.splitlines(keepends=True), lines.line):
        line = raw.decode("utf-8", "replace").strip()
        values: list[float] = []
        with suppress(ValueError):
            values = [float(word) for word in line.split(delimiter)]
        comment = delimiter is None and line.startswith(COMMENTS)
        if line and not comment and (len(values) != columns or (columns == 2 and min(values) < 0)):
            required = "two node numbers" if columns == 2 else f"{columns} numbers"
            where = f"line {number} of {path}, from byte {start} on,"
            raise DataError(f"{where} must hold {required}, got {line[:60]!r}")
        start += len(raw)


def _by_columns(columns: dict[str, Array]) -> _Edges:
    rest = dict(columns)
    edges = {name: _node_numbers(rest.pop(name), name) for name in ENDS}
    if "weight" in rest:
        edges["edge_weight"] = rest.pop("weight")
    if rest:
        edges["edge_attr"] = np.stack(list(rest.values()), axis=1)
    for name, value in edges.items():
        if not np.isfinite(value).all():
            raise DataError(f"`{name}` must be finite; clean the edge list before use")
    return edges


def _node_numbers(numbers: Array, name: str) -> Array:
    """Return whole numbers of any type as int64; those too large for nodes stay so."""
    if numbers.dtype.kind == "f":
        integral = np.isfinite(numbers) & (numbers == np.floor(numbers))
        if not integral.all():
            raise DataError(f"`{name}` must hold node numbers, got {numbers[np.argmin(integral)]}")
        numbers = np.clip(numbers, -1, BEYOND)
    elif numbers.dtype == np.uint64:
        numbers = np.minimum(numbers, np.uint64(BEYOND))
    return numbers.astype(np.int64)


def _parquet(path: Path) -> Iterator[_Edges]:
    """Read columns as those of a CSV file, by pyarrow; the index of pandas is left out."""
    parquet = extra("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if not name.startswith("__index_level_")]
            _check_heading(names, path)
            row = 0
            for batch in file.iter_batches(batch_size=PART // 8, columns=names):
                columns = {name: _parquet_column(batch.column(name), name, path, row) for name in names}
                yield _by_columns(columns)
                row += batch.num_rows
    except DataError:
        raise
    except Exception as error:  # pyarrow's errors are its own
        raise DataError(f"{path} is damaged, or no Parquet file ({error}); write it anew") from error


def _parquet_column(column: Any, name: str, path: Path, row: int) -> Array:
    """Return the numbers of a column, whose first row has the number `row`."""
    if column.null_count:
        first = row + int(np.argmax(np.asarray(column.is_null())))
        raise DataError(f"`{name}` of {path} has no value in row {first}; fill it, or leave such edges out")
    values: Array = np.asarray(column)
    if values.dtype.kind not in "iuf":
        raise DataError(f"`{name}` of {path} must hold numbers, got {column.type}; convert or drop it")
    return values


def _array(path: Path) -> Iterator[_Edges]:
    edges = _map_numbers(path)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise DataError(f"{path} must hold node numbers [2, edges], got {edges.dtype} {list(edges.shape)}")
    for block in _blocks(edges.T, PART // 8):
        yield _by_columns(dict(zip(ENDS, block.T, strict=True)))


def _map_numbers(path: Path) -> Array:
    try:
        return map_array(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing, damaged, or no array of numbers ({error})") from error
