"""`save_model` and `load_model`: a model in a safetensors file, with its class and arguments as JSON."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from fgai.attention import Wrapped, add_limits, limits_of, model_name, unwrapped
from fgai.errors import CheckpointError, InputError
from fgai.files import check, load_torch, pack, parse_json, read_metadata, unpack, write_atomic
from fgai.models import MODELS, AttentionModel
from fgai.training.resume import History, set_history
from fgai.typed import typed

Factory = Callable[..., nn.Module] | str  # returns a model; or its name, `package.module:name`
_FACTORY_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_PICKLE_SUFFIXES = (".pt", ".pth")
PRETRAINED = Path(__file__).parent.parent / "pretrained"  # written by tools/pretrained.py
SCHEMA = 2  # of the header; in 2 the arguments of models have PyG's names

_Header = TypedDict(
    "_Header",
    {
        "schema": int,
        "class": str,
        "config": dict[str, Any],
        "factory": NotRequired[str],
        "call": NotRequired[str],
        "limits": NotRequired[bool],
        "data_fingerprint": NotRequired[str],
        "about": NotRequired[dict[str, Any]],
        "history": NotRequired[dict[str, Any] | None],
    },
)


def _factory_name(factory: Callable[..., Any] | str) -> str:
    """Return `package.module:name` of a factory, without importing anything."""
    if isinstance(factory, str):
        if _FACTORY_NAME.fullmatch(factory) is None:
            raise InputError(f"`factory` must be of the form package.module:name, got {factory!r}")
        return factory
    if not callable(factory):
        raise InputError(f"`factory` must be a function, a class or a name, got {type(factory).__name__}")
    return f"{factory.__module__}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"


@typed
def make_model(factory: Factory, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the model of a factory; `InputError` if there is none, it fails or returns no model."""
    name, function = _factory_name(factory), _import_factory(factory) if isinstance(factory, str) else factory
    try:
        model: object = function(**dict(arguments or {}))
    except Exception as error:
        names = ", ".join(arguments or ()) or "no arguments"
        raise InputError(f"`{name}`, called with {names}, failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"`{name}` must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _import_factory(name: str) -> Callable[..., object]:
    module, _, path = name.partition(":")
    try:
        member: Any = importlib.import_module(module)
    except Exception as error:  # a module may fail in any way when it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        hint = "; is its folder on the Python path?" if missing else ""
        raise InputError(f"cannot import `{name}`: {error}{hint}") from error
    for part in path.split("."):
        if not hasattr(member, part):
            close = difflib.get_close_matches(part, dir(member), 1)
            members = getattr(member, "__dict__", {}).items()
            own = [k for k, v in members if callable(v) and getattr(v, "__module__", "") == module]
            hint = f"; it defines {', '.join(own)}" if own else ""
            hint = f"; did you mean {close[0]!r}?" if close else hint
            raise InputError(f"`{module}` has no attribute {part!r}{hint}")
        member = getattr(member, part)
    if not callable(member):
        raise InputError(f"`{name}` must be a function or a class, got {type(member).__name__}")
    return member  # type: ignore[no-any-return]


@typed
def save_model(
    model: nn.Module,
    path: Path | str,
    *,
    data_fingerprint: str = "",
    about: dict[str, Any] | None = None,
    factory: Factory | None = None,
    arguments: dict[str, Any] | None = None,
) -> Path:
    """Write a model to a safetensors file with its architecture inside; return the path.

    For a model of your own the file holds the weights, the name of its factory and the factory's arguments,
    but no code; for a wrapped model also the name of the function given to `fgai.wrap`.

    Args:
        model: of fgai or a registered class; with a `factory` any other model, wrapped or not.
        path: the suffix `.safetensors` is added when missing.
        data_fingerprint: of the graph it was trained on; shown and checked by the command line.
        about: anything JSON can hold, kept beside the weights.
        factory: of a model of your own: its class, a function, or `package.module:name`.
        arguments: of the factory, by name; anything JSON can hold.

    Raises:
        CheckpointError: a class that is not registered and no factory, or arguments that JSON cannot hold.
        InputError: the path has no file name.
    """
    name, classes = model_name(model), _classes()
    own: dict[str, Any] = {}
    if factory is not None:
        own = {"factory": _factory_name(factory), "config": arguments or {}}
        if isinstance(model, Wrapped):
            own["call"] = _factory_name(model.call)
    elif classes.get(name) is not type(model):
        raise CheckpointError(
            f"only {', '.join(classes)} can be saved without a factory, got {name}; give one, e.g."
            f" `factory={name}, arguments={{...}}`, or register its class, `fgai.models.register_model`"
        )
    path = Path(path)
    if not path.name:
        raise InputError(f"`path` must name a file, got {str(path)!r}")
    if path.suffix != ".safetensors":
        path = path.with_name(path.name + ".safetensors")
    history = getattr(model, "history", None)
    header = {
        "schema": SCHEMA,
        "class": name,
        "config": getattr(model, "config", {}),
        "limits": bool(limits_of(model)),
        "data_fingerprint": data_fingerprint,
        "about": about or {},
        "history": history.to_dict() if history is not None else None,
        **own,
    }
    try:
        text = json.dumps(header)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`arguments` and `about` must be what JSON can hold ({error})") from error
    write_atomic(path, pack(dict(unwrapped(model).state_dict()), {"fgai": text}))
    return path


@typed
def pretrained_names() -> list[str]:
    """Return the names of the models that come with fgai, which `load_model` takes in place of a file."""
    return sorted(path.stem for path in PRETRAINED.glob("*.safetensors"))


def _existing_file(path: Path | str) -> Path:
    """Return `path`, or the file of a model of that name that comes with fgai; `CheckpointError` if none."""
    if os.path.exists(path):  # noqa: PTH110 (unlike pathlib's, it is False for a name that is too long)
        return Path(path)
    if str(path) not in pretrained_names():
        raise CheckpointError(f"there is no checkpoint at {path}")
    return PRETRAINED / f"{path}.safetensors"


@typed
def read_header(path: Path | str) -> dict[str, Any]:
    """Return the JSON header of a model file, without weights; `CheckpointError` if it cannot be read."""
    path = _existing_file(path)
    text = read_metadata(path).get("fgai")
    if text is None:
        raise CheckpointError(
            f"{path} holds tensors but no fgai model; for weights of your own model give its class or"
            " function, `load_model(path, factory=...)`"
        )
    try:
        header: dict[str, Any] = parse_json(text, finite=False)
        check(header, dict[str, Any], "the header")
        check(header.get("schema"), int, "schema of the header")
        schema = int(header["schema"])
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} is damaged: it does not say what it holds ({error})") from error
    if schema > SCHEMA:
        raise CheckpointError(f"{path} was written by a newer fgai (schema {schema}); update fgai")
    if schema < SCHEMA:
        raise CheckpointError(f"{path} was written before fgai was released (schema {schema}); train anew")
    try:
        check(header, _Header, "the header")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return header


