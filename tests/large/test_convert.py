"""Conversion to a folder: the same graph as in memory, in bounded memory, all or nothing."""

from __future__ import annotations

import gzip
import os
import resource
import signal
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import fgai
from fgai.datasets import fingerprint, load_dataset, load_graph
from fgai.errors import DataError, FgaiError, FgaiWarning, InputError, MissingExtraError
from fgai.graph import Graph
from fgai.large import StoredGraph, convert, edge_lists, sort
from fgai.large.sort import _sort_edges
from fgai.large.write import _Work, _write_manifest
from support.cli_cases import processes
from support.graph_cases import MAX_NODES, small_data

NODES, EDGES = 60, 400
pytestmark = pytest.mark.filterwarnings("ignore:.*duplicate edges were merged")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that every file has many."""
    monkeypatch.setattr(edge_lists, "PART", 64)
    monkeypatch.setattr(sort, "BLOCK", 7)


def drawn(seed: int = 0) -> NDArray[np.int64]:
    """[2, E] edges with some that come again, and loops."""
    return np.random.default_rng(seed).integers(0, NODES, (2, EDGES))


def in_memory(edges: NDArray[np.int64], nodes: int | None = None, **options: Any) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Graph.from_edges(torch.from_numpy(edges), nodes or int(edges.max()) + 1, **options)


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def as_text(edges: NDArray[np.int64], between: str, heading: str = "") -> str:
    return heading + "".join(f"{a}{between}{b}\n" for a, b in edges.T)


FORMATS = {
    "snap.txt": lambda edges: ("# remark\n\n%\n" + as_text(edges, "\t")).encode(),
    "windows.tsv": lambda edges: as_text(edges, " ").replace("\n", " \r\n").encode(),
    "unfinished.edges": lambda edges: as_text(edges, "  ").removesuffix("\n").encode(),
    "table.csv": lambda edges: as_text(edges, ",", "source,destination\n").encode(),
    "spaced.csv": lambda edges: as_text(edges, " , ", "source , destination\n").encode(),
    "packed.csv.gz": lambda edges: gzip.compress(as_text(edges, ",", "source,destination\n").encode()),
    "packed.txt.gz": lambda edges: gzip.compress(as_text(edges, " ").encode()),
}


class TestFormats:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("undirected", [False, True])
    @pytest.mark.usefixtures("small_parts")
    def test_text(self, name: str, undirected: bool) -> None:
        Path(name).write_bytes(FORMATS[name](drawn()))
        stored = convert(name, "stored", undirected=undirected)
        wanted = in_memory(drawn(), undirected=undirected)
        assert stored.fingerprint == fingerprint(wanted) == fingerprint(stored.load())
        assert stored.name == "stored" and names() == sorted([name, "stored"])

    @pytest.mark.usefixtures("small_parts")
    def test_values_of_edges(self) -> None:
        edges = np.unique(drawn(), axis=1)
        edges = edges[:, np.random.default_rng(3).permutation(edges.shape[1])]
        weight, attributes = np.random.default_rng(1).random((edges.shape[1],)), edges.T * 0.25
        parts = (weight.tolist(), edges.T.tolist(), attributes.tolist())
        rows = [[number, *ends, *rest] for number, ends, rest in zip(*parts, strict=True)]
        text = "weight,source,destination,a,b\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows)
        Path("e.csv").write_text(text + "\n" + text.split("\n")[1] + "\n")  # one comes again, as it was
        values = {"edge_weight": weight, "edge_attr": attributes}
        wanted = in_memory(edges, **{key: torch.from_numpy(one).float() for key, one in values.items()})
        assert convert("e.csv", "stored").fingerprint == fingerprint(wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert fingerprint(wanted) == fingerprint(load_graph("e.csv"))

        Path("e.csv").write_text(text + f"9{text.split(chr(10))[1]}\n")
        with pytest.raises(DataError, match="have different `edge_weight`"):
            convert("e.csv", "other")

    def test_arrays_of_edges_features_and_labels(self) -> None:
        x = np.random.default_rng(0).normal(size=(NODES + 5, 3))
        y = np.arange(NODES + 5) % 4
        np.save("e.npy", drawn().astype(np.int32))
        np.save("x.npy", x.astype(np.float16))
        np.save("y.npy", y[:, None])
        stored = convert("e.npy", "stored", features="x.npy", labels="y.npy")
        wanted = in_memory(
            drawn(), NODES + 5, features=torch.from_numpy(x.astype(np.float16)).float(), y=torch.from_numpy(y)
        )
        assert stored.num_nodes == NODES + 5 and stored.fingerprint == fingerprint(wanted)

    def test_a_table_of_nodes(self) -> None:
        Path("e.csv").write_text("source,destination\n0,1\n2,1\n")
        Path("n.csv").write_text("node,y,split,a\n1,ok,test,0.5\n0,fraud,train,1.5\n2,,,2.5\n")
        stored = convert("e.csv", "stored", node_table="n.csv")
        assert stored.fingerprint == fingerprint(load_graph("e.csv", "n.csv"))
        assert torch.equal(stored.load().train_mask, torch.tensor([True, False, False]))
        assert stored.load().class_names == ("fraud", "ok") and stored.load().node_names is None

    def test_pyg_data_and_datasets(self) -> None:
        data = small_data()
        torch.save(data.to_data(), "d.pt")
        arrays = {"edge_index": data.edge_index, "x": data.features.to_dense(), "y": data.y}
        np.savez("d.npz", **{name: value.numpy() for name, value in arrays.items()})
        assert convert("d.pt", "one").fingerprint == convert("d.npz", "two").fingerprint == fingerprint(data)
        planted = load_dataset("planted")
        assert convert("planted", "three").fingerprint == fingerprint(planted)

    def test_parquet_without_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("e.parquet").write_bytes(b"PAR1")
        for module in ("pyarrow", "pyarrow.parquet"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=r"fgai\[parquet\]"):
            convert("e.parquet", "stored")

    def test_parquet_through_a_stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A module that has the few names of pyarrow's that we use."""
        Path("e.parquet").write_bytes(b"PAR1")
        edges = drawn()

        class Column:
            null_count, type = 0, "int64"

            def __init__(self, values: NDArray[np.int64]) -> None:
                self.values = values

            def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[np.int64]:
                return self.values

        class Batch:
            def __init__(self, part: NDArray[np.int64]) -> None:
                self.num_rows, self.part = part.shape[1], part

            def column(self, name: str) -> Column:
                return Column(self.part[edge_lists.ENDS.index(name)])

        class ParquetFile:
            schema_arrow = types.SimpleNamespace(names=["source", "destination", "__index_level_0__"])

            def __init__(self, path: Path) -> None:
                assert path.name == "e.parquet"

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def iter_batches(self, batch_size: int, columns: list[str]) -> Any:
                assert columns == ["source", "destination"]
                return (Batch(edges[:, first : first + 50]) for first in range(0, EDGES, 50))

        module = types.SimpleNamespace(ParquetFile=ParquetFile)
        monkeypatch.setattr(edge_lists, "extra", lambda name: module)
        assert convert("e.parquet", "stored").fingerprint == fingerprint(in_memory(edges))

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.tuples(st.integers(0, MAX_NODES), st.integers(0, MAX_NODES)), max_size=30), st.booleans()
    )
    @pytest.mark.usefixtures("small_parts")
    def test_any_edges(self, edges: list[tuple[int, int]], undirected: bool) -> None:
        given_edges = np.array(edges, np.int64).reshape(-1, 2).T
        with tempfile.TemporaryDirectory() as place:
            work = _Work(Path(place), None)
            parts = (
                {"source": part[0], "destination": part[1]} for part in np.array_split(given_edges, 3, axis=1)
            )
            _sort_edges(work, parts, num_nodes=MAX_NODES + 2, undirected=undirected)
            _write_manifest(work.folder, "any", 0)
            stored = StoredGraph(work.folder)
            wanted = in_memory(given_edges, MAX_NODES + 2, undirected=undirected)
            assert stored.fingerprint == fingerprint(wanted)


