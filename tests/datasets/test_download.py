"""Downloads: only the published files reach the cache, whatever a server sends."""

from __future__ import annotations

import dataclasses
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch_geometric.datasets import Amazon, Coauthor, Planetoid

from fgai import datasets
from fgai.datasets import registry
from fgai.datasets.loader import user_cache
from fgai.errors import DataError, InputError
from fgai.files import digest_of
from support.dataset_cases import PHOTO, expect, photo, write_npz, write_tu
from support.loopback import Server, serving, trust

FINGERPRINTED = [name for name in datasets.names() if registry._SOURCES[name].fingerprint]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FGAI_DATA", raising=False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fgai.files.https.sleep", lambda seconds: None)
    trust(tmp_path, monkeypatch)
    with serving(tmp_path) as running:
        yield running


def source(monkeypatch: pytest.MonkeyPatch, name: str, **changes: object) -> None:
    monkeypatch.setitem(registry._SOURCES, name, dataclasses.replace(registry._SOURCES[name], **changes))


def cached() -> list[str]:
    folder = user_cache() / "data"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def published(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small Photo dataset as the server publishes it, and as fgai knows it."""
    path = photo(tmp_path / "original", monkeypatch) / PHOTO
    graph = datasets.load_dataset("amazon-photo", tmp_path / "original")
    address = f"{server.url}/{{file}}"
    known = {"sha256": (digest_of(path),), "fingerprint": datasets.fingerprint(graph)}
    source(monkeypatch, "amazon-photo", url=address, **known)
    return path.read_bytes()


def test_the_published_file_is_kept_and_asked_for_once(server: Server, published: bytes) -> None:
    server.answers["/amazon_electronics_photo.npz"] = published
    first, again = (datasets.load_dataset("amazon-photo") for _ in range(2))
    assert datasets.fingerprint(first) == datasets.fingerprint(again)
    assert cached() == [PHOTO] and len(server.asked) == 1


def test_a_forged_file_is_never_kept_and_asked_for_again(
    server: Server, published: bytes, tmp_path: Path
) -> None:
    write_npz(tmp_path / "forged.npz", seed=1)
    shutil.copy(tmp_path / "original" / PHOTO, tmp_path / "altered.npz")
    with np.load(tmp_path / "altered.npz") as archive:
        parts = dict(archive)
    parts["labels"] = np.roll(parts["labels"], 1)  # of the right sizes, only not the truth
    np.savez(tmp_path / "altered.npz", **parts)
    forged = [(tmp_path / name).read_bytes() for name in ("forged.npz", "altered.npz")]
    for content in (*forged, b"<html>Sign in to the network</html>", published[:-50], b""):
        server.answers["/amazon_electronics_photo.npz"] = content
        with pytest.raises(DataError, match=r"could not be downloaded.*put amazon/Photo/raw/"):
            datasets.load_dataset("amazon-photo")
        assert cached() == []
    server.answers["/amazon_electronics_photo.npz"] = published
    assert datasets.load_dataset("amazon-photo").name == "amazon-photo"


def test_the_same_graph_packed_anew_is_accepted(server: Server, published: bytes, tmp_path: Path) -> None:
    with np.load(tmp_path / "original" / PHOTO) as archive:
        np.savez_compressed(tmp_path / "again.npz", **archive)
    again = (tmp_path / "again.npz").read_bytes()
    assert again != published
    server.answers["/amazon_electronics_photo.npz"] = again
    datasets.load_dataset("amazon-photo")
    assert cached() == [PHOTO]


def test_an_altered_file_in_a_folder_is_told(published: bytes, tmp_path: Path) -> None:
    path = tmp_path / "original" / PHOTO
    with np.load(path) as archive:
        parts = dict(archive)
    parts["labels"] = np.roll(parts["labels"], 1)
    np.savez(path, **parts)
    with pytest.raises(DataError, match="does not hold 'amazon-photo' as it was published"):
        datasets.load_dataset("amazon-photo", tmp_path / "original")


def test_files_of_which_only_the_bytes_are_known_are_not_even_read(
    published: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(files: object) -> None:
        pytest.fail("a foreign file was read")

    source(monkeypatch, "amazon-photo", fingerprint="", sha256=("0" * 64,), reader=unread)
    with pytest.raises(DataError, match="is not the published file"):
        datasets.load_dataset("amazon-photo", tmp_path / "original")


def zipped(folder: Path, path: Path, *more: tuple[str, bytes]) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, f"MUTAG/{file.name}")
        for name, content in more:
            archive.writestr(name, content)
    return path.read_bytes()


def test_an_archive_gives_its_files_and_nothing_else(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tu(tmp_path / "raw", "MUTAG")
    expect(monkeypatch, "mutag", num_nodes=41, num_edges=62, num_features=3, num_graphs=10)
    source(monkeypatch, "mutag", url=f"{server.url}/MUTAG.zip")
    evil = (("../../../../escaped.txt", b"evil"), ("MUTAG/../../escaped.txt", b"evil"))
    for member in evil:
        server.answers["/MUTAG.zip"] = zipped(tmp_path / "raw", tmp_path / "evil.zip", member)
        with pytest.raises(DataError, match="a path outside it"):
            datasets.load_dataset("mutag")
        assert not list(tmp_path.rglob("escaped.txt")) and cached() == []
    server.answers["/MUTAG.zip"] = zipped(
        tmp_path / "raw", tmp_path / "good.zip", ("MUTAG/README.txt", b"words")
    )
    assert datasets.load_dataset("mutag").num_graphs == 10
    assert cached() == sorted(datasets.info("mutag").files[0])


def test_a_set_of_files_is_complete_or_not_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    source(monkeypatch, "cora", url=f"{server.url}/{{file}}")
    server.answers["/ind.cora.x"] = b"raw"
    with pytest.raises(DataError, match=r"ind\.cora\.tx: HTTP Error 404"):
        datasets.load_dataset("cora")
    assert list((user_cache() / "data").iterdir()) == []


def test_every_address_is_https_and_the_one_of_pyg() -> None:
    for name in datasets.names():
        url = registry._SOURCES[name].url
        assert url is None or url.startswith("https://")
    for name, kind in (("amazon-cs", Amazon), ("coauthor-physics", Coauthor), ("pubmed", Planetoid)):
        assert str(registry._SOURCES[name].url).startswith(kind.url)
    about = dataclasses.replace(datasets.info("cora"), name="plain")
    with pytest.raises(InputError, match="https"):
        datasets.register_dataset(about, registry.Source(make=datasets.planted, url="http://example.org/x"))


def test_known_files_are_pinned() -> None:
    pinned = {name for name in datasets.names() if registry._SOURCES[name].sha256}
    assert pinned == {*FINGERPRINTED, "cora", "citeseer", "pubmed"} and len(FINGERPRINTED) == 6
    for name in pinned:
        sums = registry._SOURCES[name].sha256
        assert len(sums) == len(datasets.info(name).files[0]) and {len(one) for one in sums} == {64}


@pytest.mark.data
@pytest.mark.parametrize("name", FINGERPRINTED)
def test_real_graphs_have_their_fingerprints(data_root: Path, name: str) -> None:
    assert datasets.fingerprint(datasets.load_dataset(name, data_root)) == registry._SOURCES[name].fingerprint
