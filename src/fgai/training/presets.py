"""Settings per method, model and dataset: chosen on validation nodes, kept as TOML in the package."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from fgai.checks import one_of
from fgai.tasks import get_task
from fgai.typed import typed


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8"))


@typed
def preset(method: str, model: str, dataset: str, task: str = "node") -> dict[str, Any]:
    """Return the settings of a method, the special ones laid over the general ones.

    Looks up `[method]`, `[method.MODEL]` and `[method.MODEL.dataset]`, later ones winning; for link and graph
    tasks the same tables under `[link]` and `[graph]` instead. An unknown method, model or dataset simply has
    no special settings.

    Args:
        method: `vanilla`, `ln`, `at`, `fgai`, `fgai-features` for `fgai` without limits, or `fgai-certified`
            for a training towards certificates against injection.
        model: class name, e.g. `GAT`.
        dataset: e.g. `amazon-photo`.
        task: its name, e.g. `node`, `link` or `graph`.

    Example:
        >>> preset("vanilla", "GAT", "a graph nobody tuned")["epochs"]
        200
    """
    found: dict[str, Any] = {}
    for level in _levels(method, model, dataset, task):
        found |= {key: value for key, value in level.items() if not isinstance(value, dict)}
    return found


def preset_named(name: str | None, method: str, model: str, dataset: str, task: str) -> dict[str, Any]:
    """Return the settings that a `preset` argument stands for.

    Args:
        name: `auto` for the data's own, the general ones where it has none; the name of a dataset for those
            chosen there; None for none.
        method: see `preset`.
        model: class name.
        dataset: of the data.
        task: of the data.

    Raises:
        InputError: nothing was chosen for this method and model on the dataset of that name.
    """
    if name is None:
        return {}
    if name != "auto":
        *_, last = levels = [{}, *_levels(method, model, "", task)]
        tuned = [key for key, value in last.items() if isinstance(value, dict)] if len(levels) == 3 else []
        dataset = one_of(name, "preset", ("auto", *tuned))
    return preset(method, model, dataset, task)


def _levels(*names: str) -> list[dict[str, Any]]:
    """Return the tables of a method, of its model and of the dataset, as far as there are any."""
    *path, task = names
    found: list[dict[str, Any]] = []
    own = get_task(task).presets
    level: Any = _table().get(own, {}) if own else _table()
    for name in path:
        level = level.get(name)
        if not isinstance(level, dict):
            break
        found.append(level)
    return found
