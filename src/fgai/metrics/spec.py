"""What a metric promises: its direction, its range and its parameters, kept beside the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from fgai import checks

Function = TypeVar("Function", bound=Callable[..., Any])

DIRECTIONS = ("higher", "lower")


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """The declaration of one metric.

    Attributes:
        name: how records and tables call it.
        direction: "higher" or "lower", whichever is better.
        low: the smallest value it can take.
        high: the largest.
        parameters: options that change its value, with their defaults.
        description: one sentence.
        function: the metric itself.
    """

    name: str
    direction: str
    low: float
    high: float
    parameters: Mapping[str, object]
    description: str
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        checks.one_of(self.direction, "direction", DIRECTIONS)

    def label(self, **chosen: object) -> str:
        """The name with its parameters, `chosen` over the defaults: "overlap (k=5)".

        Example:
            >>> from fgai.metrics import METRICS
            >>> METRICS["overlap"].label(k=3)
            'overlap (k=3)'
        """
        for name in chosen:
            checks.one_of(name, "parameter", tuple(self.parameters))
        options = ", ".join(f"{name}={value}" for name, value in {**self.parameters, **chosen}.items())
        return f"{self.name} ({options})" if options else self.name

    def better(self, a: float, b: float) -> bool:
        """Whether `a` is strictly better than `b`; never true of NaN."""
        return a > b if self.direction == "higher" else a < b


_registry: dict[str, MetricSpec] = {}
METRICS: Mapping[str, MetricSpec] = MappingProxyType(_registry)


def metric(
    *, direction: str, low: float, high: float, parameters: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Declare a function as a metric; the function itself is returned unchanged.

    Args:
        direction: "higher" or "lower", whichever is better.
        low: the smallest value it can take.
        high: the largest.
        parameters: names of the arguments that change its value; their defaults are read off the signature.

    Returns:
        A decorator.
    """

    def declare(function: Function) -> Function:
        signature = inspect.signature(function).parameters
        description = (function.__doc__ or "").strip().splitlines()[0]
        _registry[function.__name__] = MetricSpec(
            name=function.__name__,
            direction=direction,
            low=low,
            high=high,
            parameters=MappingProxyType({name: signature[name].default for name in parameters}),
            description=description,
            function=function,
        )
        return function

    return declare
