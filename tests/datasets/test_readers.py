"""Readers of raw files: equal to PyG's on the same files, and one `DataError` for whatever is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.io import read_npz as pyg_npz
from torch_geometric.io import read_planetoid_data, read_tu_data
from torch_geometric.utils import to_undirected

from fgai import datasets
from fgai.datasets import readers
from fgai.datasets.splits import _masks
from fgai.errors import DataError
from support import dataset_cases as cases
from support.dataset_cases import PHOTO, edge_set, expect, photo

PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
TU = ("A", "graph_indicator", "graph_labels", "node_labels", "node_attributes")


def parts(folder: Path, name: str, words: tuple[str, ...]) -> list[Path]:
    return [folder / f"ind.{name}.{word}" for word in words]


# Readers against PyG's on the same files


def test_npz_equals_pyg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = datasets.load_dataset("amazon-photo", photo(tmp_path, monkeypatch))
    reference = pyg_npz(str(tmp_path / PHOTO))
    assert edge_set(graph.edge_index) == edge_set(reference.edge_index)
    assert graph.num_edges == reference.edge_index.shape[1]
    assert graph.features is not None and graph.features.is_sparse
    torch.testing.assert_close(graph.features.to_dense(), reference.x)
    torch.testing.assert_close(graph.y, reference.y)
    assert graph.adjacency.degree[-2:].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["citeseer", "cora"])
def test_planetoid_equals_pyg(tmp_path: Path, name: str) -> None:
    nodes = cases.write_planetoid(tmp_path, name)
    raw = readers._read_planetoid(parts(tmp_path, name, PLANETOID))
    reference = read_planetoid_data(str(tmp_path), "citeseer") if name == "citeseer" else None
    assert raw.num_nodes == nodes and raw.y is not None and raw.split is not None
    unknown = np.flatnonzero(raw.y < 0)
    assert unknown.tolist() == [518, 522]
    words = raw.features.toarray()
    assert not words[unknown].any() and not words[1].any()
    if reference is None:
        return
    np.testing.assert_allclose(words, reference.x.numpy(), rtol=1e-6)
    known = raw.y >= 0
    np.testing.assert_array_equal(raw.y[known], reference.y.numpy()[known])
    fit, val, test = (torch.from_numpy(raw.split[key]) for key in ("train", "val", "test"))
    masks = _masks((fit, val, test), nodes)
    for mask, key in zip(masks, ("train_mask", "val_mask", "test_mask"), strict=True):
        assert torch.equal(mask, reference[key])
    edges = raw.edges[:, raw.edges[0] != raw.edges[1]]
    assert edge_set(torch.from_numpy(edges)) == edge_set(reference.edge_index)


def test_tu_equals_pyg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tu/PROTEINS/raw"
    cases.write_tu(folder, "PROTEINS")
    reference, slices, _ = read_tu_data(str(folder), "PROTEINS")
    nodes = int(slices["x"][-1])
    expect(
        monkeypatch,
        "proteins",
        num_nodes=nodes,
        num_features=4,
        num_graphs=10,
        num_edges=int(slices["edge_index"][-1]),
    )
    graph = datasets.load_dataset("proteins", tmp_path)
    assert graph.batch is not None and graph.graph_y is not None and graph.features is not None
    offset = slices["x"][graph.batch[graph.edge_index[0]]]
    assert graph.graph_y.tolist() == reference.y.tolist() and graph.y is None
    local = graph.edge_index - offset
    for i in range(10):
        mine = local[:, graph.batch[graph.edge_index[0]] == i]
        assert edge_set(mine) == edge_set(
            reference.edge_index[:, slices["edge_index"][i] : slices["edge_index"][i + 1]]
        )
    x = graph.features.to_dense()
    torch.testing.assert_close(x[:, 1:], reference.x[:, 1:])
    raw = reference.x[:, 0]
    torch.testing.assert_close(x[:, 0], (raw - raw.mean()) / raw.std(correction=0))
    for mask in (graph.train_mask, graph.val_mask, graph.test_mask):
        assert mask is not None
        share = torch.zeros(10).index_add(0, graph.batch, mask.float()) / torch.bincount(graph.batch)
        assert set(share.tolist()) <= {0.0, 1.0}


def test_ground_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = cases.write_ground_truth(tmp_path / "ground_truth/ba_shapes.npz")
    with np.load(tmp_path / "ground_truth/ba_shapes.npz") as archive:
        count, masks = archive["edge_index"].shape[1], archive["train_mask"]
    expect(monkeypatch, "ba-shapes", num_nodes=cases.NODES, num_features=4, num_classes=3, num_edges=count)
    graph = datasets.load_dataset("ba-shapes", tmp_path)
    assert graph.edge_truth is not None and graph.train_mask is not None
    marked = edge_set(graph.edge_index[:, graph.edge_truth])
    assert marked == edge_set(torch.from_numpy(np.hstack([true, true[::-1]])))
    assert graph.train_mask.tolist() == masks.tolist()
    other = datasets.load_dataset("ba-shapes", tmp_path, seed=3, split="random")
    assert other.train_mask is not None and int(other.train_mask.sum()) == 2


def test_tape_features_are_rank_weighted(tmp_path: Path) -> None:
    guesses = cases.write_tape(tmp_path / "tape.npz")
    raw = readers._read_tape([tmp_path / "tape.npz"])
    dense = raw.features.toarray()
    assert dense.shape == (cases.NODES, cases.CLASSES)
    for node, row in enumerate(guesses):
        wanted = np.zeros(cases.CLASSES)
        for rank, guess in enumerate(row):
            if guess >= 0:
                wanted[guess] = max(wanted[guess], 1 / (1 + rank))
        np.testing.assert_allclose(dense[node], wanted, rtol=1e-6)


def test_ogb_archive_zipped_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = cases.ogb_tables()
    edges = to_undirected(torch.from_numpy(tables["raw/edge.csv.gz"].T))
    count = int((edges[0] != edges[1]).sum())
    expect(monkeypatch, "ogbn-arxiv", num_nodes=cases.NODES, num_features=6, num_classes=3, num_edges=count)
    cases.write_ogb_zip(tmp_path / "zipped/ogbn_arxiv/arxiv.zip", tables)
    for member, table in tables.items():
        file = tmp_path / "unpacked/ogbn_arxiv" / member
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(cases.compress(table))
    one, two = (datasets.load_dataset("ogbn-arxiv", tmp_path / kind) for kind in ("zipped", "unpacked"))
    assert datasets.fingerprint(one) == datasets.fingerprint(two)
    assert one.features is not None and one.val_mask is not None
    np.testing.assert_allclose(one.features.to_dense(), tables["raw/node-feat.csv.gz"], rtol=1e-6)
    wanted = sorted(tables["split/time/valid.csv.gz"][:, 0].tolist())
    assert one.val_mask.nonzero().flatten().tolist() == wanted


# Damaged and foreign files


def damaged(path: Path) -> list[bytes]:
    whole = path.read_bytes()
    return [
        b"",
        whole[:7],
        whole[: len(whole) // 2],
        whole[:-30],
        b"something else entirely",
        b"\x93NUMPY" + whole,
    ]


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    for write, read in (
        (cases.write_npz, readers._read_npz),
        (cases.write_ground_truth, readers._read_ground_truth),
        (cases.write_tape, readers._read_tape),
    ):
        write(path)
        for content in damaged(path):
            path.write_bytes(content)
            with pytest.raises(DataError, match=r"file\.npz"):
                read([path])
        np.savez(path, other=np.arange(3))
        with pytest.raises(DataError, match="it has no"):
            read([path])
        with path.open("wb") as file:
            np.save(file, np.arange(3))
        with pytest.raises(DataError, match="one array"):
            read([path])


def test_npz_with_objects_or_wrong_contents(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    cases.write_npz(path)
    with np.load(path) as archive:
        good = dict(archive)
    changes: list[dict[str, np.ndarray]] = [
        {"labels": np.array([None] * cases.NODES, dtype=object)},
        {"labels": good["labels"][:-1]},
        {"adj_indices": good["adj_indices"] + 5},
        {"adj_indptr": good["adj_indptr"][::-1]},
        {"attr_shape": np.array([2, 2])},
    ]
    for change in changes:
        np.savez(path, **(good | change))
        with pytest.raises(DataError, match=r"file\.npz"):
            readers._read_npz([path])


@pytest.mark.parametrize("part", PLANETOID)
def test_damaged_planetoid(tmp_path: Path, part: str) -> None:
    cases.write_planetoid(tmp_path, "citeseer")
    file = tmp_path / f"ind.citeseer.{part}"
    if part == "x":  # part of `allx`, and not read
        return
    for content in (file.read_bytes()[:30], b"", b"1\n2\nfish\n"):
        file.write_bytes(content)
        with pytest.raises(DataError):
            readers._read_planetoid(parts(tmp_path, "citeseer", PLANETOID))


def test_planetoid_files_of_the_wrong_kind(tmp_path: Path) -> None:
    cases.write_planetoid(tmp_path, "citeseer")
    shutil.copy(tmp_path / "ind.citeseer.ally", tmp_path / "ind.citeseer.graph")
    with pytest.raises(DataError, match="holds a ndarray, expected a dict"):
        readers._read_planetoid(parts(tmp_path, "citeseer", PLANETOID))


@pytest.mark.parametrize("part", TU)
def test_damaged_tu(tmp_path: Path, part: str) -> None:
    cases.write_tu(tmp_path, "MUTAG")
    files = [tmp_path / f"MUTAG_{word}.txt" for word in TU]
    file = tmp_path / f"MUTAG_{part}.txt"
    text = file.read_text().splitlines()
    for lines in (text[: len(text) // 2] if part != "A" else ["1, 9"], ["fish"], ["1, 99999"]):
        file.write_text("\n".join(lines))
        with pytest.raises(DataError, match="MUTAG"):
            readers._read_tu(files)


def test_damaged_ogb(tmp_path: Path) -> None:
    path = tmp_path / "arxiv.zip"
    tables = cases.ogb_tables()
    cases.write_ogb_zip(path, tables)
    for content in damaged(path)[:-1]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"arxiv\.zip"):
            readers._read_ogbn_arxiv([path])
    for change in (
        {"raw/edge.csv.gz": tables["raw/edge.csv.gz"] + 9},
        {"raw/node-feat.csv.gz": tables["raw/node-feat.csv.gz"][:-1]},
        {"split/time/test.csv.gz": np.array([[cases.NODES]])},
    ):
        cases.write_ogb_zip(path, tables | change)
        with pytest.raises(DataError, match=r"arxiv\.zip"):
            readers._read_ogbn_arxiv([path])
    del tables["raw/edge.csv.gz"]
    cases.write_ogb_zip(path, tables)
    with pytest.raises(DataError, match=r"has no raw/edge\.csv\.gz"):
        readers._read_ogbn_arxiv([path])


def test_a_file_of_another_size_is_foreign(tmp_path: Path) -> None:
    cases.write_npz(tmp_path / PHOTO)
    with pytest.raises(DataError, match="something else: num_nodes is 23, expected 7650"):
        datasets.load_dataset("amazon-photo", tmp_path)


def test_features_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ground_truth/ba_shapes.npz"
    cases.write_ground_truth(path)
    with np.load(path) as archive:
        good = dict(archive)
    good["x"][3, 1] = np.nan
    np.savez(path, **good)
    with pytest.raises(DataError, match="damaged: `features` must be finite"):
        datasets.load_dataset("ba-shapes", tmp_path)
