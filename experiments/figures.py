"""The figures of the reproduction: from records where they hold what is drawn, else from models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

import fgai.reports.figures as draw
from experiments.build import name_of
from experiments.cells import Cell
from experiments.explainer_tables import Explained, read_explained
from experiments.results import Results, RowKey
from experiments.store import Store
from experiments.subjects import K, Source, attacked, scores, telling_node
from fgai.certificates import ARITHMETIC, PROMISE, certify_attention
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.evaluation import EvaluationRecord
from fgai.records import look_up
from fgai.training import history_of

ROWS = ("vanilla", "ln", "at", "fgai")
RADIUS = 0.01
SCOPES = {"graph": "the output layer's attention (graph)", "node": "the mean attention over layers (node)"}
Named = Iterator[tuple[str, Figure]]


@dataclass(frozen=True)
class Choice:
    """What to draw: all in the records, or the source's, where nothing is named."""

    datasets: Sequence[str] = ()
    models: Sequence[str] = ()

    def holds(self, model: str, dataset: str) -> bool:
        """Whether a model on a dataset is among what to draw."""
        return (not self.models or model in self.models) and (not self.datasets or dataset in self.datasets)

    def sources(self, source: Source) -> list[Source]:
        """The source for each model and dataset named."""
        return [
            replace(source, dataset=dataset, model=model)
            for dataset in self.datasets or (source.dataset,)
            for model in self.models or (source.model,)
        ]


def figure(name: str, store: Store, source: Source, choice: Choice | None = None) -> Named:
    """Yield the figures of a name, each with the stem of its file.

    Raise `InputError` for an unknown name, or if the records lack what it draws.
    """
    return FIGURES[one_of(name, "figure", tuple(FIGURES))](store, source, choice or Choice())


def titled(drawn: Figure, text: str) -> Figure:
    """Say on the figure what it is of, so that it reads without its caption."""
    drawn.suptitle(text, fontsize=9, x=0.01, ha="left")
    return drawn


def averaged(results: Results, row: RowKey) -> EvaluationRecord | None:
    """One record whose F-slopes are the means over the seeds, under the `standard` threat."""
    held = [
        slopes
        for record in results.held(row)
        if (slopes := look_up(record["evaluations"], "standard.metrics.f_slope")) is not None
    ]
    if not held:
        return None
    unknown = ("model", "data", "threat", "config", "version", "seconds", "peak_memory", "ledgers")
    rest: dict[str, Any] = {name: {} for name in unknown}
    metrics = {"f_slope": _mean(held)}
    return EvaluationRecord(name=name_of(row[2]), seed=0, device="", metrics=metrics, **rest)


def _f_curves(store: Store, source: Source, choice: Choice) -> Named:
    results, drawn = Results.read(store), False
    for model, dataset in results.pairs():
        records = [averaged(results, (model, dataset, row)) for row in ROWS]
        held = [record for record in records if record is not None]
        for scope in ("graph", "node") if held and choice.holds(model, dataset) else ():
            drawn = True
            title = f"{model} on {dataset}, edges removed by {SCOPES[scope]}, mean over seeds"
            yield f"f-curves-{dataset}-{model}-{scope}", titled(draw.f_curves(held, scope=scope), title)
    if not drawn:
        raise InputError(f"there are no evaluations to draw in {store.root}; run `fgai bench run node` first")


def _loss(store: Store, source: Source, choice: Choice) -> Named:
    for entry in choice.sources(source):
        model = entry.pair(entry.graph())[name_of("fgai")]
        title = f"Loss terms of FGAI on {entry.dataset}, seed {entry.seed}"
        drawn = draw.loss_curves({entry.model: history_of(model)})
        yield f"loss-{entry.dataset}-{entry.model}", titled(drawn, title)


def _averaged_certificate(held: Sequence[dict[str, Any]]) -> SimpleNamespace:
    """What `certified_curves` reads of a certificate, averaged over seeds."""

    def layer(index: int) -> SimpleNamespace:
        def curve(kind: str) -> list[float | None]:
            columns = zip(*(one["layers"][index][kind]["curve"] for one in held), strict=True)
            return [None if None in column else sum(column) / len(column) for column in columns]

        return SimpleNamespace(curve=curve)

    first = held[0]
    words = first.get("promise", PROMISE), first.get("explanation", ARITHMETIC)
    return SimpleNamespace(
        k2=first["k2"], norm=first["norm"], promise=words[0], explanation=words[1], layer=layer
    )


def _certified(store: Store, source: Source, choice: Choice) -> Named:
    results, drawn = Results.of_grid(store, "definition", "certify"), False
    for model, dataset in results.pairs():
        rows = {row: results.held((model, dataset, row)) for row in results.rows(model, dataset)}
        named = {
            name_of(row): _averaged_certificate([record["certificate"] for record in held])
            for row, held in rows.items()
            if held
        }
        if named and choice.holds(model, dataset):
            drawn = True
            title = f"{model} on {dataset}, output layer, mean over seeds"
            yield f"certified-{dataset}-{model}", titled(draw.certified_curves(named), title)
    if not drawn:
        for entry in choice.sources(source):
            graph = entry.graph()
            models = entry.pair(graph)
            parent = models[entry.model]
            made = {n: certify_attention(m, graph, vanilla=parent, radius=RADIUS) for n, m in models.items()}
            title = f"{entry.model} on {entry.dataset}, output layer, seed {entry.seed}"
            drawing = titled(draw.certified_curves(made), title)
            yield f"certified-{entry.dataset}-{entry.model}", drawing


