"""Downloads by PyG's own dataset classes, into the user's cache, all files or none."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fgai.datasets.paths import data_cache
from fgai.datasets.registry import DatasetInfo, Source
from fgai.errors import DataError


def _fetch_pyg(kind: str, name: str, folder: Path) -> Path:
    """Download the raw files of a PyG dataset below `folder` and return where they are.

    Only the class's `download` runs. Its constructor would also process the files, and unpickle some of
    them without care.
    """
    import torch_geometric.datasets

    dataset = object.__new__(getattr(torch_geometric.datasets, kind))
    dataset.root, dataset.name = str(folder), name.lower() if kind == "Amazon" else name
    dataset.split, dataset.cleaned = "public", False
    raw = Path(dataset.raw_dir)
    raw.mkdir(parents=True, exist_ok=True)
    dataset.download()
    return raw


def _fetch_url(url: str, folder: Path) -> Path:
    from torch_geometric.data import download_url

    download_url(url, str(folder))
    return folder


def advice(info: DatasetInfo, folder: Path) -> str:
    """Say which files to put where."""
    files = ", ".join(info.files[0])
    return (
        f"put {files} (source: {info.source}) into {folder}, or into a folder named by `root` or $FGAI_DATA"
    )


def download(info: DatasetInfo, source: Source) -> None:
    """Fetch the files of a dataset into the user's cache.

    They are fetched to a temporary folder first, so a broken download leaves nothing behind.

    Args:
        info: names the files.
        source: says how PyG gets them.

    Raises:
        DataError: if they cannot be had; the message says which file to put where.
    """
    cache = data_cache()
    if source.pyg is None and source.url is None:
        raise DataError(f"the files of {info.name!r} are missing and not for download; {advice(info, cache)}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
            temporary = Path(scratch)
            if source.pyg is not None:
                raw = _fetch_pyg(*source.pyg, folder=temporary)
            else:
                raw = _fetch_url(str(source.url), temporary)
            wanted = [cache / file for file in info.files[0]]
            absent = [file.name for file in wanted if not (raw / file.name).is_file()]
            if absent:
                raise FileNotFoundError(f"the download has no {', '.join(absent)}")
            for file in wanted:
                file.parent.mkdir(parents=True, exist_ok=True)
                (raw / file.name).replace(file)
    except Exception as error:  # network, disk and remote servers fail in many ways
        text = f"{info.name!r} could not be downloaded ({type(error).__name__}: {error})"
        raise DataError(f"{text}; {advice(info, cache)}") from error
