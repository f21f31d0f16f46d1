"""Where datasets are looked for, and the one folder the library writes to: the user's cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fgai.errors import DataError

ENVIRONMENT = "FGAI_DATA"


def user_cache() -> Path:
    """Return the folder for downloads and caches: `$XDG_CACHE_HOME/fgai`, or `~/.cache/fgai`.

    It is not created here.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fgai"


def data_cache() -> Path:
    """Return the folder downloaded datasets are put in."""
    return user_cache() / "data"


def search_path(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the folders to look in, in order: `root` or `$FGAI_DATA`, then the user's cache.

    Args:
        root: a folder laid out as `fgai data info` says; it is only ever read.

    Raises:
        DataError: if the folder that was named does not exist.
    """
    named = root if root is not None else os.environ.get(ENVIRONMENT) or None
    if named is None:
        return (data_cache(),)
    folder = Path(named).expanduser()
    if not folder.is_dir():
        origin = "`root`" if root is not None else f"${ENVIRONMENT}"
        raise DataError(f"{origin} names {folder}, which is not a folder; correct it or leave it out")
    return (folder, data_cache())


def find(layouts: Iterable[Sequence[str]], folders: Iterable[Path]) -> tuple[Path, ...] | None:
    """Return the files of the first layout that is complete in one of the folders, or None.

    Args:
        layouts: alternatives, each a list of file paths relative to a folder.
        folders: where to look, in order.
    """
    layouts = tuple(layouts)
    for folder in folders:
        for layout in layouts:
            files = tuple(folder / part for part in layout)
            if all(file.is_file() for file in files):
                return files
    return None
