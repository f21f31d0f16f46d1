"""From a path in a record to what is declared of the number there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fgai.errors import InputError
from fgai.metrics.declared import QUANTITIES
from fgai.metrics.quantity import Quantity
from fgai.metrics.spec import METRICS, MetricSpec
from fgai.records import look_up
from fgai.typed import typed


@typed
def quantity(path: str, title: str | None = None, form: str | None = None) -> Quantity:
    """Return what is declared of the number at a path.

    The heading is the declared one; else the metric's title followed by the names that stand for `*` and
    those below the declared path: `f1.*` and "F1" give "F1 attacked", `g_jsd` and "g-JSD" give "g-JSD last".

    Args:
        path: in the metrics of a record.
        title: another heading, where the table around it says the rest.
        form: another format.

    Raises:
        InputError: nothing is declared there.

    Example:
        >>> found = quantity("f1.attacked")
        >>> found.title, found.form, found.direction
        ('F1 attacked', '.3f', 'higher')
    """
    for found in _matches(path):
        return replace(found, title=title or found.title, form=form or found.form)
    raise InputError(f"no metric is declared at {path!r}; see fgai.metrics.METRICS")


@typed
def metric_at(path: str) -> MetricSpec | None:
    """Return the metric whose number stands at a path of a record, or None where no metric gives it.

    Example:
        >>> metric_at("overlap_touched.prediction.all").label()
        'overlap (k=5)'
    """
    for spec in METRICS.values():
        if any(_rest(pattern, path) is not None for pattern in spec.paths):
            return spec
    return None


@typed
def measured(section: str, records: Iterable[Mapping[str, Any]]) -> list[Quantity]:
    """Return what the metrics with a `measure` of their own hold in any of these records.

    Of values per layer that is their mean, `all`.

    Args:
        section: "prediction" or "explanation".
        records: the metrics of records.
    """
    held = list(records)
    paths: dict[str, None] = {}
    for spec in METRICS.values():
        if spec.measure is not None and spec.section == section:
            place = spec.paths[0]
            paths |= {path: None for values in held for path in _leaves(place, look_up(values, place))}
    return [quantity(path) for path in paths]


@typed
def null_path(path: str) -> str:
    """Where a null row keeps what a record keeps at `path`.

    Example:
        >>> null_path("overlap_touched.explanation.all"), null_path("f_slope.node.clean.gap")
        ('overlap_touched.all', 'f_slope.node.clean.gap')
    """
    name, _, rest = path.partition(".")
    views = "clean." if name in ("sharpness", "top_share") else ""
    if name in ("overlap", "overlap_touched", "overlap_graph", "rank_correlation", "intruders"):
        views = f"{rest.partition('.')[0]}."
    return f"{name}.{rest.removeprefix(views)}"


def _matches(path: str) -> Iterator[Quantity]:
    """Every declaration of a path, metrics before others."""
    for spec in METRICS.values():
        for pattern in spec.paths:
            rest = _rest(pattern, path)
            if rest is not None:
                title = spec.headings.get(path) or " ".join([spec.title, *rest])
                yield Quantity(
                    path=path,
                    title=title,
                    form=spec.form,
                    direction=spec.direction,
                    about=spec.description,
                )
    for found in QUANTITIES:
        if _rest(found.path, path) is not None:
            yield replace(found, path=path)


def _rest(pattern: str, path: str) -> list[str] | None:
    """The names of a path that stand for `*` or follow the pattern; None where it does not fit."""
    wanted, found = pattern.split("."), path.split(".")
    if len(found) < len(wanted) or any(w not in ("*", f) for w, f in zip(wanted, found, strict=False)):
        return None
    free = [f for w, f in zip(wanted, found, strict=False) if w == "*"]
    return [*free, *found[len(wanted) :]]


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and "layers" in value:
        yield f"{path}.all"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}", part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path
