"""What is claimed: predictions and explanations under every search we have, from records of today's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.again import ANOTHER
from experiments.build import LOST, RATIO, count, flat_note, name_of, nothing, sheet, warned
from experiments.cells import read_grid
from experiments.certified import ROW, certified_share
from experiments.results import LARGE, ROWS, SHARING, Layers, Results
from experiments.sheet import Estimated, Sheet, estimated
from experiments.statistics import LEAST
from experiments.store import Store
from experiments.threats import EVERY_RULE
from fgai.records import Cell, Column, Table

CLAIM, BESIDE, ANY = "ensemble", "ensemble-strong", "values"
"""The threat of every claim, the one beside it, and the one that bounds every attack by features."""
BUDGETS = (
    "`ensemble`: 20 new nodes × 20 edges, the worst of every search at `random`, `cover` and `defects`"
    " endpoints; `ensemble-strong`: 60 × 40"
)
SEARCHES = f"{BUDGETS}; `values`: 20 × 20 with any features at all, models behind limits."


PRESET = (
    f"One preset for all of them, chosen on validation nodes of {', '.join(SHARING)} (seeds 0 and 1);"
    f" {', '.join(LARGE)} had no say in it. None of these graphs is unseen: sizes of mini-batches were"
    f" compared on {', '.join(LARGE)}, whose features are guesses of a language model that alone classify"
    " most of its test papers."
)


def every_rule(store: Store) -> Results:
    """The records of the grid `endpoints`."""
    cells = read_grid("endpoints")
    keys = {cell.key for cell in cells}
    return Results.newest((record for record in store.records("attack") if record["key"] in keys), cells)


def headline(store: Store) -> list[Sheet | Table]:
    """Vanilla and FGAI in one line per model and dataset."""
    results, title = Results.node(store), "vanilla → FGAI"
    columns = [
        Column("model"),
        Column("dataset"),
        Column("clean F1"),
        Column("`ensemble`"),
        Column("`ensemble-strong`"),
        Column("top 5 lost, `cover`"),
        Column("similarity"),
        Column("sharpness"),
        Column("certified, t = 1; FGAI-certified"),
        Column("seeds"),
    ]
    rows = [
        _headline_row(results, store, model, dataset)
        for model in results.models()
        for dataset in results.datasets(model)
        if results.held(model, dataset, "fgai")
    ]
    if not rows:
        return [nothing(results, title)]
    notes = (
        f"Means over seeds. {BUDGETS}. {LOST} Similarity: of FGAI's top 5 to vanilla's. Certified, t = 1:"
        " share of test nodes whose class provably survives one injected neighbour per node; first FGAI, then"
        " FGAI-certified, a variant trained for it whose explanations match vanilla less well"
        " (certificates.md).",
        *flat_note(results, CLAIM),
        count(results, (CLAIM, BESIDE)),
        *warned(results, (CLAIM, BESIDE), ("vanilla", "fgai")),
    )
    return [Table(title, columns, rows, notes)]


def _headline_row(results: Results, store: Store, model: str, dataset: str) -> list[Cell]:
    def share(
        row: str, path: str, threat: str = CLAIM, form: str = ".3f", layers: Layers | None = None
    ) -> str | None:
        found = results.estimate(model, dataset, row, path, threat, layers)
        return None if found is None else f"{found.mean:{form}}"

    def arrow(path: str, threat: str = CLAIM, form: str = ".3f") -> str | None:
        layers = results.layers(model, dataset, ("vanilla", "fgai"), path, threat)
        held = [share(row, path, threat, form, layers) for row in ("vanilla", "fgai")]
        return None if held == [None, None] else " → ".join(text or "–" for text in held)

    def proved(row: str) -> str:
        found = certified_share(store, model, dataset, row=row)
        return "–" if found is None else f"{found.mean:.3f} (n={found.seeds})"

    return [
        model,
        dataset,
        arrow("f1.clean"),
        arrow("f1.attacked"),
        arrow("f1.attacked", BESIDE),
        arrow("lost.explanation.cover"),
        share("fgai", "similarity.overlap.all"),
        arrow("sharpness.clean.all", form=".4f"),
        f"{proved('fgai')}; {proved(ROW)}",
        str(len(results.values(model, dataset, "fgai", "f1.attacked", CLAIM))),
    ]


def attack(store: Store) -> list[Sheet | Table]:
    """Micro-F1 of the test nodes under every search we have."""
    metrics = [
        estimated("f1.clean", "clean", threat=CLAIM),
        *endpoints(CLAIM),
        *endpoints(BESIDE),
        estimated("f1.attacked", "`values`", threat=ANY),
    ]
    return [sheet(Results.node(store), "Micro-F1 of the test nodes, every search", metrics, (SEARCHES,))]


def endpoints(threat: str) -> list[Estimated]:
    """F1 under a threat: the worst of all endpoints, of those drawn at random, of those chosen by rules."""
    return [
        estimated("f1.attacked", f"`{threat}`", threat=threat),
        estimated("f1.attacked_random", "random endpoints", threat=threat),
        estimated("f1.attacked_chosen", "chosen endpoints", threat=threat),
    ]


def shifts(store: Store) -> list[Sheet | Table]:
    """How far predictions and attention move under `ensemble`."""
    metrics = [
        estimated(path, threat=CLAIM, ratio=True)
        for path in ("g_tvd.rel", "g_tvd.probs", "g_jsd.last", "g_jsd.all")
    ]
    note = f"{RATIO} `last`: output layer; `all`: mean over layers."
    return [sheet(Results.node(store), "Shifts of predictions and attention, `ensemble`", metrics, (note,))]


def explanations(store: Store) -> list[Sheet | Table]:
    """Whether the attention still says what vanilla's said, says anything, and stays put."""
    metrics: list[Estimated] = [
        estimated("similarity.overlap.all", "as vanilla", threat=CLAIM, own=False),
        estimated("similarity.overlap.sharpest", "as vanilla, sharpest layer", threat=CLAIM, own=False),
        *(
            estimated(f"lost.explanation.{rule}", f"lost, `{rule}`", threat=CLAIM)
            for rule in ("random", "cover", "defects")
        ),
        estimated("sharpness.clean.all", threat=CLAIM),
        estimated("sharpness.clean.sharpest", "sharpness, sharpest layer", threat=CLAIM),
    ]
    notes = (
        "“as vanilla”: overlap of each node's top 5 with the vanilla model's on the clean graph. Nodes with"
        f" more than 5 neighbours only. {LOST} `sharpness`: 0 says nothing, 1 points at one neighbour.",
        "Null rows, under the paper's attack: attention 1/degree, which keeps everything and says nothing,"
        " and a random ranking.",
    )
    title = "Explanations: similar, stable, sharp"
    return [sheet(Results.node(store), title, metrics, notes, nulls=True)]


