"""The tables of the reproduction, each from records alone."""

from __future__ import annotations

from collections.abc import Callable

from experiments import task_tables as tasks
from experiments import training_tables as trained
from experiments.attack_tables import attack, members
from experiments.batch_tables import batches
from experiments.build import sheet
from experiments.certificate_tables import certificates, injection
from experiments.defence_tables import defences
from experiments.explainer_tables import explainers
from experiments.limits_tables import limits
from experiments.paper import published
from experiments.results import Results
from experiments.sheet import Sheet, estimated
from experiments.store import Store
from fgai.checks import one_of
from fgai.records import Cell, Column, Table

FORMATS = ("table", "markdown", "latex", "csv")


def stability(store: Store) -> list[Sheet | Table]:
    """How far attention (g-JSD) and predictions (g-TVD) move under the `standard` attack."""
    results = Results.read(store, grid="node")
    attention = [
        estimated("g_jsd.last", ratio=True, paper=("stability", "g_jsd")),
        estimated("g_jsd.all", ratio=True),
    ]  # fmt: skip
    prediction = [
        estimated("g_tvd.rel", ratio=True),
        estimated("g_tvd.probs", "g-TVD prob", ratio=True),
        estimated("g_tvd.logits", ratio=True, paper=("stability", "g_tvd")),
    ]  # fmt: skip
    factor = "n× is how many times smaller than vanilla's the mean is."
    notes = (
        "`last`: output layer; `all`: mean over layers. The paper's g-JSD compares other edges and divides by"
        f" |E| twice: only ratios compare. {factor}",
    )
    other = (f"`rel` and `prob` do not depend on the scale of the logits as `logits` does. {factor}",)
    return [
        sheet(results, "Stability of attention, standard attack", attention, notes),
        sheet(results, "Stability of predictions, standard attack", prediction, other),
    ]


def f1(store: Store) -> list[Sheet | Table]:
    """Micro-F1 of the test nodes: clean, under `standard`, under `strong`."""
    metrics = [
        estimated("f1.clean", "clean", paper=("f1", "clean")),
        estimated("f1.attacked", "standard", paper=("f1", "attacked")),
        estimated("f1.attacked", "strong", threat="strong"),
    ]
    return [sheet(Results.read(store, grid="node"), "Micro-F1 of the test nodes", metrics)]


def f_slope(store: Store) -> list[Sheet | Table]:
    """What removing the strongest (f+) and the weakest (f−) edges does to the predictions."""
    results = Results.read(store, grid="node")
    graph, node = [], []
    for when in ("clean", "attacked"):
        for sign, mark in (("minus", "f−"), ("plus", "f+")):
            graph.append(
                estimated(
                    f"f_slope.graph.{when}.{sign}", f"{when} {mark}", paper=("f_slope", f"{when}.{sign}")
                )
            )
            node.append(estimated(f"f_slope.node.{when}.{sign}", f"{when} {mark}"))
        node.append(estimated(f"f_slope.node.{when}.gap", f"{when} gap"))
    paper = "Edges of the whole graph by the output layer's attention, loops rankable: the paper's setting."
    ours = "Edges of each neighbourhood by the mean over layers, loops kept. gap = f− − f+."
    nulls = "Null rows: FGAI's predictions, edges removed by 1/degree or at random."
    return [
        sheet(results, "F-slope, graph scope", graph, (paper, nulls), nulls=True),
        sheet(results, "F-slope, node scope", node, (ours, nulls), nulls=True),
    ]


def similarity(store: Store) -> list[Sheet | Table]:
    """Whether the attention still says what vanilla's said, says anything, and stays put."""
    metrics = [
        estimated("similarity.overlap.all", "as vanilla", own=False),
        estimated("similarity.overlap.sharpest", "as vanilla, sharpest layer", own=False),
        estimated("overlap_touched.prediction.all", "kept under attack"),
        estimated("overlap_touched.explanation.all", "kept, explanation attack"),
        estimated("sharpness.clean.all"),
        estimated("sharpness.clean.sharpest", "sharpness, sharpest layer"),
    ]
    notes = (
        "“as vanilla”: overlap of each node's top 5 with the vanilla model's on the clean graph. “kept”:"
        " overlap of the top 5 before and after the attack, nodes in its reach. Nodes with more than 5"
        " neighbours only. `sharpness`: 0 says nothing, 1 points at one neighbour. Null rows: attention"
        " 1/degree, and a random ranking; flat attention is perfectly stable.",
    )
    results = Results.read(store, grid="node")
    return [sheet(results, "Explanations: similar, stable, sharp", metrics, notes, nulls=True)]


