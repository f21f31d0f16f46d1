"""Downloads into the user's cache: over verified https, read before they are kept, all files or none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from fgai.datasets.paths import data_cache
from fgai.datasets.registry import DatasetInfo, Source
from fgai.errors import DataError
from fgai.files import extract, fetch

Files = tuple[Path, ...]


def advice(info: DatasetInfo, folder: Path) -> str:
    """Say which files to put where."""
    files = ", ".join(info.files[0])
    return (
        f"put {files} (source: {info.source}) into {folder}, or into a folder named by `root` or $FGAI_DATA"
    )


def download(info: DatasetInfo, source: Source, verify: Callable[[Files], None]) -> Files:
    """Fetch the files of a dataset into the user's cache.

    They are fetched to a temporary folder and moved only once `verify` has accepted them: a broken or a
    forged download leaves nothing behind, and is asked for again the next time.

    Args:
        info: names the files.
        source: says where they come from.
        verify: reads the files and raises if they are not what they should be.

    Returns:
        The files, in the order of the first layout.

    Raises:
        DataError: if they cannot be had; the message says which file to put where.
    """
    cache = data_cache()
    if source.url is None:
        raise DataError(f"the files of {info.name!r} are missing and not for download; {advice(info, cache)}")
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
        raise DataError(f"{text}; {advice(info, cache)}") from error
    return kept


def _fetch_all(url: str, names: list[str], folder: Path) -> Files:
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