def test_edges_that_come_again_are_told() -> None:
    Path("e.txt").write_text("0 1\n2 1\n0 1\n0 1\n")
    with pytest.warns(FgaiWarning, match="2 duplicate edges were merged"):
        assert convert("e.txt", "stored").num_edges == 2


class TestLoading:
    def test_a_folder_is_a_graph_and_a_dataset(self) -> None:
        data = small_data()
        fgai.large.write_store(data, "stored")
        assert fingerprint(load_graph("stored")) == fingerprint(data)
        assert torch.equal(load_dataset("stored").train_mask, data.train_mask)
        drawn = [load_dataset("stored", seed=seed, split="random") for seed in (0, 0, 1)]
        assert torch.equal(drawn[0].train_mask, drawn[1].train_mask)
        assert not torch.equal(drawn[0].train_mask, drawn[2].train_mask)
        assert load_dataset("./stored", task="link").links is not None

    def test_what_it_has_not(self) -> None:
        fgai.large.write_store(small_data().replace(train_mask=None), "stored")
        assert load_dataset("stored").train_mask is not None
        with pytest.raises(DataError, match="no split 'public'"):
            load_dataset("stored", split="public")
        with pytest.raises(InputError, match="is for node or link tasks"):
            load_dataset("stored", task="graph")
        with pytest.raises(DataError, match="there is no dataset 'nowhere'"):
            load_dataset("nowhere")

    def test_names_come_before_folders(self) -> None:
        fgai.large.write_store(small_data(), "planted")
        assert load_dataset("planted").num_nodes == 2000


