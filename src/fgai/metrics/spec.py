"""What a metric promises, kept beside its function: direction, range, and how and where records show it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from fgai import checks
from fgai.errors import InputError
from fgai.metrics.declared import QUANTITIES
from fgai.metrics.quantity import DIRECTIONS
from fgai.metrics.views import Views
from fgai.typed import typed

Function = TypeVar("Function", bound=Callable[..., Any])

SECTIONS = ("prediction", "explanation")


@typed
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
        title: heading in tables, without the view it is measured on.
        form: how its numbers print, e.g. `.3f`.
        paths: where it stands in a record's metrics, `*` for any one name.
        headings: of paths whose heading is more than the title and the rest of the path.
        section: the table that shows what `measure` gives: "prediction" or "explanation".
        measure: called by `evaluate`, which puts what it returns at `paths[0]`; None for the metrics that
            `evaluate` measures itself.
    """

    name: str
    direction: str
    low: float
    high: float
    parameters: Mapping[str, object]
    description: str
    function: Callable[..., Any]
    title: str
    form: str
    paths: tuple[str, ...]
    headings: Mapping[str, str]
    section: str
    measure: Callable[[Views], Any] | None

    def __post_init__(self) -> None:
        checks.one_of(self.direction, "direction", DIRECTIONS)
        checks.one_of(self.section, "section", SECTIONS)
        if self.measure is not None:
            _check_place(self)

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


@typed
def metric(
    *,
    direction: str,
    low: float,
    high: float,
    parameters: tuple[str, ...] = (),
    title: str = "",
    form: str = ".3f",
    paths: tuple[str, ...] = (),
    headings: Mapping[str, str] = MappingProxyType({}),
    section: str = "prediction",
    measure: Callable[[Views], Any] | None = None,
) -> Callable[[Function], Function]:
    """Declare a function as a metric; the function itself is returned unchanged.

    With `measure`, `fgai.evaluate` measures it, and tables, report and command line show it: nothing else has
    to be told of it.

    Args:
        direction: "higher" or "lower", whichever is better.
        low: the smallest value it can take.
        high: the largest.
        parameters: names of the arguments that change its value; their defaults are read off the signature.
        title: heading in tables; the name of the function by default.
        form: how its numbers print, e.g. `.2e`.
        paths: where it stands in a record's metrics; `*` stands for any one name. With `measure` the first is
            the place of its own, without `*`; the name of the function by default.
        headings: of paths whose heading is more than the title and the rest of the path.
        section: "prediction" or "explanation": the table that shows what `measure` gives.
        measure: from the `Views` of an evaluation to a number, or to numbers by name (`clean`, `attacked`,
            or whatever varies); None for the metrics that `evaluate` measures itself.

    Returns:
        A decorator.

    Raises:
        InputError: another function is declared under this name, or its place in records is taken.
    """

    def declare(function: Function) -> Function:
        name = function.__name__
        signature = inspect.signature(function).parameters
        description = (function.__doc__ or name).strip().splitlines()[0]
        spec = MetricSpec(
            name=name,
            direction=direction,
            low=low,
            high=high,
            parameters=MappingProxyType({option: signature[option].default for option in parameters}),
            description=description,
            function=function,
            title=title or name.replace("_", " "),
            form=form,
            paths=paths or (name,),
            headings=MappingProxyType(dict(headings)),
            section=section,
            measure=measure,
        )
        held = _registry.get(name)
        if held is not None and held.function.__module__ != function.__module__:
            raise InputError(f"there is a metric {name!r} in {held.function.__module__}; choose another name")
        _registry[name] = spec
        return function

    return declare


def _check_place(spec: MetricSpec) -> None:
    """Whether a measured metric has a place of its own in records, not within another's."""
    place = spec.paths[0]
    if "*" in place:
        raise InputError(f"a metric with `measure` needs one place in records, without `*`, got {place!r}")
    others = [path for other in _registry.values() if other.name != spec.name for path in other.paths]
    taken = {path.split(".")[0] for path in (*others, *(known.path for known in QUANTITIES), "null")}
    if place.split(".")[0] in taken:
        raise InputError(f"records hold something else at {place!r}; choose another name to begin `paths[0]`")
