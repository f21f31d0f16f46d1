"""`typed`: arguments of another type than annotated."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fgai.typed import typed
from support import fuzz


@typed
def door(
    x: Tensor,
    k: int | None = 5,
    *,
    rate: float = 0.5,
    word: str = "",
    flag: bool = False,
    several: Sequence[float] = (),
    named: Mapping[str, Tensor] | None = None,
    read: Iterable[str] = (),
    anything: Any = None,
    **rest: int,
) -> Tensor:
    return x


X = torch.zeros(2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": None},
        {"k": np.int64(3)},
        {"rate": 1},
        {"rate": np.float32(0.1)},
        {"flag": 1},
        {"several": [1, 2.0]},
        {"several": np.ones(3)},
        {"several": X},
        {"named": {"a": X}},
        {"read": (word for word in ("a", "b"))},
        {"read": ["a"]},
        {"anything": object()},
        {"other": "not looked at"},
    ],
)
def test_takes_what_fits(options: dict[str, Any]) -> None:
    assert door(X, **options) is X


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": "5"}, "`k` of `door` must be a number or None, got str"),
        ({"rate": X}, "`rate` of `door` must be a number, got Tensor"),
        ({"word": b""}, "must be str, got bytes"),
        ({"flag": "yes"}, "must be True or False, got str"),
        ({"several": 1.0}, "must be a sequence of a number, got float"),
        ({"several": ["a"]}, "got list of str"),
        ({"named": {"a": 1}}, "must be a mapping of Tensor or None, got dict"),
        ({"named": [X]}, "got list of Tensor"),
        ({"read": X}, "must be a sequence of str, got Tensor"),
    ],
)
def test_refuses_the_rest_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        door(X, **options)


Module = TypeVar("Module", bound=nn.Module)


def test_a_variable_stands_for_its_bound() -> None:
    @typed
    def same(model: Module) -> Module:
        return model

    assert isinstance(same(nn.Identity()), nn.Identity)
    with pytest.raises(TypeError, match=r"`model` of .*same` must be Module, got Tensor"):
        same(X)  # type: ignore[type-var]


UNTYPED = {"compare", "report", "dropout", "plain"}
"""They check what they are given themselves, or take anything."""


def test_every_public_function_is_typed() -> None:
    functions = [door for door in fuzz.doors() if inspect.isfunction(door.call)]
    bare = {door.name for door in functions if not any(map(is_checked, wrapped(door.call)))}
    assert len(functions) > 100 and bare == UNTYPED


def wrapped(function: Any) -> Iterator[Any]:
    """A function, and those it was decorated from."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def is_checked(function: Any) -> bool:
    return function.__code__.co_filename == typed.__code__.co_filename


def test_looks_at_positions_too() -> None:
    with pytest.raises(TypeError, match="`x` of `door` must be Tensor, got list of int"):
        door([1])
    with pytest.raises(TypeError, match="`k` of `door`"):
        door(X, "a")


def test_of_a_class_are_those_of_its_constructor() -> None:
    @typed
    @dataclass(frozen=True)
    class Pair:
        left: Tensor
        right: int = 0

    assert Pair(X).right == 0
    with pytest.raises(TypeError, match=r"`left` of `.*Pair` must be Tensor, got str"):
        Pair("a")