BROKEN = {
    "word.txt": (b"0 1\n" * 50 + b"1 x\n" + b"2 3\n" * 50, "line 51 of word.txt, from byte 200 on"),
    "alone.txt": (b"0 1\n7\n", "line 2 of alone.txt, from byte 4 on, must hold two node numbers, got '7'"),
    "three.txt": (b"0 1\n0 1 2\n", "line 2"),
    "minus.txt": (b"0 -1\n", "line 1"),
    "huge.txt": (b"0 1\n0 99999999999999999999\n", "nodes must be numbered in 0..2147483646"),
    "labels.txt": (b"0 1\n0 2000000000\n", "names node 2000000000, which is too large for 2 edges"),
    "comma.csv": (b"source,destination\n0,1\n0,,1\n", "line 3 of comma.csv, from byte 23 on"),
    "values.csv": (
        b"source,destination,weight\n0,1,0.5\n0,2,half\n",
        "line 3 of values.csv, from byte 34 on",
    ),
    "short.csv": (b"source,destination,weight\n0,1,0.5\n0,2\n", "line 3"),
    "nan.csv": (b"source,destination,weight\n0,1,nan\n", "`edge_weight` must be finite"),
    "half.csv": (b"source,destination,weight\n0.5,1,2\n", "`source` must hold node numbers"),
    "head.csv": (b"from,to\n0,1\n", "must have a column `source`, named in its heading"),
    "empty.csv": (b"", "is empty"),
    "cut.txt.gz": (gzip.compress(as_text(drawn(), " ").encode())[:-20], "damaged or truncated after byte"),
    "no.txt.gz": (b"0 1\n", "damaged or truncated after byte 0"),
    "far.csv": (b"source,destination,weight\n1e300,1,2\n", "in 0..2147483646, got 1099511627776"),
    "bits.npy": (b"\x93NUMPY nothing", "is missing, damaged, or no array"),
    "one.npz": (b"PK", "damaged"),
}


def test_a_folder_of_tables_with_names_is_converted() -> None:
    Path("shop").mkdir()
    Path("shop/edges.csv").write_text("source,destination\nb,a\nc,a\n")
    Path("shop/nodes.csv").write_text("node,y,split,age\na,ok,train,1\nb,fraud,test,2\nc,ok,val,3\n")
    stored, read = convert("shop", "stored"), load_graph("shop")
    assert stored.name == "shop" and stored.fingerprint == fingerprint(read)
    stored.verify()
    for graph in (stored.load(), stored.nodes(0), load_dataset("stored")):
        assert graph.node_names == read.node_names == ("a", "b", "c") and graph.node_index("b") == 1
        assert graph.class_names == read.class_names == ("fraud", "ok")
    Path("stored/names.json").write_text('{"node_names": ["b", "a", "c"]}')
    with pytest.raises(DataError, match=r"names\.json is damaged"):
        StoredGraph("stored").load()
    with pytest.raises(DataError, match="for names, convert its folder"):
        convert("shop/edges.csv", "other", node_table="shop/nodes.csv")


