"""What is claimed: predictions and explanations under every search we have, from records of today's."""

from __future__ import annotations

from experiments.again import ANOTHER
from experiments.build import LOST, sheet
from experiments.results import Results
from experiments.sheet import Estimated, Sheet, estimated
from experiments.store import Store
from experiments.threats import EVERY_RULE
from fgai.records import Table

CLAIM, BESIDE, ANY = "ensemble", "ensemble-strong", "values"
"""The threat of every claim, the one beside it, and the one that bounds every attack by features."""
BUDGETS = (
    "`ensemble`: 20 new nodes × 20 edges, the worst of every search at `random`, `cover` and `defects`"
    " endpoints; `ensemble-strong`: 60 × 40"
)
SEARCHES = f"{BUDGETS}; `values`: 20 × 20 with any features at all, models behind limits."


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
    results = Results.of_grid(store, "endpoints")
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
