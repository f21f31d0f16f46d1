"""`load_graph`: graphs of one's own from files, and files that are refused."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import fgai
from fgai.datasets import fingerprint
from fgai.errors import DataError, FgaiError, InputError
from fgai.graph import Graph
from support.own_cases import own_data

DATA = own_data()
FIELDS = ("x", "edge_index", "edge_attr", "y", "train_mask", "val_mask", "test_mask")


def arrays() -> dict[str, np.ndarray]:
    return {name: DATA[name].numpy() for name in FIELDS}


def write_csv(folder: Path) -> tuple[Path, Path]:
    """An edge list and a node table of `DATA`, the nodes in another order."""
    ends, attributes = DATA.edge_index.t().tolist(), DATA.edge_attr.tolist()
    rows = [",".join(map(repr, (*pair, *values))) for pair, values in zip(ends, attributes, strict=True)]
    edges, nodes = folder / "edges.csv", folder / "nodes.csv"
    edges.write_text("\n".join(["source, destination, same, noise", *rows]) + "\n")
    parts = {"train": DATA.train_mask, "val": DATA.val_mask, "test": DATA.test_mask}
    lines = []
    for node in range(DATA.num_nodes - 1, -1, -1):
        split = next((part for part, mask in parts.items() if mask[node]), "")
        features = ",".join(map(repr, DATA.x[node].tolist()))
        lines.append(f"{int(DATA.y[node])},{features},{node},{split}")
    names = ",".join(f"f{place}" for place in range(DATA.num_features))
    nodes.write_text("\n".join([f"y,{names},node,split", *lines]))
    return edges, nodes


def write_npz(folder: Path) -> tuple[Path, None]:
    doubles = {name: value.astype("f8") if value.dtype == "f4" else value for name, value in arrays().items()}
    np.savez(folder / "graph.npz", **doubles)
    return folder / "graph.npz", None


def write_data(folder: Path) -> tuple[Path, None]:
    torch.save(DATA, folder / "data.pt")
    return folder / "data.pt", None


def write_dictionary(folder: Path) -> tuple[Path, None]:
    torch.save({**DATA.to_dict(), "y": DATA.y[:, None]}, folder / "fields.pt")
    return folder / "fields.pt", None


WRITERS = {"npz": write_npz, "pt": write_data, "dictionary": write_dictionary, "csv": write_csv}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_holds_the_same_graph(kind: str, tmp_path: Path) -> None:
    path, table = WRITERS[kind](tmp_path)
    graph, wanted = fgai.load_graph(path, table), Graph.from_data(DATA)
    assert fingerprint(graph) == fingerprint(wanted) and graph.name == path.stem
    assert torch.equal(graph.edge_attr, wanted.edge_attr) and graph.features.dtype == torch.float32
    for part in ("train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(graph, part), getattr(wanted, part))


def test_weights_and_bare_edge_lists(tmp_path: Path) -> None:
    path = tmp_path / "bare.csv"
    path.write_text("destination,weight,source\n1,0.5,0\n2,1.5,4\n")
    graph = fgai.load_graph(path)
    assert graph.num_nodes == 5 and graph.features is None and graph.edge_attr is None
    np.savez(tmp_path / "more.npz", edge_index=graph.edge_index.numpy(), num_nodes=7)
    assert fgai.load_graph(tmp_path / "more.npz").num_nodes == 7
    assert graph.edge_index.tolist() == [[0, 4], [1, 2]] and graph.edge_weight.tolist() == [0.5, 1.5]


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("fgai-was-here"),)


def _bombed_data(path: Path) -> None:
    data = DATA.clone()
    data.extra = Bomb()
    torch.save(data, path)


def _flipped(path: Path) -> None:
    """Change the lowest bit of one feature."""
    torch.save(DATA, path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(DATA.x.numpy().tobytes())] ^= 1
    path.write_bytes(raw)


def _shortened(path: Path) -> None:
    """Leave the last array out of the list at the end of the archive, and its bytes where they are."""
    np.savez(path, **arrays())
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist.pop()
        archive.comment = b"x"  # so that the list is written again


def _swollen(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 27))


def _with(**changes: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        left = {name: value for name, value in {**arrays(), **changes}.items() if value is not None}
        np.savez(path, **left)

    return write


def _text(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def _holed(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values[3, 1] = np.nan
    return values


REFUSED: dict[str, tuple[str, Callable[[Path], None] | None, type[FgaiError], str]] = {
    "no file": ("a.npz", None, DataError, "there is no file"),
    "an archive whose list is cut": ("a.npz", _shortened, DataError, "damaged"),
    "a label for a number": (
        "a.csv",
        _text("source,destination\n0,299999999\n"),
        DataError,
        "too large for 1 edges",
    ),
    "another kind": ("a.gml", _text("graph"), DataError, "must be a graph as .npz, .pt or .csv"),
    "a raw pickle": (
        "a.pt",
        lambda p: p.write_bytes(pickle.dumps(Bomb())) and None,
        DataError,
        "was refused",
    ),
    "a saved graph with a changed byte": ("a.pt", _flipped, DataError, "checksum"),
    "a saved bomb": ("a.pt", lambda p: torch.save(Bomb(), p), DataError, "was refused"),
    "a bomb in data": ("a.pt", _bombed_data, DataError, "was refused"),
    "a swollen archive": ("a.pt", _swollen, DataError, "more than its own size explains"),
    "a cut file": ("a.pt", lambda p: p.write_bytes(b"PK\3\4 cut") and None, DataError, "was refused"),
    "a tensor": ("a.pt", lambda p: torch.save(torch.ones(3), p), DataError, "a PyG `Data` or a dictionary"),
    "types of edges": (
        "a.pt",
        lambda p: torch.save({**DATA.to_dict(), "edge_type": torch.ones(3)}, p),
        InputError,
        "edge_type` would be lost",
    ),
    "a pickled array": ("a.npz", _with(x=np.array([{}, None])), DataError, "pickled"),
    "an unknown name": ("a.npz", _with(edge_weights=np.ones(3)), DataError, "holds 'edge_weights', which is"),
    "no edges": ("a.npz", _with(edge_index=None), DataError, "holds no `edge_index`"),
    "text": ("a.npz", _with(y=np.array(["a", "b"])), DataError, "`y` of .* must hold numbers"),
    "a scalar": ("a.npz", _with(x=np.float32(1.0)), FgaiError, "."),
    "a short attribute": ("a.npz", _with(edge_attr=np.ones((3, 2))), InputError, "`edge_attr` must have one"),
    "holes": (
        "a.npz",
        _with(edge_attr=_holed(arrays()["edge_attr"])),
        InputError,
        "`edge_attr` must be finite",
    ),
    "no archive": ("a.npz", _text("nothing"), DataError, "is damaged, or not what its name says"),
    "no heading": ("a.csv", _text("0,1\n1,2\n"), DataError, "must have a column `source` in its first line"),
    "nothing": ("a.csv", _text(""), DataError, "got nothing"),
    "a short line": ("a.csv", _text("source,destination,a\n0,1,2\n1,2\n"), DataError, "look at line 3"),
    "a word": ("a.csv", _text("source,destination\n0,1\none,2\n"), DataError, "`source` in line 3 .* 'one'"),
    "a hole": ("a.csv", _text("source,destination,a\n0,1,nan\n"), InputError, "`edge_attr` must be finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_no_graph_are_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, write, kind, words = REFUSED[case]
    if write is not None:
        write(tmp_path / name)
    with pytest.raises(kind, match=words):
        fgai.load_graph(tmp_path / name)
    assert not Path("fgai-was-here").exists()


NODES = {
    "node,y\n0,1\n0,0\n": "node '0' is in lines 2 and 3 of .*nodes.csv",
    "node,split\n0,train\n1,dev\n": "`split` in line 3 of .* got 'dev'",
    "y\n1\n": "a column `node`",
    "node,y\n0,a\n1,0\n": "`y` in line 2 of .* must be a whole number as others are, got 'a'",
}


@pytest.mark.parametrize("text", NODES)
def test_node_tables_that_do_not_fit_are_refused(text: str, tmp_path: Path) -> None:
    edges, nodes = tmp_path / "edges.csv", tmp_path / "nodes.csv"
    edges.write_text("source,destination\n0,1\n")
    nodes.write_text(text)
    with pytest.raises(DataError, match=NODES[text]):
        fgai.load_graph(edges, nodes)
    with pytest.raises(DataError, match="there is no file"):
        fgai.load_graph(edges, tmp_path / "none.csv")
    np.savez(tmp_path / "graph.npz", edge_index=np.zeros((2, 1), dtype=int))
    with pytest.raises(InputError, match="`node_table` is for an edge list"):
        fgai.load_graph(tmp_path / "graph.npz", nodes)


def test_a_data_without_tensors_of_its_own_is_refused(tmp_path: Path) -> None:
    torch.save(Data(), tmp_path / "empty.pt")
    with pytest.raises(DataError, match=r"holds no `edge_index`.*it has nothing"):
        fgai.load_graph(tmp_path / "empty.pt")