class TestBroken:
    @pytest.mark.parametrize("name", BROKEN)
    @pytest.mark.usefixtures("small_parts")
    def test_is_refused_and_leaves_nothing(self, name: str) -> None:
        raw, words = BROKEN[name]
        Path(name).write_bytes(raw)
        with pytest.raises(DataError) as error:
            convert(name, "stored")
        assert words in str(error.value) and names() == [name]

    def test_options_that_do_not_go_together(self) -> None:
        Path("e.txt").write_text("0 1\n")
        np.save("x.npy", np.zeros((1, 2)))
        np.save("bad.npy", np.full((3, 2), np.nan))
        np.save("y.npy", np.array([0, 1, 1]))
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("planted", {"undirected": True}, "are for edge lists"),
            ("e.txt", {"features": "x.npy"}, "names node 1, but there are 1 nodes"),
            ("e.txt", {"features": "bad.npy"}, "row 0 of bad.npy holds NaN"),
            ("e.txt", {"features": "y.npy"}, "must hold numbers [nodes, features]"),
            ("e.txt", {"features": "nowhere.npy"}, "there is no file nowhere.npy"),
            ("e.txt", {"features": "x.npy", "labels": "y.npy"}, "for each of the 1 rows of `features`"),
            ("e.txt", {"node_table": "n.csv", "labels": "y.npy"}, "not both"),
            ("e.docx", {}, "must be a file of a graph"),
            ("e.txt.zip", {}, "must be a file of a graph"),
            ("mutag-like", {}, "must be a file of a graph"),
        ]
        before = names()
        for source, options, words in cases:
            with pytest.raises(FgaiError) as error:
                convert(source, "stored", **options)
            assert words in str(error.value), words
            assert names() == before

    def test_what_is_there_stays(self) -> None:
        Path("e.txt").write_text("0 1\n")
        Path("mine").mkdir()
        for overwrite in (False, True):  # a folder that is no stored graph is never replaced
            with pytest.raises(DataError, match="mine exists already"):
                convert("e.txt", "mine", overwrite=overwrite)
        made = convert("e.txt", "stored")
        with pytest.warns(FgaiWarning, match="stored exists already, complete and of these sources"):
            assert convert("e.txt", "stored").fingerprint == made.fingerprint
        Path("e.txt").write_text("0 2\n")
        with pytest.raises(DataError, match="stored exists already"):
            convert("e.txt", "stored")
        assert convert("e.txt", "stored", overwrite=True).num_nodes == 3
        Path("e.txt").write_text("0 x\n")
        with pytest.raises(DataError, match="line 1"):
            convert("e.txt", "stored", overwrite=True)
        assert StoredGraph("stored").num_nodes == 3 and names() == ["e.txt", "mine", "stored"]

    @pytest.mark.parametrize("most", [100, 700, 1620])
    def test_a_full_disk_leaves_nothing(self, most: int) -> None:
        Path("e.txt").write_text(as_text(drawn(), " "))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(FgaiError, match=r"cannot write \S*stored\S*: File too large; nothing was"):
                convert("e.txt", "stored")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names() == ["e.txt"]


def test_a_killed_run_leaves_nothing_that_counts() -> None:
    Path("e.txt").write_text(as_text(drawn(), " "))
    code = (
        "import time, fgai.large.sort as sort\nfrom fgai.large import convert\n"
        "sort._move_to_rows = lambda *given: (print('at work', flush=True), time.sleep(60))\n"
        "convert('e.txt', 'stored')\n"
    )
    running, deadline = processes().start("-c", code, cwd=Path.cwd()), time.monotonic() + 60
    while processes().read()[0] != "at work\n" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path("stored").exists()
    os.kill(running, signal.SIGKILL)
    assert processes().finish()[:2] == (-signal.SIGKILL, "at work\n")
    assert len(names()) == 2  # what it left is hidden
    assert convert("e.txt", "stored").fingerprint == fingerprint(in_memory(drawn()))
    assert names() == ["e.txt", "stored"]


def test_memory_does_not_grow_with_the_edges() -> None:
    """2 million edges in blocks of 2¹⁶ need no more than 200 thousand of them."""
    code = """
import resource, sys, numpy as np
import fgai.large.edge_lists as lists, fgai.large.sort as sort, fgai.large.write as write
from fgai.large import convert
lists.PART, sort.BLOCK, write.BLOCK = 1 << 18, 1 << 16, 1 << 16
convert("warm.npy", "warm")
status = lambda name: int([line.split()[1] for line in open("/proc/self/status") if line.startswith(name)][0])
before = status("VmData")
limit = (before << 10) + (24 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
convert("large.npy", "large")
print("done")
"""
    random = np.random.default_rng(0)
    np.save("warm.npy", random.integers(0, 10_000, (2, 200_000), np.int32))
    np.save("large.npy", random.integers(0, 10_000, (2, 2_000_000), np.int32))
    assert processes().run("-c", code, cwd=Path.cwd()).out == "done\n"
    assert StoredGraph("large").num_edges > 1_900_000
