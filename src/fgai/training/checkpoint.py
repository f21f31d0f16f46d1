"""`save_model` and `load_model`: a model as safetensors plus JSON, usable without remembering anything."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
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

Factory = Callable[..., nn.Module] | str
"""A function or a class, or `package.module:name`."""
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


_PICKLED = (".pt", ".pth")
PRETRAINED = Path(__file__).parent.parent / "pretrained"
"""Folder of the models that come with fgai; tools/pretrained.py trains them."""


def _factory_name(factory: Callable[..., Any] | str) -> str:
    """Return `package.module:name` of a factory, without importing anything."""
    if isinstance(factory, str):
        if _NAME.fullmatch(factory) is None:
            raise InputError(f"`factory` must be of the form package.module:name, got {factory!r}")
        return factory
    if not callable(factory):
        raise InputError(f"`factory` must be a function, a class or a name, got {type(factory).__name__}")
    return f"{factory.__module__}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"


@typed
def make_model(factory: Factory, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the model a factory makes; a name is imported.

    Args:
        factory: given by the caller, never read from a file.
        arguments: of the factory, by name.

    Raises:
        InputError: there is no such factory, it fails, or it makes something else than a model.
    """
    name, call = _factory_name(factory), _imported(factory) if isinstance(factory, str) else factory
    try:
        made: object = call(**dict(arguments or {}))
    except Exception as error:
        given = ", ".join(arguments or ()) or "no arguments"
        raise InputError(f"`{name}`, called with {given}, failed: {error}") from error
    if not isinstance(made, nn.Module):
        raise InputError(f"`{name}` must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _imported(name: str) -> Callable[..., object]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "; is its folder on the Python path?" if error.name == module.partition(".")[0] else ""
        raise InputError(f"cannot import `{name}`: {error}{hint}") from error
    except Exception as error:  # what a module does when it is imported, it may fail at in any way
        raise InputError(f"cannot import `{name}`: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), 1)
            members = getattr(found, "__dict__", {}).items()
            own = [
                key for key, made in members if callable(made) and getattr(made, "__module__", "") == module
            ]
            known = f"; it defines {', '.join(own)}" if own else ""
            hint = f"; did you mean {close[0]!r}?" if close else known
            raise InputError(f"`{module}` has no attribute {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"`{name}` must be a function or a class, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


SCHEMA = 2
"""2: arguments of models by the names of PyG."""

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
"""What a file says of the model in it."""


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
    """Write a model to one safetensors file with its architecture inside; atomic.

    Of a model of your own the file holds the weights, the name of what makes it anew and the arguments that
    takes; no code. Of a wrapped model it also holds the name of the function given to `fgai.wrap`.

    Args:
        model: a fgai model, one of a registered class, or with a `factory` any other, wrapped or not.
        path: the file; the suffix `.safetensors` is added when missing.
        data_fingerprint: of the graph it was trained on; shown and checked by the command line.
        about: anything JSON can hold, kept beside the weights.
        factory: of a model of your own: its class, a function, or `package.module:name`.
        arguments: of the factory, by name; anything JSON can hold.

    Returns:
        The path written.

    Raises:
        CheckpointError: a class that is not registered and no factory, or arguments that JSON cannot hold.
        InputError: the path names no file.
    """
    name, known = model_name(model), _classes()
    own: dict[str, Any] = {}
    if factory is not None:
        own = {"factory": _factory_name(factory), "config": arguments or {}}
        if isinstance(model, Wrapped):
            own["call"] = _factory_name(model.call)
    elif known.get(name) is not type(model):
        raise CheckpointError(
            f"only {', '.join(known)} can be saved as they are, got {name}; say what makes it anew, e.g."
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
    """Return the names of the trained models that come with fgai, e.g. `planted-gat`.

    `load_model`, `fgai.from_pretrained` and every command take them in place of a file.
    """
    return sorted(path.stem for path in PRETRAINED.glob("*.safetensors"))


def _bundled(path: Path | str) -> Path:
    """The file of a bundled model, unless there is a file of this name."""
    given = Path(path)
    return (
        PRETRAINED / f"{given}.safetensors"
        if str(given) in pretrained_names() and not given.exists()
        else given
    )


@typed
def read_header(path: Path | str) -> dict[str, Any]:
    """Read what a checkpoint says of itself, without its weights.

    Args:
        path: the file, or the name of a model that comes with fgai.

    Raises:
        CheckpointError: if the file is missing, damaged, foreign or from a newer fgai.
    """
    path = _bundled(path)
    text = _header_text(path)
    if text is None:
        raise CheckpointError(
            f"{path} holds tensors but no fgai model; was it saved by another program? If they are the"
            " weights of a model of your own, give what makes it: `load_model(path, factory=...)`"
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


def _header_text(path: Path) -> str | None:
    """What fgai wrote beside the tensors; None where another program wrote them."""
    try:
        return read_metadata(path).get("fgai")
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None


@typed
def load_model(path: Path | str, expect: str | None = None, *, factory: Factory | None = None) -> nn.Module:
    """Read a model written by `save_model`, in eval mode.

    Weights of a model of your own need what makes the model: nothing a file names is imported unless you
    name it yourself. With a factory, files of any program that writes safetensors are read, and `.pt` files
    that hold a `state_dict`, by PyTorch's restricted loader. A model that was wrapped when it was saved is
    wrapped again if the function given to `fgai.wrap` is in the factory's module; if not, let the factory
    return the wrapped model.

    Args:
        path: the file, or the name of a model that comes with fgai, see `pretrained_names`.
        expect: class name it must have, e.g. `"GAT"`.
        factory: of a model of your own: its class, a function, or `package.module:name`, which is imported.
            Called with the arguments the file has for it.

    Raises:
        CheckpointError: as `read_header`, or if the class or the weights do not fit, limits are no ranges, or
            a factory is needed.
        InputError: the factory cannot be imported, fails or makes no model.
    """
    path = _bundled(path)
    if path.suffix in _PICKLED and factory is None:
        raise CheckpointError(f"{path} holds weights alone; give what makes the model, `factory=...`")
    foreign = factory is not None and (path.suffix in _PICKLED or _header_text(path) is None)
    header = {"class": None, "config": {}} if foreign else read_header(path)
    if expect is not None and header["class"] != expect:
        raise CheckpointError(f"{path} holds a {header['class']}, expected {expect}")
    if factory is None:
        _require_known(path, header)
    tensors = _state_dict(path) if path.suffix in _PICKLED else unpack(path)
    try:
        model = _made(header, tensors) if factory is None else _made_by(factory, header, tensors)
        kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        if len(kinds) == 1:
            model.to(kinds.pop())
        unwrapped(model).load_state_dict(tensors)
    except Exception as error:
        if factory is not None and isinstance(error, InputError):
            raise
        place = "its own architecture" if factory is None else f"what `{_factory_name(factory)}` makes"
        raise CheckpointError(f"{path} is truncated or does not fit {place}: {error}") from error
    for limits in limits_of(model):
        if (fault := limits.fault()) is not None:
            raise CheckpointError(f"{path}: {fault}; measure them again with `fgai.limit`")
    if header.get("history"):
        try:
            set_history(model, History.from_dict(header["history"]))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return _wrapped_again(model, header, factory, path).eval()


def _state_dict(path: Path) -> dict[str, Tensor]:
    """The weights in a file of `torch.save`: a `state_dict`, or one under that name in a dictionary."""
    try:
        found = load_torch(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} was refused: {error}. Write it anew with `torch.save(model.state_dict(), path)`"
        ) from error
    for name in ("state_dict", "model_state_dict"):
        found = found.get(name, found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(
            f"{path} must hold a `state_dict`, write it with `torch.save(model.state_dict(), path)`"
        )
    return dict(found)


def _wrapped_again(
    model: nn.Module, header: Mapping[str, Any], factory: Factory | None, path: Path
) -> nn.Module:
    """Wrap a model that was wrapped when it was saved; a function is only taken from the factory's module."""
    if factory is None or "call" not in header or isinstance(model, Wrapped):
        return model
    (module, _, name), made_by = header["call"].partition(":"), _factory_name(factory).partition(":")[0]
    call = getattr(sys.modules.get(made_by), name, None) if module == made_by else None
    if not callable(call):
        raise CheckpointError(
            f"{path} holds a model that was wrapped with {header['call']!r}, which is no function of"
            f" {made_by!r}; let `factory` return the wrapped model, `fgai.wrap(model, call)`"
        )
    return Wrapped(model, call)


def _require_known(path: Path, header: Mapping[str, Any]) -> None:
    """Raise unless fgai can make the model anew by itself."""
    name, known = header["class"], _classes()
    if "factory" not in header:
        if name not in known:
            raise CheckpointError(
                f"{path} holds a {name}, expected {' or '.join(known)}; of another class give what makes it,"
                " `load_model(path, factory=...)`"
            )
        return
    raise CheckpointError(
        f"{path} holds a {name} of somebody's own, made by {header['factory']!r}. That is imported only if"
        f" you say so: `load_model(path, factory={header['factory']!r})`, or give the function itself"
    )


def _limited(model: nn.Module, header: Mapping[str, Any]) -> nn.Module:
    if header.get("limits"):
        add_limits(model)
    return model


def _made(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model of one of fgai's classes without its weights, once these are known to fit.

    A header may claim a billion channels or layers: layers are counted first, and the rest is built where
    tensors have a shape and nothing else, before it takes any memory.
    """
    kind, layers = _classes()[header["class"]], header["config"].get("num_layers", 1)
    if isinstance(layers, int) and layers > max(len(tensors), 1):
        raise CheckpointError(f"it claims {layers} layers and holds {len(tensors)} tensors")
    with torch.device("meta"):
        wanted = _shapes(_limited(kind(**header["config"]), header))
    _compare(wanted, tensors)
    return _limited(kind(**header["config"]), header)


def _made_by(factory: Factory, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model of the user's own without its weights, first without memory, where that can be done."""
    arguments, wanted = header["config"], None
    with suppress(Exception), torch.device("meta"):
        wanted = _shapes(_limited(make_model(factory, arguments), header))
    if wanted is not None:
        _compare(wanted, tensors)
    return _limited(make_model(factory, arguments), header)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in unwrapped(model).state_dict().items()}


def _compare(wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if odd := sorted({*wanted.items()} ^ {*found.items()}):
        raise CheckpointError(f"{odd[0][0]} must be {wanted.get(odd[0][0])}, got {found.get(odd[0][0])}")


def _classes() -> dict[str, type[AttentionModel]]:
    """What can be saved and loaded: every registered class, by its name."""
    return {kind.__name__: kind for kind in MODELS.values()}
