"""Edge lists of any length, read part by part: CSV, SNAP's text, Parquet and `.npy`; gzip goes with text."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fgai.compiled import compiled
from fgai.errors import DataError, extra
from fgai.files import most_bytes, regular
from fgai.large.arrays import Array, map_array
from fgai.large.sort import _Edges

PART = 1 << 23  # bytes of text, or edges of arrays, that are read together
MOST_LINE = 1 << 20  # bytes of the longest line
BEYOND = 1 << 40  # node numbers stop growing here, far beyond every node
ENDS = ("source", "destination")

# mypy: disable-error-code="no-untyped-call"


def _edge_reader(path: Path) -> Callable[[], Iterator[_Edges]] | None:
    """Return what reads an edge list part by part; None where its name tells of none."""
    plain = path.name.removesuffix(".gz")
    suffix = Path(plain).suffix
    if suffix == ".csv":
        return partial(_csv, path)
    if suffix in (".txt", ".tsv", ".edges", ".edgelist"):
        return lambda: (_numbers(text, path, comma=False) for text in _texts(path))
    if plain != path.name:
        return None
    return {".parquet": partial(_parquet, path), ".npy": partial(_array, path)}.get(suffix)


class _Text(NamedTuple):
    raw: bytes  # the lines
    line: int  # number of the first one, from 1
    byte: int  # where it begins in the (unpacked) file


def _texts(path: Path) -> Iterator[_Text]:
    """The lines of a text file, many at a time; bytes of a packed one are counted as they come out."""
    line, byte, rest = 1, 0, b""
    packed = path.suffix == ".gz"
    most = most_bytes(regular(path).stat().st_size) if packed else None
    with gzip.open(path, "rb") if packed else path.open("rb") as file:
        while block := _read_part(file, path, byte + len(rest), line):
            end = block.rfind(b"\n") + 1
            whole, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
            if len(rest) > MOST_LINE:
                raise DataError(f"line {line + whole.count(10)} of {path} is longer than {MOST_LINE} bytes")
            if most is not None and byte + len(whole) > most:
                raise DataError(f"{path} unpacks to more than its own size explains; do not trust it")
            if whole:
                yield _Text(whole, line, byte)
            line, byte = line + whole.count(b"\n"), byte + len(whole)
    if rest:
        yield _Text(rest, line, byte)


def _read_part(file: Any, path: Path, byte: int, line: int) -> Any:
    try:
        return file.read(PART)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged or cut off after byte {byte}, line {line} or later: {error}; fetch it again"
        ) from error


@compiled
def _skip(raw, at):  # type: ignore[no-untyped-def]
    """Where spaces and tabs from `at` on end."""
    while at < len(raw) and (raw[at] == 32 or raw[at] == 9):
        at += 1
    return at


@compiled
def _number(raw, at):  # type: ignore[no-untyped-def]
    """The whole number at `at` (-1: there is none) and where it ends; it stops growing at `BEYOND`."""
    value, first = np.int64(0), at
    while at < len(raw) and 48 <= raw[at] <= 57:
        value = min(value * 10 + (raw[at] - 48), np.int64(BEYOND))
        at += 1
    return (value if at > first else np.int64(-1)), at


@compiled
def _pair(raw, at, comma):  # type: ignore[no-untyped-def]
    """Two numbers from `at` on and where they end; -1 for what is missing or not apart from the other."""
    one, at = _number(raw, at)
    gap, at = at, _skip(raw, at)
    if comma:
        if at == len(raw) or raw[at] != 44:
            return one, np.int64(-1), at
        at = _skip(raw, at + 1)
    elif at == gap:
        return one, np.int64(-1), at
    two, at = _number(raw, at)
    return one, two, _skip(raw, at)


@compiled
def _parse(raw, comma, source, destination):  # type: ignore[no-untyped-def]
    """Read two whole numbers a line; return how many lines had them, and where a line without begins (-1)."""
    found, at, end = 0, 0, len(raw)
    while at < end:
        start, at = at, _skip(raw, at)
        if at < end and (raw[at] == 35 or raw[at] == 37):  # a remark after # or %
            while at < end and raw[at] != 10:
                at += 1
        elif at < end and raw[at] != 10 and raw[at] != 13:
            one, two, at = _pair(raw, at, comma)
            if one < 0 or two < 0:
                return found, start
            source[found], destination[found] = one, two
            found += 1
        at += at < end and raw[at] == 13
        if at < end and raw[at] != 10:
            return found, start
        at += 1
    return found, -1


def _numbers(text: _Text, path: Path, comma: bool) -> _Edges:
    raw = np.frombuffer(text.raw, np.uint8)
    room = text.raw.count(b"\n") + 1
    source, destination = np.empty(room, np.int64), np.empty(room, np.int64)
    found, bad = _parse(raw, comma, source, destination)
    if bad >= 0:
        _refuse_line(path, text, bad, "two node numbers")
    return _Edges(source[:found], destination[:found], {})


def _refuse_line(path: Path, text: _Text, start: int, wanted: str) -> None:
    line = text.line + text.raw.count(b"\n", 0, start)
    shown = text.raw[start : start + 60].split(b"\n")[0].decode("utf-8", "replace")
    raise DataError(
        f"line {line} of {path}, from byte {text.byte + start} on, must hold {wanted}, got {shown!r}"
    )


def _csv(path: Path) -> Iterator[_Edges]:
    """A heading with `source` and `destination`, perhaps `weight`, and other columns as attributes."""
    heading: list[str] | None = None
    for text in _texts(path):
        part = text
        if heading is None:
            first, _, rest = text.raw.partition(b"\n")
            heading = [name.strip() for name in first.decode("utf-8", "replace").split(",")]
            _check_heading(heading, path)
            part = _Text(rest, 2, len(first) + 1)
        if heading == list(ENDS):
            yield _numbers(part, path, comma=True)
        elif part.raw.strip():
            yield _by_columns(dict(zip(heading, _table(part, len(heading), path).T, strict=True)))
    if heading is None:
        raise DataError(f"{path} is empty; its first line must name `source` and `destination`")


def _check_heading(heading: list[str], path: Path) -> None:
    missing = [name for name in ENDS if name not in heading]
    if missing or len(set(heading)) != len(heading):
        wanted = f"a column `{missing[0]}`" if missing else "different columns"
        raise DataError(f"{path} must have {wanted}, named in its heading, got {', '.join(heading)[:200]}")


def _table(text: _Text, columns: int, path: Path) -> Array:
    """Lines of numbers apart by commas, [lines, columns]."""
    lines = text.raw.decode("utf-8", "replace").splitlines()
    try:
        found = np.loadtxt(lines, np.float64, delimiter=",", comments=None, ndmin=2)
        if found.shape[1] == columns:
            return found
    except ValueError:
        pass
    start = 0
    for line in text.raw.splitlines(keepends=True):
        numbers = 0
        with suppress(ValueError):
            numbers = len([float(word) for word in line.decode().split(",")])
        if line.strip() and numbers != columns:
            _refuse_line(path, text, start, f"{columns} numbers")
        start += len(line)
    raise DataError(f"{path} has lines with another number of values than its heading")


def _by_columns(columns: dict[str, Array]) -> _Edges:
    """Edges from columns of numbers by their names."""
    rest = dict(columns)
    source, destination = (_node_numbers(rest.pop(name), name) for name in ENDS)
    values = {}
    if "weight" in rest:
        values["edge_weight"] = rest.pop("weight")
    if rest:
        values["edge_attr"] = np.stack(list(rest.values()), axis=1)
    for name, value in values.items():
        if not np.isfinite(value).all():
            raise DataError(f"`{name}` must be finite; clean the edge list before use")
    return _Edges(source, destination, values)


def _node_numbers(numbers: Array, name: str) -> Array:
    """Whole numbers of any type as int64; those beyond every node stay so."""
    if numbers.dtype.kind == "f":
        whole = np.isfinite(numbers) & (numbers == np.floor(numbers))
        if not whole.all():
            raise DataError(f"`{name}` must hold node numbers, got {numbers[np.argmin(whole)]}")
        numbers = np.clip(numbers, -1, BEYOND)
    elif numbers.dtype == np.uint64:
        numbers = np.minimum(numbers, np.uint64(BEYOND))
    return numbers.astype(np.int64)


def _parquet(path: Path) -> Iterator[_Edges]:
    """Columns as those of a CSV file, read by pyarrow part by part; the index of pandas is left out."""
    parquet = extra("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if not name.startswith("__index_level_")]
            _check_heading(names, path)
            row = 0
            for batch in file.iter_batches(batch_size=PART // 8, columns=names):
                yield _by_columns({name: _numbers_in(batch.column(name), name, path, row) for name in names})
                row += batch.num_rows
    except DataError:
        raise
    except Exception as error:  # pyarrow's errors are its own
        raise DataError(f"{path} is damaged, or no Parquet file ({error}); write it anew") from error


def _numbers_in(column: Any, name: str, path: Path, row: int) -> Array:
    """The numbers of a column of pyarrow's; `row` is that of the first one."""
    if column.null_count:
        first = row + int(np.argmax(np.asarray(column.is_null())))
        raise DataError(f"`{name}` of {path} has no value in row {first}; fill it, or leave such edges out")
    found: Array = np.asarray(column)
    if found.dtype.kind not in "iuf":
        raise DataError(
            f"`{name}` of {path} must hold numbers, got {column.type}; convert or drop the column"
        )
    return found


def _array(path: Path) -> Iterator[_Edges]:
    edges = _mapped(path)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise DataError(f"{path} must hold node numbers [2, edges], got {edges.dtype} {list(edges.shape)}")
    for first in range(0, edges.shape[1], PART // 8):
        part = edges[:, first : first + PART // 8]
        yield _by_columns(dict(zip(ENDS, part, strict=True)))


def _mapped(path: Path) -> Array:
    try:
        return map_array(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is missing, damaged, or no array of numbers ({error})") from error
