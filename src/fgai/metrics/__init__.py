"""Metrics of prediction, stability and explanation: pure functions, each with a declared direction and range.

What tables and reports show of a metric is declared with it (`metric`) and found by its path in a record
(`quantity`). A metric declared with `measure`, in this package or outside, is measured by `fgai.evaluate`.

Attention arguments are one value per edge, [E], on matched edges in one order, with `rowptr` [N+1]: heads
averaged for distances, `LayerAttention.ranking` for what ranks. All return a Python float. `METRICS` holds
the declarations by name. Functions ending in `_per_node` give the values behind a mean, with NaN at nodes
that do not count.
"""

from fgai.metrics.fidelity import characterization, fidelity_minus, fidelity_plus
from fgai.metrics.intruders import (
    intruder_mass,
    intruder_mass_per_node,
    intruder_nodes,
    intruder_places,
    intruder_places_per_node,
)
from fgai.metrics.nodes import mean_of_defined, mean_over
from fgai.metrics.nulls import random_ranking, uniform_attention
from fgai.metrics.paths import measured, metric_at, null_path, quantity
from fgai.metrics.prediction import (
    accuracy,
    average_precision,
    balanced_accuracy,
    changed_share,
    f1,
    macro_f1,
    recall,
    roc_auc,
)
from fgai.metrics.quantity import Quantity
from fgai.metrics.ranking import (
    kept_by_layer,
    overlap,
    overlap_chance,
    overlap_graph,
    overlap_per_node,
    rank_correlation,
    rank_correlation_per_node,
    tied_share,
)
from fgai.metrics.removal import (
    FRACTIONS,
    edges_to_remove,
    f_slope_gap,
    f_slope_minus,
    f_slope_plus,
    slope,
    still_right,
)
from fgai.metrics.scores import chance_score, error_weights, task_scores
from fgai.metrics.sharpness import (
    NOTHING,
    sharpness,
    sharpness_per_node,
    top_share,
    top_share_per_node,
    uniform_share,
)
from fgai.metrics.spec import METRICS, SECTIONS, MetricSpec, metric
from fgai.metrics.stability import g_jsd, g_tvd, g_tvd_prob, g_tvd_rel
from fgai.metrics.truth import truth_auc, truth_chance, truth_precision
from fgai.metrics.views import Views

__all__ = [
    "FRACTIONS",
    "METRICS",
    "NOTHING",
    "SECTIONS",
    "MetricSpec",
    "Quantity",
    "Views",
    "accuracy",
    "average_precision",
    "balanced_accuracy",
    "chance_score",
    "changed_share",
    "characterization",
    "edges_to_remove",
    "error_weights",
    "f1",
    "f_slope_gap",
    "f_slope_minus",
    "f_slope_plus",
    "fidelity_minus",
    "fidelity_plus",
    "g_jsd",
    "g_tvd",
    "g_tvd_prob",
    "g_tvd_rel",
    "intruder_mass",
    "intruder_mass_per_node",
    "intruder_nodes",
    "intruder_places",
    "intruder_places_per_node",
    "kept_by_layer",
    "macro_f1",
    "mean_of_defined",
    "mean_over",
    "measured",
    "metric",
    "metric_at",
    "null_path",
    "overlap",
    "overlap_chance",
    "overlap_graph",
    "overlap_per_node",
    "quantity",
    "random_ranking",
    "rank_correlation",
    "rank_correlation_per_node",
    "recall",
    "roc_auc",
    "sharpness",
    "sharpness_per_node",
    "slope",
    "still_right",
    "task_scores",
    "tied_share",
    "top_share",
    "top_share_per_node",
    "truth_auc",
    "truth_chance",
    "truth_precision",
    "uniform_attention",
    "uniform_share",
]
