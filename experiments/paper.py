"""What the FGAI paper published, to stand beside our numbers."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Published(NamedTuple):
    """One published number; `std` is None where the paper gives none."""

    mean: float
    std: float | None


@cache
def _tables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        files("experiments").joinpath("paper.json").read_text(encoding="utf-8")
    )
    return found


def published(table: str, metric: str, row: tuple[str, str, str]) -> Published | None:
    """Return a number of the paper for a model, dataset and method, or None where it has none.

    Datasets are known by their exact names, so `arxiv-tape` (other features) never gets the paper's arXiv
    numbers.

    Example:
        >>> published("f1", "attacked", ("GAT", "amazon-photo", "fgai"))
        Published(mean=0.8637, std=0.01)
    """
    level: Any = _tables()
    for name in (table, *row, metric):
        level = level.get(name)
        if level is None:
            return None
    return Published(*level)
