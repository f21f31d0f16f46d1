"""Tables of link prediction, graph classification and explanations against the truth, from records alone."""

from __future__ import annotations

from experiments.build import sheet
from experiments.results import Results
from experiments.sheet import Metric, Sheet
from experiments.store import Store
from fgai.records import Table

STABLE = [
    Metric(title="g-TVD rel", path="g_tvd.rel", form=".2e", better="lower", ratio=True),
    Metric(title="g-TVD prob", path="g_tvd.probs", form=".2e", better="lower", ratio=True),
    Metric(title="g-JSD all", path="g_jsd.all", form=".2e", better="lower", ratio=True),
]


def link(store: Store) -> list[Sheet | Table]:
    """ROC-AUC of test links, clean and attacked, how far scores and attention move, and what is explained."""
    results = Results.read(store, "link", grid="link")
    scores = [
        Metric(title="AUC clean", path="roc_auc.clean", better="higher", paper=("link", "roc_auc")),
        Metric(
            title="AUC standard", path="roc_auc.attacked", better="higher", paper=("link", "roc_auc_attacked")
        ),
        Metric(title="AUC strong", path="roc_auc.attacked", threat="strong", better="higher"),
        Metric(title="AP clean", path="average_precision.clean", better="higher"),
        Metric(title="AP standard", path="average_precision.attacked", better="higher"),
    ]
    stability = [
        Metric(
            title="g-TVD logits", path="g_tvd.logits", form=".2e", better="lower", ratio=True,
            paper=("link", "g_tvd"),
        ),
        *STABLE,
        Metric(
            title="g-JSD last", path="g_jsd.last", form=".2e", better="lower", ratio=True,
            paper=("link", "g_jsd"),
        ),
    ]  # fmt: skip
    explained = [
        Metric(title="links", path="explanations.prediction.links.all", better="higher"),
        Metric(title="other pairs", path="explanations.prediction.pairs.all", better="higher"),
        Metric(title="links, expl. attack", path="explanations.explanation.links.all", better="higher"),
        Metric(title="other pairs, expl. attack", path="explanations.explanation.pairs.all", better="higher"),
        Metric(
            title="links as vanilla", path="explanations.similarity.links.all", better="higher", own=False
        ),
        Metric(title="sharpness", path="sharpness.clean.all", better="higher"),
    ]
    split = (
        "85 / 5 / 10 % of the links; messages pass along training links, at test time also validation ones."
    )
    attack = "New nodes are joined to ends of test links; all test links and as many other pairs are scored."
    paper = (
        "The paper's g-TVD is one of a softmax over all links and its g-JSD compares other edges: only ratios"
        " compare. n× is how many times smaller than vanilla's the mean is."
    )
    both = (
        "A pair is explained by the top 5 neighbours of both its ends; shown is the share of them that stays,"
        " over ends with more than 5 neighbours."
    )
    return [
        sheet(results, "Link prediction", scores, (split, attack)),
        sheet(results, "Stability of link prediction, standard attack", stability, (paper,)),
        sheet(results, "Explanations of links, standard attack", explained, (both,)),
    ]


def graphs(store: Store) -> list[Sheet | Table]:
    """Ten-fold accuracy and ROC-AUC of small graphs, clean and attacked, and how far everything moves."""
    results = Results.read(store, "graph", grid="graphs")
    scores = [
        Metric(title="accuracy clean", path="accuracy.clean", better="higher"),
        Metric(title="accuracy standard", path="accuracy.attacked", better="higher"),
        Metric(title="accuracy strong", path="accuracy.attacked", threat="strong", better="higher"),
        Metric(title="AUC clean", path="roc_auc.clean", better="higher"),
        Metric(title="AUC standard", path="roc_auc.attacked", better="higher"),
    ]
    stability = [
        *STABLE,
        Metric(title="graphs", path="explanations.prediction.graphs.all", better="higher"),
        Metric(title="graphs, expl. attack", path="explanations.explanation.graphs.all", better="higher"),
        Metric(title="as vanilla", path="similarity.overlap.all", better="higher", own=False),
        Metric(title="sharpness", path="sharpness.clean.all", better="higher"),
    ]
    folds = (
        "Ten folds with equal shares of the classes: one for test, one for validation, eight for training."
        " `standard`: one new node with 3 edges in every test graph; `strong`: three with 4."
    )
    kept = (
        "“graphs”: share of the 2 edges of a graph with the largest attention relative to uniform that stays"
        " under attack; “as vanilla”: of each node's top 2."
    )
    return [
        sheet(results, "Graph classification", scores, (folds,)),
        sheet(results, "Stability of graph classification, standard attack", stability, (kept,)),
    ]


def truth(store: Store) -> list[Sheet | Table]:
    """Attention as a score for the true edges, before and after both attacks."""
    results = Results.read(store, "truth", grid="truth")
    views = (("clean", "truth"), ("attacked", "truth_prediction"), ("expl. attack", "truth_explanation"))
    ranked = [
        Metric(title=f"AUC {name}", path=f"{part}.auc_node.all", better="higher") for name, part in views
    ]
    ranked += [
        Metric(title=f"precision {name}", path=f"{part}.precision.all", better="higher")
        for name, part in views
    ]
    layers = [
        Metric(title=f"AUC {name}", path=f"{part}.auc_node.sharpest", better="higher") for name, part in views
    ]
    layers += [
        Metric(title=f"AUC graph {name}", path=f"{part}.auc.all", better="higher") for name, part in views
    ]
    scores = [
        Metric(title="F1 clean", path="f1.clean", better="higher"),
        Metric(title="F1 attacked", path="f1.attacked", better="higher"),
        *STABLE,
    ]
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
