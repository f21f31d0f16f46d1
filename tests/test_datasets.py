"""Readers against PyG's, loading from folders, downloads, splits and fingerprints."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.datasets import Amazon, Coauthor, Planetoid, TUDataset
from torch_geometric.io import read_npz as pyg_npz
from torch_geometric.io import read_planetoid_data, read_tu_data
from torch_geometric.utils import to_undirected

import dataset_cases as cases
from fgai import datasets
from fgai.datasets import download as downloading
from fgai.datasets import ogb, paths, readers, registry
from fgai.datasets.splits import index_split, random_split, stratified_split
from fgai.errors import DataError, InputError
from fgai.graph import Graph
from fgai.ops import Features, edge_keys

PHOTO = "amazon/Photo/raw/amazon_electronics_photo.npz"


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's folders or the network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(downloading, "_fetch_pyg", offline)
    monkeypatch.setattr(downloading, "_fetch_url", offline)


def expect(monkeypatch: pytest.MonkeyPatch, name: str, **sizes: int) -> None:
    """Let `name` have other sizes than the real dataset."""
    monkeypatch.setitem(registry._INFO, name, dataclasses.replace(registry._INFO[name], **sizes))


def photo(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FGAI_DATA", raising=False)
    cases.write_npz(root / PHOTO)
    reference = pyg_npz(str(root / PHOTO))
    expect(
        monkeypatch,
        "amazon-photo",
        num_nodes=cases.NODES,
        num_features=cases.WORDS,
        num_classes=cases.CLASSES,
        num_edges=reference.edge_index.shape[1],
    )
    return root


def edge_set(edges: torch.Tensor) -> set[tuple[int, int]]:
    return set(zip(*edges.tolist(), strict=True))


def parts(folder: Path, name: str, words: tuple[str, ...]) -> list[Path]:
    return [folder / f"ind.{name}.{word}" for word in words]


PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
TU = ("A", "graph_indicator", "graph_labels", "node_labels", "node_attributes")


# Names and descriptions


def test_every_dataset_describes_itself() -> None:
    assert datasets.names()[0] == "planted" and len(set(datasets.names())) == 14
    for name in datasets.names():
        about = datasets.info(name)
        assert about.name == name and about.description and about.citation and about.licence and about.source
        assert (
            about.num_nodes > 1 and about.num_edges > 1 and about.num_features > 1 and about.num_classes > 1
        )
        assert about.files or name == "planted"
        assert set(about.splits) <= {"random", "public"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("amazon-foto", "amazon-photo"),
        ("Cora", "cora"),
        ("ogbn_arxiv", "ogbn-arxiv"),
        ("coauthor_cs", "coauthor-cs"),
    ],
)
def test_unknown_names_suggest_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(DataError, match=f"did you mean '{right}'"):
        datasets.load(wrong)


def test_unknown_split_and_bad_seed() -> None:
    with pytest.raises(DataError, match="no split 'public'; use 'random'"):
        datasets.load("planted", split="public")
    with pytest.raises(InputError, match="seed"):
        datasets.load("planted", seed=-1)


# Readers against PyG's on the same files


def test_npz_equals_pyg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = datasets.load("amazon-photo", photo(tmp_path, monkeypatch))
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
    raw = readers.read_planetoid(parts(tmp_path, name, PLANETOID))
    reference = read_planetoid_data(str(tmp_path), "citeseer") if name == "citeseer" else None
    assert raw.num_nodes == nodes and raw.y is not None and raw.split is not None
    unknown = np.flatnonzero(raw.y < 0)
    assert unknown.tolist() == [518, 522]
    words = raw.features.toarray()
    assert not words[unknown].any() and not words[1].any()
    np.testing.assert_allclose(words.sum(axis=1)[words.any(axis=1)], 1.0, rtol=1e-5)
    if reference is None:
        return
    total = reference.x.sum(dim=1, keepdim=True)
    np.testing.assert_allclose(words, (reference.x / total.clamp(min=1e-9)).numpy(), rtol=1e-5)
    known = raw.y >= 0
    np.testing.assert_array_equal(raw.y[known], reference.y.numpy()[known])
    masks = index_split(*(torch.from_numpy(raw.split[key]) for key in ("train", "val", "test")), nodes)
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
    graph = datasets.load("proteins", tmp_path)
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
    graph = datasets.load("ba-shapes", tmp_path)
    assert graph.edge_truth is not None and graph.train_mask is not None
    marked = edge_set(graph.edge_index[:, graph.edge_truth])
    assert marked == edge_set(torch.from_numpy(np.hstack([true, true[::-1]])))
    assert graph.train_mask.tolist() == masks.tolist()
    other = datasets.load("ba-shapes", tmp_path, seed=3, split="random")
    assert other.train_mask is not None and int(other.train_mask.sum()) == 2


def test_tape_features_are_rank_weighted(tmp_path: Path) -> None:
    guesses = cases.write_tape(tmp_path / "tape.npz")
    raw = readers.read_tape([tmp_path / "tape.npz"])
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
    one, two = (datasets.load("ogbn-arxiv", tmp_path / kind) for kind in ("zipped", "unpacked"))
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
        (cases.write_npz, readers.read_npz),
        (cases.write_ground_truth, readers.read_ground_truth),
        (cases.write_tape, readers.read_tape),
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
            readers.read_npz([path])


@pytest.mark.parametrize("part", PLANETOID)
def test_damaged_planetoid(tmp_path: Path, part: str) -> None:
    cases.write_planetoid(tmp_path, "citeseer")
    file = tmp_path / f"ind.citeseer.{part}"
    if part == "x":  # part of `allx`, and not read
        return
    for content in (file.read_bytes()[:30], b"", b"1\n2\nfish\n"):
        file.write_bytes(content)
        with pytest.raises(DataError):
            readers.read_planetoid(parts(tmp_path, "citeseer", PLANETOID))


def test_planetoid_files_of_the_wrong_kind(tmp_path: Path) -> None:
    cases.write_planetoid(tmp_path, "citeseer")
    shutil.copy(tmp_path / "ind.citeseer.ally", tmp_path / "ind.citeseer.graph")
    with pytest.raises(DataError, match="holds a ndarray, expected a dict"):
        readers.read_planetoid(parts(tmp_path, "citeseer", PLANETOID))


@pytest.mark.parametrize("part", TU)
def test_damaged_tu(tmp_path: Path, part: str) -> None:
    cases.write_tu(tmp_path, "MUTAG")
    files = [tmp_path / f"MUTAG_{word}.txt" for word in TU]
    file = tmp_path / f"MUTAG_{part}.txt"
    text = file.read_text().splitlines()
    for lines in (text[: len(text) // 2] if part != "A" else ["1, 9"], ["fish"], ["1, 99999"]):
        file.write_text("\n".join(lines))
        with pytest.raises(DataError, match="MUTAG"):
            readers.read_tu(files)


def test_damaged_ogb(tmp_path: Path) -> None:
    path = tmp_path / "arxiv.zip"
    tables = cases.ogb_tables()
    cases.write_ogb_zip(path, tables)
    for content in damaged(path)[:-1]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"arxiv\.zip"):
            ogb.read_ogbn_arxiv([path])
    for change in (
        {"raw/edge.csv.gz": tables["raw/edge.csv.gz"] + 9},
        {"raw/node-feat.csv.gz": tables["raw/node-feat.csv.gz"][:-1]},
        {"split/time/test.csv.gz": np.array([[cases.NODES]])},
    ):
        cases.write_ogb_zip(path, tables | change)
        with pytest.raises(DataError, match=r"arxiv\.zip"):
            ogb.read_ogbn_arxiv([path])
    del tables["raw/edge.csv.gz"]
    cases.write_ogb_zip(path, tables)
    with pytest.raises(DataError, match=r"has no raw/edge\.csv\.gz"):
        ogb.read_ogbn_arxiv([path])


def test_a_file_of_another_size_is_foreign(tmp_path: Path) -> None:
    cases.write_npz(tmp_path / PHOTO)
    with pytest.raises(DataError, match="foreign: num_nodes is 23, expected 7650"):
        datasets.load("amazon-photo", tmp_path)


def test_features_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ground_truth/ba_shapes.npz"
    cases.write_ground_truth(path)
    with np.load(path) as archive:
        good = dict(archive)
    good["x"][3, 1] = np.nan
    np.savez(path, **good)
    with pytest.raises(DataError, match="damaged: `features` must be finite"):
        datasets.load("ba-shapes", tmp_path)


# Folders and downloads


def test_the_data_folder_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = photo(tmp_path / "root", monkeypatch)
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    datasets.load("amazon-photo", root)
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before
    assert not (tmp_path / "cache").exists()


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo(tmp_path / "named", monkeypatch)
    with pytest.raises(DataError, match=r"could not be downloaded.*no network.*put amazon/Photo/raw/"):
        datasets.load("amazon-photo")
    monkeypatch.setenv("FGAI_DATA", str(tmp_path / "named"))
    by_environment = datasets.load("amazon-photo")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="could not be downloaded"):
        datasets.load("amazon-photo", tmp_path / "empty")
    shutil.copytree(tmp_path / "named", paths.data_cache(), dirs_exist_ok=True)
    by_cache = datasets.load("amazon-photo", tmp_path / "empty")
    assert datasets.fingerprint(by_environment) == datasets.fingerprint(by_cache)
    monkeypatch.setenv("FGAI_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"\$FGAI_DATA names .*absent"):
        datasets.load("amazon-photo")
    with pytest.raises(DataError, match=r"`root` names .*missing"):
        datasets.load("amazon-photo", tmp_path / "missing")
    assert datasets.load("planted").num_nodes == 2000


def test_what_cannot_be_downloaded_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not for download; put ground_truth/ba_community\.npz"):
        datasets.load("ba-community", tmp_path)
    with pytest.raises(DataError, match=r"ogbn_arxiv/ogbn_arxiv_nofeat\.npz"):
        datasets.load("arxiv-tape", tmp_path)


REAL_FETCH = downloading._fetch_pyg


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("amazon-cs", Amazon),
        ("coauthor-physics", Coauthor),
        ("citeseer", Planetoid),
        ("pubmed", Planetoid),
        ("mutag", TUDataset),
    ],
)
def test_pyg_downloads_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type
) -> None:
    monkeypatch.setattr(downloading, "_fetch_pyg", REAL_FETCH)
    about, origin = datasets.info(name), registry.source(name)

    def fake(self: object) -> None:
        for file in about.files[0]:
            Path(self.raw_dir, Path(file).name).write_text("raw")  # type: ignore[attr-defined]

    monkeypatch.setattr(kind, "download", fake)
    downloading.download(about, origin)
    made = {
        str(file.relative_to(paths.data_cache())) for file in paths.data_cache().rglob("*") if file.is_file()
    }
    assert made == set(about.files[0])
    if kind is not TUDataset:  # its raw files are named by its zip
        names = object.__new__(kind)
        names.name, names.split = (origin.pyg or ("", ""))[1], "public"
        assert {Path(file).name for file in about.files[0]} >= set(np.atleast_1d(names.raw_file_names))


def test_a_broken_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "_fetch_pyg", REAL_FETCH)

    def broken(self: object) -> None:
        half(self)
        raise OSError("connection reset")

    def half(self: object) -> None:
        Path(self.raw_dir, "ind.cora.x").write_text("raw")  # type: ignore[attr-defined]

    for fetch, message in ((broken, "connection reset"), (half, r"the download has no ind\.cora\.tx")):
        monkeypatch.setattr(Planetoid, "download", fetch)
        with pytest.raises(DataError, match=message):
            downloading.download(datasets.info("cora"), registry.source("cora"))
        assert list(paths.data_cache().iterdir()) == []


# Splits


@given(labels=st.lists(st.integers(-1, 4), min_size=1, max_size=60), seed=st.integers(0, 50))
def test_random_split_covers_the_labelled_nodes_once(labels: list[int], seed: int) -> None:
    y = torch.tensor(labels)
    for split in (random_split(y, seed), stratified_split(y, seed)):
        total = torch.stack(split).long().sum(dim=0)
        assert torch.equal(total, (y >= 0).long())
    again = random_split(y, seed)
    assert all(torch.equal(a, b) for a, b in zip(random_split(y, seed), again, strict=True))


def test_splits_have_their_shares_and_follow_the_seed() -> None:
    y = torch.arange(300) % 3
    split = random_split(y, 0)
    assert [int(mask.sum()) for mask in split] == [30, 30, 240]
    assert not torch.equal(split.train, random_split(y, 1).train)
    drawn = random_split(y, 0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(split.train, drawn.train)
    for mask, share in zip(stratified_split(y, 2), (80, 10, 10), strict=True):
        assert torch.bincount(y[mask]).tolist() == [share] * 3
    with pytest.raises(InputError, match="leave some for test"):
        random_split(y, train=0.6, val=0.4)


# Fingerprints


def small(features: object = None, **fields: object) -> Graph:
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    x = torch.tensor([[0.0, 1.5], [2.0, 0.0], [0.0, 0.0], [0.25, -1.0]]) if features is None else features
    return Graph.from_edges(edges, 4, x, y=torch.tensor([0, 1, 1, 0]), **fields)  # type: ignore[arg-type]


def test_fingerprint_is_fixed() -> None:
    assert datasets.fingerprint(small()) == "d9c4ec6f29198b6b1173628f4e3301c8"


def test_fingerprint_depends_on_content_not_on_form() -> None:
    base = small()
    assert base.features is not None
    dense = base.features.to_dense()
    rows = sp.csr_matrix(dense.numpy())
    shuffled = Features.sparse(
        torch.tensor([0, 2, 3, 3, 5]),
        torch.tensor([1, 0, 0, 1, 0]),  # not in order, with a stored zero
        torch.tensor([1.5, 0.0, 2.0, -1.0, 0.25]),
        2,
    )
    mask = torch.tensor([True, False, False, False])
    same = [small(rows), small(shuffled), small(dense.double()), small(train_mask=mask), small(name="other")]
    assert {datasets.fingerprint(graph) for graph in same} == {datasets.fingerprint(base)}
    changed = dense.clone()
    changed[1, 1] = 1e-3
    other = [
        small(changed),
        base.replace(y=torch.tensor([0, 1, 1, 1])),
        base.replace(y=None),
        base.remove(torch.tensor([1]))[0],
        base.inject(torch.tensor([[0, 2]]))[0],
        base.replace(features=None),
        base.replace(features=base.features.perturb(torch.tensor([2]), torch.tensor([[0.5, 0.0]]))),
    ]
    assert len({datasets.fingerprint(graph) for graph in [base, *other]}) == len(other) + 1


# The real files


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n in datasets.names() if n not in ("planted", "ogbn-arxiv")])
def test_real_datasets_load(data_root: Path, name: str) -> None:
    graph = datasets.load(name, data_root)  # sizes are checked while loading
    source, destination = graph.edge_index
    assert not bool((source == destination).any())
    assert torch.equal(torch.sort(edge_keys(destination, source)).values, graph.keys)
    isolated = {"amazon-photo": 115, "amazon-cs": 281, "citeseer": 48}
    if name in isolated:
        assert int((graph.adjacency.degree == 0).sum()) == isolated[name]


@pytest.mark.data
def test_real_cora_equals_pyg(data_root: Path) -> None:
    graph = datasets.load("cora", data_root, split="public")
    reference = read_planetoid_data(str(data_root / "planetoid/Cora/raw"), "cora")
    assert edge_set(graph.edge_index) == edge_set(reference.edge_index)
    assert torch.equal(graph.y, reference.y) and torch.equal(graph.test_mask, reference.test_mask)
    assert graph.features is not None
    total = reference.x.sum(dim=1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(graph.features.to_dense(), reference.x / total)


@pytest.mark.data
def test_real_tape_guesses_classify_three_quarters(data_root: Path) -> None:
    graph = datasets.load("arxiv-tape", data_root)
    assert graph.features is not None
    right = graph.features.to_dense().argmax(dim=1) == graph.y
    assert 0.72 < float(right[graph.test_mask].float().mean()) < 0.76
