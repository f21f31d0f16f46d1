"""Find the files of a dataset, or download them into the user's cache: all files, verified, or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

from fgai.datasets.registry import DatasetInfo, Source
from fgai.errors import DataError
from fgai.files import extract, fetch
from fgai.graph import Graph

ENVIRONMENT = "FGAI_DATA"


def user_cache() -> Path:
    """Return the folder for downloads, which may be missing: `$XDG_CACHE_HOME/fgai` or `~/.cache/fgai`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fgai"


def _data_cache() -> Path:
    return user_cache() / "data"


def search_path(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the folders to look in, in order: `root` or `$FGAI_DATA`, then the user's cache."""
    chosen = root if root is not None else os.environ.get(ENVIRONMENT) or None
    if chosen is None:
        return (_data_cache(),)
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        origin = "`root`" if root is not None else f"${ENVIRONMENT}"
        raise DataError(f"{origin} is {folder}, which is not a folder; correct it or leave it out")
    return (folder, _data_cache())


def find(layouts: Iterable[Sequence[str]], folders: Iterable[Path]) -> tuple[Path, ...] | None:
    """Return the files of the first layout (relative paths) that is complete in a folder, or None."""
    candidates = (tuple(folder / file for file in layout) for folder, layout in product(folders, layouts))
    return next((files for files in candidates if all(file.is_file() for file in files)), None)


def _download(info: DatasetInfo, source: Source, verify: Callable[[tuple[Path, ...]], Graph]) -> Graph:
    """Download the files of a dataset; they are moved into the cache after `verify` has accepted them."""
    cache, names = _data_cache(), [Path(file).name for file in info.files[0]]
    advice = (
        f"put {', '.join(info.files[0])} (source: {info.source}) into {cache}, or into a folder named by"
        " `root` or $FGAI_DATA"
    )
    if source.url is None:
        raise DataError(f"the files of {info.name!r} are missing and not for download; {advice}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
            folder = Path(scratch)
            if "{file}" in source.url or names == [source.url.rpartition("/")[2]]:
                for name in names:
                    fetch(source.url.replace("{file}", name), folder / name)
            else:
                fetch(source.url, folder / "archive.zip")
                extract(folder / "archive.zip", names, folder)
            graph = verify(tuple(folder / name for name in names))
            for file in info.files[0]:
                (cache / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / Path(file).name).replace(cache / file)
    except Exception as error:  # network, disk and remote servers fail in many ways
        text = f"{info.name!r} could not be downloaded ({type(error).__name__}: {error})"
        raise DataError(f"{text}; {advice}") from error
    return graph