@typed
def load_model(path: Path | str, expect: str | None = None, *, factory: Factory | None = None) -> nn.Module:
    """Read a model written by `save_model`, in eval mode.

    `path` may be the name of a model that comes with fgai (see `pretrained_names`); `expect` is the class
    name it must have. A model of your own needs its `factory`, which gets the arguments in the file: nothing
    that a file names is imported unless you name it yourself. With a factory, files of any program that
    writes safetensors are read, and `.pt` files that hold a `state_dict`, by PyTorch's restricted loader. A
    wrapped model is wrapped again if the function given to `fgai.wrap` is in the factory's module; if not,
    the factory must wrap it.

    Raises:
        CheckpointError: as `read_header`; a class or weights that do not fit, invalid limits, or a missing
            factory.
        InputError: the factory cannot be imported, fails or returns no model.
    """
    path = _existing_file(path)
    pickled = path.suffix in _PICKLE_SUFFIXES
    if pickled and factory is None:
        raise CheckpointError(f"{path} holds weights alone; give its class or function, `factory=...`")
    foreign = factory is not None and (pickled or "fgai" not in read_metadata(path))
    header = {"class": None, "config": {}} if foreign else read_header(path)
    if not foreign and expect not in (None, header["class"]):
        raise CheckpointError(f"{path} holds a {header['class']}, expected {expect}")
    if factory is None:
        _check_known_class(path, header)
    tensors = _state_dict(path) if pickled else unpack(path)
    try:
        model = _build(header, tensors, factory)
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        if len(dtypes) == 1:
            model.to(dtypes.pop())
        unwrapped(model).load_state_dict(tensors)
    except Exception as error:
        if factory is not None and isinstance(error, InputError):
            raise
        source = "its own architecture" if factory is None else f"the model of `{_factory_name(factory)}`"
        raise CheckpointError(f"{path} is truncated or does not fit {source}: {error}") from error
    if foreign and expect not in (None, model_name(model)):
        raise CheckpointError(f"`factory` returned a {model_name(model)} for {path}, expected {expect}")
    for limits in limits_of(model):
        if (fault := limits.fault()) is not None:
            raise CheckpointError(f"{path}: {fault}; measure them again with `fgai.limit`")
    if header.get("history"):
        try:
            set_history(model, History.from_dict(header["history"]))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return _restore_wrapper(model, header, factory, path).eval()


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The weights in a file of `torch.save`: a `state_dict`, or one under that name in a dictionary."""
    try:
        state = load_torch(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} was refused: {error}. Write it anew with `torch.save(model.state_dict(), path)`"
        ) from error
    for name in ("state_dict", "model_state_dict"):
        state = state.get(name, state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(
            f"{path} must hold a `state_dict`, write it with `torch.save(model.state_dict(), path)`"
        )
    return dict(state)


def _restore_wrapper(
    model: nn.Module, header: Mapping[str, Any], factory: Factory | None, path: Path
) -> nn.Module:
    """Wrap a model that was wrapped when it was saved; a function is only taken from the factory's module."""
    if factory is None or "call" not in header or isinstance(model, Wrapped):
        return model
    (module, _, name), origin = header["call"].partition(":"), _factory_name(factory).partition(":")[0]
    call = getattr(sys.modules.get(origin), name, None) if module == origin else None
    if not callable(call):
        raise CheckpointError(
            f"{path} holds a model that was wrapped with {header['call']!r}, which is no function of"
            f" {origin!r}; let `factory` return the wrapped model, `fgai.wrap(model, call)`"
        )
    return Wrapped(model, call)


