"""Factories: what makes a user's own model anew, so that saved weights have somewhere to go.

A file names its factory and is not followed: an import runs code, and files are not believed. Whoever loads
says which factory to use, as a function or by the name it can be imported by.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fgai.errors import InputError
from fgai.typed import typed

Factory = Callable[..., nn.Module] | str
"""A function or a class, or `package.module:name`."""
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def factory_name(factory: Factory) -> str:
    """Return `package.module:name` of a factory, without importing anything.

    Raises:
        InputError: a text of another form, or nothing that can be called.
    """
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
    name, call = factory_name(factory), _imported(factory) if isinstance(factory, str) else factory
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
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # what a module does when it is imported, it may fail at in any way
        raise InputError(f"cannot import `{name}`: {error}; is its folder on the Python path?") from error
    if not callable(found):
        raise InputError(f"`{name}` must be a function or a class, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]
