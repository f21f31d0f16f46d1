"""`@metric`: the one declaration of a metric, and the numbers of records by their paths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, TypeVar

from fgai import checks
from fgai.errors import InputError
from fgai.metrics.views import Views
from fgai.records import Column
from fgai.typed import typed

_Function = TypeVar("_Function", bound=Callable[..., Any])

SECTIONS = ("prediction", "explanation", "fidelity")
"""What a metric is about; the first has a table of its own, the others share one."""


@typed
@dataclass(frozen=True)
class Quantity(Column):
    """The column of a table for one number, at a dotted path of each record."""

    path: str = ""

    def best(self, values: Iterable[float]) -> float:
        """The best of at least one value."""
        return max(values) if self.better == "higher" else min(values)


@typed
@dataclass(frozen=True)
class Shown:
    """A number of a metric that tables or the report show."""

    path: str  # in the metrics of a record
    heading: str = ""  # in tables; the metric's title and the rest of the path by default
    words: str = ""  # row of the report, in plain words; the report leaves it out where there are none
    about: str = ""  # one sentence for the report
    table: str | None = None  # "prediction", "explanation", empty for no table; by default by the section
    like: str = ""  # path of the number to stay close to, where neither higher nor lower is better


def _under_attacks(path: str, heading: str, words: str, about: str) -> tuple[Shown, Shown]:
    """The number at `path`, whose `{}` names the attack, under both attacks."""
    again = "The same when the attack aims at the explanation."
    return (
        Shown(path.format("prediction"), heading, f"{words}, prediction attacked", about),
        Shown(path.format("explanation"), f"{heading}, expl.", f"{words}, explanation attacked", again),
    )


def _clean_and_attacked(path: str, heading: str, words: str, about: str) -> tuple[Shown, Shown]:
    """The number at `path`, whose `{}` names the graph, on the clean and on the attacked graph."""
    clean, attacked = (heading and f"{heading} {graph}" for graph in ("clean", "attacked"))
    again = "The same on the attacked graph."
    return (
        Shown(path.format("clean"), clean, f"{words}, clean", about),
        Shown(path.format("attacked"), attacked, f"{words}, attacked", again),
    )


@typed
@dataclass(kw_only=True, eq=False)
class MetricSpec:
    """`@metric(...)` declares a function as a metric, and makes it check the types of its arguments.

    With `measure`, `fgai.evaluate` measures it, and tables, report and command line show it. `METRICS` holds
    every declaration with the `name` of the function, the `function` and its `description`, the first line of
    its docstring. A name or path in records that is taken raises `InputError`.

    Attributes:
        direction: "higher" or "lower", whichever is better; empty if neither is.
        low, high: the smallest and the largest value it can take.
        title: heading in tables; the name of the function by default.
        form: how its numbers print, e.g. `.2e`.
        paths: where its numbers stand in a record's metrics, by default the name of the function; `*` stands
            for any one name. What `measure` returns is stored at a single path without `*`; else `measure`
            returns nested mappings from the top of the record's metrics.
        section: "prediction", "explanation", or "fidelity": whether the explanation decides the prediction.
        shown: the numbers that tables and report show; by default all of them.
        measure: from the `Views` of an evaluation to a number, or to numbers by name (`clean`, ...); metrics
            may share one. None for scores, which a task names.
        null: likewise with uniform or random attention (`views.null`). It has one attack, so of values by
            attack only those under `prediction` are kept. An empty mapping leaves the row out.
        chance: what guessing gets, stored at `<path>.chance`: from labels [T] to a number for a score, else
            from the `Views` to a number or `views.by_layer(...)`, or to a mapping of these by dotted path if
            there are several paths or `*`.
    """

    direction: str
    low: float = 0
    high: float = 1
    title: str = ""
    form: str = ".3f"
    paths: tuple[str, ...] = ()
    section: str = "prediction"
    shown: tuple[Shown, ...] | None = None
    measure: Callable[[Views], Any] | None = None
    null: Callable[[Views], Any] | None = None
    chance: Callable[..., Any] | None = None
    name: str = field(init=False, default="")
    function: Callable[..., Any] = field(init=False)
    description: str = field(init=False, default="")

    def __post_init__(self) -> None:
        checks.one_of(self.direction, "direction", ("higher", "lower", ""))
        checks.one_of(self.section, "section", SECTIONS)

    def __call__(self, function: _Function) -> _Function:
        """Declare `function`."""
        function = typed(function)
        spec, name = copy(self), function.__name__
        spec.name, spec.function = name, function
        spec.description = (function.__doc__ or name).strip().splitlines()[0]
        spec.title, spec.paths = self.title or name.replace("_", " "), self.paths or (name,)
        previous = _registry.get(name)
        if previous is not None and previous.function.__module__ != function.__module__:
            module = previous.function.__module__
            raise InputError(f"there is a metric {name!r} in {module}; choose another name")
        others = [path for other in _registry.values() if other.name != name for path in other.paths]
        for path, other in product(spec.paths, (*others, *_OTHERS, "null")):
            if all(a == b or "*" in (a, b) for a, b in zip(path.split("."), other.split("."), strict=False)):
                raise InputError(f"`{path}` collides with {other!r} in records; choose another name")
        _registry[name] = spec
        return function

    @property
    def path(self) -> str:
        """The one path of the values that `measure` returns; empty if it returns them from the top."""
        return self.paths[0] if len(self.paths) == 1 and "*" not in self.paths[0] else ""

    @property
    def defaults(self) -> dict[str, Any]:
        """The arguments that change its value, with their defaults."""
        arguments = inspect.signature(self.function).parameters.values()
        return {a.name: a.default for a in arguments if a.kind != a.KEYWORD_ONLY and a.default is not a.empty}


metric = MetricSpec
_registry: dict[str, MetricSpec] = {}
METRICS: Mapping[str, MetricSpec] = MappingProxyType(_registry)


_OTHERS = {
    path: Quantity(title, form, better, path)
    for path, title, form, better in (
        ("training.epoch_seconds", "seconds per epoch", ".3g", "lower"),
        ("training.seconds", "training s", ".1f", "lower"),
        ("training.peak_memory", "peak memory", ".3g", "lower"),
        ("certificate.share", "certified share", ".3f", "higher"),
        ("certificate.median_radius", "median radius", ".3f", "higher"),
        ("certificate.class_share", "certified class", ".3f", "higher"),
        ("certificate.sharpness", "sharpness", ".3f", "higher"),
        ("injection.class_share", "certified class, injection", ".3f", "higher"),
        ("injection.order_share", "certified order, injection", ".3f", "higher"),
    )
}
"""Numbers of other records than evaluations: costs and certified shares."""


@typed
def quantity(path: str, title: str | None = None, form: str | None = None) -> Quantity:
    """Return the column of the number at a path; `InputError` if nothing is declared there.

    The heading is the declared one; else the metric's title followed by the names that stand for `*` and
    those below the declared path: `f1.*` and "F1" give "F1 attacked". `title` and `form` replace them.
    """
    spec = metric_at(path)
    if spec is not None:
        heading = next((entry.heading for entry in spec.shown or () if entry.path == path), "")
        declared = Quantity(heading or _default_title(spec, path), spec.form, spec.direction, path)
        if "chance" in path.split("."):
            declared = replace(declared, title="chance", better="")
    elif path in _OTHERS:
        declared = _OTHERS[path]
    else:
        raise InputError(f"no metric is declared at {path!r}; see fgai.metrics.METRICS")
    return replace(declared, title=title or declared.title, form=form or declared.form)


def _default_title(spec: MetricSpec, path: str) -> str:
    """The metric's title and the names that its path adds; `attacked_random` is "random ends"."""
    words = [spec.title]
    for name in next(rest for pattern in spec.paths if (rest := _rest(pattern, path)) is not None):
        ends = name.startswith("attacked_") and name != "attacked_explanation"
        words.append(f"{name.removeprefix('attacked_')} ends" if ends else name)
    return " ".join(words)


