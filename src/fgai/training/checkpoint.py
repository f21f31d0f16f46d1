"""`save_model` and `load_model`: a model as safetensors plus JSON, usable without remembering anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from torch import nn

from fgai.attention import add_limits, limits_of
from fgai.errors import CheckpointError
from fgai.files import pack, write_atomic
from fgai.models import DEFENCES, MODELS, AttentionModel, current_names
from fgai.training.loop import History
from fgai.training.train import set_history
from fgai.typed import typed

SCHEMA = 2
"""2: arguments of models by the names of PyG."""


@typed
def save_model(
    model: nn.Module, path: Path | str, *, data_fingerprint: str = "", about: dict[str, Any] | None = None
) -> Path:
    """Write a model to one safetensors file with its architecture inside; atomic.

    Args:
        model: a fgai model, or one of a registered class. For your own PyG model use
            `safetensors.torch.save_model`.
        path: the file; the suffix `.safetensors` is added when missing.
        data_fingerprint: of the graph it was trained on; shown and checked by the command line.
        about: anything JSON can hold, kept beside the weights.

    Returns:
        The path written.

    Raises:
        CheckpointError: if its class is not registered, see `fgai.models.register_model`.
    """
    name, known = type(model).__name__, _classes()
    if known.get(name) is not type(model):
        raise CheckpointError(
            f"only {', '.join(known)} can be saved here, got {name}; register its class with"
            " `fgai.models.register_model`, or use safetensors directly"
        )
    path = Path(path)
    if path.suffix != ".safetensors":
        path = path.with_name(path.name + ".safetensors")
    history = getattr(model, "history", None)
    header = {
        "schema": SCHEMA,
        "class": name,
        "config": model.config,
        "limits": bool(limits_of(model)),
        "data_fingerprint": data_fingerprint,
        "about": about or {},
        "history": history.to_dict() if history is not None else None,
    }
    write_atomic(path, pack(dict(model.state_dict()), {"fgai": json.dumps(header)}))
    return path


@typed
def read_header(path: Path | str) -> dict[str, Any]:
    """Read what a checkpoint says of itself, without its weights.

    Raises:
        CheckpointError: if the file is missing, damaged, foreign or from a newer fgai.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > 100_000_000:
                raise ValueError("no safetensors header")
            head = json.loads(file.read(size))
            metadata = head.get("__metadata__", {}) if isinstance(head, dict) else {}
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file ({error})") from error
    if "fgai" not in metadata:
        raise CheckpointError(f"{path} holds tensors but no fgai model; was it saved by another program?")
    try:
        header: dict[str, Any] = json.loads(metadata["fgai"])
        schema = int(header["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: it does not say what it holds ({error})") from error
    if schema > SCHEMA:
        raise CheckpointError(f"{path} was written by a newer fgai (schema {schema}); update fgai")
    if schema < 2:
        for part, name in ((header, "config"), (header.get("about") or {}, "settings")):
            if isinstance(part.get(name), dict):
                part[name] = current_names(part[name])
    return header


@typed
def load_model(path: Path | str, expect: str | None = None) -> nn.Module:
    """Read a model written by `save_model`, in eval mode.

    Args:
        path: the file.
        expect: class name it must have, e.g. `"GAT"`.

    Raises:
        CheckpointError: as `read_header`, or if the class or the weights do not fit.
    """
    path, header = Path(path), read_header(path)
    name, known = header.get("class"), _classes()
    if name not in known or (expect is not None and name != expect):
        raise CheckpointError(f"{path} holds a {name}, expected {expect or ' or '.join(known)}")
    try:
        model: nn.Module = known[name](**header["config"])
        if header.get("limits"):
            add_limits(model)
        model.load_state_dict(load_tensors(path.read_bytes()))
    except Exception as error:
        raise CheckpointError(f"{path} is truncated or does not fit its own architecture: {error}") from error
    if header.get("history"):
        set_history(model, History.from_dict(header["history"]))
    return model.eval()


def _classes() -> dict[str, type[AttentionModel]]:
    """What can be saved and loaded: every registered class, by its name."""
    return {kind.__name__: kind for kind in (*MODELS.values(), *DEFENCES.values())}
