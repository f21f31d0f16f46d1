"""Graphs in a folder: the same as in memory, and damaged ones are refused."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fgai
from fgai.datasets import fingerprint, planted
from fgai.errors import DataError, FgaiError, InputError
from fgai.files import add_checksum
from fgai.graph import Graph
from fgai.large import StoredGraph, write_store
from support.graph_cases import small_data


def valued() -> Graph:
    """A graph with everything a store holds."""
    edges = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 1, 2]])
    return Graph.from_edges(
        edges, 7, torch.randn(7, 3), edge_attr=torch.rand(5, 2), edge_weight=torch.rand(5),
        edge_truth=torch.tensor([True, False, True, False, False]), y=torch.tensor([0, 1, 1, 0, -1, 2, 2]),
        train_mask=torch.arange(7) < 3, val_mask=torch.arange(7) == 3, test_mask=torch.arange(7) > 3,
        name="valued",
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "graph",
    [
        valued(),
        small_data(),
        planted(num_nodes=90),
        Graph.from_edges(torch.zeros(2, 0, dtype=torch.long), 3),
        Graph.from_edges(torch.tensor([[1], [1]]), 2, torch.ones(2, 1), name="a b/ü"),
    ],
    ids=["valued", "dense", "sparse", "no edges", "one loop"],
)
def test_comes_back_as_it_was(graph: Graph, tmp_path: Path) -> None:
    stored = write_store(graph, tmp_path / "deep" / "stored")
    again = StoredGraph(str(tmp_path / "deep" / "stored")).load()
    assert (stored.num_nodes, stored.num_edges) == (graph.num_nodes, graph.num_edges)
    assert (stored.num_features, stored.num_classes) == (graph.num_features, graph.num_classes)
    assert stored.name == again.name == graph.name
    assert stored.fingerprint == fingerprint(graph) == fingerprint(again)
    for field in ("train_mask", "val_mask", "test_mask", "edge_truth"):
        one, two = getattr(graph, field), getattr(again, field)
        assert (one is None and two is None) or torch.equal(one, two)
    if graph.features is not None:
        assert type(again.features.base) is type(graph.features.base)
    assert names(tmp_path / "deep") == ["stored"]


def test_fingerprint_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fgai.large.write.BLOCK", 7)
    monkeypatch.setattr("fgai.large.write.NUMBERS", 20)
    monkeypatch.setattr("fgai.large.arrays.CHECKED", 5)
    for number, graph in enumerate((valued(), small_data(), planted(num_nodes=90))):
        assert write_store(graph, tmp_path / str(number)).fingerprint == fingerprint(graph)


def test_some_rows(tmp_path: Path) -> None:
    for number, graph in enumerate((small_data(), planted(num_nodes=90))):
        stored, dense = write_store(graph, tmp_path / str(number)), graph.features.to_dense()
        for rows in (np.array([5, 2, 2, 30]), slice(3, 9), slice(30, None), slice(4, 4), np.zeros(0, int)):
            assert torch.equal(stored.features(rows).to_dense(), dense[rows])
            assert torch.equal(stored.node_fields(rows)["y"], graph.y[rows])


def test_is_pickled_as_its_place(tmp_path: Path) -> None:
    stored = write_store(small_data(), tmp_path / "s")
    raw = pickle.dumps(stored)
    assert len(raw) < 300 and pickle.loads(raw).fingerprint == stored.fingerprint


def damage_pointers(folder: Path) -> None:
    pointers = np.load(folder / "rowptr.npy")
    pointers[3] = 10**9
    np.save(folder / "rowptr.npy", pointers)


def damage_sources(folder: Path) -> None:
    source = np.load(folder / "source.npy")
    source[2] = -1
    np.save(folder / "source.npy", source)


def cut_off(folder: Path) -> None:
    raw = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(raw[:-40])


def other_type(folder: Path) -> None:
    np.save(folder / "x.npy", np.load(folder / "x.npy").astype(np.float64))


def pickled(folder: Path) -> None:
    np.save(folder / "source.npy", np.array([print], dtype=object), allow_pickle=True)


def flip(name: str) -> Callable[[Path], None]:
    """Change the lowest bit of the last number of an array."""

    def damage(folder: Path) -> None:
        array = np.load(folder / f"{name}.npy")
        array.reshape(-1).view(np.uint8)[-array.itemsize] ^= 1
        np.save(folder / f"{name}.npy", array)

    return damage


def swap_sources(folder: Path) -> None:
    source = np.load(folder / "source.npy")
    np.save(folder / "source.npy", np.roll(source, 1))


def swap_masks(folder: Path) -> None:
    (folder / "train_mask.npy").rename(folder / "other")
    (folder / "val_mask.npy").rename(folder / "train_mask.npy")
    (folder / "other").rename(folder / "val_mask.npy")


def damage_heading(folder: Path) -> None:
    raw = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(raw.replace(b"}", b" ", 1))


def edited(change: Callable[[dict], None], *, sealed: bool = True) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / "graph.json").read_text())
        change(values)
        if sealed:
            values.pop("checksum", None)
            values = add_checksum(values)
        (folder / "graph.json").write_text(json.dumps(values))

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_pointers, "point outside"),
        (damage_sources, "point outside"),
        (cut_off, "damaged or missing"),
        (other_type, "not <f4"),
        (pickled, "damaged or missing"),
        (lambda folder: (folder / "source.npy").unlink(), "damaged or missing"),
        (lambda folder: (folder / "graph.json").unlink(), "holds no stored graph"),
        (lambda folder: (folder / "graph.json").write_text("{"), "is damaged"),
        (edited(lambda m: m.update(version=9)), "newer version"),
        (edited(lambda m: m.update(num_nodes=10**12)), "no graph"),
        (edited(lambda m: m.update(num_edges=7)), "does not fit"),
        (
            edited(lambda m: m["arrays"].update(evil={"shape": [1], "dtype": "<f4", "sha256": ""})),
            "no array of this",
        ),
        (edited(lambda m: m["arrays"].pop("source")), "incomplete"),
        (edited(lambda m: m["arrays"]["y"].update(shape=[40, 2])), "does not fit"),
        (edited(lambda m: m.update(version=1)), "older version"),
        (edited(lambda m: m.update(name="other"), sealed=False), "checksum"),
        (edited(lambda m: m.pop("checksum"), sealed=False), "no checksum"),
        (flip("x"), "checksum"),
        (flip("y"), "checksum"),
        (swap_sources, "checksum"),
        (swap_masks, "checksum"),
        (damage_heading, "header is damaged"),
    ],
)
def test_damaged(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    write_store(small_data(), tmp_path / "s")
    damage(tmp_path / "s")
    with pytest.raises(DataError, match=words):
        StoredGraph(tmp_path / "s").load()


def test_whole_arrays_are_compared_with_their_checksums(tmp_path: Path) -> None:
    write_store(small_data(), tmp_path / "s")
    flip("y")(tmp_path / "s")
    stored = StoredGraph(tmp_path / "s")
    stored.rows()
    for read in (lambda: stored.num_classes, stored.verify):
        with pytest.raises(DataError, match=r"y\.npy is damaged: it does not fit its checksum"):
            read()
    swap_sources(tmp_path / "s")
    with pytest.raises(DataError, match=r"source\.npy is damaged"):
        StoredGraph(tmp_path / "s").rows()


def test_workers_do_not_verify_again(tmp_path: Path) -> None:
    stored = write_store(small_data(), tmp_path / "s")
    stored.verify()
    flip("x")(tmp_path / "s")
    pickle.loads(pickle.dumps(stored)).verify()


def test_not_everything_is_stored(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not stored"):
        write_store(fgai.datasets.link_split(small_data()), tmp_path / "s")
    write_store(small_data(), tmp_path / "s")
    with pytest.raises(DataError, match="exists already"):
        write_store(small_data(), tmp_path / "s")
    (tmp_path / "file").write_text("")
    with pytest.raises(FgaiError, match="cannot write"):
        write_store(small_data(), tmp_path / "file" / "s")
    assert names(tmp_path) == ["file", "s"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".s.partial" / "files"
    left.mkdir(parents=True)
    (left / "source.npy").write_bytes(b"half")
    write_store(small_data(), tmp_path / "s")
    assert names(tmp_path) == ["s"] and "edge_weight.npy" not in names(tmp_path / "s")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(FgaiError, match=r"cannot write .*File too large; nothing was left"):
            write_store(small_data(), tmp_path / "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_opening_reads_the_manifest_alone(tmp_path: Path) -> None:
    write_store(small_data(), tmp_path / "s")
    (tmp_path / "s" / "x.npy").unlink()
    assert isinstance(StoredGraph(tmp_path / "s"), StoredGraph)
