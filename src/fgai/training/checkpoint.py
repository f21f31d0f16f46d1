"""`save_model` and `load_model`: a model as safetensors plus JSON, usable without remembering anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from fgai.attention import add_limits, limits_of
from fgai.errors import CheckpointError
from fgai.files import check, pack, parse_json, read_metadata, unpack, write_atomic
from fgai.models import DEFENCES, MODELS, AttentionModel, current_names
from fgai.training.history import History
from fgai.training.train import set_history
from fgai.typed import typed

SCHEMA = 2
"""2: arguments of models by the names of PyG."""

Header = TypedDict(
    "Header",
    {
        "schema": int,
        "class": str,
        "config": dict[str, Any],
        "limits": NotRequired[bool],
        "data_fingerprint": NotRequired[str],
        "about": NotRequired[dict[str, Any]],
        "history": NotRequired[dict[str, Any] | None],
    },
)
"""What a file says of the model in it."""


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
        metadata = read_metadata(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    if "fgai" not in metadata:
        raise CheckpointError(f"{path} holds tensors but no fgai model; was it saved by another program?")
    try:
        header: dict[str, Any] = parse_json(metadata["fgai"], finite=False)
        check(header, dict[str, Any], "the header")
        check(header.get("schema"), int, "schema of the header")
        schema = int(header["schema"])
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} is damaged: it does not say what it holds ({error})") from error
    if schema > SCHEMA:
        raise CheckpointError(f"{path} was written by a newer fgai (schema {schema}); update fgai")
    try:
        check(header, Header, "the header")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
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
    tensors = unpack(path)
    try:
        _check_sizes(known[name], header, tensors)
        model = _built(known[name], header)
        model.load_state_dict(tensors)
    except Exception as error:
        raise CheckpointError(f"{path} is truncated or does not fit its own architecture: {error}") from error
    if header.get("history"):
        try:
            set_history(model, History.from_dict(header["history"]))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return model.eval()


def _built(kind: type[AttentionModel], header: Mapping[str, Any]) -> nn.Module:
    model = kind(**header["config"])
    if header.get("limits"):
        add_limits(model)
    return model


def _check_sizes(
    kind: type[AttentionModel], header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Raise unless the architecture has the weights of the file, before it takes any memory.

    A header may claim a billion channels or layers: layers are counted first, and the rest is built where
    tensors have a shape and nothing else.
    """
    layers = header["config"].get("num_layers", 1)
    if isinstance(layers, int) and layers > max(len(tensors), 1):
        raise CheckpointError(f"it claims {layers} layers and holds {len(tensors)} tensors")
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in _built(kind, header).state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if odd := sorted({*wanted.items()} ^ {*found.items()}):
        raise CheckpointError(f"{odd[0][0]} must be {wanted.get(odd[0][0])}, got {found.get(odd[0][0])}")


def _classes() -> dict[str, type[AttentionModel]]:
    """What can be saved and loaded: every registered class, by its name."""
    return {kind.__name__: kind for kind in (*MODELS.values(), *DEFENCES.values())}
