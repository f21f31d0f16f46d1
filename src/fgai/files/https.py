"""`fetch`: one file over verified https, bounded in time and size; `extract`: files from a zip archive."""

from __future__ import annotations

import ssl
import stat
import zipfile
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path, PurePosixPath, PureWindowsPath
from time import monotonic, sleep
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from fgai.errors import DataError
from fgai.files.read import check_sizes, regular

ATTEMPTS = 3
TIMEOUT = 30.0  # seconds without an answer
DEADLINE = 900.0  # seconds for a whole file, so that a slow download ends, too
MOST_BYTES = 1 << 29
_CHUNK = 1 << 16


class _OnlyHttps(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        _require_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _require_https(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise DataError(f"{url!r} must begin with https://, so that nobody can change the download")


def fetch(url: str, path: Path | str) -> None:
    """Download one file over verified TLS; tried again when the network fails.

    `DataError` if an address or a redirect is not https, the certificate does not verify or the file is too
    large, `OSError` if the server sends no whole file. After an error there is no file.
    """
    path = Path(path)
    _require_https(url)
    for attempt in range(ATTEMPTS):
        try:
            _fetch_once(url, path)
            break
        except (OSError, HTTPException) as error:
            path.unlink(missing_ok=True)
            if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
                raise DataError(f"the certificate of {url} does not verify: {_printable(error)}") from error
            refused = isinstance(error, HTTPError) and error.code < 500
            if refused or attempt == ATTEMPTS - 1:
                raise OSError(f"{url}: {_printable(error)}") from error
            sleep(2.0**attempt)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _printable(error: Exception) -> str:
    """The message of an error, in which a server cannot send control characters to a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(error))


def _fetch_once(url: str, path: Path) -> None:
    opener = build_opener(ProxyHandler(), HTTPSHandler(context=ssl.create_default_context()), _OnlyHttps())
    began, size = monotonic(), 0
    with opener.open(Request(url, headers={"User-Agent": "fgai"}), timeout=TIMEOUT) as answer:
        length = answer.headers.get("Content-Length")
        with path.open("wb") as file:
            while chunk := answer.read1(_CHUNK):
                size += len(chunk)
                if size > MOST_BYTES:
                    raise DataError(f"{url} sends more than {MOST_BYTES} bytes")
                if monotonic() - began > DEADLINE:
                    raise TimeoutError(f"not done after {DEADLINE:.0f} seconds")
                file.write(chunk)
    if length is not None and length.isdigit() and int(length) != size:
        raise ConnectionError(f"it ended after {size} of {length} bytes")


def extract(archive: Path | str, names: Iterable[str], folder: Path | str) -> None:
    """Write files of a zip archive into a folder, by their names without folders in the archive.

    `DataError` refuses an archive with a name like `../x` or `/x`, a link, duplicates of such a file, or more
    content than its size explains. A link in the folder is replaced, not followed.
    """
    archive, names, folder = regular(archive), set(names), Path(folder)
    with zipfile.ZipFile(archive) as opened:
        members = opened.infolist()
        for member in members:
            _check_member(member)
        chosen = {name: [m for m in members if PurePosixPath(m.filename).name == name] for name in names}
        if missing := [name for name in names if not chosen[name]]:
            raise FileNotFoundError(f"the archive has no {', '.join(missing)}")
        if duplicates := [name for name in names if len(chosen[name]) > 1]:
            raise DataError(f"the archive holds {duplicates[0]} more than once")
        try:
            check_sizes(archive, (member for (member,) in chosen.values()))
        except ValueError as error:
            raise DataError(f"the archive is refused: {error}") from None
        for name, (member,) in chosen.items():
            content = opened.read(member)
            (folder / name).unlink(missing_ok=True)
            with (folder / name).open("xb") as file:
                file.write(content)


def _check_member(member: zipfile.ZipInfo) -> None:
    name = member.filename
    absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name.startswith("\\")
    if absolute or ".." in PurePosixPath(name.replace("\\", "/")).parts:
        raise DataError(f"the archive holds {name!r}, a path outside it")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise DataError(f"the archive holds {name!r}, a link")
