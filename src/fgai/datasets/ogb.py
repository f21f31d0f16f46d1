"""The raw archive of the Open Graph Benchmark, zipped as published or unpacked, read without its package."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.datasets.readers import Raw, checked
from fgai.errors import DataError
from fgai.files import gunzip, most_bytes, regular

ARCHIVE = "arxiv.zip"
MEMBERS = (
    "raw/edge.csv.gz",
    "raw/node-feat.csv.gz",
    "raw/node-label.csv.gz",
    "raw/num-node-list.csv.gz",
    "split/time/train.csv.gz",
    "split/time/valid.csv.gz",
    "split/time/test.csv.gz",
)


def _contents(files: Sequence[Path]) -> dict[str, bytes]:
    """Compressed bytes of every member, by its path inside the dataset's folder."""
    if len(files) > 1:
        return {member: regular(file).read_bytes() for member, file in zip(MEMBERS, files, strict=True)}
    with zipfile.ZipFile(regular(files[0])) as archive:
        inside = {one.filename.split("/", 1)[1]: one for one in archive.infolist() if "/" in one.filename}
        missing = [member for member in MEMBERS if member not in inside]
        if missing:
            raise DataError(f"{files[0]} has no {', '.join(missing)}; fetch the original OGB archive again")
        if sum(inside[member].file_size for member in MEMBERS) > most_bytes(files[0].stat().st_size):
            raise DataError(f"{files[0]} claims to hold more than its size explains; do not trust it")
        return {member: archive.read(inside[member]) for member in MEMBERS}


def _table(contents: Mapping[str, bytes], member: str, kind: type) -> NDArray[Any]:
    text = gunzip(contents[member])
    return np.loadtxt(io.BytesIO(text), dtype=kind, delimiter=",", ndmin=2)


@checked
def read_ogbn_arxiv(files: Sequence[Path]) -> Raw:
    """Read `ogbn-arxiv` from its published archive: edges, 128 features, labels and the split by year.

    Args:
        files: the archive, or the seven unpacked members in the order of `MEMBERS`.

    Raises:
        DataError: if a file is truncated, foreign, or does not fit the others.
    """
    contents = _contents(files)
    n = int(_table(contents, "raw/num-node-list.csv.gz", np.int64).sum())
    edges = _table(contents, "raw/edge.csv.gz", np.int64).T
    y = _table(contents, "raw/node-label.csv.gz", np.int64)[:, 0]
    x = _table(contents, "raw/node-feat.csv.gz", np.float32)
    split = {
        name: _table(contents, f"split/time/{key}.csv.gz", np.int64)[:, 0]
        for name, key in (("train", "train"), ("val", "valid"), ("test", "test"))
    }
    return Raw(edges=edges, num_nodes=n, features=x, y=y, split=split)
