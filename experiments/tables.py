"""The tables of the reproduction, each from records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments import one_setting
from experiments import task_tables as tasks
from experiments import training_tables as trained
from experiments.batch_tables import batches
from experiments.build import RATIO, sheet
from experiments.certificate_tables import certificates, collective, injection, voting
from experiments.defence_tables import baselines, edges, inductive
from experiments.explainer_tables import explainers
from experiments.member_tables import members
from experiments.results import Results
from experiments.sheet import Sheet, estimated
from experiments.speed import kernels
from experiments.store import Store
from fgai.checks import one_of
from fgai.records import Table

WEAK = "`standard`, ten signed steps: the paper's attack, too weak for a claim."
FORMATS = ("table", "markdown", "latex", "csv")


def stability(store: Store) -> list[Sheet | Table]:
    """How far attention (g-JSD) and predictions (g-TVD) move under the paper's attack."""
    results = Results.node(store)
    attention = [
        estimated("g_jsd.last", ratio=True, paper=("stability", "g_jsd")),
        estimated("g_jsd.all", ratio=True),
    ]  # fmt: skip
    prediction = [
        estimated("g_tvd.rel", ratio=True),
        estimated("g_tvd.probs", "g-TVD prob", ratio=True),
        estimated("g_tvd.logits", ratio=True, paper=("stability", "g_tvd")),
    ]  # fmt: skip
    notes = (
        "`last`: output layer; `all`: mean over layers. The paper's g-JSD compares other edges and divides by"
        f" |E| twice: only ratios compare. {RATIO}",
    )
    other = (f"`rel` and `prob` do not depend on the scale of the logits as `logits` does. {RATIO}",)
    return [
        sheet(results, "Stability of attention, the paper's attack", attention, notes),
        sheet(results, "Stability of predictions, the paper's attack", prediction, other),
    ]


def f1(store: Store) -> list[Sheet | Table]:
    """Micro-F1 of the test nodes, clean and under the paper's attack."""
    metrics = [
        estimated("f1.clean", "clean", paper=("f1", "clean")),
        estimated("f1.attacked", "attacked", paper=("f1", "attacked")),
    ]
    return [sheet(Results.node(store), "Micro-F1 of the test nodes, the paper's attack", metrics, (WEAK,))]


def paper_methods(store: Store) -> list[Sheet | Table]:
    """What is printed and what is released, beside the vanilla model, on two small graphs."""
    results = Results.of_grid(store, "paper-methods", "evaluate")
    metrics = [
        estimated("f1.clean", "clean F1"),
        estimated("f1.attacked", "attacked F1"),
        estimated("g_tvd.rel"),
        estimated("g_jsd.last"),
        estimated("similarity.overlap.all", "as vanilla", own=False),
        estimated("sharpness.clean.all"),
    ]
    return [sheet(results, "The paper's own method, its attack, one seed", metrics)]


def f_slope(store: Store) -> list[Sheet | Table]:
    """Change of the predictions when edges are removed by attention, as the paper measures it."""
    metrics = [
        estimated(f"f_slope.graph.{when}.{sign}", f"{when} {mark}", paper=("f_slope", f"{when}.{sign}"))
        for when in ("clean", "attacked")
        for sign, mark in _SIGNS
    ]
    notes = (
        "Edges of the whole graph by the output layer's attention, loops rankable: the paper's setting.",
        _NULLS,
    )
    return [
        sheet(Results.node(store), "F-slope, graph scope, the paper's attack", metrics, notes, nulls=True)
    ]


def f_slope_node(store: Store) -> list[Sheet | Table]:
    """The same with edges of each neighbourhood, by the mean over layers."""
    metrics = []
    for when in ("clean", "attacked"):
        metrics += [estimated(f"f_slope.node.{when}.{sign}", f"{when} {mark}") for sign, mark in _SIGNS]
        metrics.append(estimated(f"f_slope.node.{when}.gap", f"{when} gap"))
    notes = ("Edges of each neighbourhood by the mean over layers, loops kept. gap = f− − f+.", _NULLS)
    return [sheet(Results.node(store), "F-slope, node scope, the paper's attack", metrics, notes, nulls=True)]


_SIGNS = (("minus", "f−"), ("plus", "f+"))
_NULLS = "Null rows: FGAI's predictions, edges removed by 1/degree or at random."

TABLES: dict[str, Callable[[Store], list[Sheet | Table]]] = {
    "methods": one_setting.methods,
    "overview": one_setting.overview,
    "pairs": one_setting.pairs,
    "whole": one_setting.whole_calls,
    "definition": one_setting.definition,
    "terms": one_setting.terms,
    "seeds": trained.seeds,
    "members": members,
    "batches": batches,
    "stability": stability,
    "f1": f1,
    "f-slope": f_slope,
    "f-slope-node": f_slope_node,
    "paper-methods": paper_methods,
    "ablation": trained.ablation,
    "cost": trained.cost,
    "baselines": baselines,
    "edges": edges,
    "inductive": inductive,
    "certificates": certificates,
    "injection": injection,
    "collective": collective,
    "voting": voting,
    "explainers": explainers,
    "kernels": kernels,
    "link": tasks.link,
    "graphs": tasks.graphs,
    "truth": tasks.truth,
    "search": trained.search,
}


def table(name: str, store: Store) -> list[Sheet | Table]:
    """Return a table of the reproduction, in one or more parts."""
    return TABLES[one_of(name, "table", tuple(TABLES))](store)


def render(name: str, store: Store, form: str = "markdown") -> str:
    """Return a table as text: `markdown`, `latex` or `csv`."""
    return text_of(table(name, store), one_of(form, "format", FORMATS[1:]))


def text_of(parts: Sequence[Sheet | Table], form: str) -> str:
    """Return the parts of a table as one text."""
    if form == "markdown":
        return "\n\n".join(
            f"**{part.title}**\n\n{part.to_markdown()}" if isinstance(part, Table) else part.to_markdown()
            for part in parts
        )
    if form == "latex":
        return "\n\n".join(part.to_latex() for part in parts)
    texts = [part.to_csv().splitlines(keepends=True) for part in parts]
    same = all(lines[0] == texts[0][0] for lines in texts)
    return "".join(line for i, lines in enumerate(texts) for line in (lines[1:] if i and same else lines))
