"""Find the files of a dataset, or download them into the user's cache: all files, checked, or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fgai.datasets.registry import DatasetInfo, Source
from fgai.errors import DataError
from fgai.files import extract, fetch

ENVIRONMENT = "FGAI_DATA"


def user_cache() -> Path:
    """Return the folder for downloads, which may be missing: `$XDG_CACHE_HOME/fgai` or `~/.cache/fgai`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fgai"


def _data_cache() -> Path:
    return user_cache() / "data"


def search_path(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the folders to look in, in order: `root` or `$FGAI_DATA`, then the user's cache.

    Raises:
        DataError: if the folder that was named does not exist.
    """
    named = root if root is not None else os.environ.get(ENVIRONMENT) or None
    if named is None:
        return (_data_cache(),)
    folder = Path(named).expanduser()
    if not folder.is_dir():
        origin = "`root`" if root is not None else f"${ENVIRONMENT}"
        raise DataError(f"{origin} names {folder}, which is not a folder; correct it or leave it out")
    return (folder, _data_cache())


def find(layouts: Iterable[Sequence[str]], folders: Iterable[Path]) -> tuple[Path, ...] | None:
    """Return the files of the first layout (relative paths) that is complete in a folder, or None."""
    layouts = tuple(layouts)
    for folder in folders:
        for layout in layouts:
            files = tuple(folder / part for part in layout)
            if all(file.is_file() for file in files):
                return files
    return None


_Files = tuple[Path, ...]


def _advice(info: DatasetInfo, folder: Path) -> str:
    files = ", ".join(info.files[0])
    return (
        f"put {files} (source: {info.source}) into {folder}, or into a folder named by `root` or $FGAI_DATA"
    )


def _download(info: DatasetInfo, source: Source, verify: Callable[[_Files], object]) -> _Files:
    """Fetch the files of a dataset into the cache; they are moved there only once `verify` accepted them."""
    cache = _data_cache()
    if source.url is None:
        raise DataError(
            f"the files of {info.name!r} are missing and not for download; {_advice(info, cache)}"
        )
    kept = tuple(cache / file for file in info.files[0])
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
            fetched = _fetch_all(source.url, [file.name for file in kept], Path(scratch))
            verify(fetched)
            for old, new in zip(fetched, kept, strict=True):
                new.parent.mkdir(parents=True, exist_ok=True)
                old.replace(new)
    except Exception as error:  # network, disk and remote servers fail in many ways
        text = f"{info.name!r} could not be downloaded ({type(error).__name__}: {error})"
        raise DataError(f"{text}; {_advice(info, cache)}") from error
    return kept


def _fetch_all(url: str, names: list[str], folder: Path) -> _Files:
    files = tuple(folder / name for name in names)
    if "{file}" in url:
        for file in files:
            fetch(url.replace("{file}", file.name), file)
    elif names == [url.rpartition("/")[2]]:
        fetch(url, files[0])
    else:
        archive = folder / "archive.zip"
        fetch(url, archive)
        extract(archive, names, folder)
    return files