def _check_known_class(path: Path, header: Mapping[str, Any]) -> None:
    name, classes = header["class"], _classes()
    if "factory" in header:
        raise CheckpointError(
            f"{path} holds a {name} made by {header['factory']!r}, which is imported only if you name it:"
            f" `load_model(path, factory={header['factory']!r})`, or give the function itself"
        )
    if name not in classes:
        raise CheckpointError(
            f"{path} holds a {name}, expected {' or '.join(classes)}; for another class give"
            " `load_model(path, factory=...)`"
        )


def _build(header: Mapping[str, Any], tensors: Mapping[str, Tensor], factory: Factory | None) -> nn.Module:
    """Return a new model if the file's weights fit it; a user's own may fail on the meta device."""
    # A damaged header may say a billion channels: the model is first built on the meta device.
    config = header["config"]

    def build() -> nn.Module:
        model = _classes()[header["class"]](**config) if factory is None else make_model(factory, config)
        if header.get("limits"):
            add_limits(model)
        return model

    layers = config.get("num_layers", 1)
    if factory is None and isinstance(layers, int) and layers > max(len(tensors), 1):
        raise CheckpointError(f"its header says {layers} layers, but it holds {len(tensors)} tensors")
    expected = None
    with nullcontext() if factory is None else suppress(Exception), torch.device("meta"):
        expected = _shapes(unwrapped(build()).state_dict())
    if expected is not None and (wrong := sorted({*expected.items()} ^ {*_shapes(tensors).items()})):
        name = wrong[0][0]
        raise CheckpointError(f"{name} must be {expected.get(name)}, got {_shapes(tensors).get(name)}")
    return build()


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _classes() -> dict[str, type[AttentionModel]]:
    return {kind.__name__: kind for kind in MODELS.values()}