def _injection(store: Store, source: Source, choice: Choice) -> Named:
    held: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for record in store.records("inject"):
        cell = Cell.from_dict(record["cell"])
        if choice.holds(cell.model, cell.dataset):
            held.setdefault((cell.model, cell.dataset), {}).setdefault(cell.row, []).append(record)
    if not held:
        raise InputError(
            f"{store.root} has no certificates against injection; run `fgai bench run injection` first"
        )
    for (model, dataset), rows in sorted(held.items()):
        seen = [record for records in rows.values() for record in records]
        alone = sum(record["alone"] for record in seen) / len(seen)
        curves = {name_of(row): _curve(records) for row, records in sorted(rows.items(), key=_place)}
        title = f"{model} on {dataset}: classes that no injected neighbour can change, mean over seeds"
        yield f"injection-{dataset}-{model}", titled(draw.injected_curves(curves, alone=alone), title)


def _place(row: tuple[str, Any]) -> int:
    """Where a row stands; those trained otherwise come last."""
    order = ("vanilla", "limits", "at", "at-limits", "fgai")
    return order.index(row[0]) if row[0] in order else len(order)


def _curve(records: Sequence[dict[str, Any]]) -> draw.InjectedCurve:
    """Mean over the seeds of what is certified and right."""
    found: dict[str, dict[int, list[float]]] = {}
    for one in (one for record in records for one in record["injection"]):
        found.setdefault(one["where"], {}).setdefault(one["neighbours"], []).append(one["right"])
    means = {where: [sum(v) / len(v) for _, v in sorted(by.items())] for where, by in found.items()}
    return draw.InjectedCurve(sorted(next(iter(found.values()))), means)


def _explainers(store: Store, source: Source, choice: Choice) -> Named:
    held = [row for row in read_explained(store) if choice.holds(row.model, row.dataset) and row.kept]
    if not held:
        raise InputError(f"{store.root} has no explainers to draw; run `fgai bench run explainers` first")
    for model in dict.fromkeys(row.model for row in held):
        panels: dict[str, dict[str, Explained]] = {}
        for row in (row for row in held if row.model == model):
            panels.setdefault(row.dataset, {})[row.title] = row
        shared = [title for title in next(iter(panels.values())) if all(title in p for p in panels.values())]
        seeds = {dataset: max(len(row.seeds) for row in rows.values()) for dataset, rows in panels.items()}
        dots = {
            f"{dataset}, {seeds[dataset]} seed{'s' * (seeds[dataset] > 1)}": [_dot(rows[t]) for t in shared]
            for dataset, rows in panels.items()
        }
        title = f"Explainers of {model}, standard attack, mean over seeds"
        yield f"explainers-{model}", titled(draw.explainer_dots(dots, k=K), title)


def _dot(row: Explained) -> draw.ExplainerDot:
    again = row.mean("again") if row.draws else None
    chance = row.mean("kept.standard.chance")
    return draw.ExplainerDot(row.title, row.kept, again, 0.0 if chance is None else chance, row.is_ours)


def _of_models(
    stem: str, paint: Callable[[Any, Any, int], Figure], both: bool = True
) -> Callable[..., Named]:
    def made(store: Store, source: Source, choice: Choice) -> Named:
        for entry in choice.sources(source):
            graph = entry.graph()
            models = entry.pair(graph) if both else {entry.model: entry.trained("vanilla", graph)}
            cases = attacked(models, graph, entry.seed, entry.threat)
            node = telling_node(cases, graph)
            right = ", ".join(scores(case, graph) for case in cases)
            title = (
                f"{entry.model} on {entry.dataset}, seed {entry.seed}: around node {node}, {entry.threat}"
                f" attack at random endpoints\ntest nodes right: {right}"
            )
            yield f"{stem}-{entry.dataset}-{entry.model}", titled(paint(cases, graph, node), title)

    return made


FIGURES: dict[str, Callable[[Store, Source, Choice], Named]] = {
    "f-curves": _f_curves,
    "loss": _loss,
    "attention-subgraph": _of_models("attention-subgraph", draw.subgraph_attention),
    "topk-neighbours": _of_models(
        "topk-neighbours", lambda cases, graph, node: draw.top_neighbours(cases, graph, node, k=K)
    ),
    "certified": _certified,
    "injection": _injection,
    "explainers": _explainers,
    "instability": _of_models("instability", draw.node_before_after, both=False),
}


def _mean(values: Sequence[Any]) -> Any:
    """Mean of equally built trees: numbers are averaged where all seeds have them, other leaves are kept."""
    first = values[0]
    if isinstance(first, dict):
        shared = [name for name in first if all(isinstance(v, dict) and name in v for v in values)]
        return {name: _mean([value[name] for value in values]) for name in shared}
    if isinstance(first, list):
        return [_mean(list(column)) for column in zip(*values, strict=True)]
    if all(isinstance(value, int | float) for value in values):
        return sum(values) / len(values)
    return None if None in values else first
