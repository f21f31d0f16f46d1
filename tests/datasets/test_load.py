"""Readers against PyG's, loading from folders, splits and fingerprints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.io import read_planetoid_data

from fgai import datasets
from fgai.datasets import loader as downloading
from fgai.datasets.loader import user_cache
from fgai.datasets.splits import random_split, stratified_split
from fgai.errors import DataError, InputError
from fgai.graph import Graph
from fgai.sparse import Features, edge_keys
from support.dataset_cases import edge_set, photo


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's folders or the network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(downloading, "fetch", offline)


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
        assert set(about.splits) <= {"random", "public", "folds"}


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
        datasets.load_dataset(wrong)


def test_unknown_split_and_bad_seed() -> None:
    with pytest.raises(DataError, match="no split 'public'; use 'random'"):
        datasets.load_dataset("planted", split="public")
    with pytest.raises(InputError, match="seed"):
        datasets.load_dataset("planted", seed=-1)


# Folders and downloads


def test_the_data_folder_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = photo(tmp_path / "root", monkeypatch)
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    datasets.load_dataset("amazon-photo", root)
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before
    assert not (tmp_path / "cache").exists()


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo(tmp_path / "named", monkeypatch)
    with pytest.raises(DataError, match=r"could not be downloaded.*no network.*put amazon/Photo/raw/"):
        datasets.load_dataset("amazon-photo")
    monkeypatch.setenv("FGAI_DATA", str(tmp_path / "named"))
    by_environment = datasets.load_dataset("amazon-photo")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="could not be downloaded"):
        datasets.load_dataset("amazon-photo", tmp_path / "empty")
    shutil.copytree(tmp_path / "named", user_cache() / "data", dirs_exist_ok=True)
    by_cache = datasets.load_dataset("amazon-photo", tmp_path / "empty")
    assert datasets.fingerprint(by_environment) == datasets.fingerprint(by_cache)
    monkeypatch.setenv("FGAI_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"\$FGAI_DATA is .*absent"):
        datasets.load_dataset("amazon-photo")
    with pytest.raises(DataError, match=r"`root` is .*missing"):
        datasets.load_dataset("amazon-photo", tmp_path / "missing")
    assert datasets.load_dataset("planted").num_nodes == 2000


def test_what_cannot_be_downloaded_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not for download; put ground_truth/ba_community\.npz"):
        datasets.load_dataset("ba-community", tmp_path)
    with pytest.raises(DataError, match=r"ogbn_arxiv/ogbn_arxiv_nofeat\.npz"):
        datasets.load_dataset("arxiv-tape", tmp_path)


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


@pytest.mark.many
@pytest.mark.data
@pytest.mark.parametrize("name", [n for n in datasets.names() if n not in ("planted", "ogbn-arxiv")])
def test_real_datasets_load(data_root: Path, name: str) -> None:
    graph = datasets.load_dataset(name, data_root)  # sizes are checked while loading
    source, destination = graph.edge_index
    assert not bool((source == destination).any())
    assert torch.equal(torch.sort(edge_keys(destination, source)).values, graph.keys)
    isolated = {"amazon-photo": 115, "amazon-cs": 281, "citeseer": 48}
    if name in isolated:
        assert int((graph.adjacency.degree == 0).sum()) == isolated[name]


@pytest.mark.data
def test_real_cora_equals_pyg(data_root: Path) -> None:
    graph = datasets.load_dataset("cora", data_root, split="public")
    reference = read_planetoid_data(str(data_root / "planetoid/Cora/raw"), "cora")
    assert edge_set(graph.edge_index) == edge_set(reference.edge_index)
    assert torch.equal(graph.y, reference.y) and torch.equal(graph.test_mask, reference.test_mask)
    assert graph.features is not None
    torch.testing.assert_close(graph.features.to_dense(), reference.x)


@pytest.mark.data
def test_real_tape_guesses_classify_three_quarters(data_root: Path) -> None:
    graph = datasets.load_dataset("arxiv-tape", data_root)
    assert graph.features is not None
    right = graph.features.to_dense().argmax(dim=1) == graph.y
    assert 0.72 < float(right[graph.test_mask].float().mean()) < 0.76
