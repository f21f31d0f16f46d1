"""What is claimed: predictions and explanations under every search we have, from records of today's."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.build import COMMON, count, flat_note, name_of, nothing, sheet
from experiments.certified import certified_share
from experiments.results import UNTUNED, Layers, Results
from experiments.sheet import Estimated, Sheet, estimated
from experiments.statistics import Estimate
from experiments.store import Store
from fgai.records import Cell, Column, Table

CLAIM, BESIDE, ANY = "ensemble", "ensemble-strong", "values"
"""The threat of every claim, the one beside it, and the one that bounds every attack by features."""
SEARCHES = (
    "`ensemble`: 20 new nodes × 20 edges, the worst of every search at random and chosen endpoints;"
    " `ensemble-strong`: 60 × 40; `values`: 20 × 20 with any features at all, models behind limits."
)


def headline(store: Store) -> list[Sheet | Table]:
    """Vanilla and FGAI in one line per model and dataset."""
    results, title = Results.node(store), "vanilla → FGAI"
    columns = [
        Column("model"),
        Column("dataset"),
        Column("clean F1"),
        Column("`ensemble`"),
        Column("`ensemble-strong`"),
        Column("top 5 kept (chance)"),
        Column("top 5 kept, explanation attack (chance)"),
        Column("similarity"),
        Column("sharpness"),
        Column("certified, t = 1"),
        Column("seeds"),
    ]
    rows = [
        _headline_row(results, model, dataset, certified_share(store, model, dataset))
        for model in results.models()
        for dataset in results.datasets(model)
        if results.held(model, dataset, "fgai")
    ]
    if not rows:
        return [nothing(results, title)]
    notes = (
        f"vanilla → FGAI, means over seeds. {SEARCHES} “kept”: share of a node's top 5 that stays, nodes in"
        " reach of `ensemble`, mean over layers, when it is after predictions or after explanations;"
        " “chance”: of a random ranking. Similarity: overlap of FGAI's top 5 with vanilla's. Certified: share"
        " of the test nodes whose class no injected neighbour of any node can change, FGAI trained towards"
        f" it. {COMMON}",
        *flat_note(results, CLAIM),
        count(results),
    )
    return [Table(title, columns, rows, notes)]


def _headline_row(results: Results, model: str, dataset: str, proved: Estimate | None) -> list[Cell]:
    def share(
        row: str, path: str, threat: str = CLAIM, form: str = ".3f", layers: Layers | None = None
    ) -> str | None:
        found = results.estimate(model, dataset, row, path, threat, layers)
        return None if found is None else f"{found.mean:{form}}"

    def arrow(path: str, threat: str = CLAIM, form: str = ".3f", layers: Layers | None = None) -> str | None:
        held = [share(row, path, threat, form, layers) for row in ("vanilla", "fgai")]
        return None if held == [None, None] else " → ".join(text or "–" for text in held)

    def kept(attack: str) -> str:
        path = f"overlap_touched.{attack}.all"
        layers = results.layers(model, dataset, ("vanilla", "fgai"), path, CLAIM)
        text = arrow(path, layers=layers)
        return f"{text or '–'} ({share('fgai', 'overlap_touched.chance.all', layers=layers) or '–'})"

    return [
        model,
        dataset,
        arrow("f1.clean"),
        arrow("f1.attacked"),
        arrow("f1.attacked", BESIDE),
        kept("prediction"),
        kept("explanation"),
        share("fgai", "similarity.overlap.all"),
        arrow("sharpness.clean.all", form=".4f"),
        None if proved is None else f"{proved.mean:.3f}",
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
    note = (
        "n× is how many times smaller than vanilla's the mean is. `last`: output layer; `all`: mean over"
        " layers."
    )
    return [sheet(Results.node(store), "Shifts of predictions and attention, `ensemble`", metrics, (note,))]


def explanations(store: Store) -> list[Sheet | Table]:
    """Whether the attention still says what vanilla's said, says anything, and stays put."""
    metrics: list[Estimated] = [
        estimated("similarity.overlap.all", "as vanilla", threat=CLAIM, own=False),
        estimated("similarity.overlap.sharpest", "as vanilla, sharpest layer", threat=CLAIM, own=False),
        estimated("overlap_touched.prediction.all", "kept under attack", threat=CLAIM),
        estimated("overlap_touched.explanation.all", "kept, explanation attack", threat=CLAIM),
        estimated("overlap_touched.chance.all", "chance", threat=CLAIM, own=True),
        estimated("intruders.explanation.mass.all", "intruders' mass", threat=CLAIM),
        estimated("sharpness.clean.all", threat=CLAIM),
        estimated("sharpness.clean.sharpest", "sharpness, sharpest layer", threat=CLAIM),
    ]
    notes = (
        "“as vanilla”: overlap of each node's top 5 with the vanilla model's on the clean graph. “kept”:"
        " overlap of the top 5 before and after `ensemble`, nodes in its reach, when it is after predictions"
        " and when it is after explanations; “chance”: of a random ranking. Nodes with more than 5 neighbours"
        " only. “intruders' mass”: attention that injected nodes take where they are joined, explanation"
        " attack. `sharpness`: 0 says nothing, 1 points at one neighbour.",
    )
    return [sheet(Results.node(store), "Explanations: similar, stable, sharp", metrics, notes)]


def worst(store: Store) -> list[Sheet | Table]:
    """The seed that holds worst, beside the mean: a mean may hide a training that failed."""
    return [_worst(Results.node(store), "Worst seed under `ensemble`")]


def untuned(store: Store) -> list[Sheet | Table]:
    """Graphs nobody chose settings for, under `ensemble`."""
    results = Results.node(store, UNTUNED)
    metrics = [
        estimated("f1.clean", "clean", threat=CLAIM),
        *endpoints(CLAIM),
        estimated("similarity.overlap.all", "as vanilla", threat=CLAIM, own=False),
        estimated("sharpness.clean.all", threat=CLAIM),
    ]
    return [sheet(results, "Graphs without settings of their own", metrics, (SEARCHES,))]


def _worst(results: Results, title: str) -> Table:
    rows: list[Sequence[Cell]] = []
    for model in results.models():
        for dataset in results.datasets(model):
            for row in results.rows(model, dataset):
                found = results.values(model, dataset, row, "f1.attacked", CLAIM)
                if found:
                    seed = min(found, key=lambda one: found[one])
                    mean = sum(found.values()) / len(found)
                    rows.append(
                        [
                            model,
                            dataset,
                            name_of(row),
                            mean,
                            found[seed],
                            found[seed] - mean,
                            str(seed),
                            str(len(found)),
                        ]
                    )
    if not rows:
        return nothing(results, title)
    columns = [Column(name) for name in ("model", "dataset", "method")]
    columns += [
        Column("mean F1"),
        Column("worst F1"),
        Column("apart", "+.3f"),
        Column("seed"),
        Column("seeds"),
    ]
    return Table(title, columns, rows, (count(results),))
