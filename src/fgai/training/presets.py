"""Settings per method, model and dataset: chosen on validation nodes, kept as TOML in the package."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from fgai.tasks import get_task


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8"))


def preset(method: str, model: str, dataset: str, task: str = "node") -> dict[str, Any]:
    """Return the settings of a method, the special ones laid over the general ones.

    Looks up `[method]`, `[method.MODEL]` and `[method.MODEL.dataset]`, later ones winning; for link and graph
    tasks the same tables under `[link]` and `[graph]` instead. An unknown method, model or dataset simply has
    no special settings.

    Args:
        method: `vanilla`, `ln`, `at` or `fgai`.
        model: class name, e.g. `GAT`.
        dataset: e.g. `amazon-photo`.
        task: its name, e.g. `node`, `link` or `graph`.

    Example:
        >>> preset("vanilla", "GAT", "a graph nobody tuned")["epochs"]
        200
    """
    found: dict[str, Any] = {}
    own = get_task(task).presets
    level: Any = _table().get(own, {}) if own else _table()
    for name in (method, model, dataset):
        level = level.get(name) if isinstance(level, dict) else None
        if level is None:
            break
        found |= {key: value for key, value in level.items() if not isinstance(value, dict)}
    return found
