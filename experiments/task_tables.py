"""Tables of link prediction, graph classification and explanations against the truth, from records alone."""

from __future__ import annotations

from dataclasses import replace

from experiments.build import RATIO, sheet
from experiments.results import Results
from experiments.sheet import Estimated, Sheet, estimated
from experiments.store import Store
from experiments.threats import CLAIM
from fgai.records import Table

STABLE = [
    estimated("g_tvd.rel", ratio=True),
    estimated("g_tvd.probs", "g-TVD prob", ratio=True),
    estimated("g_jsd.all", ratio=True),
]


def link(store: Store) -> list[Sheet | Table]:
    """ROC-AUC of test links, clean and attacked, how far scores and attention move, and what is explained."""
    results = Results.read(store, "link", grid="link")
    scores = [
        estimated("roc_auc.clean", paper=("link", "roc_auc")),
        estimated("roc_auc.attacked", "AUC standard", paper=("link", "roc_auc_attacked")),
        estimated("roc_auc.attacked", "AUC ensemble", threat=CLAIM),
        estimated("average_precision.clean"),
        estimated("average_precision.attacked", "AP ensemble", threat=CLAIM),
    ]
    stability = [
        estimated("g_tvd.logits", form=".2e", ratio=True, paper=("link", "g_tvd")),
        *STABLE,
        estimated("g_jsd.last", ratio=True, paper=("link", "g_jsd")),
    ]  # fmt: skip
    explained = [
        estimated("explanations.prediction.links.all", threat=CLAIM),
        estimated("explanations.prediction.pairs.all", threat=CLAIM),
        estimated("explanations.explanation.links.all", "links, expl. attack", threat=CLAIM),
        estimated("explanations.explanation.pairs.all", "other pairs, expl. attack", threat=CLAIM),
        estimated("explanations.similarity.links.all", "links as vanilla", own=False),
        estimated("sharpness.clean.all"),
    ]
    split = (
        "85 / 5 / 10 % of the links; messages pass along training links, at test time also validation ones."
    )
    attack = "New nodes are joined to ends of test links; all test links and as many other pairs are scored."
    paper = (
        "The paper's g-TVD is one of a softmax over all links and its g-JSD compares other edges: only ratios"
        f" compare. {RATIO}"
    )
    both = (
        "A pair is explained by the top 5 neighbours of both its ends; shown is the share of them that stays,"
        " over ends with more than 5 neighbours."
    )
    return [
        sheet(results, "Link prediction", scores, (split, attack)),
        sheet(results, "Stability of link prediction, standard attack", stability, (paper,)),
        sheet(results, "Explanations of links under `ensemble`", explained, (both,)),
    ]


def graphs(store: Store) -> list[Sheet | Table]:
    """Ten-fold accuracy and ROC-AUC of small graphs, clean and attacked, and how far everything moves."""
    results = Results.read(store, "graph", grid="graphs")
    scores = [
        estimated("accuracy.clean"),
        estimated("accuracy.attacked", "accuracy standard"),
        estimated("accuracy.attacked", "accuracy ensemble", threat=CLAIM),
        estimated("roc_auc.clean"),
        estimated("roc_auc.attacked", "AUC ensemble", threat=CLAIM),
    ]
    stability = [
        *(replace(column, threat=CLAIM) for column in STABLE),
        estimated("explanations.prediction.graphs.all", threat=CLAIM),
        estimated("explanations.explanation.graphs.all", "graphs, expl. attack", threat=CLAIM),
        estimated("similarity.overlap.all", "as vanilla", own=False),
        estimated("sharpness.clean.all"),
    ]
    folds = (
        "Ten folds with equal shares of the classes: one for test, one for validation, eight for training."
        " `standard` and `ensemble`: one new node with 3 edges in every test graph."
    )
    kept = (
        "“graphs”: share of the 2 edges of a graph with the largest attention relative to uniform that stays"
        " under attack; “as vanilla”: of each node's top 2."
    )
    return [
        sheet(results, "Graph classification", scores, (folds,)),
        sheet(results, "Stability of graph classification under `ensemble`", stability, (kept,)),
    ]


def truth(store: Store) -> list[Sheet | Table]:
    """Attention as a score for the true edges, before and after both attacks."""
    results = Results.read(store, "truth", grid="truth")
    views = (("clean", "truth"), ("attacked", "truth_prediction"), ("expl. attack", "truth_explanation"))

    def columns(path: str, title: str) -> list[Estimated]:
        return [estimated(f"{part}.{path}", f"{title} {name}", threat=CLAIM) for name, part in views]

    ranked = columns("auc_node.all", "AUC") + columns("precision.all", "precision")
    layers = columns("auc_node.sharpest", "AUC") + columns("auc.all", "AUC graph")
    scores = [estimated("f1.clean"), estimated("f1.attacked"), *STABLE]
    scores = [replace(column, threat=CLAIM) for column in scores]
    within = (
        "AUC within each neighbourhood that has true and other edges, mean over nodes and layers; precision"
        " among the top 5, or as many as are true if fewer. Null rows: attention 1/degree, a random ranking."
    )
    degrees = (
        "ba-shapes and ba-community: one-hot degrees are appended to the features, which say nothing of the"
        " houses; attention that averages constant features could not tell any two nodes apart."
    )
    other = "First the sharpest layer alone; `graph`: all edges into nodes with true ones, ranked together."
    return [
        sheet(results, "Attention against the true explanation", ranked, (within, degrees), nulls=True),
        sheet(results, "The same, sharpest layer and whole graph", layers, (other,), nulls=True),
        sheet(results, "Prediction on the graphs with a true explanation", scores),
    ]