def headline(store: Store) -> list[Sheet | Table]:
    """Vanilla and FGAI in one line per model and dataset."""
    results = Results.read(store, grid="node")
    columns = [
        Column("model"),
        Column("dataset"),
        Column("F1 clean"),
        Column("F1 attacked"),
        Column("paper's FGAI"),
        Column("predictions move"),
        Column("output attention moves"),
        Column("top 5 as vanilla (chance)"),
        Column("top 5 lost under attack (chance)"),
        Column("seeds"),
    ]
    rows = [
        _headline_row(results, model, dataset)
        for model in results.models()
        for dataset in results.datasets(model)
        if "fgai" in results.rows(model, dataset)
    ]
    notes = (
        "vanilla → FGAI, means over seeds, `standard` attack. “move”: g-TVD rel of predictions, and g-JSD of"
        " the output layer alone, how many times less than vanilla's. “lost”: share of a node's top 5 by the"
        " mean over heads, nodes in reach. “chance”: what a random ranking would share with vanilla's top 5,"
        " or lose.",
        *(
            []
            if not results.missing
            else [f"{results.missing} of {len(results.expected)} cells are missing."]
        ),
    )
    return [Table("vanilla → FGAI", columns, rows, notes)]


def _headline_row(results: Results, model: str, dataset: str) -> list[Cell]:
    def mean(row: str, path: str) -> float | None:
        found = results.estimate(model, dataset, row, path)
        return None if found is None else found.mean

    def share(row: str, path: str, lost: bool = False) -> str | None:
        value = mean(row, path)
        return None if value is None else f"{1 - value if lost else value:.3f}"

    def arrow(path: str, lost: bool = False) -> str | None:
        held = [share(row, path, lost) for row in ("vanilla", "fgai")]
        return None if held == [None, None] else " → ".join(text or "–" for text in held)

    def beside(text: str | None, path: str, lost: bool = False) -> str | None:
        chance = share("fgai", path, lost)
        return text if text is None or chance is None else f"{text} ({chance})"

    def factor(path: str) -> str | None:
        base, ours = (mean(row, path) for row in ("vanilla", "fgai"))
        return None if not base or not ours else times(base / ours)

    known = published("f1", model, dataset, "fgai", "attacked")
    return [
        model,
        dataset,
        arrow("f1.clean"),
        arrow("f1.attacked"),
        None if known is None else f"{known.mean:.3f}",
        factor("g_tvd.rel"),
        factor("g_jsd.last"),
        beside(share("fgai", "similarity.overlap.all"), "overlap.chance.all"),
        beside(arrow("overlap_touched.prediction.all", lost=True), "overlap_touched.chance.all", lost=True),
        str(len(results.values(model, dataset, "fgai", "f1.clean"))),
    ]


def times(ratio: float) -> str:
    """How many times less something moves, or more; never a number that rounding turned into 1.

    Example:
        >>> times(42.3), times(1.26), times(0.78)
        ('42× less', '1.3× less', '1.3× more')
    """
    size, word = (ratio, "less") if ratio >= 1 else (1 / ratio, "more")
    return f"{size:.0f}× {word}" if size >= 2 else f"{size:.1f}× {word}"


TABLES: dict[str, Callable[[Store], list[Sheet | Table]]] = {
    "headline": headline,
    "attack": attack,
    "members": members,
    "limits": limits,
    "batches": batches,
    "stability": stability,
    "f1": f1,
    "f-slope": f_slope,
    "similarity": similarity,
    "ablation": trained.ablation,
    "cost": trained.cost,
    "defences": defences,
    "certificates": certificates,
    "injection": injection,
    "explainers": explainers,
    "link": tasks.link,
    "graphs": tasks.graphs,
    "truth": tasks.truth,
    "search": trained.search,
}


def table(name: str, store: Store) -> list[Sheet | Table]:
    """Return a table of the reproduction, in one or more parts.

    Raises:
        InputError: there is no such table.
        CheckpointError: a record is damaged, or a row holds two settings.
    """
    return TABLES[one_of(name, "table", tuple(TABLES))](store)


def render(name: str, store: Store, form: str = "markdown") -> str:
    """Return a table as text: `markdown`, `latex` or `csv`."""
    one_of(form, "format", FORMATS[1:])
    parts = table(name, store)
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