def by_rule(store: Store) -> list[Sheet | Table]:
    """F1 and explanations at the endpoints of every rule."""
    results = every_rule(store)
    rules = ("random", "cover", "defects")
    scores = [
        estimated(f"f1.attacked_{rule}", f"F1, `{rule}`", threat=EVERY_RULE) for rule in (*rules, "weakest")
    ]
    kept = [
        estimated(f"endpoints.{rule}.explanation.overlap.last", f"kept, `{rule}`", threat=EVERY_RULE)
        for rule in rules
    ]
    taken = [
        estimated(f"endpoints.cover.explanation.intruders.{part}.last", title, threat=EVERY_RULE)
        for part, title in (("nodes", "intruded, `cover`"), ("mass", "their mass, `cover`"))
    ]
    chance = estimated("overlap_touched.chance.last", "chance, `cover`", threat=EVERY_RULE)
    notes = (
        "`ensemble` with all four rules. `weakest` reads the attacked model; the other rules give"
        " every method the same nodes. “kept”: of the top 5 at the output layer, explanation attack, touched"
        " nodes; “chance”: by a random ranking; “intruded”: share of the joined nodes with an injected node"
        " in their top 5; “their mass”: attention that injected nodes take there.",
    )
    return [sheet(results, "Endpoints by rule", [*scores, *kept, chance, *taken], notes)]