@typed
def metric_at(path: str) -> MetricSpec | None:
    """Return the metric whose number stands at a path of a record, or None where no metric gives it."""
    specs = (s for s in METRICS.values() if any(_rest(pattern, path) is not None for pattern in s.paths))
    return next(specs, None)


@typed
def chance_path(path: str) -> str:
    """Return where a record keeps the chance level of the number at `path`; empty if its metric has none.

    Example:
        >>> chance_path("overlap_touched.explanation.all"), chance_path("similarity.overlap.all")
        ('overlap_touched.chance.all', 'overlap.chance.all')
    """
    spec = metric_at(path)
    if spec is None or spec.chance is None:
        return ""
    name, *rest = path.removeprefix("similarity.").split(".")  # similarity is over the same nodes
    return ".".join([name, "chance", *(rest if path.startswith("similarity.") else rest[1:])])


@typed
def null_path(path: str) -> str:
    """Return where a null row keeps the number at `path`: without the name of the graph or the attack.

    Example:
        >>> null_path("overlap_touched.explanation.all"), null_path("f_slope.node.clean.gap")
        ('overlap_touched.all', 'f_slope.node.clean.gap')
    """
    name, view, *rest = [*path.split("."), ""]
    spec = metric_at(path)
    if spec is None or spec.null is None or view not in ("clean", "prediction", "explanation"):
        return path
    return ".".join([name, *rest[:-1]])


@typed
def shown_numbers(records: Iterable[Mapping[str, Any]], table: str | None = None) -> list[Shown]:
    """Return the numbers that metrics show, in the order of their declaration.

    Of a metric that declares none these are all its numbers in `records` (each the metrics of one); of values
    per layer, their mean, `all`. Of the `table` "prediction" or "explanation" those under the attack on
    predictions come first; without one, numbers that only the report shows are among them.
    """
    values = list(records)
    if not all(isinstance(each, Mapping) for each in values):
        raise InputError("`records` must be mappings from a metric's name to its numbers")
    entries: list[Shown] = []
    for spec in METRICS.values():
        own = "prediction" if spec.section == "prediction" else "explanation"
        shown = _every_number(spec, values) if spec.shown is None else spec.shown
        entries += [replace(entry, table=own if entry.table is None else entry.table) for entry in shown]
    if table is None:
        return entries
    entries = [entry for entry in entries if entry.table == table]
    return sorted(entries, key=lambda e: (".prediction." not in e.path, ".explanation." not in e.path))


def _every_number(spec: MetricSpec, records: list[Mapping[str, Any]]) -> list[Shown]:
    names = dict.fromkeys(pattern.split(".")[0] for pattern in spec.paths)
    paths = (path for values in records for name in names for path in _leaves(name, values.get(name)))
    return [
        Shown(path, words=quantity(path).title, about=spec.description)
        for path in dict.fromkeys(paths)
        if metric_at(path) is spec
    ]


def _rest(pattern: str, path: str) -> list[str] | None:
    """The names of a path that stand for `*` or follow the pattern; None where it does not fit."""
    parts, names = pattern.split("."), path.split(".")
    if len(names) < len(parts) or any(w not in ("*", n) for w, n in zip(parts, names, strict=False)):
        return None
    free = [n for w, n in zip(parts, names, strict=False) if w == "*"]
    return [*free, *names[len(parts) :]]


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and "layers" in value:
        yield f"{path}.all"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name != "chance":
                yield from _leaves(f"{path}.{name}", part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path
