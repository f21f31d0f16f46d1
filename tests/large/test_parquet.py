"""Edge lists in Parquet files, read by pyarrow itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fgai.datasets import fingerprint
from fgai.errors import DataError
from fgai.graph import Graph
from fgai.large import convert, edge_lists

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NODES, ROWS = 60, 379


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edge_lists, "PART", 8 * 50)


def ends() -> tuple[Any, Any]:
    """Different edges in random order."""
    keys = np.random.default_rng(0).permutation(NODES * NODES)[:ROWS]
    return keys // NODES, keys % NODES


def stored(**columns: Any) -> str:
    """Write columns in row groups of 64 and convert them; the fingerprint of the result."""
    pq.write_table(pa.table(columns), "e.parquet", row_group_size=64)
    return convert("e.parquet", "stored").fingerprint


def wanted(**values: Any) -> str:
    edges = torch.from_numpy(np.stack(ends()))
    return fingerprint(Graph.from_edges(edges, int(edges.max()) + 1, **values))


@pytest.mark.parametrize("kind", ["int32", "int64", "uint64", "uint8", "float64"])
def test_node_numbers_of_every_type(kind: str) -> None:
    source, destination = (pa.array(end.astype(kind)) for end in ends())
    assert stored(destination=destination, source=source) == wanted()


def test_dictionaries_are_read_as_their_values() -> None:
    source, destination = (pa.array(end).dictionary_encode() for end in ends())
    assert stored(source=source, destination=destination) == wanted()


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int16"])
def test_weights_and_attributes(kind: str) -> None:
    source, destination = ends()
    weight = (np.arange(ROWS) % 97 / (1 if kind == "int16" else 4)).astype(kind)
    found = stored(source=source, weight=weight, destination=destination, a=destination * 2, b=weight)
    values = torch.from_numpy(weight.astype(np.float32))
    pair = torch.stack([torch.from_numpy(destination * 2).float(), values], 1)
    assert found == wanted(edge_weight=values, edge_attr=pair)


def test_no_edges_and_the_index_of_pandas() -> None:
    none = pa.array([], "int64")
    assert stored(source=none, destination=none) == fingerprint(
        Graph.from_edges(torch.zeros(2, 0, dtype=torch.long), 1)
    )
    Path("stored").rename("other")
    source, destination = ends()
    assert stored(source=source, destination=destination, __index_level_0__=source[::-1]) == wanted()


def without(values: Any, row: int) -> Any:
    return pa.array([None if place == row else value for place, value in enumerate(values.tolist())])


def refused() -> dict[str, tuple[dict[str, Any], str]]:
    source, destination = ends()
    both = {"source": source, "destination": destination}
    huge = pa.array([2**63 + 5] * ROWS, "uint64")
    return {
        "no source": (
            {**both, "source": without(source, 133)},
            "`source` of e.parquet has no value in row 133",
        ),
        "no weight": (
            {**both, "weight": without(source / 2, 70)},
            "`weight` of e.parquet has no value in row 70",
        ),
        "words": (
            {**both, "kind": [str(n) for n in source]},
            "`kind` of e.parquet must hold numbers, got string",
        ),
        "truth": (
            {**both, "destination": source > 3},
            "`destination` of e.parquet must hold numbers, got bool",
        ),
        "nested": ({**both, "pair": [[1, 2]] * ROWS}, "`pair` of e.parquet must hold numbers, got list"),
        "halves": ({**both, "source": source + 0.5}, "`source` must hold node numbers"),
        "huge": ({**both, "source": huge}, "nodes must be numbered in 0..2147483646, got 1099511627776"),
        "names": ({"from": source, "to": destination}, "must have a column `source`"),
        "infinite": ({**both, "weight": np.full(ROWS, np.inf)}, "`edge_weight` must be finite"),
    }


@pytest.mark.parametrize("case", refused())
def test_is_refused_in_words(case: str) -> None:
    columns, words = refused()[case]
    with pytest.raises(DataError) as error:
        stored(**columns)
    assert words in str(error.value)
    assert [path.name for path in Path().iterdir()] == ["e.parquet"]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off(share: float) -> None:
    source, destination = ends()
    pq.write_table(pa.table({"source": source, "destination": destination}), "e.parquet", row_group_size=64)
    raw = Path("e.parquet").read_bytes()
    Path("e.parquet").write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(DataError, match=r"e\.parquet is damaged, or no Parquet file"):
        convert("e.parquet", "stored")


def test_damage_half_way() -> None:
    source, destination = ends()
    table = pa.table({"source": source, "destination": destination})
    pq.write_table(table, "e.parquet", row_group_size=64, use_dictionary=False, compression="zstd")
    raw = bytearray(Path("e.parquet").read_bytes())
    place = pq.ParquetFile("e.parquet").metadata.row_group(3).column(0).data_page_offset
    raw[place + 20 : place + 60] = bytes(40)
    Path("e.parquet").write_bytes(raw)
    with pytest.raises(DataError, match=r"e\.parquet is damaged"):
        convert("e.parquet", "stored")
    assert [path.name for path in Path().iterdir()] == ["e.parquet"]
