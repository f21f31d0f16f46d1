"""Downloads from a hostile server: nothing but the right file is ever kept."""

from __future__ import annotations

import io
import stat
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from fgai.errors import DataError
from fgai.files import extract, fetch
from support.loopback import Server, redirect, send, serving, trust

MODULE = "fgai.files.https"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    trust(tmp_path, monkeypatch)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(f"{MODULE}.sleep", lambda seconds: None)
    with serving(tmp_path) as running:
        yield running


class TestFetch:
    def test_a_file_comes_as_it_is_also_by_way_of_another_address(
        self, server: Server, tmp_path: Path
    ) -> None:
        content = bytes(range(256)) * 999
        server.answers |= {"/there": content, "/here": redirect(f"{server.url}/there")}
        for name in ("there", "here"):
            fetch(f"{server.url}/{name}", tmp_path / name)
            assert (tmp_path / name).read_bytes() == content

    def test_only_https_is_asked(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "plain").mkdir()
        with serving(tmp_path / "plain", tls=False) as plain:
            plain.answers["/file"] = b"forged"
            server.answers["/away"] = redirect(f"{plain.url}/file")
            for url in (
                f"{plain.url}/file",
                f"{server.url}/away",
                "file:///etc/hostname",
                "ftp://127.0.0.1/x",
            ):
                with pytest.raises(DataError, match="must begin with https"):
                    fetch(url, tmp_path / "kept")
            assert plain.asked == [] and not (tmp_path / "kept").exists()

    def test_a_certificate_nobody_vouches_for_is_refused(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SSL_CERT_FILE")
        server.answers["/file"] = b"forged"
        with pytest.raises(DataError, match="does not verify"):
            fetch(f"{server.url}/file", tmp_path / "kept")
        assert server.asked == [] and not (tmp_path / "kept").exists()

    def test_it_is_asked_again_when_the_server_stumbles(self, server: Server, tmp_path: Path) -> None:
        def stumbling(handler: BaseHTTPRequestHandler) -> None:
            if len(server.asked) == 1:
                handler.send_error(503)
            elif len(server.asked) == 2:
                send(handler, b"half", told=9)
            else:
                send(handler, b"the whole")

        server.answers["/file"] = stumbling
        fetch(f"{server.url}/file", tmp_path / "kept")
        assert (tmp_path / "kept").read_bytes() == b"the whole" and len(server.asked) == 3

    @pytest.mark.parametrize(("status", "times"), [(404, 1), (403, 1), (500, 3)])
    def test_what_is_not_there_is_not_asked_for_long(
        self, server: Server, tmp_path: Path, status: int, times: int
    ) -> None:
        server.answers["/file"] = lambda handler: handler.send_error(status)
        with pytest.raises(OSError, match=str(status)):
            fetch(f"{server.url}/file", tmp_path / "kept")
        assert len(server.asked) == times and not (tmp_path / "kept").exists()

    def test_what_a_server_says_is_shown_without_control_characters(
        self, server: Server, tmp_path: Path
    ) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.1 404 \x1b]0;owned\x07\x1b[2J\x9b31m\r\n\r\n")

        server.answers["/file"] = answer
        with pytest.raises(OSError, match="404") as error:
            fetch(f"{server.url}/file", tmp_path / "kept")
        assert str(error.value).isprintable() and "owned" in str(error.value)

    def test_truncated_silent_trickling_and_endless_answers_end(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = threading.Event()

        def trickling(handler: BaseHTTPRequestHandler) -> None:
            send(handler, b"", told=10**6)
            while not done.wait(0.02):
                try:
                    handler.wfile.write(b"x")
                except OSError:
                    return

        def endless(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            try:
                while not done.is_set():
                    handler.wfile.write(bytes(1 << 16))
            except OSError:
                return

        server.answers |= {
            "/truncated": lambda handler: send(handler, b"half", told=9),
            "/silent": lambda handler: done.wait(20) and None,
            "/trickling": trickling,
            "/endless": endless,
        }
        monkeypatch.setattr(f"{MODULE}.TIMEOUT", 0.3)
        monkeypatch.setattr(f"{MODULE}.DEADLINE", 0.4)
        monkeypatch.setattr(f"{MODULE}.MOST_BYTES", 1 << 20)
        monkeypatch.setattr(f"{MODULE}.ATTEMPTS", 1)
        try:
            for name in ("truncated", "silent", "trickling"):
                with pytest.raises(OSError, match=name):
                    fetch(f"{server.url}/{name}", tmp_path / "kept")
            monkeypatch.setattr(f"{MODULE}.DEADLINE", 60.0)
            with pytest.raises(DataError, match="sends more than"):
                fetch(f"{server.url}/endless", tmp_path / "kept")
        finally:
            done.set()
        assert not (tmp_path / "kept").exists()


def archive(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members:
            opened.writestr(name, content)
    return path


def link(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


class TestExtract:
    def test_files_are_taken_out_by_name(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "a.zip", ("SET/SET_A.txt", b"1, 2"), ("SET/README.txt", b"words"))
        out = tmp_path / "out"
        out.mkdir()
        extract(path, ["SET_A.txt"], out)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == {"SET_A.txt": b"1, 2"}

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (("../../outside.txt", b"evil"), "a path outside it"),
            (("SET/../../outside.txt", b"evil"), "a path outside it"),
            (("/tmp/outside.txt", b"evil"), "a path outside it"),
            (("..\\outside.txt", b"evil"), "a path outside it"),
            (("C:\\outside.txt", b"evil"), "a path outside it"),
            ((link("SET/more"), b"/etc"), "a link"),
            (("other/SET_A.txt", b"2, 1"), "more than once"),
            (("SET/big.txt", bytes(1 << 27)), "more than its own size explains"),
        ],
    )
    def test_hostile_archives_are_refused_as_a_whole(
        self, tmp_path: Path, extra: tuple[str | zipfile.ZipInfo, bytes], message: str
    ) -> None:
        path = archive(tmp_path / "a.zip", ("SET/SET_A.txt", b"1, 2"), extra)
        out = tmp_path / "deep" / "out"
        out.mkdir(parents=True)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DataError, match=message):
            extract(path, ["SET_A.txt", *(["big.txt"] if "big" in str(extra[0]) else [])], out)
        assert sorted(tmp_path.rglob("*")) == before

    def test_links_in_the_folder_are_not_followed(self, tmp_path: Path) -> None:
        path = archive(tmp_path / "a.zip", ("SET/SET_A.txt", b"1, 2"))
        out, mine = tmp_path / "out", tmp_path / "mine"
        out.mkdir()
        mine.write_bytes(b"mine")
        (out / "SET_A.txt").symlink_to(mine)
        extract(path, ["SET_A.txt"], out)
        assert mine.read_bytes() == b"mine" and (out / "SET_A.txt").read_bytes() == b"1, 2"
        assert not (out / "SET_A.txt").is_symlink()

    @pytest.mark.parametrize("name", ["../SET_A.txt", "/tmp/SET_A.txt", "", ".."])
    def test_names_with_folders_are_refused(self, tmp_path: Path, name: str) -> None:
        path = archive(tmp_path / "a.zip", ("SET/SET_A.txt", b"1, 2"))
        with pytest.raises((DataError, FileNotFoundError)):
            extract(path, [name], tmp_path)

    def test_missing_files_and_other_formats(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"SET_B\.txt"):
            extract(archive(tmp_path / "a.zip", ("SET/SET_A.txt", b"")), ["SET_B.txt"], tmp_path)
        with pytest.raises(zipfile.BadZipFile):
            extract(Path(__file__), ["SET_A.txt"], tmp_path)
        whole = io.BytesIO((tmp_path / "a.zip").read_bytes())
        (tmp_path / "b.zip").write_bytes(whole.getvalue()[:-9])
        with pytest.raises(zipfile.BadZipFile):
            extract(tmp_path / "b.zip", ["SET_A.txt"], tmp_path)