def worst(store: Store) -> list[Sheet | Table]:
    """The seed that holds worst, beside the mean: a mean may hide a training that failed."""
    results, title = Results.node(store), "Worst seed"
    columns = [Column(name) for name in ("model", "dataset", "method")]
    for threat in (CLAIM, BESIDE):
        columns += [Column(f"`{threat}`: mean F1"), Column(f"`{threat}`: worst")]
        columns += [Column(f"`{threat}`: apart", "+.3f"), Column(f"`{threat}`: seed")]
    columns.append(Column("seeds"))
    rows: list[Sequence[Cell]] = []
    for model in results.models():
        for dataset in results.datasets(model):
            for row in results.rows(model, dataset):
                parts = [
                    results.values(model, dataset, row, "f1.attacked", threat) for threat in (CLAIM, BESIDE)
                ]
                if len(parts[0]) >= LEAST:
                    said = [cell for part in parts for cell in _worst(part)]
                    rows.append([model, dataset, name_of(row), *said, str(len(parts[0]))])
    if not rows:
        return [nothing(results, title)]
    notes = (f"Rows with {LEAST} seeds at least.", count(results, (CLAIM, BESIDE)))
    return [Table(title, columns, rows, notes)]


def _worst(found: Mapping[int, float]) -> list[Cell]:
    """Mean, worst, how far apart, and which seed."""
    if not found:
        return [None] * 4
    seed, mean = min(found, key=lambda one: found[one]), sum(found.values()) / len(found)
    return [mean, found[seed], found[seed] - mean, str(seed)]


def seeds(store: Store) -> list[Sheet | Table]:
    """How far two trainings that differ in their seed alone explain alike, vanilla and FGAI."""
    results = Results.read(store, "again", "seeds")
    metrics = [
        estimated("similarity.overlap.all", "top 5 shared", threat=ANOTHER),
        estimated("similarity.overlap.sharpest", "sharpest layer", threat=ANOTHER),
        estimated("overlap.chance.all", "by chance", threat=ANOTHER),
        estimated("similarity.rank_correlation.all", "rank correlation", threat=ANOTHER),
    ]
    note = (
        "Attention on the clean graph of two models trained alike with one seed and the next: another split,"
        " other weights, other draws. Mean over layers and nodes with more than 5 neighbours."
    )
    return [sheet(results, "Explanations of two seeds", metrics, (note,))]


def warnings(store: Store) -> list[Sheet | Table]:
    """Which rows carry which reliability warning under the searches of claims, on how many seeds."""
    results, title = Results.node(store), "Reliability warnings under every search"
    rows: list[Sequence[Cell]] = []
    for code, places in results.warnings((CLAIM, BESIDE)).items():
        methods: dict[str, list[str]] = {}
        for (model, dataset, row), seeds in places.items():
            methods.setdefault(row, []).append(f"{model} on {dataset} × {seeds}")
        rows += [[code, name_of(row), "; ".join(methods[row])] for row in ROWS if row in methods]
    if not rows:
        return [nothing(results, title, (CLAIM, BESIDE))]
    columns = [Column("warning"), Column("method"), Column("where × seeds")]
    return [
        Table(title, columns, rows, ("What each means: reliability.md.", count(results, (CLAIM, BESIDE))))
    ]


def shared(store: Store) -> list[Sheet | Table]:
    """Graphs that share one preset, under `ensemble`."""
    results = Results.node(store, (*SHARING, *LARGE))
    metrics = [
        estimated("f1.clean", "clean", threat=CLAIM),
        *endpoints(CLAIM),
        estimated("similarity.overlap.all", "as vanilla", threat=CLAIM, own=False),
        estimated("sharpness.clean.all", threat=CLAIM),
    ]
    return [sheet(results, "Graphs without settings of their own", metrics, (SEARCHES, PRESET))]
